"""Committed checkpoint -> a file of Keras, a SavedModel or a checkpoint of TensorFlow."""

import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from tasks.evaluate.averages import use_averages
from tasks.evaluate.export.target import made_whole, require_free_target
from tasks.foundation.accelerator.batches import per_replica_batch_size
from tasks.foundation.accelerator.strategy import acquire
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.identity import differences, in_words
from tasks.foundation.contracts.log_entry import Head
from tasks.foundation.contracts.placement import AcceleratorSpec
from tasks.foundation.contracts.run_file import RunFile
from tasks.foundation.dataset.manifest import read_manifest
from tasks.foundation.dataset.reader import zero_batch
from tasks.foundation.errors import InvalidInput, ModelError
from tasks.foundation.model.identity import model_identity
from tasks.foundation.state.train_state import build_train_state
from tasks.foundation.storage.base import Storage
from tasks.foundation.user_code import USER_PACKAGE_PREFIX, describe

# What a checkpoint's files begin with, in its folder.
PREFIX = "ckpt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written.

    Attributes:
        path: to load from: the file, the folder of a SavedModel, or what the names of a checkpoint's files begin with.
        warnings: what whoever loads it should know.
    """

    path: Path
    warnings: tuple[str, ...]


def export(
    run: RunFile, head: Head, ref: CheckpointRef, *, root: Storage, home: Storage, form: str, target: Path
) -> Exported:
    """Write a committed checkpoint, with the averages of `use_ema` as evaluation uses them.

    On one replica of the CPU, whatever it was trained on.

    Args:
        run: its model is built; it must be the one that the run was trained with.
        head: of the run's log.
        ref: the checkpoint.
        root: the storage root that the run's dataset lies below, whose manifest says what the model is called on.
        home: the run's home.
        form: keras, weights, saved_model or checkpoint.
        target: a path that is not there yet.

    Raises:
        InvalidInput: the target will not do, or the run file builds another model.
        StateMismatch: the run file builds a model with other variables.
        DamagedCheckpoint: the checkpoint is not what the log says.
        DamagedDataset: the dataset's manifest is gone.
        ModelError: the model cannot be built, or Keras cannot write it in this form.
        StorageError: the disk refused or failed.
    """
    require_free_target(form, target)
    accelerator = acquire(AcceleratorSpec(kind="cpu"), head.environment)
    batch_size = per_replica_batch_size(run.spec.train.global_batch_size, head.environment.replicas)
    batch = zero_batch(read_manifest(root, head.identity["data.folder"]), batch_size)
    state = build_train_state(run.spec, code_folder=run.folder, accelerator=accelerator, batch=batch)
    _require_same_model(run, head, state.model, home)
    state.restore(home, ref)
    use_averages(state.model)
    with made_whole(form, target) as path:
        try:
            _write(state.model, form, path)
        except OSError:
            raise
        except Exception as fault:
            raise ModelError(
                f"{run.spec.model.build}: Keras cannot write this model as {form}: {describe(fault)}; "
                "--format weights and checkpoint need the least of a model"
            ) from fault
        warnings = tuple(_shortcomings(state.model, form, path))
    return Exported(path=target / PREFIX if form == "checkpoint" else target, warnings=warnings)


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


def _require_same_model(run: RunFile, head: Head, model: keras.Model, home: Storage) -> None:
    """The weights of one model in another would load, and predict something else."""
    now = model_identity(model, run.spec.model, run.folder)
    keys = [key for key in now if key.startswith("model.") and key in head.identity]
    found = differences({key: head.identity[key] for key in keys}, {key: now[key] for key in keys})
    if found:
        raise InvalidInput(
            f"{run.path} builds another model than {home.uri} was trained with: {in_words(found)}; name the run file, "
            "with the code beside it, as it was"
        )


def _shortcomings(model: keras.Model, form: str, path: Path) -> Iterator[str]:
    if form == "keras":
        yield from _unregistered(path)
    elif form == "checkpoint":
        yield from _untracked(model, str(path / PREFIX))


def _untracked(model: keras.Model, prefix: str) -> Iterator[str]:
    """What `tf.train.Checkpoint` does not see of a model of Keras, such as statistics of layers kept in a list."""
    reader = tf.train.load_checkpoint(prefix)
    graph = trackable_object_graph_pb2.TrackableObjectGraph()
    graph.ParseFromString(reader.get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH"))
    there = {attribute.full_name.partition(":")[0] for node in graph.nodes for attribute in node.attributes}
    missed = [variable.path for variable in model.variables if variable.path not in there]
    weights = [path for path in missed if not path.endswith("seed_generator_state")]
    if weights:
        yield (
            f"{', '.join(weights)}: not in the checkpoint, for tf.train.Checkpoint does not find them in this model; "
            "--format keras or weights has them"
        )


def _unregistered(file: Path) -> Iterator[str]:
    """Classes of the user's that Keras will not find again, for it looks for them in Baton's private package."""
    with zipfile.ZipFile(file) as archive:
        config = json.loads(archive.read("config.json"))
    names = dict.fromkeys(_private_classes(config))
    if names:
        yield (
            f"{', '.join(names)}: not registered with Keras, so keras.saving.load_model will not find them; decorate "
            'them with @keras.saving.register_keras_serializable("a-name") and train or export again, or load with '
            "custom_objects"
        )


def _private_classes(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        registered = str(value.get("registered_name") or "")
        if str(value.get("module") or "").startswith(USER_PACKAGE_PREFIX) and ">" not in registered:
            yield str(value.get("class_name"))
        value = list(value.values())
    if isinstance(value, list):
        for below in value:
            yield from _private_classes(below)
