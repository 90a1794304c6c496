"""The measured cost of a commit is that of Baton's own writer and reader."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import keras
import pytest

from flows.doctor import cost as commit_cost
from flows.doctor.cost import check_commit
from flows.doctor.run_file_checks import Checks
from flows.opened_run import storage_of
from tasks.foundation.contracts.placement import AcceleratorSpec
from tasks.foundation.errors import StoreRefused
from tasks.foundation.machine.devices import acquire
from tasks.foundation.state.train_state import TrainState
from tasks.foundation.storage.local import LocalStorage
from tests.fakes.gcs.server import FakeGcs
from tests.support.faulty_runs import load_faulty_run

MiB = 1 << 20


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Sizes of the files written to a folder, by name."""
    sizes: dict[str, int] = {}
    write = LocalStorage.write_buffers

    def record(self: LocalStorage, path: str, buffers: Sequence[memoryview]) -> Any:
        sizes[path.rsplit("/", 1)[-1]] = sum(each.nbytes for each in buffers)
        return write(self, path, buffers)

    monkeypatch.setattr(LocalStorage, "write_buffers", record)
    return sizes


def state_of_size(mebibytes: int) -> TrainState:
    x = keras.Input((1,))
    wide = [keras.layers.Dense(MiB // 4, use_bias=False, kernel_initializer="ones") for _ in range(mebibytes)]
    accelerator = acquire(AcceleratorSpec(), None)
    with accelerator.strategy.scope():
        model = keras.Model(x, [layer(x) for layer in wide])
        model.compile("sgd")
        model.optimizer.build(model.trainable_variables)
    return TrainState(model, accelerator)


def test_commit_is_measured_and_leaves_no_files(tmp_path: Path, written: dict[str, int]) -> None:
    state = state_of_size(3)
    digest = state.digest().root
    found = check_commit(LocalStorage(tmp_path / "far" / "runs"), state)
    cost = found.value
    assert 3 * MiB < cost.state_bytes < 3.1 * MiB
    assert cost.commit_seconds > 0
    assert cost.restore_seconds > 0
    assert cost.training_seconds > 0
    assert sorted(written) == ["ckpt.data-00000-of-00001", "ckpt.index"]
    assert state.digest().root == digest
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("enough", "verdict"), [(True, "pass"), (False, "warn")])
def test_memory_for_saving_beside_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enough: bool, verdict: str
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(commit_cost, "enough_memory_for_snapshot", lambda size: asked.append(size) or enough)
    found = check_commit(LocalStorage(tmp_path), state_of_size(3))
    assert found.verdict == verdict
    assert "to save beside the training takes 3.1 MB of memory" in found.text
    assert ("training waits for each commit" in found.text) is not enough
    assert (found.value.training_seconds == found.value.commit_seconds) is not enough
    assert asked == [found.value.state_bytes]


def test_large_state_is_written_in_part(
    tmp_path: Path, written: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_cost, "_SENT_BYTES", MiB + MiB // 2)
    found = check_commit(LocalStorage(tmp_path), state_of_size(4))
    assert MiB <= max(written.values()) < 1.1 * MiB
    assert "of it measured, the rest assumed as fast" in found.text
    assert found.value.state_bytes > 4 * MiB


@pytest.mark.parametrize("address", ["./runs", "gs://bucket/team"])
def test_files_are_deleted_after_failure(
    address: str, tmp_path: Path, cloud: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise StoreRefused("no")

    run = load_faulty_run(tmp_path, f"storage={address}")
    storage = storage_of(run)
    monkeypatch.setattr(type(storage), "checksum" if address == "./runs" else "download", refuse)
    found = Checks(lambda _: None).run("commit", lambda: check_commit(storage, state_of_size(1)))
    assert (found.verdict, found.text) == ("fail", "no")
    assert not (run.folder / "runs").exists()
    assert cloud.store.names("bucket") == []
