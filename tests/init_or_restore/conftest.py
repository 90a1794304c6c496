"""A lab whose run has begun, for tests that continue it."""

from pathlib import Path

import pytest

from tests.support.lab import Lab, lab_of, spec_of


@pytest.fixture(scope="module")
def begun_lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    lab = lab_of(tmp_path_factory.mktemp("begun"), request.module.MODEL)
    lab.begin(spec_of("build"))
    return lab


@pytest.fixture
def lab(begun_lab: Lab, tmp_path: Path) -> Lab:
    """The module's MODEL in a lab where the run "build" has begun; beginning takes seconds."""
    return begun_lab.copy(tmp_path / "begun")
