"""A dataset of a function has the files that the function read: when they change, it is prepared anew."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.tasks.foundation.dataset.manifest import changed_files, load_manifest
from baton.tasks.foundation.telemetry.events import DatasetUsed, Note
from tests.prepare_data.conftest import Workshop

CODE = """
import csv, os, tempfile
from pathlib import Path
import numpy as np
TABLE = np.loadtxt("scale.txt")

def load(**options):
    with open("train.csv") as file:
        numbers = [float(row[0]) for row in csv.reader(file)]
    open("cache.txt", "w").write("x")
    open("cache.txt").read()
    Path("unfinished").write_text("x")
    os.rename("unfinished", "renamed.txt")
    open("renamed.txt").read()
    with tempfile.NamedTemporaryFile() as scratch:
        open(scratch.name).read()
    open(".secret").read()
    open(np.__file__.replace("__init__.py", "version.py")).read()
    open("/proc/self/stat").read()
    for number in numbers:
        yield np.float32([number]), int(number) % 3

def load_validation():
    yield np.float32([float(open("val.csv").read())]), 0

def load_folder():
    for file in sorted(Path("parts").glob("*.txt")):
        yield np.float32([float(file.read_text())]), 0

def load_in_threads():
    import tensorflow as tf
    def rows():
        yield from np.loadtxt("train.csv", dtype=np.float32)
    return tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec([], tf.float32)).prefetch(2)

def load_images():
    import keras
    return keras.utils.image_dataset_from_directory("images", image_size=(2, 2), verbose=False, shuffle=False)

def load_tensors(path):
    import tensorflow as tf
    for line in tf.data.TextLineDataset(path):
        yield np.float32([float(line.numpy())]), 0
