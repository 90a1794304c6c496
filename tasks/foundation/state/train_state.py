"""The train state of one process: the model and every variable that a checkpoint of it holds.

`checkpoint/` writes, restores and commits it; see `checkpoint/save.py`. The state remembers the data files that it was
last saved to or restored from, so that unchanged ones are not written again.

A change in mid-run (a layer is unfrozen, Adam becomes AdamW, a metric is added) gives the train state other variables
than a checkpoint from before it has. `carry` says which values the model keeps. Each variable of either side has a
*meaning*: a weight is its path; a slot is its optimizer, its name, and the variable it belongs to; a metric's sum is
the metric's name and its own. Positions count for nothing, because one more variable moves all that come after it. A
variable keeps its value if the checkpoint has one of the same meaning, dtype and shape. Other slots, metrics and seeds
begin fresh, or are dropped.

Weights are what was trained, so none is dropped, and none begins fresh but in a layer that keeps others (as those of
`enable_lora`): then the checkpoint belongs to another model. So a change can only add weights, and a rewind to a
checkpoint before several changes keeps what these changes kept. The result follows from the two trees alone. It is
computed at each restore of a checkpoint from before a change, so no kill can come between the change and what it does.
"""

import re
import shutil
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from baton.tasks.foundation.contracts.checkpoint import (
    CarriedState,
    CheckpointManifest,
    FileRecord,
    OptimizerRecord,
    VariableRecord,
)
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import StorageError
from baton.tasks.foundation.machine.devices import DEVICE_LOST_ERRORS, Accelerator
from baton.tasks.foundation.model.build import build_with_variables
from baton.tasks.foundation.model.metrics import ReturnedMetrics, trace_returned_metrics
from baton.tasks.foundation.model.randomness import StepDraws, exact_draws
from baton.tasks.foundation.model.variables import Leaf, finalize_layers, leaves_of, optimizer_records
from baton.tasks.foundation.state.digest import (
    HOST,
    RETURNED,
    StateDigest,
    digest_of,
    is_learning_rate,
    object_graph_of,
    of_model,
    other_model,
    signature_of,
    text_of,
    tree_of,
)
from baton.tasks.foundation.state.host_memory import HostState, HostValues, PageBuffer
from baton.tasks.foundation.state.host_shares import HostShares
from baton.tasks.foundation.state.replicas import ReplicaSeeds, ReplicaVariables, returned_leaves


class EarlierFiles:
    """Remembers them, so that a save need not write the same bytes again. They may be deleted at any time.

    The training thread restores, and the thread that saves writes, but never both at once.
    """

    def __init__(self) -> None:
        self._files: tuple[tuple[str, FileRecord], ...] = ()

    def remember(self, folder: str, files: Sequence[FileRecord]) -> None:
        """Remember the files of one checkpoint in place of the one before.

        Args:
            folder: of the checkpoint, relative to the home.
        """
        self._files = tuple((f"{folder}/{file.name}", file) for file in files)

    def of_size(self, size: int) -> list[tuple[str, FileRecord]]:
        """Return path and record of the files with this size. No other checkpoint, in any home, has these paths."""
        return [found for found in self._files if found[1].size == size]


# More than the variables is written there: the sources that AutoGraph generates and a checkpoint's index.
_EXTRA_BYTES = 1 << 20


def require_temporary_space(leaves: Iterable[Leaf]) -> None:
    """Check that a checkpoint fits into the temporary folder, before anything is trained.

    Without this check AutoGraph fails first, and blames the model.

    Raises:
        StorageError: it does not fit, or the folder cannot be read.
    """
    variables = [part for leaf in leaves for part in (leaf.components if leaf.per_replica else leaf.components[:1])]
    # The host state has no fixed size, and is small.
    needed = sum((part.shape.num_elements() or 0) * part.dtype.size for part in variables) + _EXTRA_BYTES
    what_for = f"a checkpoint of this model takes {needed} there when it is restored from a bucket"
    _require_free(needed, subject="the train state", what_for=what_for)


