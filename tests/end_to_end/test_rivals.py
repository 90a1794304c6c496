"""Promise 3 with real processes: when two train one run, one commits on each checkpoint and the other is refused."""

import random
import time
from pathlib import Path

import pytest

from tests.support.homes import commit_count, commits_in, damaged, entries_of, head_of, read_history, unexpected_folders
from tests.support.shipped_runs import Finished
from tests.support.training_child import Child

pytestmark = pytest.mark.slow

RUN = ["train.steps=2000", "train.segment_steps=1000", "train.log_every_steps=50", "evaluate.every_steps=1000"]
SHORT_SEGMENTS = [*RUN, "train.segment_steps=100"]
ROUNDS = 2


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("straight")
    return Child("digits", folder, extra=RUN, notes=folder).finish(0)


def assert_one_history(home: Path) -> None:
    """Assert that the log has no gap, each commit follows the one before, and no file is damaged or left over."""
    entries = entries_of(home)
    assert [entry.number for entry in entries] == list(range(len(entries)))
    commits = [ref for ref in commits_in(entries) if ref.step > 0]
    assert len({ref.base for ref in commits}) == len(commits), "two commits on one base"
    assert [ref.step for ref in commits] == sorted({ref.step for ref in commits}), "a step was committed twice"
    assert damaged(home) == set()
    head = head_of(home)
    assert head is not None
    assert unexpected_folders(home, head) == set()


def test_stale_writer_is_refused(straight: Finished, tmp_path: Path) -> None:
    slow = Child("digits", tmp_path, extra=RUN, notes=tmp_path)
    # In the first of two segments, before its commit, with about 800 steps left.
    assert slow.until_printed("step 200/2000")
    assert slow.stop()
    assert commit_count(slow.home) == 1, "the process stopped too late"
    warned = Child("digits", tmp_path, "--max-segments", "1", extra=RUN, notes=tmp_path).finish(3)
    assert warned.stderr.splitlines()[-3].startswith("error: RunAtWork: digits-cnn is at work: process ")
    assert commit_count(slow.home) == 1
    Child("digits", tmp_path, "--take-over", "--max-segments", "1", extra=RUN, notes=tmp_path).finish()
    overtaken = entries_of(slow.home)
    assert commits_in(overtaken)[-1].step == 1000
    slow.resume()
    done = slow.finish(1)
    message = done.stderr.splitlines()[-1]
    assert message.startswith("error: StaleWriter: ")
    assert "the tip has moved since" in message
    assert "stop one of them, or run again to continue from the newest commit" in message
    assert "Traceback" not in done.stderr
    assert entries_of(slow.home)[: len(overtaken)] == overtaken
    assert commit_count(slow.home) == 2

    last = Child("digits", tmp_path, extra=RUN, notes=tmp_path).finish(0)
    assert_one_history(slow.home)
    assert last.result["state_digest"] == straight.result["state_digest"]
    assert read_history(slow.home) == read_history(Path(straight.result["home"]))


def test_two_processes_started_at_once_make_one_history(straight: Finished, tmp_path: Path) -> None:
    """Starts both before the origin entry and again later; the winner differs between rounds."""
    chance = random.Random(20261121)
    home = tmp_path / "digits-cnn"
    for _ in range(ROUNDS):
        children = []
        for _ in range(2):
            words = ["--take-over", "--max-segments", "3"]
            children.append(Child("digits", tmp_path, *words, extra=SHORT_SEGMENTS, notes=tmp_path))
            time.sleep(chance.uniform(0, 0.3))
        ended = [child.finish() for child in children]
        for done in ended:
            assert done.code in {0, 1, 3}, done.stderr[-3000:]
            assert "Traceback" not in done.stderr
            if done.code == 1:
                assert done.stderr.splitlines()[-1].startswith("error: StaleWriter: ")
        assert any(done.code != 1 for done in ended), "both were refused"
    last = Child("digits", tmp_path, extra=SHORT_SEGMENTS, notes=tmp_path).finish(0)
    assert_one_history(home)
    assert last.result["state_digest"] == straight.result["state_digest"]
    assert read_history(home) == read_history(Path(straight.result["home"]))
