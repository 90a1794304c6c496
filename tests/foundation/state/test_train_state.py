"""The digest of a train state depends on every value, name, dtype and shape."""

import dataclasses
import hashlib
import time
from typing import Any

import numpy as np
import pytest

from baton.tasks.foundation.state.digest import digest_of
from tests.support.train_states import changed, nearest_other


def test_any_single_value_changes_the_digest(state: Any) -> None:
    before = state.digest().root
    seen = {before}
    for leaf in state.leaves:
        with changed(leaf.components[0], nearest_other(leaf.components[0].numpy())):
            seen.add(state.digest().root)
    assert len(seen) == 1 + len(state.leaves)
    assert state.digest().root == before


def test_one_thread_at_a_time_reads_from_servers(state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = state.accelerator.environment.model_copy(update={"servers": 2})
    monkeypatch.setattr(state, "accelerator", dataclasses.replace(state.accelerator, environment=environment))
    expected, reading, most = state.digest().root, list[str](), [0]

    class Read:
        def __init__(self, value: Any) -> None:
            self.value = value

        def numpy(self) -> Any:
            reading.append("")
            most.append(len(reading))
            time.sleep(0.001)
            reading.pop()
            return self.value

    state._arrange(state.returned)
    monkeypatch.setattr(state, "saved", {key: Read(state._value(key)) for key in state.saved})
    assert state.digest().root == expected
    assert max(most) == 1


def test_the_digest_depends_on_names_dtypes_and_shapes() -> None:
    zeros = {
        "a": np.zeros(4, np.int32),
        "b": np.zeros(4, np.float32),
        "c": np.zeros((2, 2), np.int32),
        "d": np.zeros(2, np.int64),
    }
    assert len({digest_of(["same"], lambda _, key=key: zeros[key]).root for key in zeros}) == 4
    assert len({digest_of([key], lambda _: zeros["a"]).root for key in zeros}) == 4
    assert digest_of(["a", "b"], zeros.__getitem__) == digest_of(["b", "a"], zeros.__getitem__)


def test_digest_is_the_documented_tree_of_leaf_digests() -> None:
    values = {"b/w": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.int64(7)}
    found = digest_of(values, values.__getitem__)
    leaves = {key: hashlib.sha256(value.tobytes()).hexdigest() for key, value in values.items()}
    text = f"a\0int64\0[]\0{leaves['a']}\nb/w\0float32\0[2, 3]\0{leaves['b/w']}\n"
    assert found.leaves == leaves
    assert found.root == hashlib.sha256(text.encode()).hexdigest()


def test_error_in_one_thread_is_raised() -> None:
    with pytest.raises(KeyError):
        digest_of(["a", "b"], {"a": np.zeros(4)}.__getitem__)
