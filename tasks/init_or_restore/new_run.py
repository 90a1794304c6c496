"""A new run at step 0, built and checked before any of its files is written.

The relay calls `check_new_run` once the first example is known, so that a model is refused before the dataset is
written. If the same process then begins the run, it uses what was built for the check.

The identity of a run file, as the origin entry records it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.tasks.foundation.contracts.checkpoint import WeightsReport
from baton.tasks.foundation.contracts.data_spec import SetRef
from baton.tasks.foundation.contracts.dataset import DatasetRef, Feature, Reading
from baton.tasks.foundation.contracts.identity import (
    CALLBACK_RECORD,
    SIGNATURE,
    TRANSFORM_CONTENTS,
    VALIDATION,
    identity_in_run_file,
)
from baton.tasks.foundation.contracts.placement import per_replica_batch_size
from baton.tasks.foundation.contracts.run_spec import TRAIN_EXAMPLES, RunSpec, needs_examples, with_examples
from baton.tasks.foundation.dataset.manifest import zero_examples
from baton.tasks.foundation.dataset.model_inputs import apply_class_weight, model_inputs
from baton.tasks.foundation.machine.devices import Accelerator
from baton.tasks.foundation.masking import masked_values
from baton.tasks.foundation.model.build import asks_for_unknown_length, preserved_global_state, recorded_arguments
from baton.tasks.foundation.model.model_identity import (
    model_identity,
    plain_values,
    transform_contents,
    transforms_identity,
)
from baton.tasks.foundation.model.user_callbacks import StartedCallbacks, callbacks_identity
from baton.tasks.foundation.state.digest import signature_digest
from baton.tasks.foundation.state.train_state import TrainState
from baton.tasks.foundation.state.warm_state import WarmState
from baton.tasks.foundation.telemetry.events import Sink
from baton.tasks.init_or_restore.model_requirements import (
    build_state_from_examples,
    require_best,
    require_callbacks,
    require_steps,
)
from baton.tasks.init_or_restore.weights.loading import load_weights


def run_identity(spec: RunSpec, dataset: DatasetRef, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity keys of `contracts/identity.py`, and what is for information: source, folders and examples.

    Args:
        model: the keys of `user_code_identity`.
    """
    found = {
        "data.source": spec.data.source_words,
        "data.folder": dataset.folder,
        "data.content_digest": dataset.content_digest,
        **_validation(dataset.validation),
        TRAIN_EXAMPLES: dataset.train_examples,
        **identity_in_run_file(spec),
        **model,
    }
    return dict(masked_values(found))


def _validation(own: SetRef | None) -> dict[str, Any]:
    """The own validation set; None is recorded too, so that a set that is no longer named is a change."""
    return {VALIDATION: None} if own is None else {"data.validation_folder": own.folder, VALIDATION: own.content_digest}


def user_code_identity(spec: RunSpec, state: TrainState, code_folder: Path) -> dict[str, Any]:
    """Return the identity keys that the user's code determines."""
    batch = per_replica_batch_size(spec.train.global_batch_size, state.accelerator.replicas, spec.train.accumulate)
    found = {
        SIGNATURE: signature_digest(state.signature),
        **callbacks_identity(spec, code_folder),
        **transforms_identity(spec, code_folder),
        TRANSFORM_CONTENTS: transform_contents(spec, code_folder),
        **model_identity(state.model, spec.model, code_folder, batch=batch),
        "model.options": plain_values(recorded_arguments(spec, code_folder)),
    }
    return dict(masked_values(found))


def callback_record(started: StartedCallbacks) -> dict[str, Any]:
    """Return what the log records of callbacks for information."""
    return {CALLBACK_RECORD: started.treatment.record.model_dump(mode="json")}


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRun:
    """A run that may begin.

    Attributes:
        warm: the state at step 0, with initial weights.
        identity: what the log records of the model.
        loaded: report on the initial weights; None if the run file names none.
    """

    warm: WarmState
    identity: dict[str, Any]
    loaded: WeightsReport | None

    @property
    def state(self) -> TrainState:
        """The train state."""
        return self.warm.state

    def matches(self, spec: RunSpec, features: Sequence[Feature], code_folder: Path, accelerator: Accelerator) -> bool:
        """Whether building it again from these arguments would give the same run."""
        warm = self.warm
        same = (
            _without_examples(warm.spec) == _without_examples(spec)
            and warm.features == tuple(features)
            and warm.code_folder == code_folder
        )
        return same and warm.state.accelerator is accelerator


