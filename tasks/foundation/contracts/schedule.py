"""The absolute steps of segment borders, evaluations and callbacks, computed only from the run file.

Epochs in a run file become steps here, once the number of training examples is known.
"""

from collections.abc import Mapping
from typing import Any

from tasks.foundation.contracts.run_spec import EpochLength, Period, RunSpec
from tasks.foundation.errors import RunFileError

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


# Recorded beside the identity, for information: `data.content_digest` decides whether examples changed.
TRAIN_EXAMPLES = "data.train_examples"


def needs_examples(spec: RunSpec) -> bool:
    """Return whether the settings count in epochs, and the number of training examples is not known yet."""
    counts = (spec.train.epochs, spec.train.segment_epochs, spec.evaluate.every)
    return spec.train.epoch_examples is None and any(each is not None for each in counts)


def with_examples(spec: RunSpec, train_examples: int) -> RunSpec:
    """Return the settings with the number of training examples, from which epochs follow.

    Args:
        spec: the run file.
        train_examples: training examples of its prepared dataset, at least 1.

    Raises:
        RunFileError: `train.drop_remainder` leaves no batch in an epoch.
    """
    train = spec.train
    if train.drop_remainder and train_examples < train.global_batch_size:
        raise RunFileError(
            f"train.drop_remainder is true, and an epoch of {train_examples} training examples has no whole batch of "
            f"train.global_batch_size = {train.global_batch_size}; use a smaller batch, more data, or drop_remainder: "
            "false"
        )
    if train.epoch_examples == train_examples:
        return spec
    known = train.model_copy(update={"epoch_examples": train_examples})
    return spec.model_copy(update={"train": known})


def with_recorded_examples(spec: RunSpec, identity: Mapping[str, Any]) -> RunSpec:
    """Return the settings with the number of training examples that a run's identity has, if it has one."""
    examples = identity.get(TRAIN_EXAMPLES)
    return spec if examples is None else with_examples(spec, examples)


def recorded_epoch(identity: Mapping[str, Any]) -> EpochLength | None:
    """Return the length of an epoch according to a run's identity; None in logs of earlier versions."""
    examples, batch = identity.get(TRAIN_EXAMPLES), identity.get("train.global_batch_size")
    if examples is None or batch is None:
        return None
    return EpochLength(
        train_examples=examples,
        global_batch_size=batch,
        drop_remainder=identity.get("train.drop_remainder", False),
    )