"""


@pytest.fixture
def coded(workshop: Workshop) -> Workshop:
    workshop.write("data.py", CODE)
    for name in ("scale.txt", "train.csv", ".secret"):
        workshop.write(name, "1\n2\n3\n")
    return workshop


def names(workshop: Workshop, ref: Any) -> list[str]:
    return [each.path for each in load_manifest(workshop.storage, ref).opened or ()]


def inputs(workshop: Workshop, ref: Any) -> list[float]:
    return sorted(example["x"].item() for example in workshop.examples(ref))


def notes(workshop: Workshop) -> list[str]:
    found = [event.text for event in workshop.events if isinstance(event, Note)]
    workshop.events.clear()
    return found


def test_manifest_has_the_files_that_a_function_read(coded: Workshop) -> None:
    ref = coded.prepare("data.py:load", validation_fraction=0)
    assert names(coded, ref) == ["scale.txt", "train.csv"]
    (_, table) = load_manifest(coded.storage, ref).opened or ()
    assert (table.size, table.modified_ns) == (6, (coded.code / "train.csv").stat().st_mtime_ns)
    assert table.sha256 == hashlib.sha256(b"1\n2\n3\n").hexdigest()


def test_changed_file_is_read_anew_and_named(coded: Workshop) -> None:
    first = coded.prepare("data.py:load", validation_fraction=0)
    notes(coded)
    again = coded.prepare("data.py:load", validation_fraction=0)
    assert (again.folder, again.already_prepared) == (first.folder, True)
    (used,) = (event for event in coded.events if isinstance(event, DatasetUsed))
    (said,) = notes(coded)
    assert said.startswith(f"{used.words}; not seen is ")
    assert "data.py:load: the dataset that was prepared on 20" in said
    assert "it read scale.txt, train.csv, where no change is seen" in said
    assert "network" in said
    coded.write("train.csv", "7\n8\n")
    changed = coded.prepare("data.py:load", validation_fraction=0)
    assert inputs(coded, changed) == [7, 8]
    assert not changed.already_prepared
    assert changed.content_digest != first.content_digest
    words = "data.py:load is read anew: train.csv changed since its dataset was prepared on 20"
    assert [said.startswith(words) for said in notes(coded)] == [True]
    assert changed_files(coded.storage, {"data.folder": first.folder}, changed) == ["train.csv: changed since"]
    assert coded.prepare("data.py:load", validation_fraction=0).folder == changed.folder
    assert not any("anew" in said for said in notes(coded))
    # Data that comes back finds its dataset, whatever the time of the file.
    coded.write("train.csv", "1\n2\n3\n")
    assert coded.prepare("data.py:load", validation_fraction=0).folder == first.folder
    coded.write("train.csv", "9\n")
    assert inputs(coded, coded.prepare("data.py:load", validation_fraction=0)) == [9]
    # Where the file is not, as on another machine, there is nothing to compare.
    (coded.code / "train.csv").unlink()
    assert coded.prepare("data.py:load", validation_fraction=0).folder == first.folder


def test_sets_of_a_module_have_their_own_files(coded: Workshop) -> None:
    coded.write("val.csv", "4")
    ref = coded.prepare("data.py:load", validation={"source": "data.py:load_validation"})
    assert names(coded, ref) == ["scale.txt", "train.csv"]
    assert ref.validation is not None
    coded.write("val.csv", "5")
    changed = coded.prepare("data.py:load", validation={"source": "data.py:load_validation"})
    assert changed.folder == ref.folder
    assert changed.validation != ref.validation


def test_new_file_in_a_listed_folder_is_read(coded: Workshop) -> None:
    coded.write("parts/a.txt", "1")
    first = coded.prepare("data.py:load_folder", validation_fraction=0)
    assert names(coded, first) == ["parts/a.txt", "scale.txt", "parts"]
    coded.write("parts/note.md", "is no .txt")
    assert coded.prepare("data.py:load_folder", validation_fraction=0).already_prepared
    coded.write("parts/b.txt", "2")
    assert inputs(coded, coded.prepare("data.py:load_folder", validation_fraction=0)) == [1, 2]


def test_files_named_in_the_options_count_as_read(coded: Workshop) -> None:
    """TensorFlow opens files without Python."""
    options = {"path": "train.csv"}
    first = coded.prepare("data.py:load_tensors", options, validation_fraction=0)
    assert names(coded, first) == ["scale.txt", "train.csv"]
    coded.write("train.csv", "6\n")
    assert inputs(coded, coded.prepare("data.py:load_tensors", options, validation_fraction=0)) == [6]


def test_files_that_threads_of_tensorflow_open_are_seen(coded: Workshop) -> None:
    ref = coded.prepare("data.py:load_in_threads", validation_fraction=0)
    assert names(coded, ref) == ["scale.txt", "train.csv"]


def test_images_of_a_keras_dataset_are_known(coded: Workshop) -> None:
    """TensorFlow lists no folders and opens no files by Python, but the dataset has their paths."""
    import tensorflow as tf

    image = tf.io.encode_png(np.zeros((2, 2, 3), np.uint8)).numpy()
    for name in ("a/0.png", "b/1.png"):
        coded.write(f"images/{name}", image)
    first = coded.prepare("data.py:load_images", validation_fraction=0)
    assert {"images/a/0.png", "images/b/1.png"} <= set(names(coded, first))
    for name in ("b/2.png", "c/3.png"):  # another image, another class
        coded.write(f"images/{name}", image)
        assert not coded.prepare("data.py:load_images", validation_fraction=0).already_prepared


def test_file_that_changes_while_it_is_read_is_not_trusted(coded: Workshop) -> None:
    writes = 'open("train.csv") as file:\n        os.system("echo 5 >> train.csv")'
    coded.write("data.py", CODE.replace('open("train.csv") as file:', writes))
    first = coded.prepare("data.py:load", validation_fraction=0)
    coded.write("data.py", CODE)
    assert [each.sha256 == "" for each in load_manifest(coded.storage, first).opened or ()] == [False, True]


def test_dataset_without_a_list_of_files_is_used(coded: Workshop) -> None:
    """Earlier revisions wrote none."""
    ref = coded.prepare("data.py:load", validation_fraction=0)
    path = f"{ref.folder}/manifest.json"
    old = json.loads(coded.storage.read(path))
    del old["opened"], old["prepared"]
    coded.storage.write(path, json.dumps(old).encode())
    coded.write("train.csv", "7\n8\n")
    notes(coded)
    assert coded.prepare("data.py:load", validation_fraction=0).already_prepared
    assert any("the files that it read are not known" in said for said in notes(coded))


def test_files_beside_the_folder_are_named_from_it(workshop: Workshop, tmp_path: Path) -> None:
    cached = tmp_path.parent / f"home-{os.getpid()}" / ".keras" / "datasets" / "b.txt"  # sorted before tmp_path
    paths = ["../beside/a.txt", str(cached)]
    for path in paths:
        (workshop.code / path).parent.mkdir(parents=True)
        (workshop.code / path).write_text("1")
    loop = f"for path in {paths}:\n        yield np.float32([len(open(path).read())]), 0"
    workshop.write("data.py", f"import numpy as np\ndef load():\n    {loop}")
    assert names(workshop, workshop.prepare("data.py:load", validation_fraction=0)) == paths[::-1]
