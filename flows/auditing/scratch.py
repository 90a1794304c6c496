"""Scratch homes: a copy of one checkpoint and of the datasets, from which a process trains on."""

import json
import os
import uuid
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from flows.auditing.stretches import Stretch
from flows.proving.trial import Trial
from flows.run import Run
from tasks.foundation.checkpoint.verify import manifest_digest, verify_checkpoint
from tasks.foundation.contracts.checkpoint import CheckpointManifest, CheckpointRef, checkpoint_folder
from tasks.foundation.contracts.log_entry import Commit, Head, Origin
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.errors import DamagedDataset, FileMissing
from tasks.foundation.runlog.commits import commit
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.local import LocalStorage

# These settings could stop the process early, or commit by the clock. None of them changes the bits.
_SWITCHED_OFF = ("train.stop_after_seconds=null", "checkpoint.every_seconds=null")
_DATASETS = ("data.folder", "data.validation_folder")


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution(Trial):
    """A trial that continues from a copied checkpoint with the settings of the run file.

    Attributes:
        cuts: steps to commit on the way, because the log has commits there.
    """

    cuts: tuple[int, ...] = ()

    def arguments(self) -> list[str]:
        """Return the arguments for `flows.without_prefect`. What says when to evaluate and to log stays as it is."""
        settings = [
            *self.overrides,
            f"run={self.name}",
            f"storage={json.dumps(os.fspath(self.storage))}",
            *_SWITCHED_OFF,
        ]
        options = [word for setting in settings for word in ("--set", setting)]
        cuts = [word for step in self.cuts for word in ("--cut-at", str(step))]
        return [os.fspath(self.file), *options, *cuts, "--until-step", str(self.steps)]


def execution_of(run: Run, overrides: tuple[str, ...], stretch: Stretch, *, name: str, storage: Path) -> Execution:
    """Make a scratch home that holds the checkpoint at the start of a stretch. The run is only read.

    Args:
        run: the run, which has a file.
        overrides: the user's overrides.
        stretch: what to execute.
        name: name of the scratch run.
        storage: its storage root; holds the datasets already, see `copy_datasets`.

    Raises:
        DamagedCheckpoint: the checkpoint's bytes differ from its manifest.
    """
    if run.file is None:
        raise AssertionError("an audit needs the run file")
    root = LocalStorage(storage)
    home, attempt = root.at(name), uuid.uuid4().hex
    log = RunLog(home)
    # Before the checkpoint: entry 0 is its base.
    origin = Origin(
        skipped_batches=stretch.before.skipped_batches,
        identity=dict(stretch.before.identity),
        environment=stretch.before.environment,
    )
    log.append(lambda head: origin if head is None else None, attempt=attempt)
    manifest = verify_checkpoint(run.home, stretch.start)
    folder = checkpoint_folder(step=stretch.start.step, base=0, attempt=attempt)
    _copy_files(run.home, stretch.start, manifest, storage / name / folder)
    data = manifest.model_copy(update={"base": 0, "attempt": attempt}).to_json()
    home.create(f"{folder}/manifest.json", data)
    staged = stretch.start.model_copy(
        update={"path": folder, "base": 0, "attempt": attempt, "manifest_digest": manifest_digest(data)}
    )
    verify_checkpoint(home, staged)
    commit(log, Commit(checkpoint=staged, parent=None, exit_reason="forked"))
    return Execution(
        name=name,
        storage=storage,
        file=run.file,
        overrides=(*overrides, *logged_settings(run.spec, stretch)),
        target=stretch.end.step,
        steps=stretch.end.step,
        segment_steps=stretch.end.step,
        cuts=tuple(ref.step for ref in stretch.commits[:-1]),
    )


def logged_settings(spec: RunSpec, stretch: Stretch) -> tuple[str, ...]:
    """Return overrides for what may change between attempts and is in the checkpoints: the rows' distance.

    Each logged row resets the sums of the metrics, so that another `train.log_every_steps` gives other sums.
    """
    now, rows = spec.train.log_every_steps, stretch.rows
    steps = range(stretch.start.step + 1, stretch.end.step + 1)
    for every in (now, *(later - earlier for earlier, later in pairwise(rows))):
        if rows == tuple(step for step in steps if step % every == 0):
            return () if every == now else (f"train.log_every_steps={every}",)
    return ()  # too few rows to tell, or it changed on the way


def logged_copy(run: Run, stretch: Stretch, execution: Execution, storage: Path) -> Execution:
    """Copy the checkpoint at the end of a stretch to a local disk, where TensorFlow can read it.

    Raises:
        DamagedCheckpoint: its bytes differ from its manifest.
    """
    manifest = verify_checkpoint(run.home, stretch.end)
    target = storage / execution.name / stretch.end.path
    _copy_files(run.home, stretch.end, manifest, target)
    run.home.download(f"{stretch.end.path}/manifest.json", target / "manifest.json")
    return Execution(
        name=execution.name,
        storage=storage,
        file=execution.file,
        overrides=(),
        target=execution.target,
        steps=execution.steps,
        segment_steps=execution.segment_steps,
    )


def copy_datasets(root: Storage, head: Head, storage: Path) -> None:
    """Copy the run's datasets below a scratch storage root, so that what is executed reads the run's own shards.

    Files that Baton reads in place are not copied. A dataset that is not there is left to the process to prepare.

    Raises:
        DamagedDataset: a manifest does not match its shards, or a shard its manifest.
    """
    for key in _DATASETS:
        folder = head.identity.get(key)
        if isinstance(folder, str):
            _copy_dataset(root, folder, storage)


def _copy_dataset(root: Storage, folder: str, storage: Path) -> None:
    path = f"{folder}/manifest.json"
    if (storage / path).exists():
        return
    from tasks.foundation.dataset.manifest import read_manifest  # imports NumPy, which light verbs do without

    try:
        manifest = read_manifest(root, folder)
    except DamagedDataset as fault:
        if isinstance(fault.__cause__, FileMissing):
            return
        raise
    if manifest.mixture is not None:
        for source in manifest.mixture.sources:
            _copy_dataset(root, source.folder, storage)
    copy = LocalStorage(storage)
    for shard in (*manifest.train, *manifest.validation):
        name = f"{folder}/{shard.path}"
        if shard.is_external or (storage / name).exists():
            continue
        (storage / name).parent.mkdir(parents=True, exist_ok=True)
        on_disk = root.local_path(name)
        if on_disk is not None and on_disk.stat().st_size != shard.size:
            raise DamagedDataset(f"{root.uri}/{name}: its size differs from the manifest; see: baton verify")
        root.download(name, storage / name)
        if copy.checksum(name).crc32c != shard.crc32c:
            raise DamagedDataset(f"{root.uri}/{name}: its bytes differ from the manifest; see: baton verify")
    copy.create(path, root.read(path))  # last: its existence means that the shards are complete


def _copy_files(home: Storage, ref: CheckpointRef, manifest: CheckpointManifest, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for file in manifest.files:
        home.download(f"{ref.path}/{file.name}", target / file.name)
