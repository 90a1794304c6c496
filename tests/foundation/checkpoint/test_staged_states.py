"""Saving and restoring a train state on one replica: what is written, refused and restored."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import tensorflow as tf

from baton.tasks.foundation.checkpoint import restore, write
from baton.tasks.foundation.checkpoint.restore import restore_checkpoint
from baton.tasks.foundation.checkpoint.write import stage_checkpoint
from baton.tasks.foundation.contracts.checkpoint import CheckpointManifest, CheckpointRef
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import (
    DamagedCheckpoint,
    FileMissing,
    NonFinite,
    StaleWriter,
    StateMismatch,
    StorageError,
)
from baton.tasks.foundation.state.digest import digest_of
from baton.tasks.foundation.storage import local
from baton.tasks.foundation.storage.interface import FileStat
from baton.tasks.foundation.storage.local import LocalStorage
from tests.support.lab import Lab, built
from tests.support.small_logs import signed
from tests.support.train_states import changed, nearest_other

SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"


@pytest.fixture
def home(staging_home: LocalStorage) -> LocalStorage:
    return staging_home


def staged(state: Any, home: LocalStorage, attempt: str = "abc") -> CheckpointRef:
    ref: CheckpointRef = stage_checkpoint(state, home, base=7, attempt=attempt)
    return ref


def test_a_staged_checkpoint_is_its_files_and_a_manifest(state: Any, home: LocalStorage) -> None:
    ref = staged(state, home)
    manifest = CheckpointManifest.from_json(home.read(f"{ref.path}/manifest.json"), where="", error=DamagedCheckpoint)
    names = sorted(path.name for path in (home.root / ref.path).iterdir())
    assert names == sorted(["manifest.json", *(file.name for file in manifest.files)])
    assert {"ckpt.index", "ckpt.data-00000-of-00001"} == {file.name for file in manifest.files}
    assert sorted(path.name for path in home.root.iterdir()) == ["checkpoints", "log"]
    assert ref.path == "checkpoints/00000000-00000007-abc"
    assert ref.size == sum(path.stat().st_size for path in (home.root / ref.path).iterdir())
    assert (manifest.step, manifest.base, manifest.attempt, manifest.replicas) == (0, 7, "abc", 1)


def test_tensorflow_reads_every_variable_under_its_path(state: Any, home: LocalStorage) -> None:
    reader = tf.train.load_checkpoint(str(home.root / staged(state, home).path / "ckpt"))
    keys = set(reader.get_variable_to_shape_map()) - {"_CHECKPOINTABLE_OBJECT_GRAPH"}
    expected = {
        f"{record.path}{'/replica_0' if record.per_replica else ''}".replace(".", "..") + SUFFIX
        for record in state.signature
    }
    assert keys == expected
    assert f"model/hidden/kernel{SUFFIX}" in keys
    assert f"model/out..put/kernel{SUFFIX}" in keys
    kernel = next(variable for variable in state.model.variables if variable.path == "out.put/kernel")
    assert np.array_equal(reader.get_tensor(f"model/out..put/kernel{SUFFIX}"), kernel.numpy())
    kinds = {key.split("/")[0] for key in keys}
    assert {"model", "optimizer", "metrics", "generators", "variables"} <= kinds


def test_the_digest_covers_the_written_files(state: Any, home: LocalStorage) -> None:
    ref = staged(state, home)
    reader = tf.train.load_checkpoint(str(home.root / ref.path / "ckpt"))
    keys = [key for key in reader.get_variable_to_shape_map() if key != "_CHECKPOINTABLE_OBJECT_GRAPH"]
    names = {key.removesuffix(SUFFIX).replace("..", "."): key for key in keys}
    assert digest_of(names, lambda name: reader.get_tensor(names[name])).root == ref.state_digest == state.digest().root


def test_a_staged_state_is_restored(lab: Lab, spec: RunSpec, state: Any, home: LocalStorage) -> None:
    other = built(lab, spec)
    for leaf in other.leaves:
        leaf.components[0].assign(nearest_other(leaf.components[0].numpy()))
    other.step = 41
    ref = staged(other, home)
    assert ref.step == 41
    before, at_first = state.digest().root, staged(state, home, "def")
    restore_checkpoint(state, home, ref)
    assert state.step == 41
    assert state.digest().root == other.digest().root == ref.state_digest != before
    restore_checkpoint(state, home, at_first)
    assert state.digest().root == before


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_state_that_is_not_finite_is_not_staged(state: Any, home: LocalStorage, value: float) -> None:
    leaf = next(leaf for leaf in state.leaves if leaf.path == "model/hidden/kernel")
    broken = leaf.components[0].numpy()
    broken[1, 2] = value
    with changed(leaf.components[0], broken), pytest.raises(NonFinite) as refused:
        staged(state, home)
    assert "model/hidden/kernel holds NaN or infinity" in str(refused.value)
    assert "step 0" in str(refused.value)
    assert not (home.root / "checkpoints").exists()


@pytest.mark.parametrize("name", ["ckpt.index", "ckpt.data-00000-of-00001", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "lose"])
def test_damage_is_found_before_tensorflow_reads(
    state: Any, home: LocalStorage, monkeypatch: pytest.MonkeyPatch, name: str, damage: str
) -> None:
    ref = staged(state, home)
    file = home.root / ref.path / name
    data = bytearray(file.read_bytes())
    if damage == "lose":
        file.unlink()
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes(data if damage == "flip" else data[:-1])

    def read(*_: Any) -> None:
        raise AssertionError("TensorFlow was given a damaged file")

    monkeypatch.setattr("baton.tasks.foundation.checkpoint.restore._read_model", read)
    before = state.digest().root
    with pytest.raises(DamagedCheckpoint) as refused:
        restore_checkpoint(state, home, ref)
    assert name in str(refused.value)
    assert refused.value.exit_code == 4
    assert state.digest().root == before


def test_another_checkpoint_under_the_same_reference_is_refused(state: Any, home: LocalStorage) -> None:
    ref, other = staged(state, home), staged(state, home, "def")
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json has sha256"):
        restore_checkpoint(state, home, ref.model_copy(update={"path": other.path}))


def test_refused_restore_names_the_first_variable_that_differs(
    state: Any, home: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, read = staged(state, home), restore._read_model
    changed = {leaf.path: leaf for leaf in state.leaves if leaf.path in {"model/hidden/bias", "model/out.put/kernel"}}

    def misread(*arguments: Any) -> None:
        read(*arguments)
        for leaf in changed.values():
            leaf.components[0].assign(nearest_other(leaf.components[0].numpy()))

    monkeypatch.setattr(restore, "_read_model", misread)
    assert len(changed) == 2
    with pytest.raises(DamagedCheckpoint, match=r"the first variable that differs .* is model/hidden/bias$"):
        restore_checkpoint(state, home, ref)


@pytest.mark.parametrize("change", [{"state_digest": "0" * 64}, {"step": 3}])
def test_restored_step_and_digest_must_match_the_log(state: Any, home: LocalStorage, change: dict[str, Any]) -> None:
    ref = staged(state, home)
    with pytest.raises(DamagedCheckpoint, match=r"was restored as step 0, digest .* the log says step"):
        restore_checkpoint(state, home, ref.model_copy(update=change))


@pytest.mark.parametrize("number", [0, 1])
def test_a_store_with_other_bytes_is_detected(
    state: Any, home: LocalStorage, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    write, written = local.write_buffers_durably, []

    def garble(file: Path, buffers: Sequence[memoryview]) -> None:
        write(file, buffers)
        if len(written) == number:
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
        written.append(file)

    monkeypatch.setattr(local, "write_buffers_durably", garble)
    with pytest.raises(StorageError, match=r"the disk returned other bytes than were written"):
        staged(state, home)
    assert not list(home.root.rglob("manifest.json"))


class SweptByRival(LocalStorage):
    """Another process moved the tip, and deletes what others have staged."""

    def write_buffers(self, path: str, buffers: Sequence[memoryview]) -> FileStat:
        super().write_buffers(path, buffers)
        self.delete(path.rpartition("/")[0])
        raise FileMissing(f"{path} does not exist")


def test_a_staging_deleted_by_a_rival_is_stale(state: Any, home: LocalStorage) -> None:
    seventh = json.loads(home.read("log/00000007.json"))
    head = json.loads(json.dumps(seventh["head"]).replace('"entry": 7', '"entry": 0')) | {"base": 0}
    home.create("log/00000000.json", signed(seventh | {"number": 0, "head": head}))
    with pytest.raises(StaleWriter) as refused:
        stage_checkpoint(state, SweptByRival(home.root), base=7, attempt="abc")
    assert "step 0 was trained on top of log entry 7, but the tip has moved since" in str(refused.value)
    assert "Another process trains the same run" in str(refused.value)
    assert refused.value.exit_code == 1
    with pytest.raises(FileMissing):
        stage_checkpoint(state, SweptByRival(home.root), base=0, attempt="abc")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            'name="hidden")(y))',
            'name="hidden")(keras.layers.Dense(6, name="more")(y)))',
            ["only in the model: model/more/kernel float32[6, 6]", "only in the model: model/more/bias float32[6]"],
        ),
        (
            'keras.layers.BatchNormalization(name="norm. 1")(y)',
            "y",
            ["only in the checkpoint: model/norm. 1/moving_mean float32[6] per replica"],
        ),
        (
            'Dense(4, name="hidden")',
            'Dense(5, name="hidden")',
            ["checkpoint has model/hidden/kernel float32[6, 4], model has model/hidden/kernel float32[6, 5]"],
        ),
        ("keras.optimizers.Adam(0.01, use_ema=True)", "keras.optimizers.SGD()", ["only in the checkpoint: optimizer/"]),
    ],
)
def test_another_model_is_refused_with_the_differences(  # noqa: PLR0917 - fixtures and a table
    lab: Lab, spec: RunSpec, state: Any, home: LocalStorage, tmp_path: Path, old: str, new: str, words: list[str]
) -> None:
    ref = staged(state, home)
    other = built(Lab(tmp_path, lab.code).copy_of_code("other", ("model.py", old, new)), spec)
    before = other.digest().root
    with pytest.raises(StateMismatch) as refused:
        restore_checkpoint(other, home, ref)
    assert refused.value.exit_code == 2
    assert "belongs to another model" in str(refused.value)
    for word in words:
        assert word in str(refused.value)
    assert other.digest().root == before


def test_the_manifest_has_the_signature(state: Any, home: LocalStorage) -> None:
    manifest = json.loads(home.read(f"{staged(state, home).path}/manifest.json"))
    assert {"path": "model/hidden/bias", "dtype": "float32", "shape": [4], "per_replica": False} in manifest[
        "signature"
    ]
    assert [record["path"] for record in manifest["signature"]] == sorted(
        record["path"] for record in manifest["signature"]
    )


def test_every_host_learns_that_weights_are_not_finite(home: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "take_snapshot", lambda *_given, **_settings: None)  # as on hosts other than the chief
    chief_found = SimpleNamespace(
        step=7,
        accelerator=SimpleNamespace(all_agree=lambda _yes: False),
        shares=SimpleNamespace(from_chief=lambda _topic, text: text),
    )
    with pytest.raises(NonFinite, match="step 7, in segment 2: the chief found weights that are not finite") as found:
        stage_checkpoint(cast(Any, chief_found), home, base=7, attempt="abc", where=", in segment 2")
    assert found.value.step == 7
