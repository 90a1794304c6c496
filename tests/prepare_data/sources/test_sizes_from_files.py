"""What a small or sparse file says of sizes allocates nothing: the memory of processes that read real files."""

import io
import json
import os
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.tasks.foundation.storage.transfers import masked_crc32c
from tests.support import forked
from tests.support.data_folders import photos, prepared, saved
from tests.support.tars import tar
from tests.support.tfrecords import SPEC, file_of, png, record

HUGE = 8 << 30
MOST_GROWTH_KIB = 1 << 20

# Looks at the files of each folder as `baton init` does, then prepares them; says by how much the process has grown.
CHILD = """
import contextlib, io, json, os, resource, sys
from pathlib import Path
from baton.flows.commands.main import main
from baton.tasks.foundation.errors import BatonError
from baton.tasks.foundation.storage.local import LocalStorage
from tests.prepare_data.conftest import Workshop

usage = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = usage()
for folder, source, options in json.loads(sys.argv[1]):
    os.chdir(folder)
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main(["init", "run", "--data", options["path"]])
    try:
        Workshop(Path.cwd(), LocalStorage(Path.cwd() / "store")).prepare(source, options)
    except BatonError as fault:
        print(json.dumps([code, errors.getvalue(), fault.exit_code, str(fault), usage() - before]))
    else:
        print("null")
"""


def sparse(file: Path, size: int = HUGE) -> None:
    """Make a file longer, by zeros that take no room on the disk."""
    file.touch()
    os.truncate(file, size)


def record_of(length: int) -> Callable[[Path], str]:
    def made(folder: Path) -> str:
        header = struct.pack("<Q", length)
        (folder / "d.tfrecord").write_bytes(header + struct.pack("<I", masked_crc32c(header)) + bytes(5))
        return "d.tfrecord"

    return made


def array_of(shape: str, descr: str = "<f4", fortran: bool = False) -> Callable[[Path], str]:
    def made(folder: Path) -> str:
        header = f"{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {shape}}}\n".encode()
        labels = io.BytesIO()
        np.save(labels, np.zeros(4, np.int64))
        with zipfile.ZipFile(folder / "d.npz", "w") as archive:
            archive.writestr("x.npy", b"\x93NUMPY\x01\0" + struct.pack("<H", len(header)) + header)
            archive.writestr("y.npy", labels.getvalue())
        return "d.npz"

    return made


