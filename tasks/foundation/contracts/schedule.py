"""At which absolute steps something happens. Arithmetic over the run file; the same wherever a run was cut."""

from tasks.foundation.contracts.run_spec import RunSpec

DEFAULT_SEGMENT_STEPS = 1000


def next_border(spec: RunSpec, step: int, until_step: int) -> int:
    """The step at which the segment that begins at `step` ends.

    Besides the segment length, steps that are evaluated or kept for good are borders: a checkpoint must exist there.
    """
    grids = [spec.evaluate.every_steps, spec.checkpoint.keep_every_steps]
    if spec.train.segment_seconds is None:
        grids.append(spec.train.segment_steps or DEFAULT_SEGMENT_STEPS)
    return min(until_step, *(next_multiple(grid, step) for grid in grids if grid is not None), until_step)


def next_multiple(grid: int, step: int) -> int:
    """The first multiple of `grid` after `step`."""
    return (step // grid + 1) * grid


def act_at_evaluations(spec: RunSpec) -> bool:
    """Whether callbacks act where the run is evaluated between its ends; else they act at each logged row."""
    return spec.evaluate.every_steps is not None and spec.data.validation_fraction > 0


def acts_at_the_end(spec: RunSpec, step: int) -> bool:
    """Whether an epoch of callbacks ends with the evaluation at `step`, from which nothing is trained."""
    if spec.train.callbacks is None or not act_at_evaluations(spec):
        return False
    return step == spec.train.steps and step % steps_of_an_epoch(spec) == 0


def steps_of_an_epoch(spec: RunSpec) -> int:
    """An epoch, to callbacks, is so many steps; they act at each multiple."""
    every = spec.evaluate.every_steps
    return every if every is not None and act_at_evaluations(spec) else spec.train.log_every_steps
