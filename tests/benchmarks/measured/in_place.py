"""One way to read Parquet files where they are: `in_place.py RUN_FILE MODE SECONDS`; MODE is one of these.

prepare      prepares the dataset, once the files are written by `write`
write        writes the files that the run file names: rows of 100 numbers, or JPEG files of 224 x 224
raw          Baton's stream of shuffled batches over pyarrow reading the same row groups, by turns in this process;
             of images, both with Baton's decoding
hf           `datasets.Dataset.to_tf_dataset` in the order of the rows, with `shuffle(16000)`; it has no images
ours         Baton's stream alone, beside `hf`
seek         seconds to the first batch at step 1,000,000, over those at step 0
memory       memory above that of the process before it reads, over that of two windows of arrays or files
"""

import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from baton.tasks.foundation.machine.environment import quiet_tensorflow

quiet_tensorflow()

import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402
import tensorflow as tf  # noqa: E402 - TensorFlow must be quiet before it is imported
from pyarrow import parquet  # noqa: E402

from baton.tasks.foundation.contracts.run_file import load_run_file  # noqa: E402
from baton.tasks.foundation.contracts.stage_calls import PrepareDataCall  # noqa: E402
from baton.tasks.foundation.dataset.manifest import load_manifest  # noqa: E402
from baton.tasks.foundation.dataset.read import training_dataset  # noqa: E402
from baton.tasks.foundation.dataset.shards import decode_image, original_read_errors  # noqa: E402
from baton.tasks.foundation.stage import Place  # noqa: E402
from baton.tasks.foundation.storage.local import LocalStorage  # noqa: E402
from baton.tasks.foundation.telemetry.events import Silent  # noqa: E402
from baton.tasks.prepare_data.stage import prepare_data  # noqa: E402

_FAR = 1_000_000
_SHUFFLE = 16_000
_TURNS = 3
_TAKEN = 20
COLUMNS = [f"c{number:02}" for number in range(100)]
SIDE = 224


