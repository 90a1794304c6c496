"""The stage checkpoint-to-GCS: verify, commit, apply retention."""

from pathlib import Path
from typing import Any

import pytest

from baton.tasks.checkpoint_to_gcs.stage import checkpoint_to_gcs
from baton.tasks.foundation.contracts.log_entry import Commit, Entry, Retire, SegmentRequest, SegmentResult
from baton.tasks.foundation.contracts.stage_calls import CheckpointToGcsCall
from baton.tasks.foundation.errors import DamagedCheckpoint, StaleWriter
from baton.tasks.foundation.log.history import restorable
from baton.tasks.foundation.telemetry.events import Committed
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


def test_damaged_checkpoint_is_not_committed(lab: Lab) -> None:
    spec = spec_of("plain")
    before = lab.begin(spec)
    pair = staged(lab, spec, 5)
    for name in ("ckpt.index", "ckpt.data-00000-of-00001", "manifest.json"):
        file = lab.folder(spec, pair[1].staged) / name
        intact = file.read_bytes()
        data = bytearray(intact)
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        with pytest.raises(DamagedCheckpoint, match=name):
            commit(lab, pair)
        assert lab.log(spec).head() == before
        file.write_bytes(intact)
    assert commit(lab, pair).head.tip == pair[1].staged


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
    for step in range(2, 5):
        head = lab.train_and_commit(spec, step)
        assert head.tip is not None
        lab.evaluate(spec, head.tip)
    restored = {ref.step for ref in head.retained if ref.path in head.read[-1:]}
    assert {ref.step for ref in head.retained} == {1, 4} | restored  # the newest that was restored is kept too
    assert best.path in folders(lab, spec)


def test_stale_writer_is_refused_and_its_files_are_deleted(lab: Lab) -> None:
    spec = spec_of("plain")
    lab.begin(spec)
    mine, rival = staged(lab, spec, 3), staged(lab, spec, 5)
    unfinished = lab.root / "storage" / spec.run / "checkpoints" / "00000003-00000001-dead"
    unfinished.mkdir()
    (unfinished / "ckpt.index").write_bytes(b"half")
    assert commit(lab, rival).head.tip == rival[1].staged
    assert {mine[1].staged.path, f"checkpoints/{unfinished.name}"}.isdisjoint(folders(lab, spec))
    assert rival[1].staged.path in folders(lab, spec)
    # That its files are gone is not damage.
    with pytest.raises(StaleWriter, match="step 3 was trained on top of log entry 1, but the tip has moved since"):
        commit(lab, mine)
    # A checkpoint staged on the newest base may still be committed by its writer.
    waiting = staged(lab, spec, 7)
    assert commit(lab, waiting).head.tip == waiting[1].staged
    assert waiting[1].staged.path in folders(lab, spec)
