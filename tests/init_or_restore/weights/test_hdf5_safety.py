"""HDF5 files that refer to other files, or declare values that they do not hold."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from baton.tasks.foundation.contracts.run_spec import WeightsSource
from baton.tasks.foundation.errors import PathRefused, WeightsError
from baton.tasks.foundation.storage.opening import open_storage
from baton.tasks.init_or_restore.weights.loading import _local_files, _read
from baton.tasks.init_or_restore.weights.location import locate_weights
from baton.tasks.init_or_restore.weights.weight_files import read_hdf5, require_self_contained

SECRET = b"a secret of this machine " * 64


def external_storage(file: Any, secret: Path) -> None:
    file.create_dataset("layers/dense/vars/0", (400,), "f4", external=[(str(secret), 0, 1600)])


def virtual(file: Any, secret: Path) -> None:
    layout = h5py.VirtualLayout(shape=(4,), dtype="f4")
    layout[:] = h5py.VirtualSource(str(secret), "data", shape=(4,))
    file.create_virtual_dataset("layers/dense/vars/0", layout)


def external_link(file: Any, secret: Path) -> None:
    file.create_group("layers/dense/vars")["0"] = h5py.ExternalLink(str(secret), "/data")


def link_through_a_link(file: Any, secret: Path) -> None:
    file["elsewhere"] = h5py.ExternalLink(str(secret), "/")
    file.create_group("layers/dense/vars")["0"] = h5py.SoftLink("/elsewhere/data")


def link_of_the_first_group(file: Any, secret: Path) -> None:
    file["model_weights"] = h5py.ExternalLink(str(secret), "/")


def huge(file: Any, _: Path) -> None:
    file.create_dataset("layers/dense/vars/0", (2**36,), "f4")


def huge_in_chunks(file: Any, _: Path) -> None:
    dataset = file.create_dataset("layers/dense/vars/0", (2**36,), "f4", chunks=(1024,), compression="gzip")
    dataset[:1024] = 1.0


def beyond_64_bits(file: Any, _: Path) -> None:
    file.create_dataset("layers/dense/vars/0", (2**31, 2**31, 2**31), "f4", chunks=(1, 1, 1))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (external_storage, "keeps its values in another file"),
        (virtual, "is made of datasets of other files"),
        (external_link, "is a link to another file"),
        (link_through_a_link, "'/elsewhere' is a link to another file"),
        (link_of_the_first_group, "'/model_weights' is a link to another file"),
        (huge, r"has the shape \[68719476736\], which is 274,877,906,944 bytes, but the file holds 0 bytes"),
        (huge_in_chunks, r"has the shape \[68719476736\]"),
        (beyond_64_bits, "has the shape"),
    ],
)
def test_external_references_and_missing_values_are_refused(
    make: Callable[[Any, Path], None], what: str, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    with h5py.File(tmp_path / "w.weights.h5", "w") as file:
        make(file, secret)
    with pytest.raises(WeightsError, match=what) as refused:
        read_hdf5(tmp_path / "w.weights.h5", uri="from/a/stranger.h5", by_position=lambda *_: None)
    assert "from/a/stranger.h5" in str(refused.value)


def test_files_of_keras_and_others_are_accepted(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "w.weights.h5", "w") as file:
        file["layers/dense/vars/0"] = np.ones((512, 1024), "f4")
        file["layers/dense/vars/1"] = np.float32(1.0)
        file["layers/empty/vars/0"] = np.ones((0, 3), "f4")
        file["words"] = ["a", "b"]
        file.create_dataset("zeros", data=np.zeros((512, 1024), "f4"), compression="gzip", compression_opts=9)
        file["again"] = file["layers"]  # a second name for the same group
        file["layers/up"] = file["/"]
        file["soft"] = h5py.SoftLink("/layers/dense/vars/0")
    with h5py.File(tmp_path / "w.weights.h5", "r") as file:
        require_self_contained(file, uri="w.weights.h5")


@pytest.mark.usefixtures("cloud")
def test_object_names_cannot_leave_the_download_folder(tmp_path: Path) -> None:
    """On Cloud Storage any text is a name, even ../.."""
    bucket = open_storage("gs://bucket", relative_to=tmp_path, guarded=False)
    for name in ("m/ckpt.index", "m/ckpt.data-0/../../../.bashrc"):
        bucket.write(name, b"stranger's")
    place = locate_weights(WeightsSource(source="gs://bucket/m"), tmp_path)
    assert place.kind == "checkpoint"
    folder = tmp_path / "home" / "tmp"
    folder.mkdir(parents=True)
    with pytest.raises(WeightsError, match="cannot be read as a TensorFlow checkpoint"):
        _read(place, WeightsSource(source="gs://bucket/m"), folder, None, {}, seed=0)
    with pytest.raises(PathRefused):
        _local_files(place, ["m/ckpt.data-0/../../../.bashrc"], folder)
    assert not (tmp_path / "home" / ".bashrc").exists()
    assert not (tmp_path / ".bashrc").exists()
