"""A home written by a newer version is read if possible, otherwise refused, and never damaged."""

import hashlib
import json
from typing import Any

import pytest

from baton.tasks.foundation.checkpoint.retention import quarantine_damaged_tips
from baton.tasks.foundation.checkpoint.verify import find_damage, read_manifest, verify_checkpoint
from baton.tasks.foundation.contracts.attempt import AttemptRecord
from baton.tasks.foundation.contracts.log_entry import Change, Commit
from baton.tasks.foundation.errors import AnotherVersion, DamagedCheckpoint
from baton.tasks.foundation.log.appends import commit
from baton.tasks.foundation.log.attempts import read_attempts
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.telemetry.events import Silent
from tests.support.small_logs import assert_sound, begin, edit_entry, head_of, origin, signed, stage, train


def edited(data: bytes, **changes: Any) -> bytes:
    """The JSON with other values; without a key whose value is to be None."""
    values = {key: value for key, value in (json.loads(data) | changes).items() if value is not None}
    return json.dumps(values, indent=1).encode()


def commit_as_a_newer_baton(log: RunLog, step: int, /, **changes: Any) -> Commit:
    """Commit a checkpoint whose manifest has other keys, with the digest of the written file in the log."""
    head = head_of(log)
    staged = stage(log.home, step, head.base, "newer")
    path = f"{staged.path}/manifest.json"
    data = edited(log.home.read(path), **changes)
    log.home.write(path, data)
    staged = staged.model_copy(update={"manifest_digest": hashlib.sha256(data).hexdigest()})
    body = Commit(checkpoint=staged, parent=head.tip.path if head.tip else None, exit_reason="segment_end")
    commit(log, body)
    return body


def files(home: Storage) -> dict[str, bytes]:
    return {path: home.read(path) for path in home.files("")}


def test_manifest_with_unknown_keys_is_restored(store: Storage) -> None:
    log = begin(store)
    body = commit_as_a_newer_baton(log, 10, compression={"kind": "zstd"})
    assert find_damage(store, body.checkpoint, read_bytes=True) is None
    assert verify_checkpoint(store, body.checkpoint).step == 10
    head = quarantine_damaged_tips(log, attempt="b", telemetry=Silent(), verify_bytes=True)
    assert head is not None
    assert (head.tip, head.quarantined) == (body.checkpoint, ())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 2}, r"format is 2\. This is Baton \S+, which reads format 1"),
        ({"step": "ten"}, r"its digest is the log's, and not a readable CheckpointManifest: step"),
        ({"files": [{"name": "ckpt.data", "size": 1, "md5": "x"}]}, r"its digest is the log's, .*files\.0\.crc32c"),
    ],
)
def test_unreadable_newer_checkpoint_is_not_damage(store: Storage, changes: dict[str, Any], words: str) -> None:
    log = begin(store)
    train(log, 10)
    body = commit_as_a_newer_baton(log, 20, **changes)
    before = files(store)
    looks = (
        lambda: quarantine_damaged_tips(log, attempt="b", telemetry=Silent()),
        lambda: find_damage(store, body.checkpoint),
        lambda: verify_checkpoint(store, body.checkpoint),
        lambda: read_manifest(store, body.checkpoint),
    )
    for look in looks:
        with pytest.raises(AnotherVersion, match=words) as error:
            look()
        assert error.value.exit_code == 2
        assert body.checkpoint.path in str(error.value)
        assert "hint: use the version of Baton that wrote it" in str(error.value)
        assert "delet" not in str(error.value)
    assert files(store) == before


def test_manifest_of_other_digest_is_damage(store: Storage) -> None:
    log = begin(store)
    tip = head_of(log).tip
    assert tip is not None
    path = f"{tip.path}/manifest.json"
    store.write(path, edited(store.read(path), format=2))
    with pytest.raises(DamagedCheckpoint, match="the log says"):
        verify_checkpoint(store, tip)


