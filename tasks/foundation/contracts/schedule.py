"""The absolute steps of segment borders, evaluations and callbacks, computed only from the run file."""

from tasks.foundation.contracts.epoch_length import Period
from tasks.foundation.contracts.run_spec import RunSpec

DEFAULT_SEGMENT_STEPS = 1000


def next_border(spec: RunSpec, step: int, until_step: int) -> int:
    """Return the step at which the segment that starts at `step` ends.

    Steps that are evaluated or kept permanently are borders too, because they need a checkpoint.
    """
    keep_every = spec.checkpoint.keep_every_steps
    periods = [evaluations(spec), None if keep_every is None else Period(keep_every), _segments(spec)]
    return min(until_step, *(each.next_end(step) for each in periods if each is not None), until_step)


def next_multiple(grid: int, step: int) -> int:
    """Return the first multiple of `grid` after `step`."""
    return (step // grid + 1) * grid


def evaluations(spec: RunSpec) -> Period | None:
    """Return after which steps the model is evaluated; None: only at the end."""
    if spec.evaluate.every == "epoch":
        return spec.train.epoch.period()
    every = spec.evaluate.every_steps
    return None if every is None else Period(every)


def _segments(spec: RunSpec) -> Period | None:
    """The length of segments; None if it is given in seconds."""
    train = spec.train
    if train.segment_seconds is not None:
        return None
    if train.segment_epochs is not None:
        return train.epoch.period(train.segment_epochs)
    return Period(train.segment_steps or DEFAULT_SEGMENT_STEPS)


def callbacks_act_at_evaluations(spec: RunSpec) -> bool:
    """Return whether callbacks act at each periodic evaluation; otherwise they act at each logged row."""
    periodic = spec.evaluate.every_steps is not None or spec.evaluate.every is not None
    return periodic and spec.data.has_validation


def callbacks_act_at_end(spec: RunSpec, step: int) -> bool:
    """Return whether callbacks get the evaluation at `step`, the last step of the run. It ends their last epoch.

    That epoch may be shorter than the others, as in Keras the last batch may be smaller.
    """
    return spec.train.callbacks is not None and callbacks_act_at_evaluations(spec) and step == spec.train.target


def epochs_of_callbacks(spec: RunSpec) -> Period:
    """Return an epoch as callbacks see it; they act at the end of each."""
    period = evaluations(spec) if callbacks_act_at_evaluations(spec) else None
    return Period(spec.train.log_every_steps) if period is None else period