def require_space_to_trace() -> None:
    """Check that AutoGraph can write the sources that it generates; otherwise it blames the user's code.

    Raises:
        StorageError: the temporary folder is full, or cannot be read.
    """
    what_for = f"TensorFlow needs {_EXTRA_BYTES} there to trace a step"
    _require_free(_EXTRA_BYTES, subject="tracing a step", what_for=what_for)


def _require_free(needed: int, *, subject: str, what_for: str) -> None:
    folder = tempfile.gettempdir()
    with temporary_folder_errors(subject):
        free = shutil.disk_usage(folder).free
    if free < needed:
        raise StorageError(
            f"{folder} has {free} bytes left, and {what_for}; free some space there, or name another folder with "
            "TMPDIR, and run again"
        )


@contextmanager
def temporary_folder_errors(subject: str) -> Iterator[None]:
    """Turn errors of TensorFlow and the system about temporary files into a `StorageError`.

    Args:
        subject: what is being written or read, for the message.

    Raises:
        StorageError: a file could not be written or read.
    """
    try:
        yield
    except DEVICE_LOST_ERRORS:
        raise  # a lost device or host, not a file
    except (tf.errors.OpError, OSError) as fault:
        lines = (fault.message if isinstance(fault, tf.errors.OpError) else str(fault)).splitlines()
        raise StorageError(
            f"{subject}: no files could be written or read in {tempfile.gettempdir()} "
            f"({lines[0] if lines else fault}); free some space there, or name another folder with TMPDIR, and run "
            "again"
        ) from fault


