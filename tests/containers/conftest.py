"""A fixture for the container engine."""

import pytest

from tests.support.engine import Engine, engine_or_skip


@pytest.fixture(scope="session")
def engine() -> Engine:
    return engine_or_skip()
