"""The source `huggingface`: datasets that the package `datasets` saved, the hub's layout, and the hub itself."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.tasks.foundation.dataset.manifest import load_manifest, manifest_path
from baton.tasks.foundation.errors import BatonError, DamagedInTransit, RunFileError, SourceError
from baton.tasks.foundation.storage.memory import MemoryStorage
from baton.tasks.prepare_data.sources.hub_layouts import find_split, split_of_layout
from baton.tasks.prepare_data.sources.huggingface import download_split, hub_columns
from tests.fakes.hub import FakeHub
from tests.support.tfrecords import png

COMMIT = "ab" * 20
WHOLE = {"x": ["image", "vector", "matrix", "text"], "y": "label", "size": [4, 5]}


SHARDS = [
    "data/train-00000-of-00002.parquet",
    "data/train-00001-of-00002-4ac.parquet",
    "data/test-00000-of-00001.parquet",
]


@pytest.mark.parametrize(
    ("names", "config", "split", "found"),
    [
        (SHARDS, None, "train", SHARDS[:2]),
        ([*SHARDS, "train.parquet"], None, "test", SHARDS[2:]),
        (["a.parquet", "b.parquet", "LICENSE"], None, "train", ["a.parquet", "b.parquet"]),
        (["x_train.parquet", "x_dev.parquet"], None, "validation", ["x_dev.parquet"]),
        (["training/a.parquet", "eval/train.parquet"], None, "test", ["eval/train.parquet"]),
        (["en/train/0000.parquet", "fr/train/0000.parquet"], "fr", "train", ["fr/train/0000.parquet"]),
    ],
)
def test_split_is_found_in_the_layout_of_the_hub(
    names: list[str], config: str | None, split: str, found: list[str]
) -> None:
    assert split_of_layout(names, config=config, split=split, where="repo") == found


def test_one_of_several_configurations_must_be_named() -> None:
    names = ["en/train-00000-of-00001.parquet", "fr/train-00000-of-00001.parquet"]
    with pytest.raises(RunFileError, match=r"config is missing: repo has the split 'train' in .*set one of en, fr"):
        split_of_layout(names, config=None, split="train", where="repo")


FEATURES = {
    "image": {"_type": "Image"},
    "label": {"_type": "ClassLabel", "names": ["cat", "dog"]},
    "vector": {"_type": "List", "feature": {"_type": "Value", "dtype": "float32"}, "length": 3},
    "matrix": {"_type": "Array2D", "shape": [2, 3], "dtype": "float32"},
    "text": {"_type": "Value", "dtype": "string"},
    "box": {"width": {"_type": "Value", "dtype": "float64"}, "tags": [{"_type": "ClassLabel", "num_classes": 10**9}]},
    "words": {"_type": "List", "feature": {"_type": "Value", "dtype": "int32"}},
    "sound": {"_type": "Audio"},
    "old": {
        "_type": "Sequence",
        "length": -1,
        "feature": {"_type": "List", "length": 2, "feature": {"_type": "Value"}},
    },
    "batch": {"_type": "Array3D", "shape": [None, 2, 3], "dtype": "int32"},
}
COLUMNS = ["image", "label", "vector", "matrix", "text", "words", "sound"]


def test_features_say_shapes_and_classes() -> None:
    found = {name: (each.kind, each.shape, each.classes) for name, each in hub_columns(FEATURES, where="x").items()}
    assert found == {
        "image": ("Image", (), ()),
        "label": ("ClassLabel", (), ("cat", "dog")),
        "vector": ("Value", (3,), ()),
        "matrix": ("Array2D", (2, 3), ()),
        "text": ("Value", (), ()),
        "box.width": ("Value", (), ()),
        "box.tags": ("ClassLabel", None, ()),
        "words": ("Value", None, ()),
        "sound": ("Audio", (), ()),
        "old": ("Value", None, ()),
        "batch": ("Array3D", None, ()),
    }


@pytest.mark.parametrize("damage", [3, {"_type": "List"}, {"_type": "Array2D"}, [], {"_type": "List", "feature": []}])
def test_damaged_features_are_refused(damage: Any) -> None:
    with pytest.raises(SourceError, match=r"^here: the features of this dataset cannot be read"):
        hub_columns({"a": damage}, where="here")


def numbered(count: int, begin: int = 0) -> Any:
    """A dataset whose row n has only values that follow from n."""
    import datasets
    import pyarrow as pa
    from datasets.table import InMemoryTable

    features = datasets.Features.from_dict({name: FEATURES[name] for name in COLUMNS})
    rows = range(begin, begin + count)
    values = {
        "image": [{"bytes": png(row), "path": None} for row in rows],
        "label": [row % 2 for row in rows],
        "vector": [[row, row + 0.5, -row] for row in rows],
        "matrix": [[[row] * 3, [row + 1] * 3] for row in rows],
        "text": [f"row {row}" for row in rows],
        "words": [[row] * (row % 3) for row in rows],
        "sound": [None for _ in rows],
    }
    schema = features.arrow_schema
    columns = []
    for name, column in values.items():
        kind = schema.field(name).type
        stored = pa.array(column, getattr(kind, "storage_type", kind))
        columns.append(pa.ExtensionArray.from_storage(kind, stored) if isinstance(kind, pa.ExtensionType) else stored)
    table = InMemoryTable(pa.table(dict(zip(values, columns, strict=True))))
    return datasets.Dataset(table, info=datasets.DatasetInfo(features=features))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a saved DatasetDict, one of its splits saved alone, and the hub's layout."""
    import datasets

    folder = tmp_path_factory.mktemp("written")
    datasets.disable_progress_bars()
    both = datasets.DatasetDict({"train": numbered(40), "test": numbered(8, 40)})
    both.save_to_disk(folder / "saved", num_shards={"train": 3, "test": 1})
    both["test"].save_to_disk(folder / "alone")
    for number in range(2):
        shard = both["train"].shard(2, number, contiguous=True)
        shard.to_parquet(folder / f"hub/data/train-{number:05d}-of-00002.parquet")
    both["test"].to_parquet(folder / "hub/data/test-00000-of-00001.parquet")
    (folder / "hub/README.md").write_text("# A dataset\n")
    return folder


