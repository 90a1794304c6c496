"""The train state of one process: the model and every variable it has, saved and restored as a named tree."""

import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tasks.foundation.accelerator.strategy import OUTER_CAUSES, Accelerator
from tasks.foundation.checkpoint.verify import fetch, manifest_digest, read_manifest
from tasks.foundation.contracts.checkpoint import (
    CheckpointManifest,
    CheckpointRef,
    FileRecord,
    checkpoint_folder,
    replica_key,
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
from tasks.foundation.model.build import build_model, make_variables
from tasks.foundation.model.returned_metrics import Returned, returned_by
from tasks.foundation.model.variables import Leaf, leaves_of
from tasks.foundation.runlog.commits import stale_writer
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.state.digest import digest_of
from tasks.foundation.state.host_state import HostMemory, read_host
from tasks.foundation.state.layout import (
    HOST,
    RETURNED,
    is_learning_rate,
    require_same_signature,
    signature_of,
    stored_name,
    tree_of,
)
from tasks.foundation.state.replicas import Replicas
from tasks.foundation.state.returned_means import read_returned, returned_leaves, saved_values
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.download import side_by_side
from tasks.foundation.storage.temporary_files import temporary_folder

_PREFIX = "ckpt"
# What TensorFlow puts among the temporary files besides: sources that AutoGraph writes, a checkpoint's index.
_ROOM_BESIDES_BYTES = 1 << 20
# Shards of this size go up and come down side by side.
_SHARD_BYTES = 64 << 20


class TrainState:
    """A built model, its leaves, and the step counter."""

    def __init__(
        self,
        model: keras.Model,
        accelerator: Accelerator,
        *,
        frozen: frozenset[int] = frozenset(),
        memory: HostMemory | None = None,
        returned: Returned | None = None,
    ) -> None:
        self.model = model
        self.accelerator = accelerator
        self.memory = memory
        self.returned = returned
        with accelerator.strategy.scope():
            self._step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
        of_model = (*leaves_of(model, frozen), Leaf(path="step", variable=self._step, per_replica=False))
        self._of_returned = tuple(returned_leaves(returned))
        of_host = () if memory is None else (memory.leaf,)
        self.leaves: tuple[Leaf, ...] = (*of_model, *self._of_returned, *of_host)
        self.signature = signature_of(self.leaves)
        self._replicas = Replicas(self.leaves, accelerator)
        self._saved = self._replicas.saved(self.leaves)
        self._checkpoint = tf.train.Checkpoint(**tree_of(self._saved))
        self._checkpoint_of_model = tf.train.Checkpoint(**tree_of(self._replicas.saved(of_model)))
        self._leaves_of_model = of_model
        self._derive_seeds()
        # A learning rate is a variable, so that a restored one would replace what the run file says now.
        self._configured = {
            leaf.path: float(leaf.components[0].numpy()) for leaf in self.leaves if is_learning_rate(leaf)
        }

    @property
    def step(self) -> int:
        """Global batches that went through `train_step` since initialization."""
        return int(self._step.numpy())

    @step.setter
    def step(self, step: int) -> None:
        self._step.assign(step)

    def digest(self) -> str:
        """Digest of the state in memory; of other hosts' parts, as they were when it was last staged or restored."""
        return digest_of(self._saved, lambda key: _numpy(self._saved[key]))

    def require_finite(self, where: str) -> None:
        """Refuse to let NaN or infinity into a checkpoint.

        Raises:
            NonFinite: naming the first such trainable variable.
        """
        for leaf in self.leaves:
            part = leaf.components[0]
            if leaf.trainable and part.dtype.is_floating and not bool(tf.reduce_all(tf.math.is_finite(part))):
                raise NonFinite(
                    f"{where}: {leaf.path} holds NaN or infinity, which is not committed. Lower the learning rate, "
                    "clip gradients, or look at the data of these steps",
                    step=self.step,
                )

    def stage(self, home: Storage, *, base: int, attempt: str, where: str = "") -> CheckpointRef | None:
        """Write the state, upload it, read it back, and put the manifest down last.

        Of several hosts all call it at the same step; the chief alone writes, and the others get None.

        Args:
            home: the run's home.
            base: number of the log entry that the work started from.
            attempt: who works.
            where: what else to say than the step, should a variable not be finite; as ", in segment 2".

        Raises:
            NonFinite: a trainable variable is NaN or infinite.
            StaleWriter: another writer moved the tip first, and swept what was being staged.
            StorageError: the store or the folder for temporary files refused, or the store has other bytes than sent.
            RunLogError: the run's log is gone, so this would be staged beside nothing.
        """
        self.require_finite(f"step {self.step}{where}")
        self._replicas.gather()
        self._require_derived_seeds()
        if not self.accelerator.is_chief:
            return None
        # A home that was moved away, or whose disk is no longer mounted, must not be begun anew by an upload.
        RunLog(home).entry(base)
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
            experimental_io_device=self.accelerator.io_device,
            experimental_sharding_callback=tf.train.experimental.MaxShardSizePolicy(max_shard_size=_SHARD_BYTES),
        )
        with _temporary_files_of(f"step {step}"), temporary_folder("baton-staging-") as local:
            written = self._checkpoint.write(str(local / _PREFIX), options=options)
            files = side_by_side(
                lambda file: _upload(home, file, f"{folder}/{file.name}"),
                sorted(local.iterdir()),
                workers=home.transfers,
            )
            state_digest = self._digest_of_files(written)
        manifest = CheckpointManifest(
            step=step,
            base=base,
            attempt=attempt,
            replicas=self.accelerator.replicas,
            state_digest=state_digest,
            signature=self.signature,
            configured=self._configured,
            files=tuple(files),
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
        """Verify a checkpoint's bytes, read them, and compare step and digest. Of several hosts all call it.

        Raises:
            DamagedCheckpoint: the bytes differ from the manifest, or what was read differs from what was written. All
                hosts raise it if one finds that.
            StateMismatch: it belongs to another model.
        """
        fault = None
        try:
            self._restore(home, ref)
        except DamagedCheckpoint as found:
            fault = found
        if not self.accelerator.all_agree(fault is None):
            raise fault or DamagedCheckpoint(f"{home.uri}/{ref.path} could not be restored on another host")

    def _restore(self, home: Storage, ref: CheckpointRef) -> None:
        where = f"{home.uri}/{ref.path}"
        manifest = read_manifest(home, ref)
        require_same_signature(manifest.signature, self.signature, where=where)
        with _temporary_files_of(where), temporary_folder("baton-restoring-") as local:
            fetch(home, ref, manifest, local)
            try:
                self._read(str(local / _PREFIX), manifest)
                remembered = read_host(str(local / _PREFIX), manifest.signature)
                returned = read_returned(str(local / _PREFIX), manifest)
            except tf.errors.NotFoundError as fault:
                # Files of this machine are linked to, and whoever retires the checkpoint deletes them.
                raise DamagedCheckpoint(f"{where}: a file went while it was being read") from fault
        self._derive_seeds()
        same_replicas = manifest.replicas == self.accelerator.replicas
        digest = self._digest_with(remembered | returned)
        if self.step != ref.step or (same_replicas and digest != ref.state_digest):
            raise DamagedCheckpoint(
                f"{where} was restored as step {self.step}, digest {digest[:12]}…; "
                f"the log says step {ref.step}, digest {ref.state_digest[:12]}…"
            )
        if self.memory is not None:
            self.memory.take(remembered)
        for leaf in self._of_returned:
            self._assign(leaf, saved_values(leaf, returned, manifest.replicas))
        self._take_accepted_learning_rates(manifest)

    def _take_accepted_learning_rates(self, manifest: CheckpointManifest) -> None:
        """One that the model is compiled with now and was not then; the user's code may have changed it meanwhile."""
        for leaf in self.leaves:
            now = self._configured.get(leaf.path)
            if now is not None and now != manifest.configured.get(leaf.path, now):
                leaf.variable.assign(now)

    def _read(self, prefix: str, manifest: CheckpointManifest) -> None:
        if manifest.replicas == self.accelerator.replicas:
            options = tf.train.CheckpointOptions(experimental_io_device=self.accelerator.io_device)
            read = self._checkpoint_of_model.read(prefix, options=options)
            read.assert_existing_objects_matched()
            read.expect_partial()  # TensorFlow need not tell of what Python remembers, which is read for itself
            return
        # Another replica count.
        reader = tf.train.load_checkpoint(prefix)
        for leaf in self._leaves_of_model:
            if leaf.seed:
                self._replicas.first_seed(leaf).assign(reader.get_tensor(stored_name(leaf.path)))
                continue
            if not leaf.per_replica:
                leaf.variable.assign(reader.get_tensor(stored_name(leaf.path)))
                continue
            saved = [
                reader.get_tensor(stored_name(replica_key(leaf.path, index))) for index in range(manifest.replicas)
            ]
            self._assign(leaf, saved)

    def _assign(self, leaf: Leaf, saved: Sequence[Any]) -> None:
        parts = self._replicas.of(leaf)
        values = saved if len(saved) == len(parts) else _dealt(leaf, saved, len(parts))
        for part, value in zip(parts, values, strict=True):
            part.assign(value)

    def _digest_with(self, held: Mapping[str, Any]) -> str:
        """Digest of the model's state in memory, and of what else the checkpoint has, be it ours or not."""
        keys = [key for key in self._saved if not key.startswith((HOST, RETURNED))]
        return digest_of([*keys, *held], lambda key: held[key] if key in held else _numpy(self._saved[key]))

    def _digest_of_files(self, prefix: str) -> str:
        reader = tf.train.load_checkpoint(prefix)
        for key in self._saved:
            if not reader.has_tensor(stored_name(key)):
                raise StateMismatch(f"{prefix}: TensorFlow wrote no {key}; the checkpoint is not used")
        return digest_of(self._saved, lambda key: reader.get_tensor(stored_name(key)))

    def _derive_seeds(self) -> None:
        """Give each replica its own random stream; left alone, Keras gives all of them the same masks."""
        for _, part, derived in self._own_seeds():
            part.assign(derived)

    def _require_derived_seeds(self) -> None:
        """Only replica 0's seed is saved: the others must be what restoring will derive from it."""
        for where, part, derived in self._own_seeds():
            if not np.array_equal(part.numpy(), derived):
                raise ModelError(
                    f"{where}'s random stream has left the one derived from replica 0's, so a resume could not "
                    "continue it; draw equally often on every replica"
                )

    def _own_seeds(self) -> Iterator[tuple[str, Any, Any]]:
        """Of each seed of this host's replicas, but replica 0: whose, the variable, and what it is to be."""
        for leaf in self.leaves:
            if leaf.seed:
                first = self._replicas.first_seed(leaf).numpy()
                for replica, part in zip(self.accelerator.local_replicas, leaf.components, strict=False):
                    if replica > 0:
                        yield f"{leaf.path}: replica {replica}", part, _derived(first, replica)


def build_train_state(
    spec: RunSpec, *, code_folder: Path, accelerator: Accelerator, batch: Sequence[Any], training: bool = False
) -> TrainState:
    """Build the user's model and every variable of its train state, at its seeded initial values.

    Args:
        spec: names the function and the seed.
        code_folder: the run file's folder.
        accelerator: the process's.
        batch: one per-replica batch of zeros, see `zero_batch`.
        training: it is to be trained, so what a train_step of its own returns is kept.

    Raises:
        ModelError: the user's code or model cannot be used.
        StorageError: there is no room to write a checkpoint before it is uploaded.
    """
    model = build_model(spec, code_folder=code_folder, accelerator=accelerator)
    frozen = make_variables(
        model, batch, reference=spec.model.build, accelerator=accelerator, freezing=spec.init.freeze
    )
    memory = None if spec.train.callbacks is None else HostMemory("callbacks")
    returned = None
    if training:
        returned = returned_by(model, "train_step", batch, reference=spec.model.build, accelerator=accelerator)
    state = TrainState(model, accelerator, frozen=frozen, memory=memory, returned=returned)
    _require_room(state)
    return state


def _require_room(state: TrainState) -> None:
    """Before anything is trained: without room, AutoGraph fails first, and blames the model."""
    folder = tempfile.gettempdir()
    parts = [part for leaf in state.leaves for part in (leaf.components if leaf.per_replica else leaf.components[:1])]
    # What Python remembers has no fixed size, and is small.
    needed = sum((part.shape.num_elements() or 0) * part.dtype.size for part in parts) + _ROOM_BESIDES_BYTES
    with _temporary_files_of("the train state"):
        free = shutil.disk_usage(folder).free
    if free < needed:
        raise StorageError(
            f"{folder} has {free} bytes left, and a checkpoint of this model takes {needed} there before it is "
            "uploaded; free some space there, or name another folder with TMPDIR, and run again"
        )


@contextmanager
def _temporary_files_of(what: str) -> Iterator[None]:
    """What TensorFlow and the system say of a full or locked folder for temporary files, as one sentence of Baton's."""
    try:
        yield
    except OUTER_CAUSES:
        raise  # a device or a host is gone
    except (tf.errors.OpError, OSError) as fault:
        said = (fault.message if isinstance(fault, tf.errors.OpError) else str(fault)).splitlines()
        raise StorageError(
            f"{what}: no files could be written or read in {tempfile.gettempdir()} ({said[0] if said else fault}); "
            "free some space there, or name another folder with TMPDIR, and run again"
        ) from fault


def _derived(seed: Any, replica: int) -> Any:
    """A seed state [seed, counter] for a replica: another seed, the same counter.

    Drawing only moves the counter, so deriving commutes with drawing and a restored run continues every stream.
    """
    text = f"{int(seed[0])}/{replica}".encode()
    own = int.from_bytes(hashlib.sha256(text).digest()[:4], "big") & 0x7FFFFFFF
    return np.array([own, seed[1]], dtype=seed.dtype)


def _dealt(leaf: Leaf, saved: Sequence[Any], count: int) -> list[Any]:
    """Values for `count` replicas from those of another count: everyone gets replica 0's.

    But what a metric's variable reads as over all replicas stays: a sum goes to replica 0, a mean to everyone.
    """
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
