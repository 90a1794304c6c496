"""The measured cost of a commit is that of Baton's own writer and reader; what preemptions cost."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import keras
import pytest

from baton.flows.doctor import cost as commit_cost
from baton.flows.doctor.cost import CommitCost, check_commit, check_preemption
from baton.flows.doctor.run_file_checks import Checks, Target
from baton.flows.opened_run import storage_of
from baton.tasks.foundation.contracts.placement import AcceleratorSpec
from baton.tasks.foundation.errors import StoreRefused
from baton.tasks.foundation.machine.devices import acquire
from baton.tasks.foundation.model.randomness import StepDraws
from baton.tasks.foundation.state.train_state import TrainState
from baton.tasks.foundation.storage.local import LocalStorage
from tests.fakes.gcs.server import FakeGcs
from tests.support.faulty_runs import load_faulty_run

MiB = 1 << 20
CPU = Target(tpu=None, replicas=1, hosts=1, is_tpu=False, has_servers=False)


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
    return TrainState(model, StepDraws(0, accelerator))


def test_commit_is_measured_and_leaves_no_files(tmp_path: Path, written: dict[str, int]) -> None:
    state = state_of_size(3)
    digest = state.digest().root
    found = check_commit(LocalStorage(tmp_path / "far" / "runs"), state, CPU)
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
    found = check_commit(LocalStorage(tmp_path), state_of_size(3), CPU)
    assert found.verdict == verdict
    assert "to save beside the training takes 3.1 MB of memory" in found.text
    assert ("training waits for each commit" in found.text) is not enough
    assert (found.value.training_seconds == found.value.commit_seconds) is not enough
    assert asked == [found.value.state_bytes]


def test_large_state_is_written_in_part(
    tmp_path: Path, written: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_cost, "_SENT_BYTES", MiB + MiB // 2)
    found = check_commit(LocalStorage(tmp_path), state_of_size(4), CPU)
    assert MiB <= max(written.values()) < 1.1 * MiB
    assert "of it measured, the rest assumed as fast" in found.text
    assert found.value.state_bytes > 4 * MiB


def test_network_to_servers_is_said_to_be_left_out(tmp_path: Path) -> None:
    target = replace(CPU, replicas=16, hosts=4, has_servers=True)
    found = check_commit(LocalStorage(tmp_path), state_of_size(3), target)
    assert "the network from and to the TensorFlow servers is not measured" in found.text


@pytest.mark.parametrize("address", ["./runs", "gs://bucket/team"])
def test_files_are_deleted_after_failure(
    address: str, tmp_path: Path, cloud: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise StoreRefused("no")

    run = load_faulty_run(tmp_path, f"storage={address}")
    storage = storage_of(run)
    monkeypatch.setattr(type(storage), "checksum" if address == "./runs" else "download", refuse)
    found = Checks(lambda _: None).run("commit", lambda: check_commit(storage, state_of_size(1), CPU))
    assert (found.verdict, found.text) == ("fail", "no")
    assert not (run.folder / "runs").exists()
    assert cloud.store.names("bucket") == []


FIXED = ["checkpoint.every_seconds=null"]


def cost_of(commit_seconds: float, training_seconds: float | None = None) -> CommitCost:
    """The cost of a commit; in line, unless it takes less from the training."""
    taken = commit_seconds if training_seconds is None else training_seconds
    return CommitCost(commit_seconds=commit_seconds, training_seconds=taken, restore_seconds=1.0, state_bytes=1)


@pytest.mark.parametrize(
    ("overrides", "commit_seconds", "verdict", "words"),
    [
        ([], 8.0, "pass", ["a commit every 8 min 00 s", "about 4 min 11 s", "every_seconds is auto, so commits"]),
        (FIXED, 8.0, "pass", ["a commit every 8 min 00 s", "checkpoint.every_seconds: auto commits as often as"]),
        (["train.segment_seconds=480"], 40.0, "warn", ["stop.grace_seconds = 25", "closer"]),
    ],
)
def test_preemption_cost_and_advice(
    tmp_path: Path, *, overrides: list[str], commit_seconds: float, verdict: str, words: list[str]
) -> None:
    cost = cost_of(commit_seconds)
    found = check_preemption(load_faulty_run(tmp_path, *overrides), cost, start_seconds=10.0, hours_between=4.0)
    text = f"{found.text} {found.remedy}"
    assert found.verdict == verdict, text
    assert [word for word in words if word not in text] == [], text


def test_advice_counts_what_a_commit_takes_from_training(tmp_path: Path) -> None:
    """A commit beside the training takes less from it than it lasts; the grace period must last for all of it."""
    run = load_faulty_run(tmp_path, *FIXED)
    beside = check_preemption(run, cost_of(8.0, 0.5), start_seconds=10.0, hours_between=4.0)
    assert "a commit every 2 min 00 s" in beside.text
    long = check_preemption(run, cost_of(40.0, 0.5), start_seconds=10.0, hours_between=4.0)
    assert "a commit takes longer than stop.grace_seconds = 25" in long.text
