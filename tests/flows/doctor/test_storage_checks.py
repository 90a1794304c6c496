"""The checks of the storage, and the measured cost of a commit."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import tensorflow as tf

from flows.doctor import storage_checks
from flows.doctor.finding import Checks
from flows.doctor.storage_checks import check_commit, check_storage
from flows.run import storage_of
from tasks.foundation.contracts.run_file import load_run_file
from tasks.foundation.errors import StoreRefused
from tasks.foundation.storage.local import LocalStorage
from tests.fakes.gcs.server import FakeGcs
from tests.support.faulty_runs import load_faulty_run, make_run

MiB = 1 << 20


@pytest.fixture
def uploaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files uploaded to a folder."""
    names: list[str] = []
    upload = LocalStorage.upload

    def record_upload(self: LocalStorage, source: Path, path: str) -> Any:
        names.append(path)
        return upload(self, source, path)

    monkeypatch.setattr(LocalStorage, "upload", record_upload)
    return names


def state_of_size(mebibytes: int) -> Any:
    from tasks.foundation.model.variables import Leaf

    variables = [tf.Variable(tf.fill([MiB // 4], float(number))) for number in range(mebibytes)]
    leaves = [
        Leaf(path=f"model/v{number}", variable=variable, per_replica=False) for number, variable in enumerate(variables)
    ]
    return SimpleNamespace(leaves=leaves)


def test_commit_is_measured_and_leaves_no_files(tmp_path: Path, uploaded: list[str]) -> None:
    state = state_of_size(3)
    found = check_commit(LocalStorage(tmp_path / "far" / "runs"), state)
    assert found.value.state_bytes > 3 * MiB
    assert found.value.commit_seconds > 0
    assert found.value.restore_seconds > 0
    assert sorted(uploaded) == ["ckpt.data-00000-of-00001", "ckpt.index"]
    assert [float(leaf.variable[0]) for leaf in state.leaves] == [0.0, 1.0, 2.0]
    assert list(tmp_path.iterdir()) == []


def test_large_state_is_uploaded_in_part(tmp_path: Path, uploaded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_checks, "_SENT_BYTES", MiB)
    monkeypatch.setattr(storage_checks, "_SHARD_BYTES", MiB)
    found = check_commit(LocalStorage(tmp_path), state_of_size(4))
    assert len(uploaded) == 1
    assert "of it measured, the rest assumed as fast" in found.text


@pytest.mark.parametrize("address", ["./runs", "gs://bucket/team"])
def test_uploads_are_deleted_after_failure(
    address: str, tmp_path: Path, cloud: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise StoreRefused("no")

    run = load_faulty_run(tmp_path, f"storage={address}")
    storage = storage_of(run)
    monkeypatch.setattr(type(storage), "download", refuse)
    found = Checks(lambda _: None).run("commit", lambda: check_commit(storage, state_of_size(1)))
    assert (found.verdict, found.text) == ("fail", "no")
    assert not (run.folder / "runs").exists()
    assert cloud.store.names("bucket") == []


@pytest.mark.parametrize(
    ("denied", "expected"),
    [
        (["storage.objects.create"], "no permission to create objects"),
        (["storage.objects.delete"], "no permission to delete or replace objects"),
        ([], "wrote, read and deleted a file"),
    ],
)
def test_bucket_permissions_are_checked(cloud: FakeGcs, denied: list[str], expected: str, tmp_path: Path) -> None:
    cloud.store.set_bucket("bucket", denied=denied)
    run = load_run_file(make_run(tmp_path / "run"), ["storage=gs://bucket/team"])
    checks = Checks(lambda _: None)
    found = checks.run("storage", lambda: check_storage(run))
    assert found.verdict == ("fail" if denied else "pass")
    assert expected in found.text
    left = cloud.store.names("bucket")
    assert len(left) == ("storage.objects.delete" in denied)
    assert all(name.startswith("team/.probe-") for name in left)
