"""Two trials that should be one: examples, metrics, and every variable of the train state at the end."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from flows.proving.receipt import End, VariableDifference
from flows.proving.trial import Trial
from tasks.foundation.checkpoint.verify import check
from tasks.foundation.contracts.checkpoint import CheckpointManifest, CheckpointRef
from tasks.foundation.contracts.log_entry import Head
from tasks.foundation.contracts.segment import MetricRow, TracedStep
from tasks.foundation.errors import DamagedCheckpoint, RunLogError
from tasks.foundation.runlog.history import commit_of, history_of
from tasks.foundation.runlog.log import RunLog

# A checkpoint's variables by key: the NumPy arrays as TensorFlow itself reads them.
Arrays = Mapping[str, Any]

# What was computed first comes first: weights and what is drawn from, then what follows from them.
_GROUPS = ("model", "variables", "seeds", "generators", "optimizer", "optimizers", "metrics")
_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What two trials have in common, and what not."""

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
        """Whether nothing differs at all: the bytes as read, Baton's own digest of them, examples and metrics."""
        return self.same_digest and self.same_examples and not self.differing and self.first_step is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """What the log of a trial tells once it is done."""

    head: Head
    tip: CheckpointRef
    rows: tuple[MetricRow, ...]
    committed_steps: tuple[int, ...]
    traced: frozenset[TracedStep] = frozenset()

    @property
    def end(self) -> End:
        """What the receipt keeps of it."""
        return End(
            state_digest=self.tip.state_digest, content_digest=str(self.head.identity.get("data.content_digest"))
        )


def reached(trial: Trial) -> Reached:
    """Read a trial's log.

    Raises:
        RunLogError: it has no tip, or ends elsewhere than where it was sent.
    """
    history = history_of(RunLog(trial.home).entries())
    head = history.head
    if head is None or head.tip is None or head.tip.step != trial.steps:
        at = "nowhere" if head is None or head.tip is None else f"at step {head.tip.step}"
        raise RunLogError(f"{trial.home.uri} was to be trained to step {trial.steps} and ended {at}")
    steps = tuple(commit_of(entry).checkpoint.step for entry in history.commits)
    traced = frozenset(step for entry in history.commits if (step := commit_of(entry).traced) is not None)
    return Reached(head=head, tip=head.tip, rows=history.rows, committed_steps=steps, traced=traced)


def compare(
    one: Trial, other: Trial, *, read: Callable[[Trial, CheckpointRef], Arrays] | None = None
) -> tuple[Comparison, Reached, Reached]:
    """Compare two trials that are done.

    Args:
        one: the uninterrupted one.
        other: the one that was cut, or a repetition.
        read: reads a checkpoint; left out: TensorFlow does.

    Raises:
        DamagedCheckpoint: a checkpoint's bytes are not those that were committed.
    """
    read = read or read_arrays
    first, second = reached(one), reached(other)
    mine, theirs = read(one, first.tip), read(other, second.tip)
    keys = in_order(mine.keys() | theirs.keys())
    differing = [key for key in keys if not _same(mine.get(key), theirs.get(key))]
    comparison = Comparison(
        variables=len(keys),
        differing=len(differing),
        first=_difference(differing[0], mine, theirs) if differing else None,
        rows=max(len(first.rows), len(second.rows)),
        first_step=_first_step(first.rows, second.rows),
        same_digest=first.tip.state_digest == second.tip.state_digest,
        same_examples=first.end.content_digest == second.end.content_digest,
        same_step=same_step(first.traced | second.traced),
    )
    return comparison, first, second


def same_step(traced: Iterable[TracedStep]) -> bool:
    """Whether all processes traced the same step in the same circumstances."""
    found: dict[str, str] = {}
    return all(found.setdefault(each.circumstances, each.fingerprint) == each.fingerprint for each in traced)


class CheckpointArrays(Mapping[str, Any]):
    """A checkpoint's variables, each read when it is asked for, so that memory holds one at a time."""

    def __init__(self, reader: Any, names: Mapping[str, str]) -> None:
        self._reader = reader
        self._names = names

    def __getitem__(self, key: str) -> Any:
        return self._reader.get_tensor(self._names[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read_arrays(trial: Trial, ref: CheckpointRef) -> Arrays:
    """Every variable of a checkpoint, whose files are verified first.

    Raises:
        DamagedCheckpoint: the files are not those that were committed, or hold other variables than the manifest.
    """
    from tasks.foundation.accelerator.environment import quiet_tensorflow

    quiet_tensorflow()
    import tensorflow as tf

    from tasks.foundation.state.layout import stored_name

    manifest = check(trial.home, ref)
    reader = tf.train.load_checkpoint(str(trial.home.root / ref.path / "ckpt"))
    names = {key: stored_name(key) for key in _keys(manifest)}
    # The object graph is TensorFlow's own note, not a variable.
    odd = {*reader.get_variable_to_shape_map(), _OBJECT_GRAPH} ^ {*names.values(), _OBJECT_GRAPH}
    if odd:
        raise DamagedCheckpoint(f"{trial.home.uri}/{ref.path}: {min(odd)} is in its files or in its manifest, not both")
    return CheckpointArrays(reader, names)


def in_order(keys: Iterable[str]) -> list[str]:
    """Keys of the train state: the model's first, then the optimizer's and the metrics'; numbers by their value."""

    def place(key: str) -> tuple[int, list[tuple[int, str]]]:
        group = key.partition("/")[0]
        parts = [(int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS.split(key)]
        return (_GROUPS.index(group) if group in _GROUPS else len(_GROUPS), parts)

    return sorted(keys, key=place)


def _keys(manifest: CheckpointManifest) -> list[str]:
    return [key for record in manifest.signature for key in record.keys(manifest.replicas)]


def _same(one: Any, other: Any) -> bool:
    """Bit by bit: NaN is the same as itself, and 0.0 is not -0.0."""
    if one is None or other is None:
        return False
    return bool((one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes()))


def _difference(key: str, mine: Arrays, theirs: Arrays) -> VariableDifference:
    import numpy as np

    one, other = mine.get(key), theirs.get(key)
    there = other if one is None else one
    if there is None:
        raise AssertionError(f"{key} is in neither")
    values, largest = int(there.size), None
    if one is not None and other is not None and (one.dtype, one.shape) == (other.dtype, other.shape):
        bits = [np.frombuffer(value.tobytes(), np.uint8).reshape(value.size, -1) for value in (one, other)]
        values = int((bits[0] != bits[1]).any(axis=1).sum())
        if one.dtype.kind in "iuf" or one.dtype.name == "bfloat16":
            with np.errstate(invalid="ignore"):  # infinity less infinity
                gaps = np.abs(one.astype(np.float64) - other.astype(np.float64))
            largest = float(gaps[np.isfinite(gaps)].max(initial=0.0))
    return VariableDifference(
        path=key, dtype=there.dtype.name, shape=tuple(there.shape), values=values, largest=largest,
        only_in="" if one is not None and other is not None else "straight" if one is not None else "cut",
    )  # fmt: skip


def _first_step(one: tuple[MetricRow, ...], other: tuple[MetricRow, ...]) -> int | None:
    """The first step whose logged metrics differ; compared as text, since NaN differs from itself."""
    for mine, theirs in zip_longest(one, other):
        if mine is None or theirs is None or mine.to_json() != theirs.to_json():
            return min(row.step for row in (mine, theirs) if row is not None)
    return None
