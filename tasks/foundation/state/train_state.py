"""The train state of one process: the model and every variable it has, saved and restored as a named tree."""

import hashlib
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tasks.foundation.accelerator.strategy import Accelerator
from tasks.foundation.contracts.checkpoint import (
    CheckpointManifest,
    CheckpointRef,
    FileRecord,
    checkpoint_folder,
)
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.errors import (
    DamagedCheckpoint,
    FileMissing,
    ModelError,
    NonFinite,
    StateMismatch,
    StorageError,
)
from tasks.foundation.model.building import build_model, make_variables
from tasks.foundation.model.variables import Leaf, leaves_of
from tasks.foundation.runlog.committing import stale_writer
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.runlog.verifying import check, manifest_digest
from tasks.foundation.state.digest import digest_of
from tasks.foundation.state.layout import require_same_signature, signature_of, slots, stored_name, tree_of
from tasks.foundation.storage.base import Storage

_PREFIX = "ckpt"
# Shards of this size go up and come down side by side.
_SHARD_BYTES = 64 << 20


class TrainState:
    """A built model, its leaves, and the step counter."""

    def __init__(self, model: keras.Model, accelerator: Accelerator) -> None:
        self.model = model
        self.accelerator = accelerator
        with accelerator.strategy.scope():
            self._step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
        self.leaves: tuple[Leaf, ...] = (
            *leaves_of(model),
            Leaf(path="step", variable=self._step, per_replica=False),
        )
        self.signature = signature_of(self.leaves)
        self._slots = {key: part for leaf in self.leaves for key, part in slots(leaf).items()}
        self._checkpoint = tf.train.Checkpoint(**tree_of(self.leaves))
        self._derive_seeds()

    @property
    def step(self) -> int:
        """Global batches that went through `train_step` since initialization."""
        return int(self._step.numpy())

    @step.setter
    def step(self, step: int) -> None:
        self._step.assign(step)

    def digest(self) -> str:
        """Digest of the state in memory."""
        return digest_of(self._slots, lambda key: _numpy(self._slots[key]))

    def require_finite(self, where: str) -> None:
        """Refuse to let NaN or infinity into a checkpoint.

        Raises:
            NonFinite: naming the first such trainable variable.
        """
        for leaf in self.leaves:
            part = leaf.components[0]
            if leaf.trainable and part.dtype.is_floating and not bool(tf.reduce_all(tf.math.is_finite(part))):
                raise NonFinite(
                    f"{where}: {leaf.path} holds NaN or infinity; nothing of this segment is committed. Lower the "
                    "learning rate, clip gradients, or look at the data of these steps"
                )

    def stage(self, home: Storage, *, base: int, attempt: str) -> CheckpointRef:
        """Write the state, upload it, read it back, and put the manifest down last.

        Args:
            home: the run's home.
            base: number of the log entry that the work started from.
            attempt: who works.

        Raises:
            NonFinite: a trainable variable is NaN or infinite.
            StaleWriter: another writer moved the tip first, and swept what was being staged.
            StorageError: the store refused, or has other bytes than were sent.
        """
        self.require_finite(f"step {self.step}")
        self._require_derived_seeds()
        try:
            return self._stage(home, base=base, attempt=attempt)
        except FileMissing as fault:
            # Whoever moves the tip sweeps what was begun before; there is nothing wrong with the store then.
            log = RunLog(home)
            head = log.head()
            if head is None or head.base == base:
                raise
            raise stale_writer(log, head, step=self.step, base=base) from fault

    def _stage(self, home: Storage, *, base: int, attempt: str) -> CheckpointRef:
        step = self.step
        folder = checkpoint_folder(step=step, base=base, attempt=attempt)
        options = tf.train.CheckpointOptions(
            experimental_sharding_callback=tf.train.experimental.MaxShardSizePolicy(max_shard_size=_SHARD_BYTES)
        )
        with tempfile.TemporaryDirectory(prefix="baton-staging-") as local:
            written = self._checkpoint.write(str(Path(local) / _PREFIX), options=options)
            files = tuple(_upload(home, file, f"{folder}/{file.name}") for file in sorted(Path(local).iterdir()))
            state_digest = self._digest_of_files(written)
        manifest = CheckpointManifest(
            step=step,
            base=base,
            attempt=attempt,
            replicas=self.accelerator.replicas,
            state_digest=state_digest,
            signature=self.signature,
            files=files,
        ).to_json()
        home.create(f"{folder}/manifest.json", manifest)
        return CheckpointRef(
            path=folder,
            step=step,
            base=base,
            attempt=attempt,
            state_digest=state_digest,
            manifest_digest=manifest_digest(manifest),
            size=sum(file.size for file in files) + len(manifest),
        )

    def restore(self, home: Storage, ref: CheckpointRef) -> None:
        """Verify a checkpoint's bytes, read them, and compare step and digest.

        Raises:
            DamagedCheckpoint: the bytes differ from the manifest, or what was read differs from what was written.
            StateMismatch: it belongs to another model.
        """
        where = f"{home.uri}/{ref.path}"
        manifest = check(home, ref)
        require_same_signature(manifest.signature, self.signature, where=where)
        with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="baton-restoring-") as local:
            for file in manifest.files:
                source = stack.enter_context(home.local_file(f"{ref.path}/{file.name}"))
                (Path(local) / file.name).symlink_to(source)
            self._read(str(Path(local) / _PREFIX), manifest)
        self._derive_seeds()
        same_replicas = manifest.replicas == self.accelerator.replicas
        if self.step != ref.step or (same_replicas and self.digest() != ref.state_digest):
            raise DamagedCheckpoint(
                f"{where} was restored as step {self.step}, digest {self.digest()[:12]}…; "
                f"the log says step {ref.step}, digest {ref.state_digest[:12]}…"
            )

    def _read(self, prefix: str, manifest: CheckpointManifest) -> None:
        if manifest.replicas == self.accelerator.replicas:
            self._checkpoint.read(prefix).assert_existing_objects_matched()
            return
        # Another replica count.
        reader = tf.train.load_checkpoint(prefix)
        for leaf in self.leaves:
            if not leaf.per_replica:
                leaf.variable.assign(reader.get_tensor(stored_name(leaf.path)))
                continue
            saved = [
                reader.get_tensor(stored_name(f"{leaf.path}/replica_{index}")) for index in range(manifest.replicas)
            ]
            for part, value in zip(leaf.components, _dealt(leaf, saved), strict=True):
                part.assign(value)

    def _digest_of_files(self, prefix: str) -> str:
        reader = tf.train.load_checkpoint(prefix)
        for key in self._slots:
            if not reader.has_tensor(stored_name(key)):
                raise StateMismatch(f"{prefix}: TensorFlow wrote no {key}; the checkpoint is not used")
        return digest_of(self._slots, lambda key: reader.get_tensor(stored_name(key)))

    def _derive_seeds(self) -> None:
        """Give each replica its own random stream; left alone, Keras gives all of them the same masks."""
        for leaf in self.leaves:
            if leaf.seed:
                first, *others = leaf.components
                for replica, part in enumerate(others, start=1):
                    part.assign(_derived(first.numpy(), replica))

    def _require_derived_seeds(self) -> None:
        """Only replica 0's seed is saved: the others must be what restoring will derive from it."""
        for leaf in self.leaves:
            if leaf.seed:
                first, *others = leaf.components
                for replica, part in enumerate(others, start=1):
                    if not np.array_equal(part.numpy(), _derived(first.numpy(), replica)):
                        raise ModelError(
                            f"{leaf.path}: replica {replica}'s random stream has left the one derived from replica "
                            "0's, so a resume could not continue it; draw equally often on every replica"
                        )


