"""The stage as a Prefect task."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.train_segment.stage import train_segment

# Never cached: what is done already is known from the run's log, and only from there.
train_segment_task = task(
    name="train-segment", task_run_name="train-segment to step {request.until_step}", cache_policy=NO_CACHE
)(train_segment)
