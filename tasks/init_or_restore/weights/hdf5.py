"""Keras's own files: .weights.h5, the weights within a .keras file, and HDF5 files of Keras 2.

Keras 3 files a variable under the places of its layers, as layers/dense_1/vars/0: counted by class, whatever the layers
are called. But with each layer it writes down the name, so variables are asked for by the names of layers and their
number within the layer, encoder/dense/0. Only where that does not fit, and the whole file is wanted, is Keras asked to
load it its own way.
"""

import hashlib
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import tensorflow as tf

from tasks.foundation.errors import WeightsError
from tasks.init_or_restore.weights.hdf5_safety import require_self_contained
from tasks.init_or_restore.weights.source_variables import Array, Contents, Held, as_array, told_apart

_WITHIN_KERAS = "model.weights.h5"
_AGAIN = "again.weights.h5"
_VARIABLES = "vars"
_NO_WEIGHTS = {"optimizer", "_optimizer", "metrics", "_metrics"}
_RANDOM = "seed_generator"
ByPlace = Callable[[Path, Path], Mapping[str, Array] | None]


def read_hdf5(file: Path, *, uri: str, by_place: ByPlace) -> Contents:
    """Read a file of weights.

    Args:
        file: a .weights.h5, .h5 or .keras file of this machine.
        uri: what the user calls it.
        by_place: has Keras load the file into the model, see `Contents`, and write what it has then to another file.

    Raises:
        WeightsError: it is no such file, or leads to others.
    """
    try:
        with _opened(file) as opened:
            require_self_contained(opened, uri=uri)
            legacy = opened.get("model_weights", opened)
            if "layer_names" in legacy.attrs:
                return Contents(variables=told_apart(list(_of_keras_2(legacy))), ignored=0, place=uri)
            found, ignored = _of_keras_3(opened)
    except (OSError, KeyError, ValueError, TypeError, RuntimeError, MemoryError, zipfile.BadZipFile) as fault:
        raise WeightsError(
            f"init.weights: {uri} cannot be read as weights of Keras ({type(fault).__name__}: {fault}); save them "
            "again with model.save_weights('….weights.h5') or model.save('….keras')"
        ) from fault

    def whole() -> Mapping[str, Array] | None:
        again = file.with_name(_AGAIN)
        values = by_place(file, again)
        if values is None:
            return None
        # Keras passes over what a file has more than the model, and some of what it has less. What it writes now must
        # be what it read, which may be in a form of a layer's own.
        with _opened(again) as opened:
            return values if _marks(_of_keras_3(opened)[0]) == _marks(found) else None

    return Contents(
        variables=told_apart(found),
        ignored=ignored,
        place=uri,
        by_place=whole if file.name.endswith((".weights.h5", ".keras")) else None,
    )


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    if file.suffix != ".keras":
        with h5py.File(file, "r") as opened:
            yield opened
        return
    # Without its configuration: nothing of a model's code is run, and no class of it need be known here.
    with zipfile.ZipFile(file) as archive, archive.open(_WITHIN_KERAS) as member, h5py.File(member, "r") as opened:
        yield opened


def _of_keras_3(opened: Any) -> tuple[list[Held], int]:
    """Weights, and the number of entries that are none."""
    keys = list(_datasets(opened))
    weights = [
        Held(_names(opened, key), _value(dataset))
        for key, dataset in keys
        if key.split("/")[0] not in _NO_WEIGHTS and _RANDOM not in key
    ]
    return weights, len(keys) - len(weights)


def _datasets(group: Any) -> Iterator[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    group.visititems(lambda key, item: found.append((key, item)) if isinstance(item, h5py.Dataset) else None)
    return iter(found)


def _names(opened: Any, key: str) -> tuple[str, ...]:
    """The names of the layers that lead to a variable, and its number; and the key itself.

    Keras before 3.6 wrote no names: then the key alone, since dense_1 in it is a place and not a name.
    """
    parts = key.split("/")
    if _VARIABLES not in parts:
        return (key,)
    end = len(parts) - 1 - parts[::-1].index(_VARIABLES)
    names = []
    for depth in range(1, end + 1):
        place = opened.get("/".join([*parts[:depth], _VARIABLES]))
        if place is None:
            continue  # an attribute, or a container of layers
        if "name" not in place.attrs:
            return (key,)
        names.append(str(place.attrs["name"]))
    return ("/".join([*names, *parts[end + 1 :]]), key)


def _value(dataset: Any) -> Array:
    if dataset.attrs.get("dtype") == "bfloat16":
        return np.array(dataset, dtype=tf.bfloat16.as_numpy_dtype)
    return as_array(dataset)


def _of_keras_2(group: Any) -> Iterator[Held]:
    """Layers with the names of their weights, as dense/kernel:0 or kernel."""
    for layer in _texts(group.attrs["layer_names"]):
        below = group[layer]
        for name in _texts(below.attrs.get("weight_names", ())):
            plain = name.partition(":")[0]
            names = (plain, f"{layer}/{plain}") if "/" in plain else (f"{layer}/{plain}",)
            yield Held(names, as_array(below[name]))


def _marks(found: Iterable[Held]) -> list[bytes]:
    """The same for the same values in any order."""
    marked = (f"{held.value.dtype} {held.value.shape} ".encode() + held.value.tobytes() for held in found)
    return sorted(hashlib.sha256(mark).digest() for mark in marked)


def _texts(values: Any) -> list[str]:
    return [value.decode() if isinstance(value, bytes) else str(value) for value in np.asarray(values).tolist()]
