"""The identity of a run file, as the origin entry records it."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.foundation.contracts.dataset import DatasetRef
from tasks.foundation.contracts.identity import identity_in_run_file
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.model.callbacks import callbacks_identity
from tasks.foundation.model.identity import model_identity
from tasks.foundation.state.layout import of_model
from tasks.foundation.state.train_state import TrainState


def run_identity(spec: RunSpec, dataset: DatasetRef, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity keys of `contracts/identity.py`, and data.source and data.folder for information.

    Args:
        spec: the run file.
        dataset: the dataset that it prepared.
        model: the keys of `user_code_identity`.
    """
    return {
        "data.source": spec.data.source,
        "data.folder": dataset.folder,
        "data.content_digest": dataset.content_digest,
        **identity_in_run_file(spec),
        **model,
    }


def user_code_identity(spec: RunSpec, state: TrainState, code_folder: Path) -> dict[str, Any]:
    """Return the identity keys that the user's code determines."""
    signature = "\n".join(record.model_dump_json() for record in of_model(state.signature))
    return {
        "model.signature": hashlib.sha256(signature.encode()).hexdigest(),
        **callbacks_identity(spec, code_folder),
        **model_identity(state.model, spec.model, code_folder),
    }
