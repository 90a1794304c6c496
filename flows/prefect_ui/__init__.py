"""What Prefect's pages show of a run: artifacts and logs."""
