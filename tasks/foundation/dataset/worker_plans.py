"""Plans as tensors: input for a host that runs no Python of Baton.

In a slice of several TPU hosts one process drives all of them, and each host has a TensorFlow server. A graph that runs
there can neither call Python nor read the client's disk. So the plans, which `reader.py` makes one by one in
Python, are made beforehand, for a range of batches, and are constants of the graph. The batches are the same.

Such a host verifies no shards, because their checksums are compared in Python. TensorFlow compares each record with the
checksum that TFRecord files have.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tasks.foundation.contracts.dataset import DatasetManifest
from tasks.foundation.dataset.order import Window
from tasks.foundation.dataset.shards import part_of
from tasks.foundation.errors import AcceleratorError

Labels = tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFiles:
    """What a host reads that runs no Python of Baton.

    Attributes:
        root: the storage root as that host finds it: a folder there, or gs://bucket/prefix.
        batches: how many global batches are planned, at least 1; the dataset ends at this number or a few later.
    """

    root: str
    batches: int

    def __post_init__(self) -> None:
        if self.batches < 1:
            raise AcceleratorError(f"batches={self.batches} must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRecords:
    """How many records of a stream are planned, and where their host finds the storage root."""

    root: str
    records: int


def windows_with(windows: Iterable[Window], records: int) -> list[Window]:
    """Return the first windows, at least one, until they have `records` examples."""
    found: list[Window] = []
    for window in windows:
        found.append(window)
        records -= window.end - window.skip
        if records <= 0:
            break
    return found


def planned_windows(folder: str, manifest: DatasetManifest, windows: Sequence[Window]) -> Any:
    """Return a dataset of plans as `record_batches.windows_of` does, without Python.

    Args:
        folder: the dataset's folder as the host finds it.
        manifest: its manifest.
        windows: what to read, at least one window.

    Raises:
        AcceleratorError: the dataset reads files where they were before.
    """
    shards = [[manifest.train[shard] for shard in window.shards] for window in windows]
    if any(shard.is_external for each in shards for shard in each):
        raise AcceleratorError(
            f"{manifest.source}: its examples are parts of files outside the storage root, which another host cannot "
            "read by itself; set data.options.copy: true"
        )
    parts = [part_of(manifest, each, "train") for each in shards]
    plans = (
        tf.ragged.constant([[f"{folder}/{shard.path}" for shard in each] for each in shards], tf.string),
        tf.constant([count for count, _ in parts], tf.int64),
        tf.RaggedTensor.from_row_lengths(
            np.concatenate([positions for _, positions in parts]), [len(positions) for _, positions in parts]
        ),
        tf.constant([window.seed for window in windows], tf.int64),
        tf.constant([(window.skip, window.end) for window in windows], tf.int64),
    )
    return tf.data.Dataset.from_tensor_slices(plans)


def labels_with(labels: Iterator[Labels], records: int) -> Labels:
    """Return the labels of a mixture, until `records` examples are kept: indices of sources, and which are kept."""
    sources: list[npt.NDArray[np.int64]] = []
    kept: list[npt.NDArray[np.bool_]] = []
    for found, of_found in labels:
        sources.append(found)
        kept.append(of_found)
        records -= int(of_found.sum())
        if records <= 0:
            break
    return np.concatenate(sources), np.concatenate(kept)
