"""Compares two trials: their examples, their metrics, and every variable of the final train state."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Protocol

from flows.proving.receipt import TrialEnd, VariableDifference
from flows.proving.trial import Trial
from tasks.foundation.checkpoint.verify import verify_checkpoint
from tasks.foundation.contracts.checkpoint import CheckpointManifest, CheckpointRef
from tasks.foundation.contracts.log_entry import Head
from tasks.foundation.contracts.segment import MetricRow, TracedStep
from tasks.foundation.errors import DamagedCheckpoint, RunLogError
from tasks.foundation.runlog.history import commit_of, history_of
from tasks.foundation.runlog.log import RunLog

if TYPE_CHECKING:
    from tasks.foundation.dataset.features import Array

# A checkpoint's variables by key, as NumPy arrays from TensorFlow's own reader.
Arrays = Mapping[str, "Array"]

# In the order of computation, so that the first difference is nearest to the cause.
_GROUPS = ("model", "variables", "seeds", "generators", "optimizer", "optimizers", "metrics")
_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of comparing two trials.

    Attributes:
        variables: number of compared variables.
        differing: number of variables that differ.
        first: the first variable that differs, in the order of computation.
        rows: number of compared rows of metrics.
        first_step: first step whose metrics differ.
        same_digest: whether Baton's digests of the final states are equal.
        same_examples: whether both prepared the same examples in the same order.
        same_step: whether all processes traced the same train step; helps to explain a difference. `same` ignores it.
    """

    variables: int
    differing: int
    first: VariableDifference | None
    rows: int
    first_step: int | None
    same_digest: bool
    same_examples: bool
    same_step: bool = True

    @property
    def same(self) -> bool:
        """Whether the final variables, their digests, the examples and the metrics are all equal."""
        return self.same_digest and self.same_examples and not self.differing and self.first_step is None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """The result of a finished trial, read from its log."""

    head: Head
    tip: CheckpointRef
    rows: tuple[MetricRow, ...]
    committed_steps: tuple[int, ...]
    traced: frozenset[TracedStep] = frozenset()

    @property
    def end(self) -> TrialEnd:
        """The part of the outcome that the receipt stores."""
        return TrialEnd(
            state_digest=self.tip.state_digest, content_digest=str(self.head.identity.get("data.content_digest"))
        )


def read_outcome(trial: Trial) -> TrialOutcome:
    """Read the outcome of a trial from its log.

    Raises:
        RunLogError: the trial has no tip, or its tip is not at the trial's last step.
    """
    history = history_of(RunLog(trial.home).entries())
    head = history.head
    if head is None or head.tip is None or head.tip.step != trial.steps:
        at = "without a checkpoint" if head is None or head.tip is None else f"at step {head.tip.step}"
        raise RunLogError(f"{trial.home.uri} was to train to step {trial.steps} but ended {at}")
    steps = tuple(commit_of(entry).checkpoint.step for entry in history.commits)
    traced = frozenset(step for entry in history.commits if (step := commit_of(entry).traced) is not None)
    return TrialOutcome(head=head, tip=head.tip, rows=history.rows, committed_steps=steps, traced=traced)


def compare(
    one: Trial, other: Trial, *, read: Callable[[Trial, CheckpointRef], Arrays] | None = None
) -> tuple[Comparison, TrialOutcome, TrialOutcome]:
    """Compare two finished trials.

    Args:
        one: the uninterrupted trial.
        other: the trial with cuts, or a repetition.
        read: reads a checkpoint; None for TensorFlow's reader.

    Returns:
        The comparison, and the outcomes of both trials.

    Raises:
        RunLogError: a trial did not reach its last step.
        DamagedCheckpoint: a checkpoint's bytes differ from its manifest.
    """
    read = read or read_arrays
    first, second = read_outcome(one), read_outcome(other)
    arrays, other_arrays = read(one, first.tip), read(other, second.tip)
    keys, differing, difference = compare_arrays(arrays, other_arrays)
    comparison = Comparison(
        variables=len(keys),
        differing=len(differing),
        first=difference,
        rows=max(len(first.rows), len(second.rows)),
        first_step=_first_step(first.rows, second.rows),
        same_digest=first.tip.state_digest == second.tip.state_digest,
        same_examples=first.end.content_digest == second.end.content_digest,
        same_step=same_step(first.traced | second.traced),
    )
    return comparison, first, second


def compare_arrays(arrays: Arrays, other_arrays: Arrays) -> tuple[list[str], list[str], VariableDifference | None]:
    """Compare the variables of two checkpoints.

    Returns:
        All keys in the order of computation, the keys of the variables that differ, and the first difference.
    """
    keys = sorted_keys(arrays.keys() | other_arrays.keys())
    differing = [key for key in keys if not _same(arrays.get(key), other_arrays.get(key))]
    return keys, differing, _difference(differing[0], arrays, other_arrays) if differing else None