def build_train_state(
    spec: RunSpec, *, code_folder: Path, accelerator: Accelerator, batch: Sequence[Any]
) -> TrainState:
    """Build the user's model and every variable of its train state, at its seeded initial values.

    Args:
        spec: names the function and the seed.
        code_folder: the run file's folder.
        accelerator: the process's.
        batch: one per-replica batch of zeros, see `zero_batch`.

    Raises:
        ModelError: the user's code or model cannot be used.
    """
    model = build_model(spec, code_folder=code_folder, accelerator=accelerator)
    make_variables(model, batch, reference=spec.model.build, accelerator=accelerator)
    return TrainState(model, accelerator)


def _derived(seed: Any, replica: int) -> Any:
    """A seed state [seed, counter] for a replica: another seed, the same counter.

    Drawing only moves the counter, so deriving commutes with drawing and a restored run continues every stream.
    """
    text = f"{int(seed[0])}/{replica}".encode()
    own = int.from_bytes(hashlib.sha256(text).digest()[:4], "big") & 0x7FFFFFFF
    return np.array([own, seed[1]], dtype=seed.dtype)


def _dealt(leaf: Leaf, saved: Sequence[Any]) -> list[Any]:
    """Values for the replicas here from those of another count: everyone gets replica 0's.

    But what a metric's variable reads as over all replicas stays: a sum goes to replica 0, a mean to everyone.
    """
    count = len(leaf.components)
    aggregation = leaf.variable.aggregation if leaf.path.startswith("metrics/") else tf.VariableAggregation.NONE
    if aggregation == tf.VariableAggregation.SUM:
        return [np.sum(saved, axis=0, dtype=saved[0].dtype), *([np.zeros_like(saved[0])] * (count - 1))]
    if aggregation == tf.VariableAggregation.MEAN:
        return [np.mean(saved, axis=0, dtype=saved[0].dtype)] * count
    return [saved[0]] * count


def _numpy(variable: Any) -> Any:
    part = variable.values[0] if hasattr(variable, "values") else variable
    return part.numpy()


def _upload(home: Storage, file: Path, path: str) -> FileRecord:
    sent = home.upload(file, path)
    stored = home.stat(path)
    if stored != sent:
        raise StorageError(
            f"{home.uri}/{path}: sent {sent.size} bytes with crc32c {sent.crc32c}, the store has {stored.size} with "
            f"{stored.crc32c}; run again"
        )
    return FileRecord(name=file.name, size=stored.size, crc32c=stored.crc32c)
