"""Epochs in a run file become steps here, once the number of training examples is known."""

from collections.abc import Mapping
from typing import Any

from tasks.foundation.contracts.epoch_length import EpochLength
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.errors import RunFileError

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