def same_step(traced: Iterable[TracedStep]) -> bool:
    """Return whether all processes traced the same step under the same circumstances."""
    found: dict[str, TracedStep] = {}
    return all(found.setdefault(each.circumstances, each) == each for each in traced)


class CheckpointReader(Protocol):
    """TensorFlow's reader of a checkpoint."""

    def get_tensor(self, tensor_str: str, /) -> "Array":
        """Read a variable."""


class CheckpointArrays(Mapping[str, "Array"]):
    """The variables of a checkpoint. Each is read on access, so that memory holds one at a time."""

    def __init__(self, reader: CheckpointReader, names: Mapping[str, str]) -> None:
        self._reader = reader
        self._names = names

    def __getitem__(self, key: str) -> "Array":
        return self._reader.get_tensor(self._names[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read_arrays(trial: Trial, ref: CheckpointRef) -> Arrays:
    """Verify a checkpoint's files and read every variable.

    Raises:
        DamagedCheckpoint: the files differ from the manifest, or hold other variables than it lists.
    """
    from tasks.foundation.accelerator.environment import quiet_tensorflow

    quiet_tensorflow()
    import tensorflow as tf

    from tasks.foundation.checkpoint.bundle import PREFIX
    from tasks.foundation.checkpoint.bundle_errors import bundle_errors
    from tasks.foundation.state.layout import stored_name

    manifest = verify_checkpoint(trial.home, ref)
    prefix, names = str(trial.home.root / ref.path / PREFIX), {key: stored_name(key) for key in _keys(manifest)}
    with bundle_errors(f"{trial.home.uri}/{ref.path}", prefix):
        reader = tf.train.load_checkpoint(prefix)
        # The object graph is not a variable.
        unmatched = {*reader.get_variable_to_shape_map(), _OBJECT_GRAPH} ^ {*names.values(), _OBJECT_GRAPH}
    if unmatched:
        raise DamagedCheckpoint(
            f"{trial.home.uri}/{ref.path}: {min(unmatched)} is in its files or in its manifest, not in both"
        )
    return CheckpointArrays(reader, names)


def sorted_keys(keys: Iterable[str]) -> list[str]:
    """Sort keys of the train state in the order of computation, the model's first; numbers in keys sort by value."""

    def position(key: str) -> tuple[int, list[tuple[int, str]]]:
        group = key.partition("/")[0]
        parts = [(int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS.split(key)]
        return (_GROUPS.index(group) if group in _GROUPS else len(_GROUPS), parts)

    return sorted(keys, key=position)


def _keys(manifest: CheckpointManifest) -> list[str]:
    return [key for record in manifest.signature for key in record.keys(manifest.replicas)]


def _same(one: "Array | None", other: "Array | None") -> bool:
    """Whether all bits are equal. A NaN equals the same NaN, and 0.0 differs from -0.0."""
    if one is None or other is None:
        return False
    return bool((one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes()))


def _difference(key: str, arrays: Arrays, other_arrays: Arrays) -> VariableDifference:
    import numpy as np

    one, other = arrays.get(key), other_arrays.get(key)
    present = other if one is None else one
    if present is None:
        raise AssertionError(f"{key} is in neither checkpoint")
    values, largest = int(present.size), None
    if one is not None and other is not None and (one.dtype, one.shape) == (other.dtype, other.shape):
        bits = [np.frombuffer(value.tobytes(), np.uint8).reshape(value.size, -1) for value in (one, other)]
        values = int((bits[0] != bits[1]).any(axis=1).sum())
        if one.dtype.kind in "iuf" or one.dtype.name == "bfloat16":
            with np.errstate(invalid="ignore"):  # infinity minus infinity is NaN
                gaps = np.abs(one.astype(np.float64) - other.astype(np.float64))
            largest = float(gaps[np.isfinite(gaps)].max(initial=0.0))
    return VariableDifference(
        path=key, dtype=present.dtype.name, shape=tuple(present.shape), values=values, largest=largest,
        only_in="" if one is not None and other is not None else "straight" if one is not None else "cut",
    )  # fmt: skip


def _first_step(one: tuple[MetricRow, ...], other: tuple[MetricRow, ...]) -> int | None:
    """The first step whose logged metrics differ. They are compared as text, because NaN is not equal to itself."""
    for row, other_row in zip_longest(one, other):
        if row is None or other_row is None or row.to_json() != other_row.to_json():
            return min(each.step for each in (row, other_row) if each is not None)
    return None
