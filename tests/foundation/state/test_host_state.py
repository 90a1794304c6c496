"""What Python remembers lies in the checkpoint, counts in its digest, and belongs to no model."""

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.foundation.contracts.checkpoint import CheckpointManifest
from tasks.foundation.errors import DamagedCheckpoint, StateMismatch
from tasks.foundation.state.layout import of_model
from tasks.foundation.storage.local import LocalStorage
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


def test_it_comes_back_at_any_length(remembering: Any, home: LocalStorage) -> None:
    memory = remembering.memory
    assert memory.read() == {}
    refs = []
    for held in ({}, {"wait": 3, "best": float("inf"), "order": {"b": 1, "a": 2}}, {"wait": 12}):
        memory.write(held)
        ref = remembering.stage(home, base=7, attempt=f"a{len(refs)}")
        assert ref.state_digest == remembering.digest()
        assert bytes_in(home, ref) == {KEY: json.dumps(held).encode()}
        refs.append((ref, held))
    assert len({ref.state_digest for ref, _ in refs}) == 3
    manifest = CheckpointManifest.from_json(
        home.read(f"{refs[0][0].path}/manifest.json"), where="", error=StateMismatch
    )
    assert [record.shape for record in manifest.signature if record.path == "host/callbacks"] == [(-1,)]
    for ref, held in reversed(refs):
        remembering.restore(home, ref)
        assert json.dumps(memory.read()) == json.dumps(held)


def test_a_state_with_it_and_one_without_are_the_same_model(state: Any, remembering: Any, home: LocalStorage) -> None:
    assert of_model(remembering.signature) == state.signature
    without = state.stage(home, base=7, attempt="without")
    remembering.memory.write({"wait": 3})
    with_it = remembering.stage(home, base=7, attempt="with")
    assert without.state_digest != with_it.state_digest
    assert bytes_in(home, without) == {}
    remembering.restore(home, without)
    assert remembering.memory.read() == {}
    state.restore(home, with_it)
    assert state.stage(home, base=7, attempt="again").state_digest == without.state_digest


def test_it_counts_in_the_digest_of_who_does_not_keep_it(state: Any, remembering: Any, home: LocalStorage) -> None:
    remembering.memory.write({"wait": 3})
    ref = remembering.stage(home, base=7, attempt="abc")
    for each in (state, remembering):
        with pytest.raises(DamagedCheckpoint, match="the log says"):
            each.restore(home, ref.model_copy(update={"state_digest": "0" * 64}))
