"""Compares two trainings: their examples, their metrics, and every variable of the final train state.

Variables are compared by the digests in the manifests, in the order of computation, so that the first difference is
nearest to its cause. Only that one is read. For two
trainings of one run file, `causes_of` names the usual causes of a difference.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from baton.tasks.foundation.checkpoint.verify import verify_checkpoint
from baton.tasks.foundation.contracts.checkpoint import CheckpointManifest, CheckpointRef, differing_keys
from baton.tasks.foundation.contracts.home_files import OnlyIn, TrainingEnd, VariableDifference
from baton.tasks.foundation.contracts.log_entry import Head, MetricRow, TracedStep
from baton.tasks.foundation.errors import DamagedCheckpoint, RunLogError
from baton.tasks.foundation.log.history import commit_of, history_of
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.telemetry.formatting import number_words

if TYPE_CHECKING:
    from baton.tasks.foundation.dataset.features import Array

_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateComparison:
    """The result of comparing two trainings.

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
class Outcome:
    """The result of a finished training, read from its log.

    Attributes:
        head: the newest head.
        tip: its checkpoint.
        rows: all rows of metrics.
        commits: the checkpoints of all commits, in order; most of them are deleted.
        traced: the train steps that its processes traced.
    """

    head: Head
    tip: CheckpointRef
    rows: tuple[MetricRow, ...]
    commits: tuple[CheckpointRef, ...]
    traced: frozenset[TracedStep] = frozenset()

    @property
    def end(self) -> TrainingEnd:
        """The part of the outcome that a receipt stores."""
        return TrainingEnd(
            state_digest=self.tip.state_digest, content_digest=str(self.head.identity.get("data.content_digest"))
        )


def read_outcome(home: LocalStorage, steps: int) -> Outcome:
    """Read the outcome of a training to the step `steps` from its log.

    Raises:
        RunLogError: there is no tip, or it is not at that step.
    """
    history = history_of(RunLog(home).entries())
    head = history.head
    if head is None or head.tip is None or head.tip.step != steps:
        at = "without a checkpoint" if head is None or head.tip is None else f"at step {head.tip.step}"
        raise RunLogError(f"{home.uri} was to train to step {steps} but ended {at}")
    commits = tuple(commit_of(entry).checkpoint for entry in history.commits)
    traced = frozenset(step for entry in history.commits if (step := commit_of(entry).traced) is not None)
    return Outcome(head=head, tip=head.tip, rows=history.rows, commits=commits, traced=traced)


def compare(
    straight: LocalStorage,
    cut: LocalStorage,
    steps: int,
    *,
    saved: Callable[[LocalStorage, CheckpointRef], "SavedState"],
) -> tuple[StateComparison, Outcome, Outcome]:
    """Compare two finished trainings to the same step.

    Args:
        straight: home of the uninterrupted training.
        cut: home of the training with cuts, or of a repetition.
        steps: the absolute step that both were to reach.
        saved: gives the state in a checkpoint of a home.

    Returns:
        The comparison, and the outcomes of both.

    Raises:
        RunLogError: a training did not reach its last step.
        DamagedCheckpoint: a checkpoint's bytes differ from its manifest.
    """
    one, other = read_outcome(straight, steps), read_outcome(cut, steps)
    variables, differing, difference = compare_states(
        saved(straight, one.tip), saved(cut, other.tip), names=("straight", "cut")
    )
    comparison = StateComparison(
        variables=variables,
        differing=differing,
        first=difference,
        rows=max(len(one.rows), len(other.rows)),
        first_step=_first_step(one.rows, other.rows),
        same_digest=one.tip.state_digest == other.tip.state_digest,
        same_examples=one.end.content_digest == other.end.content_digest,
        same_step=same_step(one.traced | other.traced),
    )
    return comparison, one, other


def compare_states(
    one: "SavedState", other: "SavedState", *, names: tuple[OnlyIn, OnlyIn]
) -> tuple[int, int, VariableDifference | None]:
    """Compare the variables of two checkpoints, which `names` names. Only the first that differs is read.

    Returns:
        How many variables there are, how many differ, and the first difference.
    """
    differing = differing_keys(one.leaves, other.leaves)
    first = _difference(differing[0], one, other, names) if differing else None
    return len(one.leaves.keys() | other.leaves.keys()), len(differing), first


def same_step(traced: Iterable[TracedStep]) -> bool:
    """Return whether all processes traced the same step under the same circumstances."""
    found: dict[str, TracedStep] = {}
    return all(found.setdefault(each.circumstances, each) == each for each in traced)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """The state in a checkpoint.

    Attributes:
        leaves: a text for each variable, by its key, see `CheckpointManifest.leaves`.
        read: reads a variable by its key; raises `DamagedCheckpoint` if the files differ from the manifest.
    """

    leaves: Mapping[str, str]
    read: Callable[[str], "Array"]


def saved_state(home: LocalStorage, ref: CheckpointRef) -> SavedState:
    """The state in a checkpoint of `home`.

    Raises:
        DamagedCheckpoint: its files differ from the manifest.
    """
    manifest = verify_checkpoint(home, ref)
    return SavedState(leaves=manifest.leaves, read=lambda key: read_variable(home, ref, manifest, key))


