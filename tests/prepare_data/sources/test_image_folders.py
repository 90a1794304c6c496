"""The source `images`: folders of real image files, local and in a store."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.tasks.foundation.dataset.manifest import load_manifest
from baton.tasks.foundation.errors import BatonError, RunFileError, SourceError
from baton.tasks.foundation.storage.memory import MemoryStorage
from tests.support.tfrecords import png

PETS = {"path": "pets", "size": [6, 5]}


def encoded(kind: str, pixels: Any) -> bytes:
    import tensorflow as tf

    encode = {"png": tf.io.encode_png, "jpg": lambda image: tf.io.encode_jpeg(image, quality=100)}[kind]
    return bytes(encode(np.asarray(pixels, np.uint8)).numpy())


def flat(value: int, *shape: int) -> Any:
    """Return an image of one color, whose resized pixels are known."""
    return np.full(shape or (6, 5, 3), value, np.uint8)


def pets() -> dict[str, bytes]:
    """Return seven images of three classes; each has its own pixel value."""
    return {
        "dog/a.png": encoded("png", flat(10)),
        "dog/deep/b.jpg": encoded("jpg", flat(20, 30, 20, 3)),
        "cat/one.jpeg": encoded("jpg", flat(30)),
        "cat/named_wrongly.txt": encoded("png", flat(40, 3, 2, 3)),
        "cat/grey.png": encoded("png", flat(50, 6, 5, 1)),
        "ant/transparent.png": encoded("png", flat(60, 6, 5, 4)),
        "ant/tall.png": encoded("png", flat(70, 100, 3, 3)),
    }


LABELS = {10: 2, 20: 2, 30: 1, 40: 1, 50: 1, 60: 0, 70: 0}


@pytest.fixture
def remote() -> Any:
    storage = MemoryStorage("images-test")
    storage.delete("")
    yield storage
    storage.delete("")


def write(workshop: Any, files: dict[str, bytes], root: str = "pets") -> None:
    for name, data in files.items():
        workshop.write(f"{root}/{name}", data)


def found(workshop: Any, ref: Any) -> dict[int, int]:
    """Return pixel value -> label of all examples."""
    examples = workshop.examples(ref) + workshop.examples(ref, "validation")
    for example in examples:
        assert np.ptp(example["x"]) == 0
    return {int(example["x"].flat[0]): example["y"].item() for example in examples}


def test_folders_are_classes_and_images_are_resized(workshop: Any) -> None:
    write(workshop, {**pets(), ".hidden/a.png": b"", "cat/.DS_Store": b""})
    ref = workshop.prepare("images", PETS, classes=3)
    manifest = load_manifest(workshop.storage, ref)
    assert [(feature.name, feature.dtype, feature.shape) for feature in manifest.features] == [
        ("x", "uint8", (6, 5, 3)),
        ("y", "int64", ()),
    ]
    assert manifest.class_names == ("ant", "cat", "dog")
    assert manifest.origin["one.jpeg"].startswith("crc32c ")
    assert found(workshop, ref) == LABELS


def test_channels_are_converted(workshop: Any) -> None:
    red = np.zeros((6, 5, 3), np.uint8)
    red[..., 0] = 200
    write(workshop, {"a/red.png": encoded("png", red), "a/grey.jpg": encoded("jpg", flat(90, 6, 5, 1))})
    ref = workshop.prepare("images", {**PETS, "channels": 1}, validation_fraction=0)
    assert {example["x"].shape for example in workshop.examples(ref)} == {(6, 5, 1)}
    # Luma of ITU-R BT.601, as in JPEG: 0.299 of red.
    assert sorted(found(workshop, ref)) == [pytest.approx(60, abs=2), 90]


def test_one_number_is_the_size_of_both_sides(workshop: Any) -> None:
    """As deploy/runs/README.md shows it; it is the same dataset as with two."""
    workshop.write("pets/cat/a.png", png(1))
    ref = workshop.prepare("images", {"path": "pets", "size": 4}, validation_fraction=0)
    assert [each["x"].shape for each in workshop.examples(ref)] == [(4, 4, 3)]
    assert workshop.prepare("images", {"path": "pets", "size": [4, 4]}, validation_fraction=0) == ref.model_copy(
        update={"already_prepared": True}
    )


def test_image_of_the_right_size_keeps_every_pixel(workshop: Any) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 3), np.uint8)
    write(workshop, {"a/a.png": encoded("png", pixels)})
    (example,) = workshop.examples(workshop.prepare("images", PETS, validation_fraction=0))
    np.testing.assert_array_equal(example["x"], pixels)


def test_shrinking_averages_pixels(workshop: Any) -> None:
    # One column in four is bright. Without antialiasing only the middle two of each eight columns would count.
    stripes = np.zeros((48, 40, 3), np.uint8)
    stripes[:, ::4] = 200
    write(workshop, {"a/a.png": encoded("png", stripes)})
    (example,) = workshop.examples(workshop.prepare("images", PETS, validation_fraction=0))
    assert np.abs(example["x"].astype(int) - 50).max() <= 8


def test_class_of_an_image_changes_the_dataset_name(workshop: Any) -> None:
    images = [encoded("png", flat(value)) for value in (10, 20, 30)]
    write(workshop, {"a/1": images[0], "a/2": images[1], "b/1": images[2]}, "one")
    write(workshop, {"a/1": images[0], "b/1": images[1], "b/2": images[2]}, "two")
    write(workshop, {"c/1": images[0], "c/2": images[1], "d/1": images[2]}, "three")
    refs = [workshop.prepare("images", {**PETS, "path": path}) for path in ("one", "two", "three")]
    assert len({ref.folder for ref in refs}) == 3
    write(workshop, {"a/x": images[0], "a/y": images[1], "b/z": images[2]}, "four")
    assert workshop.prepare("images", {**PETS, "path": "four"}).already_prepared
    assert not workshop.prepare("images", {**PETS, "path": "four", "size": [5, 6]}).already_prepared


def test_folders_are_sorted_by_path_part(workshop: Any) -> None:
    """`a-b/x` sorts before `a/x` as text, though `a` comes before `a-b`."""
    write(workshop, {"a/1.png": encoded("png", flat(10)), "a-b/1.png": encoded("png", flat(20))})
    ref = workshop.prepare("images", PETS, validation_fraction=0)
    assert found(workshop, ref) == {10: 0, 20: 1}


def test_images_in_a_store_are_the_same_examples(workshop: Any, remote: MemoryStorage) -> None:
    files = pets()
    for name, data in files.items():
        remote.write(f"pets/{name}", data)
    write(workshop, files)
    near = workshop.prepare("images", PETS)
    far = workshop.prepare("images", {**PETS, "path": "memory://images-test/pets"})
    assert found(workshop, far) == LABELS
    assert far.content_digest == near.content_digest
    assert "crc32c" in load_manifest(workshop.storage, far).origin["one.jpeg"]


def test_folders_become_batches(workshop: Any) -> None:
    from baton.tasks.foundation.dataset import read as reader

    write(workshop, pets())
    ref = workshop.prepare("images", PETS, validation_fraction=0, shard_examples=3)
    dataset = reader.training_dataset(
        workshop.storage, ref, seed=0, global_batch_size=7, window_shards=2, first_batch=0
    )
    x, y = next(iter(dataset.as_numpy_iterator()))
    assert (x.shape, x.dtype, y.dtype) == ((7, 6, 5, 3), np.uint8, np.int64)
    assert {int(pixels.flat[0]): int(label) for pixels, label in zip(x, y, strict=True)} == LABELS


def apng() -> bytes:
    plain = encoded("png", flat(10))
    at = plain.index(b"IDAT") - 4
    return plain[:at] + b"\0\0\0\x08acTL" + bytes(8) + bytes(4) + plain[at:]


JPEG_NOISE = np.random.default_rng(0).integers(0, 256, (60, 50, 3), np.uint8)
REFUSED: dict[str, tuple[Callable[[], dict[str, bytes]], list[str]]] = {
    "text": (lambda: {"cat/notes.md": b"# notes"}, ["cat/notes.md is not an image", "remove them from the folder"]),
    "empty": (lambda: {"cat/a.jpg": b""}, ["cat/a.jpg is empty"]),
    "gif": (lambda: {"cat/a.jpg": b"GIF89a..."}, ["cat/a.jpg is GIF", "as JPEG or PNG"]),
    "webp": (lambda: {"cat/a.jpg": b"RIFF....WEBPVP8 "}, ["cat/a.jpg is WebP"]),
    "cut jpeg": (
        lambda: {"cat/a.jpg": encoded("jpg", JPEG_NOISE)[:-2000]},
        ["cat/a.jpg is a JPEG that is truncated or damaged"],
    ),
    "cut png": (
        lambda: {"cat/a.png": encoded("png", JPEG_NOISE)[:-2000]},
        ["cat/a.png is a PNG that is truncated or damaged"],
    ),
    "animated": (lambda: {"cat/a.png": apng()}, ["cat/a.png is an animated PNG"]),
    "beside": (
        lambda: {"a.png": b"", "b.png": b""},
        ["data.options.path: 'pets'", "class folders: a.png, b.png", "or elsewhere"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_image_is_named_and_nothing_is_written(workshop: Any, case: str) -> None:
    make, expected = REFUSED[case]
    write(workshop, {**pets(), **make()})
    with pytest.raises(SourceError) as refused:
        workshop.prepare("images", PETS)
    assert [part for part in expected if part not in str(refused.value)] == [], str(refused.value)
    assert workshop.files() == {}


def test_up_to_ten_invalid_images_are_listed_at_once(workshop: Any) -> None:
    write(workshop, {**pets(), **{f"cat/bad-{index}.jpg": b"no" for index in range(3)}})
    with pytest.raises(SourceError, match="3 of 10 images cannot be used") as refused:
        workshop.prepare("images", PETS)
    assert str(refused.value).count("is not an image") == 3
    write(workshop, {f"dog/bad-{index:02d}.jpg": b"no" for index in range(50)})
    with pytest.raises(SourceError, match="10 or more of 60 images") as refused:
        workshop.prepare("images", PETS)
    assert str(refused.value).count("is not an image") == 10


def folder_of(*names: str) -> Callable[[Any], None]:
    def make(workshop: Any) -> None:
        for name in names:
            if name.endswith("/"):
                (workshop.code / name).mkdir(parents=True)
            else:
                workshop.write(name, encoded("png", flat(10)))

    return make


FOLDERS: list[tuple[Callable[[Any], None], list[str]]] = [
    (folder_of(), ["'pets'", "does not exist"]),
    (folder_of("pets/"), ["'pets'", "no files at", "name a file, or a folder"]),
    (folder_of("pets"), ["contains no folders, but pets", "one folder per class"]),
    (folder_of("pets/a.png", "pets/b.png"), ["contains no folders, but a.png, b.png"]),
    (folder_of("pets/.git/a"), ["only hidden files"]),
    (folder_of("pets/cat/a.png", "pets/dog/", "pets/.git/"), ["no images in dog", "remove the folder"]),
]


@pytest.mark.parametrize(("make", "expected"), FOLDERS)
def test_invalid_class_folders_are_refused(workshop: Any, make: Callable[[Any], None], expected: list[str]) -> None:
    make(workshop)
    with pytest.raises(SourceError) as refused:
        workshop.prepare("images", PETS)
    assert [part for part in expected if part not in str(refused.value)] == [], str(refused.value)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"path": "pets"}, ["data.options.size is missing", "[height, width]"]),
        ({**PETS, "size": 0}, ["data.options.size: 0", "[height, width]"]),
        ({**PETS, "size": 16384}, ["data.options.size: 16384", "more than 67,108,864 pixels"]),
        ({**PETS, "size": True}, ["data.options.size: True", "[height, width]"]),
        ({**PETS, "size": [6]}, ["data.options.size: [6]", "[height, width]"]),
        ({**PETS, "size": [6, 0]}, ["data.options.size: [6, 0]", "at least 1"]),
        ({**PETS, "channels": 4}, ["data.options.channels: 4", "3 for color, 1 for grey"]),
        ({**PETS, "resize": "x"}, ["data.options.resize", "did you mean size?"]),
    ],
)
def test_invalid_options_are_refused(workshop: Any, options: dict[str, Any], expected: list[str]) -> None:
    with pytest.raises(RunFileError) as refused:
        workshop.prepare("images", options)
    assert [part for part in expected if part not in str(refused.value)] == [], str(refused.value)


def test_more_classes_than_declared_are_refused(workshop: Any) -> None:
    write(workshop, pets())
    with pytest.raises(BatonError, match=r"label y is 2, outside of \[0, 2\)"):
        workshop.prepare("images", PETS, classes=2)
    assert workshop.files() == {}


def test_image_changed_in_its_store_while_reading_is_refused(
    workshop: Any, remote: MemoryStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, data in pets().items():
        remote.write(name, data)
    read = MemoryStorage.read

    def changed(storage: MemoryStorage, path: str) -> bytes:
        return encoded("png", flat(99)) if path.endswith("tall.png") else read(storage, path)

    monkeypatch.setattr(MemoryStorage, "stat", lambda storage, path: _checked(read(storage, path)))
    monkeypatch.setattr(MemoryStorage, "read", changed)
    with pytest.raises(SourceError, match=r"memory://images-test/ant/tall\.png: changed while it was being read"):
        workshop.prepare("images", {**PETS, "path": "memory://images-test"})


def _checked(data: bytes) -> Any:
    from baton.tasks.foundation.storage.transfers import checksum_bytes

    return checksum_bytes(data)


def test_local_image_changed_while_reading_is_refused(workshop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write(workshop, pets())
    workshop.emit = lambda _: Path(workshop.code, "pets/dog/a.png").write_bytes(b"other")
    monkeypatch.setattr("baton.tasks.prepare_data.stage._REPORT_EVERY_EXAMPLES", 7)
    with pytest.raises(SourceError, match=r"dog/a\.png: changed while it was being read"):
        workshop.prepare("images", PETS)


@pytest.mark.parametrize("pattern", ["pets/*/*", "pets/*/*.png"])
def test_classes_of_a_local_pattern_start_at_its_wildcard(workshop: Any, pattern: str) -> None:
    """They never start at the root of the file system, whose folders are not classes."""
    write(workshop, pets())
    ref = workshop.prepare("images", {"path": pattern, "size": [6, 5]}, validation_fraction=0)
    assert json.loads(load_manifest(workshop.storage, ref).origin["classes"]) == ["ant", "cat", "dog"]
