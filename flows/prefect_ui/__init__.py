"""What Prefect's UI shows of a run: artifacts and logs."""