class TrainState:
    """A built model, the leaves of its train state, and the step counter.

    Attributes:
        model: built, with every variable it uses.
        accelerator: the process's.
        host_state: state of Python objects as JSON, such as that of callbacks; None in a run without any.
        returned: means of what the user's `train_step` or `compute_metrics` returns; None if both are Keras's.
        draws: seeds of the random operations in the model's steps; no part of the state.
        model_leaves: leaves of the model, its optimizer, its metrics, and the step.
        returned_leaves: leaves of `returned`.
        leaves: all of them, and the host state's.
        signature: path, dtype and shape of each leaf, sorted by path.
        replica_variables: the variable of each replica, where replicas may differ.
        seeds: the random seed of each replica.
        saved: key to variable, of everything that a checkpoint holds.
        host_values: reads the values of `saved`.
        object_graph: TensorFlow's description of `saved`, see `digest.py`.
        shares: which host saves what of `saved`.
        earlier_files: data files of the checkpoint that was last saved or restored.
        page_buffer: the memory that snapshots of this state use, one after the other.
        model_checkpoint: reads the part that belongs to `model_leaves`.
        compiled_learning_rates: learning rates that the model was compiled with, by path of their variable. A learning
            rate is a variable, so a restored one would replace what the run file says now.
        optimizers: what the slots mean, by the path of their leaves without position.
    """

    def __init__(
        self,
        model: keras.Model,
        draws: StepDraws,
        *,
        frozen: frozenset[int] = frozenset(),
        host_state: HostState | None = None,
    ) -> None:
        self.model = model
        self.draws = draws
        self.accelerator = accelerator = draws.accelerator
        self.host_state = host_state
        with accelerator.strategy.scope():
            self._step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
        step_leaf = Leaf(path="step", variable=self._step, per_replica=False)
        self.model_leaves: tuple[Leaf, ...] = (*leaves_of(model, frozen), step_leaf)
        self._arrange(None)
        self.seeds.derive()
        self.compiled_learning_rates = {
            leaf.path: float(leaf.components[0].numpy()) for leaf in self.leaves if is_learning_rate(leaf)
        }
        self.optimizers = optimizer_records(model)

    def add_returned(self, batch: Sequence[Any], *, reference: str) -> None:
        """Add the means of the metrics that a custom `train_step` returns; a state for training has them.

        Args:
            batch: one per-replica batch of zeros, see `zero_examples`.
            reference: the user's name of the model, for messages.

        Raises:
            ModelError: the model's `train_step` cannot be traced.
        """
        returned = trace_returned_metrics(self.model, "train_step", batch, reference=reference, draws=self.draws)
        if returned is not None:
            self._arrange(returned)

    def _arrange(self, returned: ReturnedMetrics | None) -> None:
        """Collect the leaves and what depends on them."""
        host_state, accelerator = self.host_state, self.accelerator
        self.returned = returned
        self.returned_leaves: tuple[Leaf, ...] = tuple(returned_leaves(returned))
        host_leaves = () if host_state is None else (host_state.leaf,)
        self.leaves: tuple[Leaf, ...] = (*self.model_leaves, *self.returned_leaves, *host_leaves)
        self.signature = signature_of(self.leaves)
        self.replica_variables = ReplicaVariables(self.leaves, accelerator)
        self.saved = self.replica_variables.saved(self.leaves)
        self.shares = HostShares(self.leaves, self.saved, accelerator)
        self.host_values = HostValues(self.saved, accelerator.io_device)
        self.object_graph = object_graph_of(self.host_values.names())
        self.earlier_files = EarlierFiles()
        self.page_buffer = PageBuffer()
        # Leaves are hashed side by side, but a server got a garbled call once when several threads read from it.
        self._one_read = threading.Lock() if accelerator.has_servers else nullcontext()
        self.model_checkpoint = tf.train.Checkpoint(**tree_of(self.replica_variables.saved(self.model_leaves)))
        self.seeds = ReplicaSeeds(self.leaves, self.replica_variables, accelerator)

    @property
    def tree(self) -> "StateTree":
        """The variables, and what the slots among them mean."""
        return StateTree(signature=self.signature, optimizers=self.optimizers)

    @property
    def step(self) -> int:
        """Global batches that went through `train_step` since initialization."""
        return int(self._step.numpy())

    @step.setter
    def step(self, step: int) -> None:
        self._step.assign(step)

    def finalize(self) -> None:
        """Make the constants of layers that follow from variables; call it after variables were assigned.

        Raises:
            ModelError: a layer's `finalize_state` raised.
        """
        with self.accelerator.strategy.scope():
            finalize_layers(self.model)

    def digest(self, *, stored: Mapping[str, Any] | None = None) -> StateDigest:
        """Digest of the state in memory.

        The parts of other hosts count as they were when the state was last staged or restored.

        Args:
            stored: host state and returned means as a checkpoint holds them, by key. They replace those in memory,
                and count even if this process keeps none.
        """
        if stored is None:
            return digest_of(self.saved, self._value)
        keys = [key for key in self.saved if not key.startswith((HOST, RETURNED))]
        return digest_of([*keys, *stored], lambda key: stored[key] if key in stored else self._value(key))

    def _value(self, key: str) -> Any:
        variable = self.saved[key]
        first = variable.values[0] if hasattr(variable, "values") else variable
        with self._one_read:
            return first.numpy()


def build_train_state(
    spec: RunSpec, *, code_folder: Path, accelerator: Accelerator, batch: Sequence[Any], training: bool = False
) -> TrainState:
    """Build the user's model and every variable of its train state, with their seeded initial values.

    Args:
        spec: names the function and the seed.
        batch: one per-replica batch of zeros, see `zero_examples`.
        training: whether the state is built for training; it then includes the metrics that a custom `train_step`
            returns.

    Raises:
        ModelError: the user's code or model cannot be used.
        StorageError: the temporary folder has too little space for a checkpoint.
    """
    draws = StepDraws(spec.train.seed, accelerator)
    with exact_draws(draws):
        model, frozen = build_with_variables(spec, batch, code_folder=code_folder, accelerator=accelerator)
    host_state = None if spec.train.callbacks is None else HostState("callbacks")
    state = TrainState(model, draws, frozen=frozen, host_state=host_state)
    if training:
        state.add_returned(batch, reference=spec.model.build)
    require_temporary_space(state.leaves)
    return state


