"""The host state is saved with the checkpoint, counts in its digest, and is not part of the model."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.checkpoint.restore import restore_checkpoint
from baton.tasks.foundation.checkpoint.write import stage_checkpoint
from baton.tasks.foundation.contracts.checkpoint import CheckpointManifest
from baton.tasks.foundation.errors import DamagedCheckpoint, StateMismatch
from baton.tasks.foundation.state.digest import of_model
from baton.tasks.foundation.storage.local import LocalStorage
from tests.support.lab import Lab, built, spec_of

WITH = spec_of("build", train__callbacks="callbacks.py:make")
KEY = "host/callbacks/.ATTRIBUTES/VARIABLE_VALUE"


@pytest.fixture(scope="module")
def remembering(lab: Lab) -> Any:
    return built(lab, WITH)


def bytes_in(home: LocalStorage, ref: Any) -> dict[str, bytes]:
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(Path(home.root) / ref.path / "ckpt"))
    return {key: reader.get_tensor(key).tobytes() for key in reader.get_variable_to_shape_map() if "host" in key}


def test_host_state_of_any_length_is_restored(remembering: Any, home: LocalStorage) -> None:
    memory = remembering.host_state
    assert memory.read() == {}
    refs = []
    for held in ({}, {"wait": 3, "best": float("inf"), "order": {"b": 1, "a": 2}}, {"wait": 12}):
        memory.write(held)
        ref = stage_checkpoint(remembering, home, base=7, attempt=f"a{len(refs)}")
        assert ref.state_digest == remembering.digest().root
        assert bytes_in(home, ref) == {KEY: json.dumps(held).encode()}
        refs.append((ref, held))
    assert len({ref.state_digest for ref, _ in refs}) == 3
    manifest = CheckpointManifest.from_json(
        home.read(f"{refs[0][0].path}/manifest.json"), where="", error=StateMismatch
    )
    assert [record.shape for record in manifest.signature if record.path == "host/callbacks"] == [(-1,)]
    for ref, held in reversed(refs):
        restore_checkpoint(remembering, home, ref)
        assert json.dumps(memory.read()) == json.dumps(held)


def test_states_with_and_without_host_state_are_one_model(state: Any, remembering: Any, home: LocalStorage) -> None:
    assert of_model(remembering.signature) == state.signature
    without = stage_checkpoint(state, home, base=7, attempt="without")
    remembering.host_state.write({"wait": 3})
    with_it = stage_checkpoint(remembering, home, base=7, attempt="with")
    assert without.state_digest != with_it.state_digest
    assert bytes_in(home, without) == {}
    restore_checkpoint(remembering, home, without)
    assert remembering.host_state.read() == {}
    restore_checkpoint(state, home, with_it)
    assert stage_checkpoint(state, home, base=7, attempt="again").state_digest == without.state_digest


def test_host_state_counts_in_the_digest_even_if_not_kept(state: Any, remembering: Any, home: LocalStorage) -> None:
    remembering.host_state.write({"wait": 3})
    ref = stage_checkpoint(remembering, home, base=7, attempt="abc")
    for each in (state, remembering):
        with pytest.raises(DamagedCheckpoint, match="the log says"):
            restore_checkpoint(each, home, ref.model_copy(update={"state_digest": "0" * 64}))