@pytest.fixture
def folder(written: Path, workshop: Any) -> Path:
    """A copy of it beside the run file, which a test may change."""
    shutil.copytree(written, workshop.code, dirs_exist_ok=True)
    return Path(workshop.code)


def names_of(path: str, folder: Path, **chosen: Any) -> list[str]:
    return [file.name for file in find_split(path, folder, **{"config": None, "split": "train", **chosen}).files]


def test_files_of_a_split_are_found(written: Path) -> None:
    assert names_of("saved", written) == [f"data-{number:05d}-of-00003.arrow" for number in range(3)]
    assert names_of("saved", written, split="test") == ["data-00000-of-00001.arrow"]
    assert names_of("saved/test", written) == names_of("alone", written) == ["data-00000-of-00001.arrow"]
    assert names_of("hub", written) == ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]
    assert names_of("hub/data", written, split="test") == ["test-00000-of-00001.parquet"]
    assert list(find_split("saved", written, config=None, split="train").features or ()) == COLUMNS


def changed_json(**changed: Any) -> Any:
    def change(file: Path) -> None:
        file.write_text(json.dumps(json.loads(file.read_text()) | changed))

    return change


STATE, TABLE, INFO = "train/state.json", "train/data-00001-of-00003.arrow", "train/dataset_info.json"


