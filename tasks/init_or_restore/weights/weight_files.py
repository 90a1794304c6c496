"""Reads weights from files: TensorFlow checkpoints and SavedModels, other runs' checkpoints, Keras's own files.

The keys of a checkpoint's object graph are positions (model/_operations/4/_kernel), but the checkpoint contains the
graph, which has the name of each variable and shows which objects are optimizers. A variable may have a key below its
optimizer only, so the graph and not the key decides what is a weight. A committed checkpoint of another Baton run is
verified as for a resume.

In a .weights.h5 or .keras file, Keras 3 stores a variable under the position of its layer, such as
layers/dense_1/vars/0, counted by class, not by the layer's name. It also stores each layer's name, so variables are
matched by the names of layers and the variable's index, such as encoder/dense/0. If names do not match and the run
loads the whole file, Keras loads it by position. HDF5 files of Keras 2 have the names of layers and variables.

HDF5 can store values in other files (external storage, virtual datasets, external links), so any local file could be
read as weights, and a file can declare a shape without holding its values. Such files are refused.
"""

import hashlib
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from baton.tasks.foundation.checkpoint.selection import read_selected
from baton.tasks.foundation.checkpoint.tensor_bundle import PREFIX, bundle_errors
from baton.tasks.foundation.checkpoint.verify import fetch, read_manifest
from baton.tasks.foundation.contracts.checkpoint import CheckpointManifest, CheckpointRef, replica_key
from baton.tasks.foundation.errors import WeightsError
from baton.tasks.foundation.state.digest import stored_name
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.text import shown
from baton.tasks.init_or_restore.weights.matching import (
    Array,
    SourceContents,
    SourceVariable,
    as_array,
    with_unique_names,
)

_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
# Keras 3 and 2.11 or newer; older Keras 2.
_COUNTERS_OF_OPTIMIZERS = {"_iterations", "iter"}
# Layers that a layer holds in a list are in the graph only as variables that the optimizer trains.
_TRAINED = "_trainable_variables"
_NO_WEIGHTS = {
    "metrics",
    "_metrics",
    "_compile_metrics",
    "_compile_loss",
    "_loss_tracker",
    "compiled_metrics",
    "compiled_loss",
    "keras_api",
    "save_counter",
}
_RANDOM = re.compile(r"(^|/)(seed_generator_state|StateVar)$")
_MODEL = "model/"
_RAW = "variables/"
_RANDOM_STATE = "seed_generator_state"
# The highest compression ratio of deflate, the compression of HDF5.
_MOST_COMPRESSED = 1032
# A small dataset may be declared without stored values.
_SMALL_BYTES = 1 << 20
_NAME_CHARACTERS = 120
_WITHIN_KERAS = "model.weights.h5"
_SAVED_AGAIN = "again.weights.h5"
_VARIABLES = "vars"
_NO_WEIGHTS_OF_KERAS = {"optimizer", "_optimizer", "metrics", "_metrics"}
_RANDOM_OF_KERAS = "seed_generator"
LoadByPosition = Callable[[Path, Path], Mapping[str, Array] | None]


def read_checkpoint(prefix: str, *, uri: str) -> SourceContents:
    """Read the variables of a checkpoint.

    Args:
        prefix: path prefix of its files, on this machine.
        uri: the address in the run file.

    Raises:
        WeightsError: files are missing, cannot be read, or are of TensorFlow 1.
    """
    try:
        reader = tf.train.load_checkpoint(prefix)
        found, ignored = _of_graph(reader) if reader.has_tensor(_GRAPH) else ([], 0)
    except (tf.errors.OpError, ValueError, RuntimeError, IndexError) as fault:
        lines = str(fault).splitlines()
        raise WeightsError(
            f"init.weights: {uri} cannot be read as a TensorFlow checkpoint ({lines[0] if lines else fault}); check "
            "that all its files are present: .index, and every .data-… file"
        ) from fault
    if not reader.has_tensor(_GRAPH):
        raise WeightsError(
            f"init.weights: {uri} has no object graph, as a checkpoint of TensorFlow 1; read it in a function such as "
            "weights.py:load, which returns arrays by the paths of variables"
        )
    return SourceContents(variables=with_unique_names(found), ignored=ignored, place=uri)


def _of_graph(reader: Any) -> tuple[list[SourceVariable], int]:
    graph = trackable_object_graph_pb2.TrackableObjectGraph()
    graph.ParseFromString(reader.get_tensor(_GRAPH))
    weights = set(_weights_of(graph))
    found, ignored, seen = [], 0, set()
    for index, node in enumerate(graph.nodes):
        for attribute in node.attributes:
            key = attribute.checkpoint_key
            if key in seen or not reader.has_tensor(key):
                continue
            seen.add(key)
            plain = key.removesuffix(_SUFFIX)
            name = attribute.full_name.partition(":")[0]
            if index not in weights or plain == key or _RANDOM.search(name or plain):
                ignored += 1
                continue
            value = as_array(reader.get_tensor(key))
            if value.dtype.kind in "OS" or _is_counter(index, value, graph):
                ignored += 1
                continue
            # The default name of a tf.Variable does not tell variables apart; the key does.
            names = (name, plain) if name and name != "Variable" else (plain,)
            found.append(SourceVariable(tuple(dict.fromkeys(names)), value))
    return found, ignored


