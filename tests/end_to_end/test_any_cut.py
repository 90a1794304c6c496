"""Promise 1: a run has the same result however it is cut, compared without Baton's own digest."""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.homes import read_history

pytestmark = pytest.mark.slow

Read = Callable[[str], Any]
Uncut = Callable[[str, int], Any]

# `make chaos` runs every pair; here each model and each replica count appears once.
WHOLE = "BATON_TEST_WHOLE_TABLE" in os.environ
RUNS = [("digits", 1), ("text", 2), *([("text", 1), ("digits", 2)] if WHOLE else [])]


@pytest.fixture(scope="module")
def uncut(train_without_prefect: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Uncut:
    """Train an uncut run, once for each model and replica count."""

    @cache
    def train(name: str, replicas: int) -> Any:
        storage = tmp_path_factory.mktemp("uncut")
        return train_without_prefect(name, storage, replicas=replicas, extra=["train.segment_steps=1000"]).result

    return train


def in_processes(
    train_without_prefect: Callable[..., Any],
    name: str,
    storage: Path,
    *,
    replicas: int,
    extra: list[str],
    options: list[list[str]],
) -> Any:
    """Run a process for each list of options; returns the last result."""
    for words in options[:-1]:
        train_without_prefect(name, storage, *words, replicas=replicas, extra=extra)
    return train_without_prefect(name, storage, *options[-1], replicas=replicas, extra=extra)


@pytest.mark.parametrize("run", RUNS)
def test_any_cut_gives_the_same_bytes(
    train_without_prefect: Callable[..., Any], uncut: Uncut, stored_bytes: Read, tmp_path: Path, *, run: tuple[str, int]
) -> None:
    name, replicas = run
    steps = {"digits": 60, "text": 40}[name]
    straight = uncut(name, replicas)
    fifth = f"train.segment_steps={steps // 5}"
    # A process and a second one that continue at an odd step, both with segments.
    odd = in_processes(
        train_without_prefect,
        name,
        tmp_path / "odd",
        replicas=replicas,
        extra=[fifth],
        options=[["--until-step", "11"], []],
    ).result
    others, evaluated = [odd], [slice(None)]
    if (name, replicas) == ("digits", 1) or WHOLE:  # one more process for the fast run
        several = in_processes(
            train_without_prefect,
            name,
            tmp_path / "several",
            replicas=replicas,
            extra=[fifth, "evaluate.every_steps=1000"],
            options=[*[["--max-segments", "1"]] * 2, []],
        ).result
        others, evaluated = [odd, several], [slice(None), slice(-1, None)]

    expected = stored_bytes(straight["checkpoint"])
    assert len(expected) > 20
    assert odd["segments"] >= 4
    for other in others:
        found = stored_bytes(other["checkpoint"])
        assert found.keys() == expected.keys()
        assert [key for key in expected if found[key] != expected[key]] == []
        assert other["state_digest"] == straight["state_digest"]
        assert other["metrics"] == straight["metrics"]
    rows, evaluations = read_history(straight["home"])
    assert [step for step, _ in rows] == list(range(7, steps + 1, 7))
    assert [step for step, _ in evaluations] == [25, *([50] if steps > 50 else []), steps]
    for other, chosen in zip(others, evaluated, strict=True):
        assert read_history(other["home"]) == (rows, evaluations[chosen])


@pytest.mark.nightly
def test_missing_seed_state_changes_a_resumed_run(
    train_without_prefect: Callable[..., Any], stored_bytes: Read, tmp_path: Path
) -> None:
    """Shows that the test above can fail: without the seed state a resumed run draws other dropout masks."""
    whole = ["train.segment_steps=1000"]
    straight = train_without_prefect("text", tmp_path / "straight", "--without-seed-state", extra=whole).result
    train_without_prefect("text", tmp_path / "cut", "--without-seed-state", "--until-step", "11", extra=whole)
    resumed = train_without_prefect("text", tmp_path / "cut", "--without-seed-state", extra=whole).result
    expected, found = stored_bytes(straight["checkpoint"]), stored_bytes(resumed["checkpoint"])
    assert [key for key in expected if found[key] != expected[key]] != []
    assert resumed["state_digest"] != straight["state_digest"]


@pytest.mark.nightly
@pytest.mark.parametrize("replicas", [4, 8] if WHOLE else [4])
def test_resumed_run_on_more_replicas_has_the_same_bytes(
    train_without_prefect: Callable[..., Any], stored_bytes: Read, tmp_path: Path, replicas: int
) -> None:
    whole = ["train.segment_steps=1000"]
    straight = train_without_prefect("digits", tmp_path / "straight", replicas=replicas, extra=whole).result
    train_without_prefect("digits", tmp_path / "cut", "--until-step", "31", replicas=replicas, extra=whole)
    resumed = train_without_prefect("digits", tmp_path / "cut", replicas=replicas, extra=whole).result
    assert stored_bytes(resumed["checkpoint"]) == stored_bytes(straight["checkpoint"])
    assert resumed["state_digest"] == straight["state_digest"]


def test_segments_by_seconds_give_the_same_bytes(
    train_without_prefect: Callable[..., Any], uncut: Uncut, stored_bytes: Read, tmp_path: Path
) -> None:
    straight = uncut("digits", 1)
    clocked = train_without_prefect(
        "digits", tmp_path / "clocked", extra=["train.segment_steps=null", "train.segment_seconds=0.05"]
    )
    assert clocked.result["segments"] > 3
    assert stored_bytes(clocked.result["checkpoint"]) == stored_bytes(straight["checkpoint"])
