"""The stage as a Prefect task."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.init_or_restore.stage import init_or_restore

# Never cached: what is done already is known from the run's log, and only from there.
init_or_restore_task = task(name="init-or-restore", task_run_name="init-or-restore {spec.run}", cache_policy=NO_CACHE)(
    init_or_restore
)
