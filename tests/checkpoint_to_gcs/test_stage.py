"""The stage checkpoint-to-GCS: verify, commit, apply retention."""

from pathlib import Path
from typing import Any

import pytest

from tasks.checkpoint_to_gcs.stage import checkpoint_to_gcs
from tasks.foundation.contracts.log_entry import Commit, Entry, Retire, SegmentRequest, SegmentResult
from tasks.foundation.contracts.stage_calls import CheckpointToGcsCall
from tasks.foundation.errors import DamagedCheckpoint, StaleWriter
from tasks.foundation.log.history import restorable
from tasks.foundation.telemetry.events import Committed
from tests.support.lab import Lab, spec_of


@pytest.fixture(scope="module")
def begun_lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    lab = Lab(tmp_path_factory.mktemp("begun"))
    lab.begin(spec_of("plain"))
    return lab


@pytest.fixture
def lab(begun_lab: Lab, tmp_path: Path) -> Lab:
    """A lab where the run "plain" has begun; beginning takes seconds."""
    return begun_lab.copy(tmp_path / "begun")


def staged(lab: Lab, spec: Any, until: int) -> tuple[SegmentRequest, SegmentResult]:
    head = lab.log(spec).head() or lab.begin(spec)
    assert head.tip is not None
    return lab.request(spec, head.tip, until, base=head.base), lab.train(spec, head.tip, until)


def commit(lab: Lab, pair: tuple[SegmentRequest, SegmentResult]) -> Entry:
    return checkpoint_to_gcs(CheckpointToGcsCall.of(*pair), lab.place(pair[0].spec))


def folders(lab: Lab, spec: Any) -> set[str]:
    return {f"checkpoints/{path.name}" for path in (lab.root / "storage" / spec.run / "checkpoints").iterdir()}


def test_commit_makes_a_staged_checkpoint_the_tip(lab: Lab) -> None:
    spec = spec_of("plain")
    before = lab.begin(spec)
    request, result = staged(lab, spec, 5)
    assert lab.log(spec).head() == before
    entry = commit(lab, (request, result))
    head = lab.log(spec).head()
    assert head is not None
    assert head == entry.head
    assert head.tip == result.staged
    assert head.base == entry.number
    assert isinstance(entry.body, Commit)
    assert entry.body.parent == request.start.path
    assert (entry.body.history, entry.body.examples) == (result.history, 40)
    assert entry.body.seconds == result.seconds
    event = [event for event in lab.recorder.events if isinstance(event, Committed)][-1]
    assert (event.step, event.path, event.size) == (5, result.staged.path, result.staged.size)
    assert event.metrics == result.history[-1].metrics


@pytest.mark.parametrize("name", ["ckpt.index", "ckpt.data-00000-of-00001", "manifest.json"])
def test_damaged_checkpoint_is_not_committed(lab: Lab, name: str) -> None:
    spec = spec_of("plain")
    before = lab.begin(spec)
    pair = staged(lab, spec, 5)
    file = lab.folder(spec, pair[1].staged) / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match=name):
        commit(lab, pair)
    assert lab.log(spec).head() == before


def test_committing_twice_changes_nothing(lab: Lab) -> None:
    spec = spec_of("plain", checkpoint__keep_last=1)
    pair = staged(lab, spec, 3)
    first = commit(lab, pair)
    kept = lab.log(spec).head()
    assert commit(lab, pair) == first
    assert lab.log(spec).head() == kept
    # Also after later commits, when its files are deleted.
    lab.train_and_commit(spec, 4, 5, 6)
    assert not lab.folder(spec, pair[1].staged).exists()
    newest = lab.log(spec).head()
    assert commit(lab, pair) == first
    assert lab.log(spec).head() == newest


