"""The identity of a run file, as the origin entry records it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.foundation.accelerator.batches import per_replica_batch_size
from tasks.foundation.contracts.callback_record import CALLBACK_RECORD, CallbackRecord
from tasks.foundation.contracts.dataset import DatasetRef
from tasks.foundation.contracts.epochs import TRAIN_EXAMPLES
from tasks.foundation.contracts.evaluation_sets import SetRef
from tasks.foundation.contracts.identity import identity_in_run_file
from tasks.foundation.contracts.identity_keys import SIGNATURE, TRANSFORM_CONTENTS, VALIDATION
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.masking import masked_values
from tasks.foundation.model.build_arguments import recorded_arguments
from tasks.foundation.model.callbacks import StartedCallbacks, callbacks_identity
from tasks.foundation.model.identity import model_identity, plain_values
from tasks.foundation.state.layout import signature_digest
from tasks.foundation.state.train_state import TrainState
from tasks.foundation.transforms.identity import transform_contents, transforms_identity


def run_identity(spec: RunSpec, dataset: DatasetRef, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity keys of `contracts/identity.py`, and what is for information: source, folders and examples.

    Args:
        spec: the run file.
        dataset: the dataset that it prepared.
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
    """Return what the log records of callbacks for information; empty if Baton does nothing in their place."""
    record = started.treatment.record
    return {} if record == CallbackRecord() else {CALLBACK_RECORD: record.model_dump(mode="json")}
