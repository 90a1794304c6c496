"""Checks an untrusted file of weights: it must not refer to other files, or declare more values than it holds.

HDF5 can store values in other files (external storage, virtual datasets, external links). So any local file could be
read as weights. A file can also declare a shape without holding its values.
"""

from collections.abc import Iterator
from typing import Any

import h5py

from tasks.foundation.errors import WeightsError
from tasks.foundation.messages import shown

# The highest compression ratio of deflate, the compression of HDF5.
_MOST_COMPRESSED = 1032
# A small dataset may be declared without stored values.
_SMALL_BYTES = 1 << 20
_NAME_CHARACTERS = 120


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
