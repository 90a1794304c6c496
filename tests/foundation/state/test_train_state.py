"""The digest of a train state depends on every value, name, dtype and shape."""

from typing import Any

import numpy as np

from tasks.foundation.state.layout import digest_of
from tests.support.train_states import changed, nearest_other


def test_any_single_value_changes_the_digest(state: Any) -> None:
    before = state.digest()
    seen = {before}
    for leaf in state.leaves:
        with changed(leaf.components[0], nearest_other(leaf.components[0].numpy())):
            seen.add(state.digest())
    assert len(seen) == 1 + len(state.leaves)
    assert state.digest() == before


def test_the_digest_depends_on_names_dtypes_and_shapes() -> None:
    zeros = {
        "a": np.zeros(4, np.int32),
        "b": np.zeros(4, np.float32),
        "c": np.zeros((2, 2), np.int32),
        "d": np.zeros(2, np.int64),
    }
    assert len({digest_of(["same"], lambda _, key=key: zeros[key]) for key in zeros}) == 4
    assert len({digest_of([key], lambda _: zeros["a"]) for key in zeros}) == 4
    assert digest_of(["a", "b"], zeros.__getitem__) == digest_of(["b", "a"], zeros.__getitem__)
