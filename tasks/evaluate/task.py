"""The stage as a Prefect task."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.evaluate.stage import evaluate

# Never cached: what is done already is known from the run's log, and only from there.
evaluate_task = task(name="evaluate", task_run_name="evaluate step {checkpoint.step}", cache_policy=NO_CACHE)(evaluate)
