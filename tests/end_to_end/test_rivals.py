"""Promise 3 with real processes: when two train one run, one commits on each checkpoint and the other is refused."""

from pathlib import Path

import pytest

from tests.support.homes import (
    commit_count,
    commits_in,
    damaged,
    entries_of,
    head_of,
    read_history,
    tip_of,
    unexpected_folders,
)
from tests.support.training_child import Child

pytestmark = pytest.mark.slow

RUN = ["train.steps=2000", "train.segment_steps=1000", "train.log_every_steps=50", "evaluate.every_steps=1000"]
SHORT_SEGMENTS = [*RUN, "train.segment_steps=100"]


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


def test_one_of_two_processes_is_refused(tmp_path: Path) -> None:
    """Two start at once, before the origin entry. Then one overtakes another in its segment, and ends the run."""
    words = ["--take-over", "--max-segments", "3"]
    ended = []
    for child in [Child("digits", tmp_path, *words, extra=SHORT_SEGMENTS, notes=tmp_path) for _ in range(2)]:
        ended.append(child.finish())
        assert ended[-1].code in {0, 1, 3}, ended[-1].stderr[-3000:]
        assert "Traceback" not in ended[-1].stderr
        if ended[-1].code == 1:
            assert ended[-1].stderr.splitlines()[-1].startswith("error: StaleWriter: ")
    assert any(done.code != 1 for done in ended), "both were refused"
    home = tmp_path / "digits-cnn"
    assert_one_history(home)

    slow = Child("digits", tmp_path, extra=RUN, notes=tmp_path)
    # In the segment to step 1000, before its commit.
    assert slow.until_printed("step 700/2000")
    assert slow.stop()
    entries, commits = entries_of(home), commit_count(home)
    assert tip_of(home).step <= 600, "the process stopped too late"
    warned = Child("digits", tmp_path, "--max-segments", "1", extra=RUN, notes=tmp_path).finish(3)
    assert warned.stderr.splitlines()[-3].startswith("error: RunAtWork: digits-cnn is at work: process ")
    assert entries_of(home) == entries
    Child("digits", tmp_path, "--take-over", "--max-segments", "1", extra=RUN, notes=tmp_path).finish()
    overtaken = entries_of(home)
    assert commits_in(overtaken)[-1].step == 1000
    slow.resume()
    done = slow.finish(1)
    message = done.stderr.splitlines()[-1]
    assert message.startswith("error: StaleWriter: ")
    assert "the tip has moved since" in message
    assert "stop one of them, or run again to continue from the newest commit" in message
    assert "Traceback" not in done.stderr
    assert entries_of(home)[: len(overtaken)] == overtaken
    assert commit_count(home) == commits + 1

    last = Child("digits", tmp_path, extra=RUN, notes=tmp_path).finish(0)
    assert_one_history(home)
    (tmp_path / "straight").mkdir()
    straight = Child("digits", tmp_path / "straight", extra=RUN, notes=tmp_path).finish(0)
    assert last.result["state_digest"] == straight.result["state_digest"]
    assert read_history(home) == read_history(Path(straight.result["home"]))