def _weights_of(graph: Any) -> Iterator[int]:
    """Yield the indices of the objects that belong to the model, not only to an optimizer or a metric."""
    slots = {slot.slot_variable_node_id for node in graph.nodes for slot in node.slot_variables}
    waiting, seen = [0], set()
    while waiting:
        index = waiting.pop()
        if index in seen or index in slots:
            continue
        seen.add(index)
        yield index
        children = graph.nodes[index].children
        is_optimizer = any(child.local_name in _COUNTERS_OF_OPTIMIZERS for child in children)
        waiting += [
            child.node_id
            for child in children
            if (child.local_name == _TRAINED if is_optimizer else child.local_name not in _NO_WEIGHTS)
        ]


def _is_counter(index: int, value: Any, graph: Any) -> bool:
    """Whether the value is an integer at the root, as in tf.train.Checkpoint(step=…)."""
    at_root = any(child.node_id == index for child in graph.nodes[0].children)
    return at_root and value.shape == () and value.dtype.kind in "iu"


def read_run_weights(home: Storage, step: int | Literal["best"] | None, folder: Path) -> SourceContents:
    """Read the weights of a checkpoint; for a per-replica variable, replica 0's.

    Args:
        home: the home of the other run.
        step: the checkpoint's step; None for the newest.
        folder: an empty local folder.

    Raises:
        WeightsError: the run has no such checkpoint, or retired it meanwhile.
        DamagedCheckpoint: its bytes differ from what was committed.
        StorageError: the store failed.
    """
    return read_selected(home, step, partial(_read, home, folder), error=WeightsError)


def _read(home: Storage, above: Path, ref: CheckpointRef) -> SourceContents:
    folder = above / ref.path  # a folder per checkpoint: one that was retired meanwhile may have left files
    folder.mkdir(parents=True)
    manifest = read_manifest(home, ref)
    fetch(home, ref, manifest, folder)
    prefix = str(folder / PREFIX)
    with bundle_errors(f"{home.uri}/{ref.path}", prefix):
        return _contents(home, ref, manifest, prefix)


def _contents(home: Storage, ref: CheckpointRef, manifest: CheckpointManifest, prefix: str) -> SourceContents:
    reader = tf.train.load_checkpoint(prefix)
    found, ignored = [], 0
    for record in manifest.signature:
        name = record.path.removeprefix(_MODEL)
        # Raw TensorFlow variables in layers are weights too, with another prefix.
        if not record.path.startswith((_MODEL, _RAW)) or _RANDOM_STATE in name:
            ignored += 1
            continue
        key = replica_key(record.path, 0) if record.per_replica else record.path
        found.append(SourceVariable((name,), as_array(reader.get_tensor(stored_name(key)))))
    return SourceContents(variables=tuple(found), ignored=ignored, place=f"{home.uri}/{ref.path}", step=ref.step)


def require_self_contained(opened: Any, *, uri: str) -> None:
    """Refuse references to other files, and values that the file does not hold. Reads no values.

    Args:
        opened: an open h5py file.
        uri: the address in the run file.

    Raises:
        WeightsError: names the entry.
    """
    fault = next(_faults(opened), None)
    if fault is not None:
        raise WeightsError(
            f"init.weights: {uri}: {fault}; Keras does not write such files. Use it only if you trust its origin: load "
            "it where it was made, and save it again with model.save_weights"
        )


def _faults(opened: Any) -> Iterator[str]:
    objects: list[tuple[str, Any]] = [("", opened)]
    opened.visititems(lambda key, item: objects.append((key, item)))  # visits each once; follows no external link
    for key, item in objects:
        name = repr(shown(key, _NAME_CHARACTERS))
        if isinstance(item, h5py.Dataset):
            yield from (f"{name} {what}" for what in _faults_of(item))
        elif isinstance(item, h5py.Group):
            for below in item:
                link = item.get(below, getlink=True)
                if isinstance(link, h5py.ExternalLink):
                    link_path = shown(f"{key}/{below}", _NAME_CHARACTERS)
                    yield f"{link_path!r} is a link to another file, {shown(link.filename, _NAME_CHARACTERS)!r}"


def _faults_of(dataset: Any) -> Iterator[str]:
    settings = dataset.id.get_create_plist()
    if settings.get_external_count():
        yield f"keeps its values in another file, {shown(str(dataset.external[0][0]), _NAME_CHARACTERS)!r}"
        return
    if settings.get_layout() == h5py.h5d.VIRTUAL:
        yield "is made of datasets of other files"
        return
    # Python integers: the product of a shape may exceed 64 bits.
    declared, stored = dataset.dtype.itemsize, dataset.id.get_storage_size()
    for size in dataset.shape or ():
        declared *= int(size)
    held = stored * (_MOST_COMPRESSED if settings.get_nfilters() else 1)
    if declared > max(held, _SMALL_BYTES):
        yield f"has the shape {list(dataset.shape)}, which is {declared:,} bytes, but the file holds {stored:,} bytes"


