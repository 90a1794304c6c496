"""The source `tfds`: a folder that TensorFlow Datasets wrote (`tfds/prepare_shapes.py`), and malformed ones."""

import json
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.tasks.foundation.dataset.manifest import load_manifest, manifest_path
from baton.tasks.foundation.dataset.shards import original_read_errors
from baton.tasks.foundation.errors import BatonError, DamagedDataset
from baton.tasks.foundation.storage.memory import MemoryStorage

FOLDER = Path(__file__).parent / "tfds"
OPTIONS = {"path": "shapes/1.0.0"}
KEYS = ("image", "mask", "labels", "vector", "half", "double", "byte", "flag", "bytes", "text", "box", "audio")
NESTED = ("pair/left", "pair/right", "steps/u", "steps/v", "both/en", "both/fr")


@pytest.fixture
def shapes(workshop: Any) -> Path:
    """A copy of the prepared folder beside the run file."""
    target = workshop.code / "shapes"
    shutil.copytree(FOLDER / "shapes", target)
    return Path(target / "1.0.0")


def edit(file: Path, change: Callable[[Any], object]) -> None:
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))


def train(workshop: Any, ref: Any) -> list[Any]:
    from baton.tasks.foundation.dataset import read

    with original_read_errors():
        dataset = read.training_dataset(
            workshop.storage, ref, seed=0, global_batch_size=1, window_shards=1, first_batch=0
        )
        return list(islice(dataset.as_numpy_iterator(), ref.train_examples))


@pytest.mark.usefixtures("shapes")
@pytest.mark.parametrize("copy", [False, True])
def test_every_kind_of_feature_is_read_as_tfds_reads_it(workshop: Any, copy: bool) -> None:
    x = {key.replace("/", "_"): key for key in (*KEYS, *NESTED)}
    options = {**OPTIONS, "x": x, "y": "label", "sample_weight": "weight", "copy": copy}
    ref = workshop.prepare("tfds", options, validation_fraction=0)
    assert (list(workshop.files()) == [manifest_path(ref.folder)]) is not copy
    with np.load(FOLDER / "expected.npz") as loaded:
        expected = {key.replace("|", "/"): loaded[key] for key in loaded}
    order = {weight: row for row, weight in enumerate(expected["weight"].tolist())}
    found = train(workshop, ref)
    assert sorted(order) == sorted(float(weight[0]) for _, _, weight in found)
    for values, label, weight in found:
        row = order[float(weight[0])]
        assert label[0] == expected["label"][row]
        for name, key in x.items():
            np.testing.assert_array_equal(values[name][0], expected[key][row], err_msg=key)
            is_text = values[name].dtype == object
            assert is_text or values[name].dtype == expected[key].dtype


def test_supervised_keys_and_class_names_are_the_default(workshop: Any, shapes: Path) -> None:
    ref = workshop.prepare("tfds", {**OPTIONS, "split": "test"}, validation_fraction=0)
    manifest = load_manifest(workshop.storage, ref)
    assert [(each.name, each.key) for each in manifest.features] == [("x", "image"), ("y", "label")]
    assert manifest.class_names == ("circle", "square", "star")
    assert manifest.train[0].path == str(shapes / "shapes-test.tfrecord-00000-of-00002")
    assert sorted(int(x[0, 0, 0, 0]) for x, _ in train(workshop, ref)) == [100, 101, 102, 103]


@pytest.mark.usefixtures("shapes")
def test_images_of_open_shape_are_resized(workshop: Any) -> None:
    ref = workshop.prepare("tfds", {**OPTIONS, "x": "photo", "y": "label", "size": [5, 7]}, validation_fraction=0)
    assert {x.shape for x, _ in train(workshop, ref)} == {(1, 5, 7, 3)}


def test_older_descriptions_of_features_are_read(workshop: Any, shapes: Path) -> None:
    first = workshop.prepare("tfds", OPTIONS)
    at = "tensorflow_datasets.core.features"
    image = {"shape": [6, 5, 3], "dtype": "uint8", "encoding_format": "png"}
    label = json.dumps({"numClasses": "3"})
    older = {
        "type": f"{at}.features_dict.FeaturesDict",
        "content": {
            "image": {"type": f"{at}.image_feature.Image", "content": image},
            "label": {"type": f"{at}.class_label_feature.ClassLabel", "content": label, "proto_cls": "ClassLabel"},
        },
    }
    (shapes / "features.json").write_text(json.dumps(older))
    edit(shapes / "dataset_info.json", lambda info: [info.pop("fileFormat"), info["splits"][0].pop("filepathTemplate")])
    assert workshop.prepare("tfds", OPTIONS).content_digest == first.content_digest


def test_changed_file_is_refused_by_name(workshop: Any, shapes: Path) -> None:
    ref = workshop.prepare("tfds", OPTIONS, validation_fraction=0)
    file = shapes / "shapes-train.tfrecord-00001-of-00002"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedDataset, match=r"train\.tfrecord-00001-of-00002 has .* restore the original file"):
        train(workshop, ref)


