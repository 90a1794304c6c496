"""Keeps what modules of these tests set at their import from the tests that follow."""

from collections.abc import Iterator

import keras
import pytest


@pytest.fixture(autouse=True)
def dtype_policy() -> Iterator[None]:
    """A policy that a user's module sets belongs to its process, and so to all later tests."""
    before = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(before)
