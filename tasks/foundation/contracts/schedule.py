"""The absolute steps of segment borders, evaluations and callbacks, computed only from the run file."""

from tasks.foundation.contracts.run_spec import RunSpec

DEFAULT_SEGMENT_STEPS = 1000


def next_border(spec: RunSpec, step: int, until_step: int) -> int:
    """Return the step at which the segment that starts at `step` ends.

    Steps that are evaluated or kept permanently are borders too, because they need a checkpoint.
    """
    grids = [spec.evaluate.every_steps, spec.checkpoint.keep_every_steps]
    if spec.train.segment_seconds is None:
        grids.append(spec.train.segment_steps or DEFAULT_SEGMENT_STEPS)
    return min(until_step, *(next_multiple(grid, step) for grid in grids if grid is not None), until_step)


def next_multiple(grid: int, step: int) -> int:
    """Return the first multiple of `grid` after `step`."""
    return (step // grid + 1) * grid


def callbacks_act_at_evaluations(spec: RunSpec) -> bool:
    """Return whether callbacks act at each periodic evaluation; otherwise they act at each logged row."""
    return spec.evaluate.every_steps is not None and spec.data.validation_fraction > 0


def callbacks_act_at_end(spec: RunSpec, step: int) -> bool:
    """Return whether an epoch of the callbacks ends with the evaluation at `step`, the last step of the run."""
    if spec.train.callbacks is None or not callbacks_act_at_evaluations(spec):
        return False
    return step == spec.train.steps and step % steps_per_epoch(spec) == 0


def steps_per_epoch(spec: RunSpec) -> int:
    """Return the steps of an epoch as callbacks see it; callbacks act at each multiple."""
    every = spec.evaluate.every_steps
    return every if every is not None and callbacks_act_at_evaluations(spec) else spec.train.log_every_steps
