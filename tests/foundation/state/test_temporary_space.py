"""Errors of the temporary folder that checkpoints are restored through."""

import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from baton.tasks.foundation.checkpoint.restore import restore_checkpoint
from baton.tasks.foundation.checkpoint.write import stage_checkpoint
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import RunLogError, StorageError
from baton.tasks.foundation.storage.local import LocalStorage
from tests.support.lab import Lab, built


@pytest.mark.parametrize(
    "fault",
    [
        tf.errors.ResourceExhaustedError(None, None, "ckpt.data: No space left on device"),
        tf.errors.PermissionDeniedError(None, None, "ckpt.data: Permission denied"),
        OSError(28, "No space left on device"),
    ],
    ids=type,
)
def test_a_failed_read_of_tensorflow_is_a_storage_error(
    state: Any, home: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise fault

    ref = stage_checkpoint(state, home, base=7, attempt="abc")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(state, "model_checkpoint", SimpleNamespace(read=refuse))
    with pytest.raises(StorageError, match=r"no files could be .* TMPDIR, and run again") as refused:
        restore_checkpoint(state, home, ref)
    assert str(tmp_path) in str(refused.value)
    assert type(refused.value) is StorageError
    assert list(tmp_path.glob("baton-*")) == []


def test_saving_needs_no_temporary_folder(
    state: Any, home: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert stage_checkpoint(state, home, base=7, attempt="abc").state_digest == state.digest().root


def test_too_little_temporary_space_is_refused_first(lab: Lab, spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(StorageError, match=r"has 1000 bytes left, and a checkpoint of this model takes \d+ there"):
        built(lab, spec)


@pytest.mark.parametrize("there", [True, False])
def test_nothing_is_staged_if_the_log_is_gone(state: Any, tmp_path: Path, there: bool) -> None:
    """An unmounted disk leaves an empty folder."""
    folder = tmp_path / "home"
    if there:
        folder.mkdir()
    with pytest.raises(RunLogError, match=r"log/00000007.json is missing: .* check that its disk is still mounted"):
        stage_checkpoint(state, LocalStorage(folder), base=7, attempt="abc")
    assert list(tmp_path.rglob("*")) == ([folder] if there else [])
