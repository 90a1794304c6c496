"""A file or a folder of every kind that a source reads; small, and always of the same content.

Each function writes it into a folder, and returns its path there.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorflow as tf  # not within a function: conftest.py sets its threads before a test uses it

from tests.support.checkout import CHECKOUT
from tests.support.tars import tar
from tests.support.tfrecords import feature, png

Made = Callable[[Path], str]


def measurements(folder: Path) -> str:
    x = np.random.default_rng(0).normal(size=(60, 4))
    np.savez(folder / "flowers.npz", x=x, y=(x[:, 0] > 0).astype(int) + (x[:, 1] > 1))
    return "flowers.npz"


def prices(folder: Path) -> str:
    np.savez(folder / "houses.npz", x=np.random.default_rng(0).normal(size=(60, 3)), y=np.linspace(1e5, 9e5, 60))
    return "houses.npz"


def pictures(folder: Path) -> str:
    """As the files of Keras's own datasets have them."""
    parts = {"train": 20, "test": 10}
    arrays = {f"x_{name}": np.zeros((many, 8, 8), np.uint8) for name, many in parts.items()}
    np.savez(folder / "mnist.npz", **arrays, **{f"y_{name}": np.arange(many) % 10 for name, many in parts.items()})
    return "mnist.npz"


def photos(folder: Path) -> str:
    for name in ("train/cat/1", "train/cat/2", "train/dog/1", "val/cat/1", "val/dog/2"):
        file = folder / "pets" / f"{name}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(png(1, height=9 + int(name[-1]), width=16))
    return "pets"


def records(folder: Path) -> str:
    with tf.io.TFRecordWriter(str(folder / "train.tfrecord")) as writer:
        for number in range(12):
            values = {"image/encoded": [png(number)], "image/class/label": [number % 3], "image/name": [b"n"]}
            features = tf.train.Features(feature={name: feature(value) for name, value in values.items()})
            writer.write(tf.train.Example(features=features).SerializeToString())
    return "train.tfrecord"


def shards(folder: Path) -> str:
    """As WebDataset writes them, and what often lies beside them."""
    (folder / "shards").mkdir()
    for name in ("LICENSE.txt", "README.md"):
        (folder / "shards" / name).write_text("free")
    for number in range(2):
        begin = 6 * number
        data = tar(*range(begin, begin + 6), suffixes=("png", "cls"))
        (folder / "shards" / f"train-{number:04d}.tar").write_bytes(data)
    return "shards"


def flowers(folder: Path) -> str:
    """A table with a text for each class."""
    kinds = ["setosa", "versicolor", "virginica"]
    rows = [f"{number % 7}.5,{number % 5},{kinds[number % 3]}" for number in range(30)]
    (folder / "iris.csv").write_text("\n".join(["length,width,species", *rows, ""]))
    return "iris.csv"


def customers(folder: Path) -> str:
    """A table of columns of many types, some of them with nulls."""
    import pyarrow as pa
    from pyarrow import parquet

    numbers = range(30)
    columns = {
        "age": [None if number == 7 else number for number in numbers],
        "city": [None if number == 8 else ("Lima", "Oslo")[number % 2] for number in numbers],
        "plan": pa.array([("free", "paid")[number % 2] for number in numbers]).dictionary_encode(),
        "vector": [[1.0, float(number)] for number in numbers],
        "clicks": [[1] * (number % 3) for number in numbers],
        "note": [f"note {number}" for number in numbers],
        "label": [number % 2 == 0 for number in numbers],
    }
    parquet.write_table(pa.table(columns), folder / "customers.parquet", row_group_size=10)
    return "customers.parquet"


def saved(folder: Path) -> str:
    """As `save_to_disk` of the package `datasets` writes them."""
    import datasets
    import pyarrow as pa
    from datasets.table import InMemoryTable

    datasets.disable_progress_bars()
    label = datasets.ClassLabel(names=["cat", "dog"])
    features = datasets.Features({"image": datasets.Image(), "id": datasets.Value("int64"), "label": label})
    parts = {}
    for name, rows in (("train", 12), ("test", 6)):
        # The package itself needs Pillow to take images.
        images = pa.array([{"bytes": png(row), "path": None} for row in range(rows)], features["image"].pa_type)
        columns = {"image": images, "id": list(range(rows)), "label": [row % 2 for row in range(rows)]}
        parts[name] = datasets.Dataset(InMemoryTable(pa.table(columns)), info=datasets.DatasetInfo(features=features))
    datasets.DatasetDict(parts).save_to_disk(str(folder / "saved"))
    return "saved"


def reviews(folder: Path) -> str:
    """A folder of tables, one for each set."""
    import pyarrow as pa
    from pyarrow import parquet

    (folder / "reviews").mkdir()
    for name, rows in (("train", 20), ("test", 10)):
        columns = {"text": [f"it is number {row}" for row in range(rows)], "label": [row % 2 for row in range(rows)]}
        parquet.write_table(pa.table(columns), folder / "reviews" / f"{name}-00000-of-00001.parquet")
    return "reviews"


def book(folder: Path) -> str:
    (folder / "book.txt").write_text("It was the best of times. " * 100)
    return "book.txt"


def prepared(folder: Path) -> str:
    """As TensorFlow Datasets prepares them; of the many features of these records, it describes three."""
    shutil.copytree(CHECKOUT / "tests/prepare_data/sources/tfds/shapes", folder / "shapes")
    file = folder / "shapes/1.0.0/features.json"
    described = json.loads(file.read_text())
    every = described["featuresDict"]["features"]
    described["featuresDict"]["features"] = {name: every[name] for name in ("image", "label", "text")}
    file.write_text(json.dumps(described))
    return "shapes/1.0.0"