def shortened(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


MALFORMED = [
    ("saved", STATE, Path.unlink, "saved/train: has no state.json; copy the whole folder"),
    ("saved", STATE, changed_json(_data_files=[]), "state.json: not a readable"),
    ("saved", STATE, changed_json(_data_files=[{"filename": "../test/a.arrow"}]), r"lists '\.\./test/a\.arrow', which"),
    ("saved", STATE, changed_json(_indices_data_files=[{"filename": "i"}]), r"save dataset\.flatten_indices"),
    ("saved", STATE, lambda file: file.write_bytes(b"{"), "state.json: not a readable"),
    ("saved", TABLE, Path.unlink, "state.json: lists 'data-00001-of-00003.arrow', which is not in this folder"),
    ("saved", TABLE, shortened, "00001-of-00003.arrow: "),
    ("saved", TABLE, lambda file: file.write_bytes(b"PAR1"), "00001-of-00003.arrow: cannot be read as Arrow"),
    ("saved", INFO, Path.unlink, "saved/train: has no dataset_info.json"),
    ("saved", INFO, changed_json(features=None), "dataset_info.json: not a readable"),
    ("saved", "dataset_dict.json", changed_json(splits=["test"]), "split: 'train': .* no such split; available: test"),
    ("saved", "dataset_dict.json", changed_json(splits=3), "dataset_dict.json: not a readable"),
    ("hub", "data/train-00001-of-00002.parquet", Path.unlink, "data/train-00001-of-00002 is missing: there are 1 of 2"),
    ("hub", "data/train-00001-of-00002.parquet", shortened, "00001-of-00002.parquet: cannot be read as Parquet"),
]


@pytest.mark.parametrize(("place", "change", "words"), [((path, name), *rest) for path, name, *rest in MALFORMED])
def test_malformed_folders_are_refused(
    workshop: Any, folder: Path, place: tuple[str, str], change: Any, words: str
) -> None:
    change(folder.joinpath(*place))
    require_refused(workshop, {"path": place[0]}, words)


def require_refused(workshop: Any, changed: dict[str, Any], words: str) -> None:
    options = {key: value for key, value in {**WHOLE, **changed}.items() if value is not None}
    with pytest.raises(BatonError, match=words) as refused:
        workshop.prepare("huggingface", options)
    assert refused.value.exit_code == 2
    assert workshop.files() == {}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"path": "hub", "split": "dev"},
            r"data\.options\.split: 'dev': hub has no such split; available: test, train",
        ),
        ({"path": "hub", "config": "date"}, r"data\.options\.config: 'date': hub .*did you mean data\?"),
        ({"path": "hub/data", "config": "x"}, r"data\.options\.config: 'x': hub/data has no such folder"),
        ({"path": "saved", "config": "x"}, r"data\.options\.config: 'x': .* has no configurations; remove it"),
        ({"path": "saved/train/dataset_info.json"}, r"no Parquet files but dataset_info\.json; name the folder"),
        ({"path": "saved", "y": "lable"}, r"data\.options\.y: .*arrow has no column 'lable'; did you mean label\?"),
        ({"path": "saved", "x": "image", "size": None}, r"the column 'image\.bytes' is .*set data\.options\.size"),
        ({"path": "saved", "x": "words", "shapes": {"words": [1]}}, r"column 'words' has a list of 0 values, not 1"),
        ({"path": "saved", "x": "words"}, r"the column 'words' is list<.*lists of any length; set data\.pad"),
        ({"path": "saved", "x": None}, r"the column 'sound' is Audio, and"),
        ({"path": "saved", "x": "sound"}, r"the column 'sound' is Audio, and .*decode it in your own data\.py:load"),
        ({"path": "hub", "revision": COMMIT}, r"data\.options\.name is missing"),
        ({}, r"data\.options\.path is missing: the source huggingface needs a path, or the name"),
        ({"name": "me/rows"}, r"data\.options\.revision is missing: me/rows names other examples whenever"),
        ({"name": "me/rows", "revision": "main"}, r"data\.options\.revision: 'main': .*its commit, 40 hex digits"),
        (
            {"name": "me/rows", "revision": COMMIT, "path": "hub"},
            r"data\.options\.name: 'me/rows': .*remove one of them",
        ),
        ({"name": "me rows", "revision": COMMIT}, r"data\.options\.name: 'me rows': .*such as owner/dataset"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_options_that_do_not_fit_are_refused(workshop: Any, changed: dict[str, Any], words: str) -> None:
    require_refused(workshop, changed, words)


def examples(workshop: Any, ref: Any, **changed: Any) -> list[Any]:
    """All training examples of one epoch, as the reader gives them."""
    from baton.tasks.foundation.dataset.read import training_dataset

    settings = {"seed": 0, "global_batch_size": ref.train_examples, "window_shards": 2, "first_batch": 0, **changed}
    return next(training_dataset(workshop.storage, ref, **settings).as_numpy_iterator())


def require_rows(x: dict[str, Any], y: Any, rows: range) -> None:
    order = np.argsort(x["vector"][:, 0])
    numbers = x["vector"][order, 0]
    assert numbers.tolist() == list(rows)
    np.testing.assert_array_equal(x["vector"][order], np.stack([numbers, numbers + 0.5, -numbers], axis=1))
    np.testing.assert_array_equal(
        x["matrix"][order], np.stack([np.stack([numbers] * 3, 1), np.stack([numbers + 1] * 3, 1)], 1)
    )
    np.testing.assert_array_equal(
        x["image"][order], np.broadcast_to(numbers[:, None, None, None], (len(rows), 4, 5, 3))
    )
    assert x["text"][order].tolist() == [f"row {row}".encode() for row in rows]
    assert y[order].tolist() == [row % 2 for row in rows]


@pytest.mark.parametrize("path", ["saved", "hub"])
def test_rows_are_read_in_place(workshop: Any, folder: Path, path: str) -> None:
    ref = workshop.prepare("huggingface", {**WHOLE, "path": path}, validation_fraction=0.0)
    assert list(workshop.files()) == [manifest_path(ref.folder)]
    manifest = load_manifest(workshop.storage, ref)
    assert manifest.class_names == ("cat", "dog")
    assert all(shard.path.startswith(f"{folder}/{path}/") for shard in manifest.train)
    require_rows(*examples(workshop, ref), range(40))
    test = workshop.prepare("huggingface", {**WHOLE, "path": path, "split": "test"}, validation_fraction=0.0)
    require_rows(*examples(workshop, test), range(40, 48))
    copied = workshop.prepare("huggingface", {**WHOLE, "path": path, "copy": True}, validation_fraction=0.0)
    require_rows(*examples(workshop, copied), range(40))


def test_saved_dataset_in_a_bucket_has_the_same_rows(workshop: Any, written: Path) -> None:
    storage = MemoryStorage("huggingface-test")
    storage.delete("")
    for file in (written / "saved").rglob("*.*"):
        storage.upload(file, str(file.relative_to(written)))
    ref = workshop.prepare("huggingface", {**WHOLE, "path": f"{storage.uri}/saved"}, validation_fraction=0.0)
    assert load_manifest(workshop.storage, ref).train[0].path.startswith(f"{storage.uri}/saved/train/data-00000")
    require_rows(*examples(workshop, ref), range(40))
    storage.delete("")


@pytest.fixture
def hub(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """The hub on loopback with one dataset, and an empty cache."""
    from huggingface_hub import constants

    with FakeHub() as server:
        files = [file for file in (written / "hub").rglob("*") if file.is_file()]
        server.add("me/rows", COMMIT, {str(file.relative_to(written / "hub")): file.read_bytes() for file in files})
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        yield server


def downloaded(name: str = "me/rows", revision: str = COMMIT, split: str = "train") -> list[Path]:
    return [Path(file.uri) for file in download_split(name, revision, Path(), config=None, split=split).files]


def test_files_of_a_split_are_downloaded_once(hub: FakeHub, written: Path) -> None:
    first = downloaded()
    assert [file.read_bytes() for file in first] == [
        file.read_bytes() for file in sorted((written / "hub/data").glob("train*"))
    ]
    assert not [path for _, path in hub.requests if path.endswith("test-00000-of-00001.parquet")]
    hub.requests.clear()
    assert downloaded() == first
    assert hub.requests == []
    hub.add("me/rows", COMMIT, {})
    hub.status = (503, "")  # what is in the cache needs no hub
    assert downloaded() == first


def test_bytes_that_differ_from_the_hub_are_refused(hub: FakeHub) -> None:
    hub.damaged.add("data/train-00001-of-00002.parquet")
    for _ in range(2):  # the damaged file is not taken from the cache
        with pytest.raises(DamagedInTransit, match=r"me/rows@abababab: data/train-00001-of-00002.parquet: has sha256"):
            downloaded()
    hub.damaged.clear()
    assert len(downloaded()) == 2


@pytest.mark.parametrize(
    ("status", "chosen", "words"),
    [
        (None, {"name": "me/columns"}, "data.options.name: me/columns@abababab: the hub has no such dataset or no"),
        (None, {"revision": "cd" * 20}, "me/rows@cdcdcdcd: the hub has no such dataset or no such commit"),
        (
            None,
            {"split": "dev"},
            "data.options.split: 'dev': me/rows@abababab has no such split; available: test, train",
        ),
        ((401, "GatedRepo"), {}, "or asks you to log in; .* accept its terms on the hub"),
        ((404, ""), {}, "cannot be downloaded .*check the connection and HF_ENDPOINT"),
    ],
)
def test_what_the_hub_does_not_give_is_refused(hub: FakeHub, status: Any, chosen: dict[str, str], words: str) -> None:
    hub.status = status
    with pytest.raises(BatonError, match=words) as refused:
        downloaded(**chosen)
    assert refused.value.exit_code == 2


def test_missing_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(SourceError, match=r"huggingface_hub is missing; install it with pip install 'baton-relay\["):
        downloaded()


def test_dataset_of_the_hub_is_read_from_its_cache(
    hub: FakeHub, workshop: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {**WHOLE, "name": "me/rows", "revision": COMMIT}
    ref = workshop.prepare("huggingface", options, validation_fraction=0.0)
    manifest = load_manifest(workshop.storage, ref)
    assert manifest.train[0].path.startswith(f"{tmp_path}/cache/datasets--me--rows/snapshots/{COMMIT}/data/train-")
    assert manifest.origin["me/rows/train"] == f"commit {COMMIT}"
    require_rows(*examples(workshop, ref), range(40))
    assert capsys.readouterr().err == ""  # no bars of a download in a log
    hub.status = (503, "")
    assert workshop.prepare("huggingface", options, validation_fraction=0.0).already_prepared


def test_class_labels_in_another_order_are_refused(workshop: Any, folder: Path) -> None:
    import datasets

    swapped = numbered(8).cast_column("label", datasets.ClassLabel(names=["dog", "cat"]))
    swapped.save_to_disk(str(folder / "swapped"))
    own = {"source": "huggingface", "options": {**WHOLE, "path": "swapped"}}
    with pytest.raises(SourceError, match=r"^data\.test: y = 0 means 'dog', and 'cat' in training"):
        workshop.prepare("huggingface", {**WHOLE, "path": "saved"}, test=own)
    assert not workshop.files()