def test_folder_in_a_store_is_the_same_dataset(workshop: Any, shapes: Path) -> None:
    storage = MemoryStorage("tfds-test")
    storage.delete("")
    for file in shapes.iterdir():
        storage.write(f"shapes/{file.name}", file.read_bytes())
    near, far = (workshop.prepare("tfds", {"path": path}) for path in ("shapes/1.0.0", "memory://tfds-test/shapes/"))
    assert far.content_digest == near.content_digest
    assert len(train(workshop, far)) == far.train_examples == 9


def kind_of(key: str, kind: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        edit(
            folder / "features.json",
            lambda document: document["featuresDict"]["features"][key].update(pythonClassName=kind),
        )

    return change


def info(change: Callable[[Any], object]) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "dataset_info.json", change)


def cut(folder: Path) -> None:
    file = folder / "shapes-train.tfrecord-00001-of-00002"
    file.write_bytes(file.read_bytes()[:-3])


def nothing(_: Path) -> None:
    pass


MALFORMED: dict[str, tuple[Callable[[Path], object], dict[str, Any], list[str]]] = {
    "another folder": (
        lambda folder: (folder / "dataset_info.json").unlink(),
        {},
        ["dataset_info.json", "mnist/3.0.1"],
    ),
    "folder above": (
        nothing,
        {"path": "shapes"},
        ["'shapes': has no dataset_info.json", "name the folder shapes/1.0.0"],
    ),
    "no features": (lambda folder: (folder / "features.json").unlink(), {}, ["1.0.0': has no features.json"]),
    "no json": (lambda folder: (folder / "features.json").write_text("{"), {}, ["features.json: is not JSON"]),
    "other json": (
        lambda folder: (folder / "features.json").write_text('{"a": 1}'),
        {},
        ["a feature is not described"],
    ),
    "a list": (lambda folder: (folder / "dataset_info.json").write_text("[]"), {}, ["dataset_info.json: it is not an"]),
    "unknown split": (nothing, {"split": "tset"}, ["data.options.split: 'tset'", "did you mean test?"]),
    "part of a split": (nothing, {"split": "train[:80%]"}, ["'train[:80%]'", "data.validation_fraction"]),
    "file format": (
        info(lambda each: each.update(fileFormat="array_record")),
        {},
        ["'array_record'", "file_format=tfrecord"],
    ),
    "lengths": (info(lambda each: each["splits"][0].update(shardLengths=["six"])), {}, ["shardLengths", "not numbers"]),
    "empty split": (info(lambda each: each["splits"][0].update(shardLengths=[])), {}, ["'train' has no examples"]),
    "other length": (
        info(lambda each: each["splits"][0].update(shardLengths=["6", "4"])),
        {},
        ["tfrecord-00001-of-00002: has 5 records, but dataset_info.json says 4"],
    ),
    "missing file": (
        lambda folder: (folder / "shapes-train.tfrecord-00001-of-00002").unlink(),
        {},
        ["shapes-train.tfrecord-00001-of-00002 is missing", "5 examples of the split 'train'"],
    ),
    "truncated file": (cut, {}, ["tfrecord-00001-of-00002: record 4", "the file ends inside it"]),
    "other records": (
        kind_of("vector", "tensorflow_datasets.core.features.class_label_feature.ClassLabel"),
        {"x": "vector"},
        ["tfrecord-00000-of-00002, record 0", "'vector' is float_list, not int64_list"],
    ),
    "own class": (kind_of("vector", "shop.features.Vector"), {"x": "vector"}, ["of the kind shop.features.Vector"]),
    "no keys": (info(lambda each: each.pop("supervisedKeys")), {}, ["data.options.x is missing", "image, label"]),
    "unknown feature": (nothing, {"x": "imge"}, ["data.options.x: 'imge'", "features.json has no such", "image?"]),
    "open sequence": (nothing, {"x": "ragged"}, ["data.options.x: 'ragged'", "open length", "data.pad"]),
    "compressed": (nothing, {"x": "zlib"}, ["'zlib': is stored as zlib"]),
    "video": (nothing, {"x": {"v": "video"}}, ["data.options.x.v: 'video': is of the kind Video"]),
    "open images": (nothing, {"x": "photo"}, ["'photo': has images of different sizes; set data.options.size"]),
    "resized labels": (nothing, {"x": "mask", "size": [2, 2]}, ["'mask': is an image of labels"]),
    "optional": (nothing, {"x": "maybe"}, ["'maybe': is optional"]),
    "nested dataset": (nothing, {"x": "rows"}, ["'rows': is of the kind Dataset"]),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_folders_and_options_are_refused(workshop: Any, shapes: Path, case: str) -> None:
    change, options, expected = MALFORMED[case]
    change(shapes)
    with pytest.raises(BatonError) as refused:
        workshop.prepare("tfds", {**OPTIONS, **options})
    assert refused.value.exit_code == 2
    assert [part for part in expected if part not in str(refused.value)] == [], str(refused.value)
    assert workshop.files() == {}
