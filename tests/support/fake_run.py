"""A run's home as training leaves it, with invented numbers and without TensorFlow."""

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from stat import S_ISREG
from typing import Any

import yaml

from baton.tasks.foundation.checkpoint.retention import KeepLast, apply_retention
from baton.tasks.foundation.contracts.checkpoint import (
    CheckpointManifest,
    CheckpointRef,
    FileRecord,
    checkpoint_folder,
    manifest_digest,
)
from baton.tasks.foundation.contracts.dataset import DatasetManifest, Feature, ShardRecord, content_digest
from baton.tasks.foundation.contracts.log_entry import (
    Commit,
    Environment,
    Evaluation,
    Head,
    MetricRow,
    Origin,
    WorkerStats,
)
from baton.tasks.foundation.contracts.run_spec import KeepBest
from baton.tasks.foundation.log.appends import commit
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.local import LocalStorage
from tests.support.ledger_records import record_of

DATASET = "datasets/0123456789ab"
FILES = ("ckpt.index", "ckpt.data-00000-of-00001")


class FakeRun:
    """A storage root with one dataset and one run."""

    def __init__(
        self, folder: Path, name: str = "digits", *, target: int | None = None, identity: Mapping[str, Any] = {}
    ) -> None:
        """Begin a run; its commits say `target`, unless it is None as in logs of earlier versions."""
        self.folder = folder
        self.name = name
        self.target = target
        self.metadata: dict[str, bool | int | float | str] = {}  # what the run file says at the next commit
        self.root = LocalStorage(folder / "runs")
        self.home = self.root.at(name)
        self.log = RunLog(self.home)
        content = self._write_dataset()
        identity = {"data.folder": DATASET, "data.content_digest": content, "train.seed": 0, **identity}
        versions = {"tensorflow": "2.19.1"}
        environment = Environment(
            accelerator="cpu", replicas=2, intra_op_threads=2, inter_op_threads=1, versions=versions
        )
        self.log.append(lambda _: Origin(identity=identity, environment=environment), attempt=uuid.uuid4().hex)
        self.commit(0)

    @property
    def address(self) -> str:
        return self.home.uri

    @property
    def head(self) -> Head:
        head = self.log.head()
        assert head is not None
        return head

    @property
    def tip(self) -> CheckpointRef:
        assert self.head.tip is not None
        return self.head.tip

    def path(self, name: str) -> Path:
        return self.home.root / name

    def run_file(self, steps: int = 400) -> Path:
        """Write the run file; returns its path."""
        path = self.folder / "run.yaml"
        spec = {
            "run": self.name,
            "storage": "runs",
            "data": {"source": "digits"},
            "model": "model.py:build_model",
            "train": {"steps": steps, "segment_steps": 100, "global_batch_size": 32},
        }
        path.write_text(yaml.safe_dump(spec))
        return path

    def commit(
        self,
        step: int,
        rows: Sequence[MetricRow] = (),
        *,
        partial: MetricRow | None = None,
        workers: tuple[WorkerStats, ...] = (),
    ) -> CheckpointRef:
        """Write a checkpoint with a manifest, and commit it with these rows; returns its reference."""
        head = self.head
        attempt = uuid.uuid4().hex
        path = checkpoint_folder(step=step, base=head.base, attempt=attempt)
        files = []
        for number, name in enumerate(FILES):
            self.home.write(f"{path}/{name}", bytes([number]) * (1000 + step))
            stored = self.home.stat(f"{path}/{name}")
            files.append(FileRecord(name=name, size=stored.size, crc32c=stored.crc32c))
        digest = f"{step:064x}"
        manifest = CheckpointManifest(
            step=step,
            base=head.base,
            attempt=attempt,
            replicas=2,
            state_digest=digest,
            signature=(),
            leaf_digests={},
            files=tuple(files),
        ).to_json()
        self.home.write(f"{path}/manifest.json", manifest)
        ref = CheckpointRef(
            path=path, step=step, base=head.base, attempt=attempt, state_digest=digest,
            manifest_digest=manifest_digest(manifest), size=sum(file.size for file in files),
        )  # fmt: skip
        body = Commit(
            checkpoint=ref, parent=head.tip.path if head.tip else None, history=tuple(rows), partial=partial,
            exit_reason="segment_end" if step else "initialized", examples=32 * 100 if step else 0,
            seconds={"train": 2.0, "stage": 0.5} if step else {}, target=self.target if step else None,
            metadata=self.metadata, workers=workers,
        )  # fmt: skip
        commit(self.log, body)
        return ref

    def train(self, *steps: int) -> "FakeRun":
        """Commit at each step, with the loss 100 / step."""
        for step in steps:
            self.commit(step, [MetricRow(step=step, metrics={"loss": 100 / step, "accuracy": 0.5})])
        return self

    def evaluate(self, accuracy: float, examples: int = 180) -> None:
        body = Evaluation(
            checkpoint=self.tip, metrics={"accuracy": accuracy}, examples=examples, seconds=0.5,
            keep_best=KeepBest(metric="accuracy", mode="max"),
        )  # fmt: skip
        self.log.append(lambda _: body, attempt=uuid.uuid4().hex)

    def attempt(self, name: str, **changes: Any) -> None:
        """Write the record of an attempt; see `record_of`."""
        record = record_of(name, **changes)
        self.home.write(f"attempts/{name}.json", record.to_json())

    def retire(self, keep_last: int) -> None:
        apply_retention(self.log, [KeepLast(keep_last)], attempt=uuid.uuid4().hex)

    def files(self) -> dict[str, bytes]:
        """The bytes of every file below the storage root; links and pipes are none."""
        regular = (path for path in self.root.files("") if S_ISREG((self.root.root / path).lstat().st_mode))
        return {path: self.root.read(path) for path in regular}

    def _write_dataset(self) -> str:
        shards = []
        for name in ("train-00000.tfrecord", "validation-00000.tfrecord"):
            self.root.write(f"{DATASET}/{name}", name.encode() * 100)
            stored = self.root.stat(f"{DATASET}/{name}")
            shards.append(ShardRecord(path=name, examples=10, size=stored.size, crc32c=stored.crc32c))
        features = (Feature(name="x", dtype="float32", shape=(8, 8)),)
        manifest = DatasetManifest(
            digest=DATASET.removeprefix("datasets/"), content_digest=content_digest(features, shards[:1], shards[1:]),
            source="digits", origin={}, features=features, train=tuple(shards[:1]), validation=tuple(shards[1:]),
        )  # fmt: skip
        self.root.write(f"{DATASET}/manifest.json", manifest.to_json())
        return manifest.content_digest


def flip_a_byte(path: Path, at: int = 17) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x01
    path.write_bytes(bytes(data))
