"""Real commits without TensorFlow, in a process that kills itself at a given moment.

`python run_commits.py HOME --until-step N [--kill-at M | --count]`

The content of a checkpoint is a function of its parent's, so a wrong restore or a lost commit changes every later one.
A moment is before or after a call of the store or of the file system below it. Counting starts with the first upload of
the first commit.
"""

import argparse
import hashlib
import os
import signal
import sys
import uuid
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Self

from baton.tasks.foundation.checkpoint.retention import quarantine_damaged_tips
from baton.tasks.foundation.checkpoint.save import AsyncSaves, commit_staged
from baton.tasks.foundation.checkpoint.verify import fetch, read_manifest
from baton.tasks.foundation.contracts.checkpoint import (
    CheckpointManifest,
    CheckpointRef,
    FileRecord,
    checkpoint_folder,
    manifest_digest,
)
from baton.tasks.foundation.contracts.log_entry import Commit, Entry, Environment, Evaluation, Head, MetricRow, Origin
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.log.appends import commit, evaluation_due
from baton.tasks.foundation.log.fold import fold
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.storage.local_files import temporary_folder
from baton.tasks.foundation.storage.transfers import parallel_map
from baton.tasks.foundation.telemetry.events import Silent
from tests.support.save_marks import mark_saves

STEPS = 10
_STORE = (
    *("read", "exists", "create", "write", "upload", "write_buffers"),
    *("stat", "checksum", "local_path", "files", "folders", "delete"),
)
_SYSTEM = ("link", "fsync", "unlink", "mkdir", "rmdir", "replace", "rename")

SPEC = RunSpec.model_validate(
    {
        "run": "commits",
        "storage": "unused",
        "data": {"source": "digits", "validation_fraction": 0.1},
        "model": {"build": "model.py:build_model"},
        "train": {"steps": 100, "segment_steps": STEPS, "global_batch_size": 8},
        # Every commit retires a checkpoint and deletes one that was retired before.
        "checkpoint": {"keep_last": 2},
        "evaluate": {"every_steps": 2 * STEPS},
    }
)


