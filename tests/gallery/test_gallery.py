"""Models of many kinds, as Keras users write them: each is cut without a trace, and trains as `fit` does.

Six of them run always; BATON_TEST_GALLERY=all runs all. `python -m tests.gallery` prints the figures as a table.
"""

import math
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.gallery.checks import CUT, STEPS, UNSEEDED, chunks, examples, largest_difference, run_checks

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

# The most different ones: transforms, own steps, several optimizers, ranges, frozen weights, layers built in a call.
ORDINARY = ("augmented_mixup", "batch_norm_cnn", "fake_quantization", "lazily_built", "lora", "two_optimizers")
WHOLE = os.environ.get("BATON_TEST_GALLERY") == "all"
NAMES = examples() if WHOLE else list(ORDINARY)
LOG_EVERY = 3 if WHOLE else 1
# TensorFlow optimizes the graphs of Baton's loop and of fit separately, and may add in another order.
TOLERANCE = 1e-5

Results = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Measure the examples, several in one process, when the first of them is asked for."""

    @cache
    def of_chunk(names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
        return run_checks(tmp_path_factory.mktemp("gallery"), names, log_every=LOG_EVERY)

    def of(name: str) -> dict[str, Any]:
        (chunk,) = [chunk for chunk in chunks(NAMES) if name in chunk]
        found = of_chunk(chunk)[name]
        assert "error" not in found, found["error"]
        return found

    return of


@pytest.mark.parametrize("name", NAMES)
def test_cut_run_ends_with_the_same_bits(results: Results, name: str) -> None:
    found = results(name)
    assert found["differing"] == []
    straight, cut = found["digests"]
    assert straight == cut
    straight, cut = found["rows"]
    assert straight == cut
    assert [row["step"] for row in straight] == list(range(LOG_EVERY, STEPS + 1, LOG_EVERY))


@pytest.mark.parametrize("name", NAMES)
def test_state_is_kept_at_a_change_of_replicas(results: Results, name: str) -> None:
    found = results(name)
    assert found["at"] == CUT
    assert found["changed"] == []
    row = found["went_on"][0]
    assert row["step"] == CUT + LOG_EVERY - CUT % LOG_EVERY
    assert all(math.isfinite(value) for value in row["metrics"].values())


@pytest.mark.parametrize("name", [name for name in NAMES if name not in UNSEEDED])
def test_losses_are_those_of_fit(results: Results, name: str) -> None:
    found = results(name)
    assert len(found["losses"]) == STEPS
    assert any("loss" in metric for metric in found["fit"][0])
    assert found["fit"][0] != found["fit"][-1]
    assert largest_difference(found["losses"], found["fit"]) < TOLERANCE