def read_hdf5(file: Path, *, uri: str, by_position: LoadByPosition) -> SourceContents:
    """Read a file of weights.

    Args:
        file: a local .weights.h5, .h5 or .keras file.
        uri: the address in the run file.
        by_position: loads the file into the model with Keras, and saves the model again; see `SourceContents`.

    Raises:
        WeightsError: it is not a file of weights, or refers to other files.
    """
    try:
        with _opened(file) as opened:
            require_self_contained(opened, uri=uri)
            legacy = opened.get("model_weights", opened)
            if "layer_names" in legacy.attrs:
                return SourceContents(variables=with_unique_names(list(_of_keras_2(legacy))), ignored=0, place=uri)
            found, ignored = _of_keras_3(opened)
    except (OSError, KeyError, ValueError, TypeError, RuntimeError, MemoryError, zipfile.BadZipFile) as fault:
        raise WeightsError(
            f"init.weights: {uri} cannot be read as Keras weights ({type(fault).__name__}: {fault}); save them again "
            "with model.save_weights('….weights.h5') or model.save('….keras')"
        ) from fault

    def whole() -> Mapping[str, Array] | None:
        saved_again = file.with_name(_SAVED_AGAIN)
        values = by_position(file, saved_again)
        if values is None:
            return None
        # Keras ignores entries that the model lacks, and some that the file lacks. The file that it saves now must have
        # the values that it read; a custom layer may store them in its own form.
        with _opened(saved_again) as opened:
            return values if _value_digests(_of_keras_3(opened)[0]) == _value_digests(found) else None

    return SourceContents(
        variables=with_unique_names(found),
        ignored=ignored,
        place=uri,
        by_position=whole if file.name.endswith((".weights.h5", ".keras")) else None,
    )


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    if file.suffix != ".keras":
        with h5py.File(file, "r") as opened:
            yield opened
        return
    # The configuration is not read: no code of a model runs, and its classes need not be importable.
    with zipfile.ZipFile(file) as archive, archive.open(_WITHIN_KERAS) as member, h5py.File(member, "r") as opened:
        yield opened


def _of_keras_3(opened: Any) -> tuple[list[SourceVariable], int]:
    """Return the weights, and the number of other entries."""
    keys = list(_datasets(opened))
    weights = [
        SourceVariable(_variable_names(opened, key), _value(dataset))
        for key, dataset in keys
        if key.split("/")[0] not in _NO_WEIGHTS_OF_KERAS and _RANDOM_OF_KERAS not in key
    ]
    return weights, len(keys) - len(weights)


def _datasets(group: Any) -> Iterator[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    group.visititems(lambda key, item: found.append((key, item)) if isinstance(item, h5py.Dataset) else None)
    return iter(found)


def _variable_names(opened: Any, key: str) -> tuple[str, ...]:
    """Return a variable's name, made of its layers' names and its index; and its key.

    Keras before 3.6 stored no names: then only the key, because dense_1 in it is a position and not a name.
    """
    parts = key.split("/")
    if _VARIABLES not in parts:
        return (key,)
    end = len(parts) - 1 - parts[::-1].index(_VARIABLES)
    names = []
    for depth in range(1, end + 1):
        saved_layer = opened.get("/".join([*parts[:depth], _VARIABLES]))
        if saved_layer is None:
            continue  # an attribute, or a list of layers
        if "name" not in saved_layer.attrs:
            return (key,)
        names.append(str(saved_layer.attrs["name"]))
    return ("/".join([*names, *parts[end + 1 :]]), key)


def _value(dataset: Any) -> Array:
    if dataset.attrs.get("dtype") == "bfloat16":
        return np.array(dataset, dtype=tf.bfloat16.as_numpy_dtype)
    return as_array(dataset)


def _of_keras_2(group: Any) -> Iterator[SourceVariable]:
    """Yield the variables of Keras 2 layers, with names such as dense/kernel:0 or kernel."""
    for layer in _strings(group.attrs["layer_names"]):
        below = group[layer]
        for name in _strings(below.attrs.get("weight_names", ())):
            plain = name.partition(":")[0]
            names = (plain, f"{layer}/{plain}") if "/" in plain else (f"{layer}/{plain}",)
            yield SourceVariable(names, as_array(below[name]))


def _value_digests(found: Iterable[SourceVariable]) -> list[bytes]:
    """Return a digest for each value, sorted: equal for the same values in any order."""
    encoded = (f"{held.value.dtype} {held.value.shape} ".encode() + held.value.tobytes() for held in found)
    return sorted(hashlib.sha256(data).digest() for data in encoded)


def _strings(values: Any) -> list[str]:
    return [value.decode() if isinstance(value, bytes) else str(value) for value in np.asarray(values).tolist()]