_METRIC = re.compile(r"metrics/(\d+)/(\d+)/(.+)")
_OPTIMIZER = re.compile(r"(optimizer|optimizers/.+)/(\d+)/(?:([^/]+)/)?(.+)")
_SEED = re.compile(r"model/(?:.+/)?seed_generator_state(?:~\d+)?")
_WEIGHTS = ("model/", "variables/")
_SCALES_LOSS = "LossScaleOptimizer"
# Both of their slots are averages of gradients and of squared gradients. Names alone do not tell: the momentum of SGD
# is a sum of steps.
_LIKE_ADAM = frozenset({"adam", "adamw", "nadam", "lamb"})

Meaning = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTree:
    """The variables of a train state, and what the slots among them mean.

    Attributes:
        signature: path, dtype and shape of each variable; what is not the model's is passed over.
        optimizers: by the path under which their variables lie, without position.
    """

    signature: Iterable[VariableRecord]
    optimizers: Mapping[str, OptimizerRecord]


def is_same_tree(stored: CheckpointManifest, mine: StateTree) -> bool:
    """Whether all variables have the same paths, shapes and meanings, so that a restore is an ordinary one."""
    same = of_model(stored.signature) == of_model(mine.signature)
    return same and all(mine.optimizers.get(path) == each for path, each in stored.optimizers.items())


def carry(stored: CheckpointManifest, mine: StateTree, *, where: str, home: str) -> CarriedState:
    """Return which values of a checkpoint a model keeps.

    Args:
        stored: the checkpoint's manifest.
        mine: the model's tree.
        where: address of the checkpoint, for the message.
        home: address of the run's home, for the message.

    Raises:
        StateMismatch: weights have other names or shapes.
    """
    before = StateTree(signature=stored.signature, optimizers=stored.optimizers)
    carried, refused = carried_between(before, mine)
    if refused:
        fitting = f"or set init.weights: {{source: {home}, strict: false}} there too, for the weights that fit"
        raise other_model(where, refused, hints=[fitting])
    return carried


def carried_between(before: StateTree, now: StateTree) -> tuple[CarriedState, list[str]]:
    """Return what becomes of the variables, and a line for each weight that cannot be carried."""
    old, new = _Meanings(before), _Meanings(now)
    kept: dict[str, str] = {}
    refused: list[str] = []
    for meaning, mine in new.records.items():
        stored = old.records.get(meaning, ())
        # Of several that share a name, the order tells, unless one of them may have come or gone.
        shared = len(mine) > 1 or new.shares_a_name(meaning)
        if len(stored) != len(mine) or (shared and not _in_order(meaning, old, new)):
            continue
        for was, now_is in zip(stored, mine, strict=True):
            if (was.dtype, was.shape) == (now_is.dtype, now_is.shape):
                if _means_the_same(meaning, old, new):
                    kept[now_is.path] = was.path
            elif _is_weight(was):
                refused.append(f"checkpoint has {text_of(was)}, model has {text_of(now_is)}")
    taken = set(kept.values())
    fresh, dropped = _others(new, kept), _others(old, taken)
    unequal = {record.path for record in dropped} & {record.path for record in fresh}
    lost = [record for record in dropped if _is_weight(record) and record.path not in unequal]
    refused += [f"only in the checkpoint: {text_of(record)}" for record in lost]
    layers = {_layer(path) for path in kept if path.startswith(_WEIGHTS) and not _SEED.fullmatch(path)}
    refused += [
        f"only in the model: {text_of(record)}"
        for record in fresh
        if _is_weight(record) and record.path not in unequal and _layer(record.path) not in layers
    ]
    return (
        CarriedState(
            kept=dict(sorted(kept.items())),
            fresh=tuple(sorted(record.path for record in fresh)),
            dropped=tuple(sorted(record.path for record in dropped)),
        ),
        refused,
    )


def is_average_of(path: str) -> str | None:
    """Return the name that an optimizer gives the variable whose average (`use_ema`) this is; None if it is none."""
    found = _OPTIMIZER.fullmatch(path)
    return found[4].removesuffix("_average") if found and found[4].endswith("_average") else None


