"""The train state that a process keeps from stage to stage: built once, then trained and evaluated in place.

A process has one distribution strategy, and a second model may not fit on its devices. So init-or-restore,
train-segment and evaluate share one state. A stage takes it out, and puts it back when it succeeds. After an exception
nobody puts it back, and the next stage builds a state and restores it from storage. What an evaluation changes is put
back bit for bit.
"""

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.dataset import DatasetRef, Feature
from baton.tasks.foundation.contracts.log_entry import Evaluation
from baton.tasks.foundation.contracts.placement import per_replica_batch_size
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.dataset.manifest import load_manifest, zero_examples
from baton.tasks.foundation.dataset.model_inputs import ModelInputs, apply_class_weight, model_inputs
from baton.tasks.foundation.machine.devices import Accelerator
from baton.tasks.foundation.model.build import RandomStates, preserved_global_state, preserved_random_states
from baton.tasks.foundation.model.metrics import Results, read_results
from baton.tasks.foundation.model.model_identity import (
    PythonAttributes,
    require_recorded_contents,
    require_recorded_transform_contents,
)
from baton.tasks.foundation.model.variables import Leaf
from baton.tasks.foundation.state.train_state import TrainState, build_train_state
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.user_functions import switch_off_debug_modes

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What the work of a stage is built from."""

    spec: RunSpec
    dataset: DatasetRef
    code_folder: Path


class WarmState:
    """A train state in memory, and which checkpoint it holds.

    Attributes:
        spec: the run file that it was built from.
        features: of the prepared examples.
        inputs: what it sees of them.
        code_folder: the run file's folder.
        state: the train state.
        restores: how often a checkpoint was restored into it.
        evaluation: the newest one of it in this process. Its checkpoint may be in flight, and it may not be logged yet.
        has_recorded_contents: whether the model is known to keep the contents that the log records.
    """

    def __init__(
        self,
        spec: RunSpec,
        features: Sequence[Feature],
        code_folder: Path,
        state: TrainState,
        *,
        inputs: ModelInputs,
    ) -> None:
        """Call it right after the state was built, because it records the random generators' states."""
        self.spec = spec
        self.features = tuple(features)
        self.inputs = inputs
        self.code_folder = code_folder
        self.state = state
        self.restores = 0
        self.evaluation: Evaluation | None = None
        self.has_recorded_contents = False
        self._as_built = RandomStates.now()
        self._attributes = PythonAttributes.of(state.model)
        self._dataset: DatasetRef | None = None
        self._content: str | None = None
        self._has_initial_values = True
        self._companions: dict[type, Any] = {}

    def is_of(self, recipe: Recipe, accelerator: Accelerator, storage: Storage) -> bool:
        """Whether building a state from these arguments would give the same state."""
        same = self.spec == recipe.spec and self.code_folder == recipe.code_folder
        if not same or self.state.accelerator is not accelerator:
            return False
        if self._dataset != recipe.dataset:  # its features are read once
            if self.features != load_manifest(storage, recipe.dataset).features:
                return False
            self._dataset = recipe.dataset
        return True

    def require_recorded_contents(self, identity: Mapping[str, Any], *, home: str) -> None:
        """Refuse a model, or transforms, with other vocabularies, tables or arrays than the run's; before tracing.

        Args:
            home: of the run, for the message.

        Raises:
            IdentityChanged: names the layers.
        """
        if not self.has_recorded_contents:
            train, replicas = self.spec.train, self.state.accelerator.replicas
            batch = per_replica_batch_size(train.global_batch_size, replicas, train.accumulate)
            require_recorded_contents(identity, self.state.model, self.spec.model.build, home=home, batch=batch)
            require_recorded_transform_contents(identity, self.spec, self.code_folder, home=home)
            self.has_recorded_contents = True

    def seed_as_built(self) -> None:
        """Set random generators, the thread's dtype policy and Keras's configuration as they were after the build.

        Call it before a step is traced: a model that was built long ago, or in another thread, must give the same graph
        as one that was built just now.
        """
        switch_off_debug_modes()  # code that yields examples, or a callback, may have switched one on
        self._as_built.restore()

    @property
    def attributes_changed(self) -> bool:
        """Whether Python code has changed attributes of the model since it was built.

        A step that is traced from now on may then differ from that of a new model, whatever its variables hold.
        """
        return self._attributes.changed(self.state.model) != frozenset()

    @property
    def can_put_back_attributes(self) -> bool:
        """Whether the attributes can be as they were built, without building the model again."""
        return self._attributes.can_be_put_back(self.state.model)

    def as_built(self) -> bool:
        """Make this what a new state would be, where that needs no other model.

        Attributes are put back, what stages have made for it is dropped, and the variables must be restored.

        Returns:
            Whether it was possible; otherwise nothing was changed.
        """
        if not self.can_put_back_attributes:
            return False
        self._attributes.put_back(self.state.model)
        self._companions.clear()
        self.forget_content()
        return True

    @contextmanager
    def attributes_as_built(self) -> Iterator[None]:
        """Put the attributes back within the block, if they can be, and restore them after it."""
        if not self.attributes_changed or not self.can_put_back_attributes:
            yield
            return
        model = self.state.model
        now = PythonAttributes.of(model)
        self._attributes.put_back(model)
        yield
        if now.can_be_put_back(model):
            now.put_back(model)

    def holds(self, ref: CheckpointRef) -> bool:
        """Whether the variables hold this checkpoint. Without collectives: hosts may disagree."""
        return self._content in {ref.path, ref.state_digest} and self.state.step == ref.step

    def set_content(self, ref: CheckpointRef | None) -> None:
        """Note that the variables hold this checkpoint; None on hosts other than the chief, which note the digest."""
        self._content = self.state.digest().root if ref is None else ref.path

    def forget_content(self) -> None:
        """Note that the variables are about to change."""
        self._content = None
        self._has_initial_values = False

    def initial_values(self) -> AbstractContextManager[TrainState]:
        """A state with the values of step 0: this one, if nothing has changed them yet, or one that is built again."""
        return nullcontext(self.state) if self._has_initial_values else self._built_again()

    @contextmanager
    def _built_again(self) -> Iterator[TrainState]:
        with preserved_global_state():
            yield warm_state_of(
                self.spec, self.features, code_folder=self.code_folder, accelerator=self.state.accelerator
            ).state

    def companion(self, kind: type[T]) -> T | None:
        """What a stage has made for this state; it is dropped together with the state."""
        return self._companions.get(kind)

    def keep_companion(self, companion: object) -> None:
        """Keep what a stage has made for this state, instead of an earlier one of the same class."""
        self._companions[type(companion)] = companion


