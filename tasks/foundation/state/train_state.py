"""The train state of one process: the model and every variable that a checkpoint of it holds.

`checkpoint/` writes, restores and commits it; see `checkpoint/save.py`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tasks.foundation.accelerator.strategy import Accelerator
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.model.built_model import build_with_variables
from tasks.foundation.model.layers import finalize_layers
from tasks.foundation.model.returned_metrics import ReturnedMetrics, trace_returned_metrics
from tasks.foundation.model.step_draws import StepDraws
from tasks.foundation.model.traced_draws import exact_draws
from tasks.foundation.model.variables import Leaf, leaves_of, optimizer_records
from tasks.foundation.state.carried_state import StateTree
from tasks.foundation.state.digest import digest_of
from tasks.foundation.state.earlier_files import EarlierFiles
from tasks.foundation.state.host_state import HostState
from tasks.foundation.state.host_values import HostValues
from tasks.foundation.state.layout import HOST, RETURNED, is_learning_rate, signature_of, tree_of
from tasks.foundation.state.object_graph import object_graph_of
from tasks.foundation.state.page_buffer import PageBuffer
from tasks.foundation.state.replica_seeds import ReplicaSeeds
from tasks.foundation.state.replica_variables import ReplicaVariables
from tasks.foundation.state.returned_means import returned_leaves
from tasks.foundation.state.temporary_space import require_temporary_space


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
        object_graph: TensorFlow's description of `saved`, see `object_graph.py`.
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