def write_numbers(file: Path, examples: int, groups: int) -> None:
    """Write rows of 100 float32 columns and a label."""
    draw = np.random.default_rng(0)
    columns = {name: draw.normal(size=examples).astype("float32") for name in COLUMNS}
    table = pa.table(columns | {"label": draw.integers(0, 10, examples)})
    parquet.write_table(table, file, row_group_size=max(1, examples // groups))


def write_images(file: Path, examples: int, groups: int) -> None:
    """Write JPEG files of 224 x 224 of about 10 kB, and a label."""
    draw = np.random.default_rng(0)
    files = []
    for _ in range(examples):
        coarse = tf.image.resize(draw.uniform(0, 255, (28, 28, 3)), (SIDE, SIDE))
        files.append(tf.io.encode_jpeg(tf.cast(coarse, tf.uint8)).numpy())
    table = pa.table({"image": pa.array(files, pa.binary()), "label": draw.integers(0, 10, examples)})
    parquet.write_table(table, file, row_group_size=max(1, examples // groups))


class Reading:
    """The ways to read one run's rows."""

    def __init__(self, file: Path) -> None:
        self.run = load_run_file(file)
        self.storage = LocalStorage(file.parent / "runs")
        self.data, self.batch = self.run.spec.data, self.run.spec.train.global_batch_size
        self.path = Path(self.data.options["path"])
        self.of_images = self.data.options["x"] == "image"
        self._cache = file.parent / "hf"

    def prepare(self) -> None:
        place = Place.of(self.storage, self.run.spec.run, code_folder=self.run.folder, telemetry=Silent())
        self.ref = prepare_data(PrepareDataCall(spec=self.run.spec), place)  # does nothing the second time
        self.manifest = load_manifest(self.storage, self.ref)

    def ours(self, first_batch: int = 0) -> Any:
        return training_dataset(
            self.storage,
            self.ref,
            seed=0,
            global_batch_size=self.batch,
            window_shards=self.data.window_shards,
            first_batch=first_batch,
        )

    def tables(self) -> Iterator[Any]:
        """The row groups of each range, ranges in a random order."""
        opened = parquet.ParquetFile(self.path)
        columns = ["image", "label"] if self.of_images else [*COLUMNS, "label"]
        while True:
            for number in np.random.default_rng(1).permutation(len(self.manifest.train)):
                layout = self.manifest.train[number].layout
                yield opened.read_row_groups(range(layout.first_part, layout.first_part + layout.parts), columns)

    def decoded_tables(self) -> Any:
        rows = tf.data.Dataset.from_generator(
            lambda: (table["image"].to_numpy() for table in self.tables()),
            output_signature=tf.TensorSpec([None], tf.string),
        )
        decoded = rows.unbatch().map(_plain(_decode), tf.data.AUTOTUNE)
        return decoded.batch(self.batch, drop_remainder=True).prefetch(tf.data.AUTOTUNE)

    def hf(self) -> Any:
        from datasets import Dataset

        rows = Dataset.from_parquet(str(self.path), cache_dir=str(self._cache))
        pairs = rows.to_tf_dataset(columns=COLUMNS, label_cols="label", batch_size=1024, shuffle=False)
        stacked = _plain(lambda x, y: (tf.stack([x[name] for name in COLUMNS], -1), y))
        examples = pairs.map(stacked, tf.data.AUTOTUNE).unbatch().repeat().shuffle(_SHUFFLE)
        return examples.batch(self.batch, drop_remainder=True).prefetch(tf.data.AUTOTUNE)

    def window_bytes(self) -> int:
        """The arrays, or the files of images, of the largest window."""
        shards = self.manifest.train
        of_example = sum(math.prod(each.shape) * np.dtype(each.dtype).itemsize for each in self.manifest.features)
        sizes = (shard.size if self.of_images else shard.records_held * of_example for shard in shards)
        return self.data.window_shards * max(sizes)


def main() -> None:
    reading, mode, seconds = Reading(Path(sys.argv[1])), sys.argv[2], float(sys.argv[3])
    if mode == "write":
        write = write_images if reading.of_images else write_numbers
        write(reading.path, int(sys.argv[4]), int(sys.argv[5]))
        return
    reading.prepare()
    if mode == "raw":
        for _ in range(_TURNS):
            ours = _rate(reading.ours(), reading.batch, seconds)
            if reading.of_images:
                _say("over raw", ours / _rate(reading.decoded_tables(), reading.batch, seconds))
            else:
                _say("over raw", ours / _rows(reading.tables(), seconds))
    elif mode in {"ours", "hf"}:
        _say("examples/s", _rate(getattr(reading, mode)(), reading.batch, seconds))
    elif mode == "seek":
        _first_batch(reading.ours())  # what is slow once
        for _ in range(_TURNS):
            near, far = _first_batch(reading.ours()), _first_batch(reading.ours(_FAR))
            _say("seek", far / near)
            _say("seek seconds", far)
    elif mode == "memory":
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        _rate(reading.ours(), reading.batch, seconds)
        more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        _say("memory", more / (2 * reading.window_bytes()))
        _say("memory MB", more / 1e6)


def _decode(data: Any) -> Any:
    return decode_image(data, (SIDE, SIDE, 3), "float32")


def _plain(function: Callable[..., Any]) -> Any:
    return tf.autograph.experimental.do_not_convert(function)


def _rate(dataset: Any, batch: int, seconds: float) -> float:
    """Examples a second, after the first batches; as the training loop takes them, in a graph."""

    @tf.function(autograph=False)
    def taken(iterator: Any) -> Any:
        one = tf.constant(1)
        return tf.while_loop(
            lambda left: left > 0, lambda left: (next(iterator), left - one)[1:], [tf.constant(_TAKEN)]
        )

    with original_read_errors():
        iterator = iter(dataset)
        taken(iterator)
        began, batches = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            taken(iterator)
            batches += _TAKEN
    return batch * batches / (time.perf_counter() - began)


def _rows(tables: Iterator[Any], seconds: float) -> float:
    """Rows a second, after the first table."""
    next(tables)
    began, rows = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        rows += len(next(tables))
    return rows / (time.perf_counter() - began)


def _first_batch(dataset: Any) -> float:
    began = time.perf_counter()
    with original_read_errors():
        next(iter(dataset))
    return time.perf_counter() - began


def _say(name: str, value: float) -> None:
    sys.stdout.write(f"value {name} = {value}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
    # TensorFlow may wait for a thread of an iterator for ever when the interpreter ends.
    os._exit(0)
