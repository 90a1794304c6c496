"""What the rooms stand on. Nothing here knows Prefect."""