def test_entry_with_unknown_keys_is_read_and_continued(store: Storage) -> None:
    log = begin(store)
    train(log, 10)

    def as_newer(entry: dict[str, Any]) -> None:
        entry["body"]["note"], entry["head"]["pinned"], entry["body"]["checkpoint"]["tier"] = "x", ["y"], "cold"
        entry["signed_by"] = "z"

    edit_entry(store, 2, as_newer)
    assert head_of(log).number == 2
    train(log, 20)
    assert_sound(store)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 3}, r"format is 3\. This is Baton \S+, which reads format 1"),
        ({"format": 3, "body": {"kind": "merge"}, "head": []}, "format is 3"),
        ({"body": {"kind": "merge", "of": ["a", "b"]}}, "body has the unknown kind 'merge'"),
    ],
)
def test_nothing_is_appended_after_newer_version(store: Storage, changes: dict[str, Any], words: str) -> None:
    log = begin(store)
    train(log, 10)
    staged = stage(store, 20, head_of(log).base, "older")
    path = "log/00000003.json"
    store.write(path, signed(json.loads(store.read("log/00000002.json")) | {"number": 3} | changes))
    store.write("log/HINT", b"3")
    before = files(store)
    environment = origin().environment
    tries = (
        log.head,
        lambda: list(log.entries()),
        lambda: log.append(lambda _: Change(environment=environment), attempt="b"),
        lambda: log.append(lambda head: origin() if head is None else None, attempt="b"),
        lambda: commit(log, Commit(checkpoint=staged, parent=None, exit_reason="segment_end")),
        lambda: quarantine_damaged_tips(log, attempt="b", telemetry=Silent()),
    )
    for act in tries:
        with pytest.raises(AnotherVersion, match=words) as error:
            act()
        assert path in str(error.value)
        assert "delete" not in str(error.value)
    store.write("log/HINT", b"2")  # as before that entry
    with pytest.raises(AnotherVersion, match=words):
        log.append(lambda _: Change(environment=environment), attempt="b")
    assert files(store) == before | {"log/HINT": b"2"}


def test_entry_by_newer_version_is_not_skipped(store: Storage) -> None:
    log = begin(store)
    newer = signed(json.loads(store.read("log/00000001.json")) | {"number": 2, "format": 3})

    def decide(_: object) -> Change:
        if not store.exists("log/00000002.json"):
            store.write("log/00000002.json", newer)  # between our reading the head and our append
        return Change(environment=origin().environment)

    with pytest.raises(AnotherVersion, match="format is 3"):
        log.append(decide, attempt="b")
    assert not store.exists("log/00000003.json")


EARLIER = r"was written by a revision of Baton before 1\.0, and revision 28ffee9 is the last that reads it"


def test_home_of_an_earlier_revision_is_refused_by_name(store: Storage) -> None:
    log = begin(store)
    train(log, 10)
    sound = json.loads(store.read("log/00000002.json"))
    del sound["format"], sound["sha256"]
    for earlier in (
        json.dumps(sound | {"schema_version": 1}).encode(),
        signed(sound | {"schema_version": 2}),
        signed(sound),
    ):
        store.write("log/00000002.json", earlier)
        before = files(store)
        for act in (RunLog(store).head, lambda: train(RunLog(store), 20), lambda: list(RunLog(store).entries())):
            with pytest.raises(AnotherVersion, match=rf"log/00000002\.json: this Entry {EARLIER}"):
                act()
        assert files(store) == before


@pytest.mark.parametrize("changes", [{"schema_version": 1}, {}], ids=["its word", "no word"])
def test_checkpoint_of_an_earlier_revision_is_not_damage(store: Storage, changes: dict[str, Any]) -> None:
    log = begin(store)
    body = commit_as_a_newer_baton(log, 10, **changes, format=None)
    before = files(store)
    for look in (lambda: find_damage(store, body.checkpoint), lambda: verify_checkpoint(store, body.checkpoint)):
        with pytest.raises(AnotherVersion, match=rf"manifest\.json: .*{EARLIER}"):
            look()
    assert files(store) == before


def test_attempts_of_newer_version_are_read_if_possible(store: Storage) -> None:
    now = "2026-01-01T00:00:00+00:00"
    for name, changes in (("a", {"watts": 7}), ("b", {"format": 2})):
        record = AttemptRecord(
            attempt=name, host="h", pid=1, began=now, alive=now, mark="0", from_step=0, step=0, committed_step=0,
            doing="train", seconds={}, uncommitted_seconds=0.0,
        )  # fmt: skip
        store.write(f"attempts/{name}.json", edited(record.to_json(), **changes))
    found = read_attempts(store)
    assert [record.attempt for record in found.records] == ["a"]
    assert found.unreadable == 1
