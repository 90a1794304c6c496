"""What relies on Prefect's internals. Each file says why; a test pins each internal."""
