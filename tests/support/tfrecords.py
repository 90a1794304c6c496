"""TFRecord and ArrayRecord files with numbered records, for tests of the sources `tfrecord` and `tfds`."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

SPEC = {
    "values": {"dtype": "float32", "shape": [2]},
    "label": {"dtype": "int64", "shape": []},
    "code": {"dtype": "int16", "shape": [3], "encoding": "raw"},
    "image": {"dtype": "uint8", "shape": [4, 5, 3], "encoding": "image"},
}
PLAIN: dict[str, Any] = {"path": "records", "features": SPEC, "x": "values", "y": "label"}


def feature(value: Any) -> Any:
    """Return integers, floats or bytes as a feature of an example."""
    import tensorflow as tf

    if isinstance(value[0], bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=value))
    if isinstance(value[0], int):
        return tf.train.Feature(int64_list=tf.train.Int64List(value=value))
    return tf.train.Feature(float_list=tf.train.FloatList(value=value))


def png(number: int, height: int = 4, width: int = 5) -> bytes:
    import tensorflow as tf

    return bytes(tf.io.encode_png(np.full((height, width, 3), number % 256, np.uint8)).numpy())


def record(number: int, drop: str = "", **changed: Any) -> bytes:
    """Return a record whose values all derive from its number."""
    import tensorflow as tf

    features = {
        "values": [float(number), number / 2],
        "label": [number],
        "code": [np.asarray([number] * 3, "<i2").tobytes()],
        "image": [png(number)],
        **changed,
    }
    lists = {name: feature(value) for name, value in features.items() if name != drop}
    example = tf.train.Example(features=tf.train.Features(feature=lists))
    return bytes(example.SerializeToString(deterministic=True))


def file_of(records: Sequence[bytes], folder: Path, kind: str = "") -> bytes:
    """Return the bytes of a TFRecord file, compressed if `kind` is GZIP or ZLIB."""
    import tensorflow as tf

    file = folder / "made.tfrecord"
    with tf.io.TFRecordWriter(str(file), options=kind) as writer:
        for each in records:
            writer.write(each)
    data = file.read_bytes()
    file.unlink()
    return data


def read_epoch(workshop: Any, ref: Any, **changed: Any) -> tuple[list[Any], list[Any]]:
    """Return all examples of one training epoch, and of validation, as the reader gives them."""
    from baton.tasks.foundation.dataset.evaluation_sets import set_batches
    from baton.tasks.foundation.dataset.read import training_dataset
    from baton.tasks.foundation.dataset.shards import original_read_errors

    settings = {"seed": 0, "global_batch_size": 1, "window_shards": 3, "first_batch": 0, **changed}
    with original_read_errors():
        dataset = training_dataset(workshop.storage, ref, **settings)
        train = list(islice(dataset.as_numpy_iterator(), ref.train_examples))
        validation = set_batches(workshop.storage, ref, on="validation", batch_size=1)
        return train, list(validation.as_numpy_iterator())


def numbers(examples: Sequence[Any]) -> list[int]:
    """Return the labels of examples that `read_epoch` gave, which are their numbers."""
    return [int(example[1][0]) for example in examples]
