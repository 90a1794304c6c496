"""Promise 1: a run has the same result however it is cut, compared without Baton's own digest."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.homes import read_history

pytestmark = pytest.mark.slow

Read = Callable[[str], Any]
STEPS = {"digits": 60, "text": 40}
WHOLE = ["train.segment_steps=1000"]


@pytest.mark.parametrize(
    ("name", "replicas"),
    [
        ("text", 2),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in (("digits", 1), ("text", 1), ("digits", 2))),
    ],
)
def test_any_cut_gives_the_same_bytes(
    train_without_prefect: Callable[..., Any], stored_bytes: Read, tmp_path: Path, name: str, replicas: int
) -> None:
    steps = STEPS[name]
    straight = train_without_prefect(name, tmp_path / "straight", replicas=replicas, extra=WHOLE).result
    fifth = f"train.segment_steps={steps // 5}"
    # Three processes: one stops at an odd step, one after a segment, and the last one cuts by seconds.
    cuts = [
        (["--until-step", "11"], [fifth]),
        (["--max-segments", "1"], [fifth]),
        ([], ["train.segment_steps=null", "train.segment_seconds=0.05"]),
    ]
    for words, extra in cuts:
        cut = train_without_prefect(name, tmp_path / "cut", *words, replicas=replicas, extra=extra).result
    assert cut["segments"] > 3
    expected, found = stored_bytes(straight["checkpoint"]), stored_bytes(cut["checkpoint"])
    assert len(expected) > 20
    assert found.keys() == expected.keys()
    assert [key for key in expected if found[key] != expected[key]] == []
    assert cut["state_digest"] == straight["state_digest"]
    assert cut["metrics"] == straight["metrics"]
    rows, evaluations = read_history(straight["home"])
    assert [step for step, _ in rows] == list(range(7, steps + 1, 7))
    assert [step for step, _ in evaluations] == [25, *([50] if steps > 50 else []), steps]
    assert read_history(cut["home"]) == (rows, evaluations)


@pytest.mark.nightly
def test_missing_seed_state_changes_a_resumed_run(
    train_without_prefect: Callable[..., Any], stored_bytes: Read, tmp_path: Path
) -> None:
    """Shows that the test above can fail: without the seed state a resumed run draws other dropout masks."""
    straight = train_without_prefect("text", tmp_path / "straight", "--without-seed-state", extra=WHOLE).result
    train_without_prefect("text", tmp_path / "cut", "--without-seed-state", "--until-step", "11", extra=WHOLE)
    resumed = train_without_prefect("text", tmp_path / "cut", "--without-seed-state", extra=WHOLE).result
    expected, found = stored_bytes(straight["checkpoint"]), stored_bytes(resumed["checkpoint"])
    assert [key for key in expected if found[key] != expected[key]] != []
    assert resumed["state_digest"] != straight["state_digest"]


@pytest.mark.nightly
@pytest.mark.parametrize("replicas", [4, 8])
def test_resumed_run_on_more_replicas_has_the_same_bytes(
    train_without_prefect: Callable[..., Any], stored_bytes: Read, tmp_path: Path, replicas: int
) -> None:
    straight = train_without_prefect("digits", tmp_path / "straight", replicas=replicas, extra=WHOLE).result
    train_without_prefect("digits", tmp_path / "cut", "--until-step", "31", replicas=replicas, extra=WHOLE)
    resumed = train_without_prefect("digits", tmp_path / "cut", replicas=replicas, extra=WHOLE).result
    assert stored_bytes(resumed["checkpoint"]) == stored_bytes(straight["checkpoint"])
    assert resumed["state_digest"] == straight["state_digest"]