class Moments:
    """Counts moments once it is `armed` and kills the process at one of them."""

    def __init__(self, kill_at: int | None) -> None:
        self.count = 0
        self.armed = False
        self._kill_at = kill_at

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function: count a moment before and after each call."""

        @wraps(function)
        def counted(*arguments: Any, **options: Any) -> Any:
            self._pass()
            try:
                return function(*arguments, **options)
            finally:
                self._pass()

        return counted

    def _pass(self) -> None:
        if not self.armed:
            return
        if self.count == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1


def watched(store: LocalStorage, moments: Moments) -> Storage:
    """The store, with a moment before and after each of its calls and each call of `os` that changes files."""
    for name in _STORE:
        setattr(store, name, moments.around(getattr(store, name)))
    for name in _SYSTEM:
        setattr(os, name, moments.around(getattr(os, name)))
    return store


def stage(home: Storage, content: bytes, *, step: int, base: int, attempt: str) -> CheckpointRef:
    """Stage as `TrainState.stage` does: files in parallel, checked, and the manifest last."""
    folder = checkpoint_folder(step=step, base=base, attempt=attempt)
    with temporary_folder("baton-staging-") as local:
        (local / "ckpt.data").write_bytes(content * 500)
        (local / "ckpt.index").write_bytes(content)

        def upload(name: str) -> FileRecord:
            sent = home.upload(local / name, f"{folder}/{name}")
            if home.stat(f"{folder}/{name}") != sent:
                raise AssertionError(name)
            return FileRecord(name=name, size=sent.size, crc32c=sent.crc32c)

        records = parallel_map(upload, ["ckpt.data", "ckpt.index"], workers=home.transfers)
    manifest = CheckpointManifest(
        step=step,
        base=base,
        attempt=attempt,
        replicas=1,
        state_digest=content.hex(),
        signature=(),
        leaf_digests={},
        files=tuple(records),
    ).to_json()
    home.create(f"{folder}/manifest.json", manifest)
    return CheckpointRef(
        path=folder,
        step=step,
        base=base,
        attempt=attempt,
        state_digest=content.hex(),
        manifest_digest=manifest_digest(manifest),
        size=len(manifest),
    )


def restored(home: Storage, ref: CheckpointRef) -> bytes:
    with temporary_folder("baton-restoring-") as local:
        fetch(home, ref, read_manifest(home, ref), local)
        content = (local / "ckpt.index").read_bytes()
        data = (local / "ckpt.data").read_bytes()
    if content.hex() != ref.state_digest or data != content * 500:
        raise AssertionError(f"{ref.path} holds another state than its log entry")
    return content


def begin(log: RunLog) -> Head:
    environment = Environment(accelerator="cpu", replicas=1, intra_op_threads=1, inter_op_threads=1, versions={})
    attempt = uuid.uuid4().hex
    log.append(
        lambda head: Origin(identity={"seed": 0}, environment=environment) if head is None else None, attempt=attempt
    )
    first = stage(log.home, hashlib.sha256(b"0").digest(), step=0, base=0, attempt=attempt)
    return commit(log, Commit(checkpoint=first, parent=None, exit_reason="initialized")).head


class Segments:
    """Trains beside its saves, as the relay does: a segment begins from memory while the save before is in flight."""

    def __init__(self, log: RunLog, *, on_restore: Callable[[CheckpointRef], None] = lambda _: None) -> None:
        self._log = log
        self._on_restore = on_restore
        self._saves = AsyncSaves()
        self._path, self._content = "", b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._saves.__exit__(*error)

    def train(self, head: Head) -> Head:
        """One segment: restore unless in memory, train, and begin to stage, commit, retire and delete.

        Returns:
            The head as it will be once the save has landed.
        """
        tip = tip_of(head)
        if tip.path != self._path:
            self._content = restored(self._log.home, tip)
            self._on_restore(tip)
        content, step = hashlib.sha256(self._content).digest(), tip.step + STEPS
        landed = self._saves.wait()
        base = landed.number if landed is not None and tip.is_in_flight else head.base
        reference = CheckpointRef.in_flight(step=step, base=base, attempt=uuid.uuid4().hex)

        def body_of(staged: CheckpointRef) -> Commit:
            return Commit(
                checkpoint=staged,
                parent=tip.path,
                exit_reason="segment_end",
                history=(MetricRow(step=step, metrics={"loss": content[0] / 256}),),
                examples=STEPS,
            )

        def commit_staged_files(staged: CheckpointRef) -> Entry:
            return commit_staged(self._log, body_of(staged), spec=SPEC, telemetry=Silent(), verified=True)

        self._saves.begin(lambda: stage(self._log.home, content, step=step, base=base, attempt=reference.attempt))
        self._saves.commit(commit_staged_files)
        self._path, self._content = reference.path, content
        return fold(head, body_of(reference))

    def land(self) -> Head:
        """Wait for the save in flight; returns the head of the log."""
        self._saves.wait()
        return self._log.require_head()


def tip_of(head: Head) -> CheckpointRef:
    if head.tip is None:
        raise AssertionError("the run has no tip")
    return head.tip


def evaluate(log: RunLog, tip: CheckpointRef) -> None:
    value = restored(log.home, tip)[0] / 256
    body = Evaluation(
        checkpoint=tip, metrics={"accuracy": value}, examples=3, seconds=0.0, keep_best=SPEC.checkpoint.keep_best
    )
    log.append(lambda head: body if head and tip.path not in head.evaluated else None, attempt=uuid.uuid4().hex)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("home", type=Path)
    parser.add_argument("--until-step", type=int, required=True)
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--count", action="store_true", help="print the number of moments of the first commit")
    options = parser.parse_args()
    mark_saves()
    moments = Moments(options.kill_at)
    log = RunLog(watched(LocalStorage(options.home), moments))
    log.require_whole()
    head = quarantine_damaged_tips(log, attempt=uuid.uuid4().hex, telemetry=Silent())
    if head is None or head.tip is None:
        head = begin(log)
    with Segments(log) as segments:
        while True:
            if evaluation_due(head, SPEC):
                head = segments.land()
                evaluate(log, tip_of(head))
                head = log.require_head()
            if tip_of(head).step >= options.until_step:
                return
            moments.armed = options.count or options.kill_at is not None
            head = segments.train(head)
            if options.count:
                segments.land()
                sys.stdout.write(f"{moments.count}\n")
                return


if __name__ == "__main__":
    main()