def read_variable(home: LocalStorage, ref: CheckpointRef, manifest: CheckpointManifest, key: str) -> "Array":
    """Read a variable of a verified checkpoint of `home` with TensorFlow's reader.

    Raises:
        DamagedCheckpoint: the files hold other variables than the manifest lists.
    """
    from baton.tasks.foundation.machine.environment import quiet_tensorflow

    quiet_tensorflow()
    import tensorflow as tf

    from baton.tasks.foundation.checkpoint.tensor_bundle import PREFIX, bundle_errors
    from baton.tasks.foundation.state.digest import stored_name

    prefix, names = str(home.root / ref.path / PREFIX), {key: stored_name(key) for key in manifest.leaves}
    with bundle_errors(f"{home.uri}/{ref.path}", prefix):
        reader = tf.train.load_checkpoint(prefix)
        # The object graph is not a variable.
        unmatched = {*reader.get_variable_to_shape_map(), _OBJECT_GRAPH} ^ {*names.values(), _OBJECT_GRAPH}
    if unmatched:
        raise DamagedCheckpoint(
            f"{home.uri}/{ref.path}: {min(unmatched)} is in its files or in its manifest, not in both"
        )
    value: Array = reader.get_tensor(names[key])
    return value


def _difference(key: str, a: SavedState, b: SavedState, names: tuple[OnlyIn, OnlyIn]) -> VariableDifference:
    import numpy as np

    one, other = (each.read(key) if key in each.leaves else None for each in (a, b))
    present = other if one is None else one
    if present is None:
        raise AssertionError(f"{key} is in neither checkpoint")
    found = VariableDifference(
        path=key,
        dtype=present.dtype.name,
        shape=tuple(present.shape),
        values=int(present.size),
        bits=None,
        largest=None,
    )
    if one is None or other is None:
        return found.model_copy(update={"only_in": names[one is None]})
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return found
    flipped = np.frombuffer(one.tobytes(), np.uint8) ^ np.frombuffer(other.tobytes(), np.uint8)
    values, largest = int(flipped.reshape(one.size, -1).any(axis=1).sum()), None
    if one.dtype.kind in "iuf" or one.dtype.name == "bfloat16":
        with np.errstate(invalid="ignore"):  # infinity minus infinity is NaN
            gaps = np.abs(one.astype(np.float64) - other.astype(np.float64))
        largest = float(gaps[np.isfinite(gaps)].max(initial=0.0))
    bits = int(np.bitwise_count(flipped).sum())
    return found.model_copy(update={"values": values, "bits": bits, "largest": largest})


def _first_step(one: tuple[MetricRow, ...], other: tuple[MetricRow, ...]) -> int | None:
    """The first step whose logged metrics differ. They are compared as text, because NaN is not equal to itself."""
    for row, other_row in zip_longest(one, other):
        if row is None or other_row is None or row.to_json() != other_row.to_json():
            return min(each.step for each in (row, other_row) if each is not None)
    return None


def causes_of(
    *, same_examples: bool, repeatable: bool | None, operations: str, source: str, same_step: bool = True
) -> tuple[str, ...]:
    """Return the causes that fit the findings, the likeliest first.

    Args:
        same_examples: whether both trainings prepared the same examples in the same order.
        repeatable: whether two straight trainings agree; None if only one was made.
        operations: the model and its operations that keep state outside the checkpoint, as in `Outcome`; may be empty.
        source: `data.source`.
        same_step: whether all processes traced the same train step.
    """
    causes = []
    if not same_examples:
        causes.append(
            f"{source} gave other examples, or the same ones in another order, on its second call. Usual causes: "
            "shuffling or drawing without a seed, the order of a set, an unsorted folder listing, threads, the time. "
            "Return the same order each time; Baton shuffles by train.seed"
        )
    if not same_step:
        causes.append(
            "the processes traced different train steps from the same code: the model's Python code reads something "
            "that changes while the step is traced, such as the time, a random number, a counter, a file or the order "
            "of a set. Make it a constant or a variable"
        )
    if operations:
        causes.append(
            f"{operations} draw from TensorFlow's own random state or run Python code, and checkpoints hold neither "
            "state. Use keras.random with a SeedGenerator in a layer, or tf.random.Generator; keep what Python code "
            "remembers in variables"
        )
    if repeatable is False and same_step:
        causes.append(
            "two uninterrupted trainings differ too, so cuts are not the cause: the model is not repeatable. Usual "
            "causes: unseeded random numbers of Python or NumPy in the model's code, the order of a set, or an "
            "operation that is not deterministic (leave train.deterministic at true; then try --set "
            "accelerator.intra_op_threads=1 and --set accelerator.inter_op_threads=1)"
        )
    elif repeatable and not operations and same_step:
        causes.append(
            "two uninterrupted trainings agree, so state is lost at the cut because no checkpoint holds it. Usual "
            "causes: a counter or a cache in Python, such as an attribute of a layer or a callback; a stateful tf.data "
            "map; a lookup table. Keep it in a variable (add_weight, or a tf.Variable of a layer)"
        )
    return tuple(causes)


def difference_words(found: VariableDifference) -> str:
    """Say how a variable differs, on one line."""
    what = f"{found.path}  {found.dtype}{list(found.shape)}"
    if found.only_in:
        return f"{what}: only in the {found.only_in}{' training' if found.only_in in {'straight', 'cut'} else ''}"
    bits = "" if found.bits is None else f" in {found.bits} bits"
    largest = "" if found.largest is None else f", by up to {number_words(found.largest)}"
    return f"{what}: {found.values} of its values differ{bits}{largest}"
