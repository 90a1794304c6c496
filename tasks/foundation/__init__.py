"""Code that the rooms share. Nothing here imports Prefect."""
