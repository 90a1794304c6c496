"""The stage as a Prefect task."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.prepare_data.stage import prepare_data

# Never cached: what is done already is known from the run's log, and only from there.
prepare_data_task = task(name="prepare-data", task_run_name="prepare-data {spec.data.source}", cache_policy=NO_CACHE)(
    prepare_data
)
