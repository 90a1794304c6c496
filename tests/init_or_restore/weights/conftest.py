"""One lab for all tests of initial weights; making it takes seconds."""

import pytest

from tests.support.lab import Lab
from tests.support.weights_lab import weights_lab


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return weights_lab(tmp_path_factory.mktemp("lab"))