def sparse_archive(folder: Path) -> str:
    """A zip file whose last bytes say that its directory has all the others, more than a process may grow."""
    size = (3 << 29) - 98
    ends = struct.pack("<4sQHHLLQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, 1, 1, size, 0)
    ends += struct.pack("<4sLQL", b"PK\x06\x07", 0, size, 1)
    ends += struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    sparse(folder / "d.npz", size)
    with (folder / "d.npz").open("ab") as file:
        file.write(ends)
    return "d.npz"


def changed(name: str, change: Callable[[Path], object]) -> Callable[[Path], str]:
    """A folder of TensorFlow Datasets with one file changed."""

    def made(folder: Path) -> str:
        path = prepared(folder)
        change(folder / path / name)
        return path

    return made


def with_json(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        document = json.loads(file.read_text())
        change(document)
        file.write_text(json.dumps(document))

    return write


def many_shards(document: Any) -> None:
    document["splits"][0]["shardLengths"] = ["0"] * 5_000_000


def huge_images(document: Any) -> None:
    shape = document["featuresDict"]["features"]["image"]["image"]["shape"]
    shape["dimensions"] = ["1000000", "1000000", "3"]


def image_with_a_tail(folder: Path) -> str:
    path = photos(folder)
    sparse(next((folder / path).rglob("*.*g")), 300 << 20)
    return path


def image_of_many_pixels(folder: Path) -> str:
    path = photos(folder)
    ihdr = b"IHDR" + struct.pack(">II", 60_000, 60_000) + b"\x08\x02\0\0\0"
    data = png(1)
    for file in (folder / path).rglob("*.*g"):
        file.write_bytes(data[:12] + ihdr + struct.pack(">I", zlib.crc32(ihdr)) + data[33:])
    return path


def zeros_behind(folder: Path) -> str:
    (folder / "d.tar").write_bytes(tar(0, 1, 2))
    sparse(folder / "d.tar", 40 << 30)
    return "d.tar"


def state_file(folder: Path) -> str:
    path = saved(folder)
    sparse(folder / path / "train/state.json")
    return path


ARRAYS = {"x": "x", "y": "y"}
RECORDS = {"features": {"values": SPEC["values"]}, "x": "values"}
HUB = {"x": "image", "y": "label", "size": [4, 5], "split": "train"}
IMAGES = {"size": [8, 8]}
FILES: dict[str, tuple[Callable[[Path], str], str, dict[str, Any], str]] = {
    "record of 2^62": (record_of(2**62), "tfrecord", RECORDS, "record 0, at byte 0: it says that it has 46116860184"),
    "record of 2^40": (record_of(2**40), "tfrecord", RECORDS, "more than 536870912; write smaller records"),
    "record of 2^29": (record_of(2**29), "tfrecord", RECORDS, "the file ends inside it, after 5 of 536870916 bytes"),
    "Fortran": (
        array_of("(1000000, 1000000)", fortran=True),
        "npz",
        ARRAYS,
        "which do not fit float32[1000000, 1000000]",
    ),
    "V0": (array_of("(1000000000000,)", "|V0"), "npz", ARRAYS, "x has shape (1000000000000,) of |V0, which has no"),
    "no bytes": (array_of("(1000000000000, 0)"), "npz", ARRAYS, "x has shape (1000000000000, 0) of float32, which has"),
    "directory": (sparse_archive, "npz", ARRAYS, "is not a valid .npz file (a part of 1610612638 bytes"),
    "features": (changed("features.json", sparse), "tfds", {}, "features.json has more than 33554432 bytes"),
    "info": (changed("dataset_info.json", sparse), "tfds", {}, "dataset_info.json has more than 33554432 bytes"),
    "labels": (changed("label.labels.txt", sparse), "tfds", {}, "label.labels.txt has more than 4194304 bytes"),
    "nested": (
        changed("features.json", lambda file: file.write_text('{"a":' * 20_000 + "1" + "}" * 20_000)),
        "tfds",
        {},
        "features.json: is not JSON: maximum recursion depth exceeded",
    ),
    "shards": (changed("dataset_info.json", with_json(many_shards)), "tfds", {}, "more than 200000 lists or 1000000"),
    "pixels of features": (
        changed("features.json", with_json(huge_images)),
        "tfds",
        {},
        "has images of 1000000 x 1000000 pixels; set data.options.size",
    ),
    "tail of an image": (image_with_a_tail, "images", IMAGES, "has more than 268435456 bytes"),
    "pixels of an image": (image_of_many_pixels, "images", IMAGES, "60000 x 60000 pixels, more than 67108864"),
    "zeros": (zeros_behind, "tar", {"x": "npy", "y": "cls"}, "more than 67108864 bytes of zeros follow the end mark"),
    "state": (state_file, "huggingface", HUB, "state.json has more than 33554432 bytes"),
}


def test_sizes_of_files_are_refused_before_they_are_memory(tmp_path: Path) -> None:
    """One process reads them all, so its growth is that of the worst."""
    given = []
    for number, (make, source, options, _) in enumerate(FILES.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        given.append([str(folder), source, {"path": make(folder), **options}])
    done = forked.run([sys.executable, "-c", CHILD, json.dumps(given)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("[", "null"))]
    for (case, (*_, expected)), line in zip(FILES.items(), lines, strict=True):
        of_init, errors, of_prepare, said, grown_kib = json.loads(line)
        assert of_prepare == 2, case
        assert expected in said, case
        if case != "pixels of features":  # which init makes smaller
            assert of_init == 2, case
            assert expected in " ".join(errors.split()), case
        assert grown_kib < MOST_GROWTH_KIB, case


LIMITED = """
import json, resource, sys
from pathlib import Path
from baton.tasks.foundation.errors import BatonError
from baton.tasks.foundation.storage.local import LocalStorage
from tests.prepare_data.conftest import Workshop

source, options, kind, most = json.loads(sys.argv[1])
workshop = Workshop(Path.cwd(), LocalStorage(Path.cwd() / "store"))
before = resource.getrlimit(getattr(resource, kind))
resource.setrlimit(getattr(resource, kind), (most, before[1]))
try:
    print(json.dumps(workshop.prepare(source, options, validation_fraction=0).train_examples))
except BatonError as fault:
    resource.setrlimit(getattr(resource, kind), before)
    again = workshop.prepare(source, options, validation_fraction=0)
    print(json.dumps([type(fault).__name__, str(fault), again.train_examples]))
"""


def prepare_limited(folder: Path, source: str, options: dict[str, Any], limit: str, most: int) -> Any:
    command = [sys.executable, "-c", LIMITED, json.dumps([source, options, limit, most])]
    done = forked.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_disk_that_is_full_while_preparing_is_named(tmp_path: Path) -> None:
    """A limit of the size of files has the kernel refuse the next byte, as a full disk does."""
    np.savez(tmp_path / "d.npz", x=np.zeros((64, 1 << 14), np.float32))
    kind, said, examples = prepare_limited(tmp_path, "npz", {"path": "d.npz", "x": "x"}, "RLIMIT_FSIZE", 1 << 20)
    assert kind == "StorageError"
    assert "writing to its disk failed: " in said
    assert "free some space and run again" in said
    assert examples == 64


@pytest.mark.parametrize("source", ["tfrecord", "tar", "images", "table"])
def test_files_that_are_open_together_are_few(tmp_path: Path, source: str) -> None:
    options: dict[str, Any] = {"path": "many"}
    for number in range(400):
        if source == "images":
            name, data = f"{number % 2}/{number}.png", png(number)
            options |= IMAGES
        elif source == "tar":
            name, data = f"{number}.tar", tar(number)
            options |= {"x": "npy", "y": "cls"}
        elif source == "table":
            name, data = f"{number}.csv", b"x,y\n1,0\n"
            options |= {"y": "y"}
        else:
            name, data = f"{number}.tfrecord", file_of([record(number)], tmp_path)
            options |= RECORDS
        (tmp_path / "many" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "many" / name).write_bytes(data)
    assert prepare_limited(tmp_path, source, options, "RLIMIT_NOFILE", 256) == 400
