"""Everything that imports Prefect: flows, the record of a run, its server, and stages in other processes."""
