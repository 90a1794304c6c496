"""How a stage runs: in this process, as a Prefect task, or as a Prefect deployment."""
