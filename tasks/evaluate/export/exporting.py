"""Exports a committed checkpoint as a Keras file, a SavedModel or a TensorFlow checkpoint."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import keras
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from tasks.evaluate.export.loading import Loading
from tasks.evaluate.export.target import atomic_target, require_free_target
from tasks.evaluate.restored_model import restored_model
from tasks.foundation.accelerator.strategy import Accelerator, acquire
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.log_entry import Head
from tasks.foundation.contracts.placement import AcceleratorSpec
from tasks.foundation.contracts.run_file import RunFile
from tasks.foundation.errors import ModelError
from tasks.foundation.messages import listed
from tasks.foundation.storage.base import Storage
from tasks.foundation.user_errors import user_error

# Prefix of the file names of an exported checkpoint.
PREFIX = "ckpt"
_CALLS = {
    "weights": "model.load_weights({path!r})",
    "saved_model": "model = tf.saved_model.load({path!r}); model.serve(x)",
    "checkpoint": "tf.train.Checkpoint(model=model).read({path!r})",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """An export.

    Attributes:
        path: what to load: the file, the folder of a SavedModel, or the prefix of a checkpoint's files.
        warnings: problems that may occur when it is loaded.
        load_with: lines of Python that load it without Baton.
    """

    path: Path
    warnings: tuple[str, ...]
    load_with: tuple[str, ...]


def export(
    run: RunFile,
    head: Head,
    ref: CheckpointRef,
    *,
    root: Storage,
    home: Storage,
    form: str,
    target: Path,
    accelerator: Accelerator | None = None,
) -> Exported:
    """Export a committed checkpoint, with the averages of `use_ema`, as evaluation uses them.

    The model is built on the CPU with one replica, even if it was trained on other devices.

    Args:
        run: the run file; it must build the model that the run was trained with.
        head: head of the run's log.
        ref: the checkpoint.
        root: storage root with the run's dataset, whose manifest has the shapes of the model's inputs.
        home: the run's home.
        form: keras, weights, saved_model or checkpoint.
        target: a path that does not exist.
        accelerator: where the model is built; None: the CPU with one replica, as the accelerator of this process.

    Raises:
        InvalidInput: the target is not usable, or the run file builds another model.
        StateMismatch: the run file builds a model with other variables.
        DamagedCheckpoint: the checkpoint differs from its manifest.
        DamagedDataset: the dataset's manifest is missing.
        ModelError: the model cannot be built, or Keras cannot write it in this form.
        StorageError: the disk refused or failed.
    """
    require_free_target(form, target)
    if accelerator is None:
        accelerator = acquire(AcceleratorSpec(kind="cpu"), head.environment, deterministic=run.spec.train.deterministic)
    model = restored_model(run, head, ref, root=root, home=home, accelerator=accelerator)
    with atomic_target(form, target) as path:
        try:
            _write(model, form, path)
        except OSError:
            raise
        except Exception as fault:
            what = f"{run.spec.model.build}: Keras cannot write this model as {form}:"
            raise ModelError(user_error(what, fault, end="; try --format weights or checkpoint")) from fault
        loading = Loading.of(path, run.spec.model.build) if form == "keras" else None
        missed = tuple(_untracked(model, str(path / PREFIX))) if form == "checkpoint" else ()
    written = target / PREFIX if form == "checkpoint" else target
    if loading is not None:
        lines = loading.lines(written, here=Path.cwd())
        return Exported(path=written, warnings=tuple(loading.warnings()), load_with=lines)
    return Exported(path=written, warnings=missed, load_with=(_CALLS[form].format(path=str(written)),))


def _write(model: keras.Model, form: str, path: Path) -> None:
    match form:
        case "keras":
            model.save(path)
        case "weights":
            model.save_weights(path)
        case "saved_model":
            model.export(path, verbose=False)
        case _:
            tf.train.Checkpoint(model=model).write(str(path / PREFIX))


def _untracked(model: keras.Model, prefix: str) -> Iterator[str]:
    """A warning about variables that `tf.train.Checkpoint` misses, such as those of layers kept in a list."""
    reader = tf.train.load_checkpoint(prefix)
    graph = trackable_object_graph_pb2.TrackableObjectGraph()
    graph.ParseFromString(reader.get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH"))
    tracked = {attribute.full_name.partition(":")[0] for node in graph.nodes for attribute in node.attributes}
    missed = [variable.path for variable in model.variables if variable.path not in tracked]
    weights = [path for path in missed if not path.endswith("seed_generator_state")]
    if weights:
        yield (
            f"{listed(weights)}: not in the checkpoint, because tf.train.Checkpoint does not find them in this model; "
            "use --format keras or weights"
        )