def is_iteration(path: str) -> bool:
    """Whether an optimizer counts its calls in this variable."""
    found = _OPTIMIZER.fullmatch(path)
    return found is not None and found[4] == "iteration"


def optimizer_path(path: str) -> str | None:
    """Return the path of the optimizer that a variable belongs to, without position; None if it belongs to none."""
    found = _OPTIMIZER.fullmatch(path)
    return None if found is None else f"{found[1]}/{found[3]}" if found[3] else found[1]


class _Meanings:
    """The variables of a tree by their meaning, those of the same meaning in the order of the model."""

    def __init__(self, tree: StateTree) -> None:
        self.optimizers: dict[tuple[str, bool], OptimizerRecord] = {}
        records = of_model(tree.signature)
        self.trained = {record.path for record in records if _is_weight(record) and not record.per_replica}
        joined = Counter("_".join(record.path.split("/")[1:]) for record in records if _is_weight(record))
        self._joined_twice = [name for name, number in joined.items() if number > 1]
        found: dict[Meaning, list[tuple[tuple[int, ...], VariableRecord]]] = defaultdict(list)
        for record in records:
            meaning, position = self._meaning(record.path, tree.optimizers)
            found[meaning].append((position, record))
        self.records: dict[Meaning, tuple[VariableRecord, ...]] = {
            meaning: tuple(record for _, record in sorted(each, key=lambda one: one[0]))
            for meaning, each in found.items()
        }

    def shares_a_name(self, meaning: Meaning) -> bool:
        """Whether a slot has the name of two weights' slots: Keras joins the parts of their paths by `_`."""
        return any(meaning[-1].startswith(f"{name}_") for name in self._joined_twice)

    def _meaning(self, path: str, optimizers: Mapping[str, OptimizerRecord]) -> tuple[Meaning, tuple[int, ...]]:
        if found := _METRIC.fullmatch(path):
            return ("metrics", found[3]), (int(found[1]), int(found[2]))
        if not (found := _OPTIMIZER.fullmatch(path)):
            return (path,), ()
        prefix, position, name, slot = found.groups()
        scales = False
        if name is not None:
            # What no record says, the name does by default.
            record = optimizers.get(f"{prefix}/{name}") or OptimizerRecord(kind=re.sub(r"_\d+$", "", name))
            scales = _plain(record.kind) == _plain(_SCALES_LOSS)
            self.optimizers[prefix, scales] = record
        return (prefix, "scale" if scales else "", slot), (int(position),)


def _in_order(meaning: Meaning, old: _Meanings, new: _Meanings) -> bool:
    return meaning[0] == "metrics" or old.trained == new.trained


def _means_the_same(meaning: Meaning, old: _Meanings, new: _Meanings) -> bool:
    """Whether two variables of one meaning by name are the same thing: what a slot holds depends on the optimizer."""
    if len(meaning) != 3:  # noqa: PLR2004 - of a slot: optimizer, whether it scales the loss, name
        return True
    prefix, scale, slot = meaning
    before, now = (each.optimizers.get((prefix, bool(scale))) for each in (old, new))
    if before is None or now is None or slot == "iteration" or slot.endswith("_average"):
        return True
    if slot.endswith("_gradient_accumulator"):
        return before.accumulates == now.accumulates
    kinds = {_plain(before.kind), _plain(now.kind)}
    return len(kinds) == 1 or kinds <= _LIKE_ADAM


def _plain(kind: str) -> str:
    """An optimizer's class or default name: `AdamW`, `adamw` and `adam_w` are the same."""
    return kind.replace("_", "").lower()


def _others(meanings: _Meanings, kept: Iterable[str]) -> list[VariableRecord]:
    known = set(kept)
    return [record for each in meanings.records.values() for record in each if record.path not in known]


def _is_weight(record: VariableRecord) -> bool:
    return record.path.startswith(_WEIGHTS) and not _SEED.fullmatch(record.path)


def _layer(path: str) -> str:
    return path.rpartition("/")[0]