class ProcessState:
    """Keeps the one warm state of a process while no stage uses it."""

    def __init__(self) -> None:
        self._kept: WarmState | None = None
        self._newest: weakref.ref[Any] | None = None

    @property
    def kept(self) -> WarmState | None:
        """The kept state; None if there is none, or a stage has taken it out."""
        return self._kept

    def take(self, recipe: Recipe, *, storage: Storage, accelerator: Accelerator) -> WarmState:
        """Take out the kept state if it fits, or build one. Only a stage that succeeds puts it back.

        Args:
            recipe: what to build it from.

        Raises:
            ModelError: the user's code or model cannot be used.
            StorageError: the temporary folder has too little space for a checkpoint.
        """
        kept, self._kept = self._kept, None
        if kept is not None and kept.is_of(recipe, accelerator, storage):
            return kept
        del kept
        self.forget()
        return build_warm_state(recipe, storage=storage, accelerator=accelerator)

    def keep(self, warm: WarmState) -> None:
        """Keep a state that is known to be valid."""
        self._kept = warm
        self._newest = weakref.ref(warm.state.model)

    def forget(self) -> None:
        """Drop the kept state, and free the memory of the one that was kept last."""
        self._kept = None
        # A model is part of reference cycles. Its variables would stay on the devices until Python happens to look.
        if self._newest is not None and self._newest() is not None:
            gc.collect()
        self._newest = None


def build_warm_state(recipe: Recipe, *, storage: Storage, accelerator: Accelerator) -> WarmState:
    """Build a train state that no process state keeps; for arguments and errors see `ProcessState.take`."""
    features = load_manifest(storage, recipe.dataset).features
    return warm_state_of(recipe.spec, features, code_folder=recipe.code_folder, accelerator=accelerator)


def warm_state_of(
    spec: RunSpec, features: Sequence[Feature], *, code_folder: Path, accelerator: Accelerator
) -> WarmState:
    """Build a train state with its initial values.

    Raises:
        ModelError: the user's code or model cannot be used.
        StorageError: the temporary folder has too little space for a checkpoint.
    """
    size = per_replica_batch_size(spec.train.global_batch_size, accelerator.replicas, spec.train.accumulate)
    inputs = model_inputs(spec, features, code_folder)
    batch = apply_class_weight(zero_examples(inputs.train, size), spec.train.class_weight)
    state = build_train_state(spec, code_folder=code_folder, accelerator=accelerator, batch=batch)
    return WarmState(spec, features, code_folder, state, inputs=inputs)


PROCESS_STATE = ProcessState()


class HeldValues:
    """The values of some leaves at one moment.

    TensorFlow shares a variable's memory with the value that is read from it, and copies only when the variable is
    written. So this takes no memory for variables that are not written.
    """

    def __init__(self, leaves: Iterable[Leaf]) -> None:
        self._values = [(part, part.read_value()) for leaf in leaves for part in leaf.components]

    def put_back(self) -> None:
        """Give every variable the value that it had."""
        for part, value in self._values:
            part.assign(value)


def peek_results(state: TrainState) -> Results:
    """Read all metrics at any step, and change nothing: what the code of one changes when it is read is put back."""
    held = HeldValues(leaf for leaf in state.leaves if leaf.seed or leaf.path.startswith("metrics/"))
    try:
        with preserved_random_states():
            return read_results(state.model, state.accelerator.strategy, state.returned)
    finally:
        held.put_back()
