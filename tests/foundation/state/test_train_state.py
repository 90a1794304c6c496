"""The digest of a train state depends on every value, name, dtype and shape."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tasks.foundation.state.digest import digest_of


@contextmanager
def changed(variable: Any, value: Any) -> Iterator[None]:
    before = variable.numpy()
    variable.assign(value)
    try:
        yield
    finally:
        variable.assign(before)


def nearest_other(value: Any) -> Any:
    """The same values, except that one of them differs by the smallest amount."""
    flat = np.array(value).reshape(-1)
    flat[-1] = np.nextafter(flat[-1], np.float32(9)) if flat.dtype.kind == "f" else flat[-1] + 1
    return flat.reshape(np.shape(value))


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
