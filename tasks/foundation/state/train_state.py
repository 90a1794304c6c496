"""The train state of one process: the model and every variable that a checkpoint of it holds.

`checkpoint/` writes, restores and commits it; see `checkpoint/save.py`. The state remembers the data files that it was
last saved to or restored from, so that unchanged ones are not written again.
"""

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tasks.foundation.contracts.checkpoint import FileRecord
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.errors import StorageError
from tasks.foundation.machine.devices import DEVICE_LOST_ERRORS, Accelerator
from tasks.foundation.model.build import build_with_variables
from tasks.foundation.model.metrics import ReturnedMetrics, trace_returned_metrics
from tasks.foundation.model.randomness import StepDraws, exact_draws
from tasks.foundation.model.variables import Leaf, finalize_layers, leaves_of, optimizer_records
from tasks.foundation.state.carried_state import StateTree
from tasks.foundation.state.host_state import HostState, HostValues
from tasks.foundation.state.layout import (
    HOST,
    RETURNED,
    digest_of,
    is_learning_rate,
    object_graph_of,
    signature_of,
    tree_of,
)
from tasks.foundation.state.page_buffer import PageBuffer
from tasks.foundation.state.replicas import ReplicaSeeds, ReplicaVariables, returned_leaves


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
            files: from its manifest.
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
        object_graph: TensorFlow's description of `saved`, see `layout.py`.
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
        accelerator: Accelerator,
        *,
        frozen: frozenset[int] = frozenset(),
        host_state: HostState | None = None,
        draws: StepDraws | None = None,
    ) -> None:
        self.model = model
        self.draws = draws
        self.accelerator = accelerator
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
            batch: one per-replica batch of zeros, see `zero_batch`.
            reference: the user's name of the model, for messages.

        Raises:
            ModelError: the model's `train_step` cannot be traced.
        """
        returned = trace_returned_metrics(
            self.model,
            "train_step",
            batch,
            reference=reference,
            accelerator=self.accelerator,
            draws=self.draws,
        )
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
        self.host_values = HostValues(self.saved, accelerator.io_device)
        self.object_graph = object_graph_of(self.host_values.names())
        self.earlier_files = EarlierFiles()
        self.page_buffer = PageBuffer()
        self.model_checkpoint = tf.train.Checkpoint(**tree_of(self.replica_variables.saved(self.model_leaves)))
        self.seeds = ReplicaSeeds(self.leaves, self.replica_variables, accelerator)

    @property
    def tree(self) -> StateTree:
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

    def digest(self, *, stored: Mapping[str, Any] | None = None) -> str:
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
        return first.numpy()


def build_train_state(
    spec: RunSpec, *, code_folder: Path, accelerator: Accelerator, batch: Sequence[Any], training: bool = False
) -> TrainState:
    """Build the user's model and every variable of its train state, with their seeded initial values.

    Args:
        spec: names the function and the seed.
        code_folder: the run file's folder.
        accelerator: the process's.
        batch: one per-replica batch of zeros, see `zero_batch`.
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
    state = TrainState(model, accelerator, frozen=frozen, host_state=host_state, draws=draws)
    if training:
        state.add_returned(batch, reference=spec.model.build)
    require_temporary_space(state.leaves)
    return state
