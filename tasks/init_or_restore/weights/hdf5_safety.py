"""A file of weights may come from a stranger: it may read no other file, and declare no more than it holds.

HDF5 can keep values in other files (external storage, virtual datasets, external links): read as weights, any file of
this machine would end up in a model. It can also declare a shape without holding values of it.
"""

from collections.abc import Iterator
from typing import Any

import h5py

from tasks.foundation.errors import WeightsError
from tasks.foundation.messages import shown

# The most that deflate, the compression of HDF5, can make of a byte.
_MOST_COMPRESSED = 1032
# What is small may be declared without being stored.
_SMALL_BYTES = 1 << 20
_NAME_CHARACTERS = 120


def require_self_contained(opened: Any, *, uri: str) -> None:
    """Refuse what leads to other files, and values that the file does not hold. Reads no values.

    Args:
        opened: an open file of h5py.
        uri: what the user calls it.

    Raises:
        WeightsError: naming the entry.
    """
    fault = next(_faults(opened), None)
    if fault is not None:
        raise WeightsError(
            f"init.weights: {uri}: {fault}; Keras writes no such files. Do not use it unless you trust where it is "
            "from; then load it where it was made and save it again with model.save_weights"
        )


def _faults(opened: Any) -> Iterator[str]:
    objects: list[tuple[str, Any]] = [("", opened)]
    opened.visititems(lambda key, item: objects.append((key, item)))  # each once, and follows no link out of the file
    for key, item in objects:
        name = repr(shown(key, _NAME_CHARACTERS))
        if isinstance(item, h5py.Dataset):
            yield from (f"{name} {what}" for what in _faults_of(item))
        elif isinstance(item, h5py.Group):
            for below in item:
                link = item.get(below, getlink=True)
                if isinstance(link, h5py.ExternalLink):
                    place = shown(f"{key}/{below}", _NAME_CHARACTERS)
                    yield f"{place!r} is a link to another file, {shown(link.filename, _NAME_CHARACTERS)!r}"


def _faults_of(dataset: Any) -> Iterator[str]:
    settings = dataset.id.get_create_plist()
    if settings.get_external_count():
        yield f"keeps its values in another file, {shown(str(dataset.external[0][0]), _NAME_CHARACTERS)!r}"
        return
    if settings.get_layout() == h5py.h5d.VIRTUAL:
        yield "is made of datasets of other files"
        return
    # Python's numbers: the product of a shape may be beyond 64 bits.
    declared, stored = dataset.dtype.itemsize, dataset.id.get_storage_size()
    for size in dataset.shape or ():
        declared *= int(size)
    held = stored * (_MOST_COMPRESSED if settings.get_nfilters() else 1)
    if declared > max(held, _SMALL_BYTES):
        yield f"has the shape {list(dataset.shape)}, which is {declared:,} bytes, and the file holds {stored:,} of them"
