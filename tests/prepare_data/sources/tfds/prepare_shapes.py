"""Writes the folder `shapes/1.0.0` beside this file, and `expected.npz` with what TFDS reads of it.

The tests read both without TFDS. Run this with a Python that has tensorflow-datasets 4.9 to write them again.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

HERE = Path(__file__).parent
F = tfds.features


class Shapes(tfds.core.GeneratorBasedBuilder):
    """Numbered records with features of many kinds."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> Any:
        features = {
            "image": F.Image(shape=(6, 5, 3), encoding_format="png"),
            "photo": F.Image(shape=(None, None, 3), encoding_format="jpeg"),
            "mask": F.LabeledImage(labels=3, shape=(4, 4, 1)),
            "label": F.ClassLabel(names=["circle", "square", "star"]),
            "labels": F.Sequence(F.ClassLabel(num_classes=7), length=2),
            "weight": F.Scalar(np.float32),
            "vector": F.Tensor(shape=(3,), dtype=np.float32),
            "half": F.Tensor(shape=(2,), dtype=np.float16),
            "double": F.Scalar(np.float64),
            "byte": F.Tensor(shape=(2, 2), dtype=np.uint8),
            "flag": F.Scalar(np.bool_),
            "bytes": F.Tensor(shape=(2,), dtype=np.int16, encoding="bytes"),
            "zlib": F.Tensor(shape=(2,), dtype=np.int16, encoding="zlib"),
            "text": F.Text(),
            "pair": {"left": F.Scalar(np.int32), "right": F.Tensor(shape=(2,), dtype=np.int32)},
            "steps": F.Sequence({"u": np.int32, "v": F.Tensor(shape=(2,), dtype=np.float32)}, length=2),
            "ragged": F.Sequence(np.int32),
            "box": F.BBoxFeature(),
            "audio": F.Audio(shape=(4,)),
            "maybe": F.Scalar(np.int32, optional=True),
            "video": F.Video(shape=(2, 4, 4, 3)),
            "both": F.Translation(languages=["en", "fr"]),
            "rows": F.Dataset({"a": np.int32}, length=2),
        }
        return tfds.core.DatasetInfo(
            builder=self, features=F.FeaturesDict(features), supervised_keys=("image", "label")
        )

    def _split_generators(self, _: Any) -> Any:
        return {"train": self._generate_examples(0, 11), "test": self._generate_examples(100, 104)}

    def _generate_examples(self, first: int, end: int) -> Iterator[tuple[int, dict[str, Any]]]:
        for n in range(first, end):
            yield (
                n,
                {
                    "image": np.full((6, 5, 3), n, np.uint8),
                    "photo": np.full((8, 8 + n % 3, 3), n, np.uint8),
                    "mask": np.full((4, 4, 1), n % 3, np.uint8),
                    "label": n % 3,
                    "labels": [n % 7, 0],
                    "weight": n / 2,
                    "vector": np.array([n, n / 2, n / 4], np.float32),
                    "half": np.array([n, 1], np.float16),
                    "double": n / 3,
                    "byte": np.full((2, 2), n, np.uint8),
                    "flag": n % 2 == 0,
                    "bytes": np.array([n, -n], np.int16),
                    "zlib": np.array([n, -n], np.int16),
                    "text": f"row {n}",
                    "pair": {"left": n, "right": np.array([n, n + 1], np.int32)},
                    "steps": {"u": [n, n + 1], "v": np.full((2, 2), n, np.float32)},
                    "ragged": list(range(n % 4)),
                    "box": F.BBox(0.0, 0.0, 0.5, 1.0),
                    "audio": np.array([n] * 4, np.int64),
                    "maybe": n if n % 2 else None,
                    "video": np.full((2, 4, 4, 3), n, np.uint8),
                    "both": {"en": f"one {n}", "fr": f"un {n}"},
                    "rows": [{"a": n}, {"a": n}],
                },
            )


def expected(builder: Any) -> dict[str, Any]:
    """Return what TFDS reads of all records, in the order of the files."""
    skipped = {"photo", "ragged", "maybe", "rows", "zlib", "video"}
    arrays: dict[str, list[Any]] = {}
    for record in tfds.as_numpy(builder.as_dataset(split="train", shuffle_files=False)):
        flat = {key: value for key, value in record.items() if key not in {*skipped, "pair", "steps", "both"}}
        for outer in ("pair", "steps", "both"):
            flat.update({f"{outer}/{inner}": value for inner, value in record[outer].items()})
        for key, value in flat.items():
            arrays.setdefault(key.replace("/", "|"), []).append(value)
    return {key: np.asarray(values, "S" if isinstance(values[0], bytes) else None) for key, values in arrays.items()}


if __name__ == "__main__":
    shutil.rmtree(HERE / "shapes", ignore_errors=True)
    builder = Shapes(data_dir=str(HERE))
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=2))
    shutil.rmtree(HERE / "downloads", ignore_errors=True)
    np.savez_compressed(HERE / "expected.npz", **expected(builder))
