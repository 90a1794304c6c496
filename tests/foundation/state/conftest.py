"""A train state with every kind of leaf, and a home to stage it in."""

import pytest

from baton.tasks.foundation.storage.local import LocalStorage
from tests.support.train_states import lab, spec, staging_home, state

__all__ = ["lab", "spec", "staging_home", "state"]


@pytest.fixture
def home(staging_home: LocalStorage) -> LocalStorage:
    return staging_home
