"""The stage as a Prefect task."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.checkpoint_to_gcs.stage import checkpoint_to_gcs

# Never cached: what is done already is known from the run's log, and only from there.
checkpoint_to_gcs_task = task(
    name="checkpoint-to-gcs", task_run_name="checkpoint-to-gcs step {result.staged.step}", cache_policy=NO_CACHE
)(checkpoint_to_gcs)