def _without_examples(spec: RunSpec) -> RunSpec:
    return spec.model_copy(update={"train": spec.train.model_copy(update={"epoch_examples": None})})


class CheckedRun:
    """Keeps the run that `check_new_run` built until `build_new_run` takes it.

    It is the only state that this module keeps between calls: the check and the stage that begins the run are two calls
    of one process, and building the model twice would double its start-up time.
    """

    def __init__(self) -> None:
        self._run: NewRun | None = None

    def keep(self, run: NewRun | None) -> None:
        """Keep a run and drop the previous one; None only drops it."""
        self._run = run

    def take(self) -> NewRun | None:
        """Take out the kept run."""
        run, self._run = self._run, None
        return run


_CHECKED_RUN = CheckedRun()


def check_new_run(
    spec: RunSpec,
    features: Sequence[Feature],
    *,
    code_folder: Path,
    accelerator: Accelerator,
    telemetry: Sink,
    reading: Reading = "examples",
) -> None:
    """Build a new run without writing anything, and keep it. For arguments and errors see `build_new_run`."""
    _CHECKED_RUN.keep(None)
    if asks_for_unknown_length(spec, code_folder):
        return  # the number of examples is not known yet, so init-or-restore builds it
    # Callbacks get the number of epochs when they start. A run that was built with another number is not kept.
    is_final = spec.train.callbacks is None or not needs_examples(spec)
    known = spec if is_final else with_examples(spec, spec.train.global_batch_size)
    with preserved_global_state():
        run = build_new_run(
            known, features, reading=reading, code_folder=code_folder, accelerator=accelerator, telemetry=telemetry
        )
    if is_final:
        _CHECKED_RUN.keep(run)


def build_new_run(
    spec: RunSpec,
    features: Sequence[Feature],
    *,
    code_folder: Path,
    accelerator: Accelerator,
    telemetry: Sink,
    reading: Reading = "examples",
) -> NewRun:
    """Build the state of step 0, and refuse a model that could not be trained or evaluated.

    Args:
        telemetry: receives a note about the initial weights.
        reading: how the examples were read, see `DatasetManifest.reading`.

    Returns:
        The run, or the one that `check_new_run` kept, if it matches.

    Raises:
        SourceError: the source yields batches, or may do so.
        ModelError: the user's model or callbacks cannot be used, or lack the metric of `checkpoint.keep_best`.
        WeightsError: the initial weights are missing, cannot be read, or do not fit.
    """
    kept = _CHECKED_RUN.take()
    if kept is not None and kept.matches(spec, features, code_folder, accelerator):
        kept.warm.spec = spec  # by now with the number of examples, which this model does not depend on
        return kept
    size = per_replica_batch_size(spec.train.global_batch_size, accelerator.replicas, spec.train.accumulate)
    inputs = model_inputs(spec, features, code_folder)
    unweighed = zero_examples(inputs.validation, size)
    batch = apply_class_weight(zero_examples(inputs.train, size), spec.train.class_weight)
    state = build_state_from_examples(
        spec, inputs.train, batch, reading=reading, code_folder=code_folder, accelerator=accelerator
    )
    warm = WarmState(spec, features, code_folder, state, inputs=inputs)
    # Before tracing, which may run Python code with side effects on the model. A resume traces nothing here.
    identity = user_code_identity(spec, state, code_folder)
    require_best(spec, state, unweighed)
    if spec.train.callbacks is not None:
        # What callbacks do to the model before training is part of step 0. The trainer uses them as they are.
        warm.seed_as_built()
        started = require_callbacks(spec, state, batch, unweighed, code_folder=code_folder)
        warm.keep_companion(started)
        identity |= callback_record(started)
    require_steps(spec, state, batch, unweighed)
    loaded = load_weights(state, spec.init, code_folder=code_folder, telemetry=telemetry, seed=spec.train.seed)
    return NewRun(warm=warm, identity=identity, loaded=loaded)