def test_second_writer_on_the_same_base_is_stale(lab: Lab) -> None:
    spec = spec_of("plain")
    lab.begin(spec)
    mine, rival = staged(lab, spec, 3), staged(lab, spec, 5)
    won = commit(lab, rival)
    # The winner deleted the files of the stale checkpoint. This is not damage.
    assert not lab.folder(spec, mine[1].staged).exists()
    with pytest.raises(StaleWriter) as refused:
        commit(lab, mine)
    assert refused.value.exit_code == 1
    assert "step 3 was trained on top of log entry 1, but the tip has moved since" in str(refused.value)
    assert f"entry 2, checkpoint, attempt {rival[1].staged.attempt[:8]}" in str(refused.value)
    head = lab.log(spec).head()
    assert head is not None
    assert head.tip == won.head.tip == rival[1].staged


def test_retention_and_evaluation_make_no_writer_stale(lab: Lab) -> None:
    spec = spec_of("plain")
    start = lab.train_and_commit(spec, 3)
    pair = staged(lab, spec, 5)
    lab.evaluate(spec, start.tip)  # type: ignore[arg-type]
    entry = commit(lab, pair)
    assert entry.number == start.number + 2
    assert entry.head.evaluated == (start.tip.path,)  # type: ignore[union-attr]


def test_retention_follows_the_run_file(lab: Lab) -> None:
    spec = spec_of("plain", checkpoint__keep_last=2, checkpoint__keep_every_steps=4)
    paths = {0: lab.begin(spec).tip.path}  # type: ignore[union-attr]
    for step in range(1, 9):
        head = lab.train_and_commit(spec, step)
        assert head.tip is not None
        paths[step] = head.tip.path
        # The newest two and multiples of four can be restored.
        expected = {s for s in paths if s % 4 == 0 or s > step - 2}
        log = lab.log(spec)
        assert [ref.step for ref in restorable(log, log.require_head())] == sorted(expected)
        # Retired checkpoints are deleted two commits later, so that readers can finish.
        assert {paths[s] for s in expected} <= folders(lab, spec)
    left = {step for step in paths if paths[step] in folders(lab, spec)}
    assert left == {0, 4, 5, 6, 7, 8}
    retired = [entry.body for entry in lab.log(spec).entries() if isinstance(entry.body, Retire)]
    assert [path for body in retired for path in body.paths] == [paths[step] for step in (1, 2, 3, 5, 6)]
    assert [path for body in retired for path in body.deleted] == [paths[step] for step in (1, 2, 3)]
    for ref in restorable(log, log.require_head()):
        assert (lab.folder(spec, ref) / "manifest.json").is_file()


def test_best_checkpoint_is_kept(lab: Lab) -> None:
    spec = spec_of("plain", checkpoint__keep_last=1, checkpoint__keep_best={"metric": "loss", "mode": "max"})
    lab.begin(spec)
    best = lab.train_and_commit(spec, 1).tip  # it has the largest loss
    assert best is not None
    lab.evaluate(spec, best)
    for step in range(2, 6):
        head = lab.train_and_commit(spec, step)
        assert head.tip is not None
        lab.evaluate(spec, head.tip)
    restored = {ref.step for ref in head.retained if ref.path in head.read[-1:]}
    assert {ref.step for ref in head.retained} == {1, 5} | restored  # the newest that was restored is kept too
    assert best.path in folders(lab, spec)


def test_checkpoints_of_stale_writers_are_deleted(lab: Lab) -> None:
    spec = spec_of("plain")
    lab.begin(spec)
    lost = staged(lab, spec, 3)[1].staged
    unfinished = lab.root / "storage" / spec.run / "checkpoints" / "00000003-00000001-dead"
    unfinished.mkdir()
    (unfinished / "ckpt.index").write_bytes(b"half")
    winner = commit(lab, staged(lab, spec, 5)).head.tip
    assert winner is not None
    assert lost.path not in folders(lab, spec)
    assert f"checkpoints/{unfinished.name}" not in folders(lab, spec)
    assert winner.path in folders(lab, spec)
    # A checkpoint staged on the newest base may still be committed by its writer.
    waiting = staged(lab, spec, 7)
    commit(lab, (waiting[0], waiting[1]))
    assert waiting[1].staged.path in folders(lab, spec)
