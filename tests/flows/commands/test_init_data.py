"""`baton init --data` says what it sees in files, and writes a run file and a model that fit them."""

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
import yaml
from pyarrow import ipc, parquet

from baton.flows.commands.main import main
from baton.flows.opened_run import OpenedRun
from baton.flows.result import Goal
from baton.flows.train import train
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.telemetry.events import Silent
from baton.tasks.foundation.user_functions import load_function
from tests.support.data_folders import (
    Made,
    book,
    customers,
    flowers,
    measurements,
    photos,
    pictures,
    prepared,
    prices,
    records,
    reviews,
    saved,
    shards,
)

# What is found of each: options of the run file, features, classes, and the shape of the model's outputs.
FOUND: dict[Made, tuple[dict[str, Any], list[str], int | None, tuple[int, ...]]] = {
    measurements: ({"x": "x", "y": "y"}, ["x float32[4]", "y int64[]"], 3, (3,)),
    prices: ({"x": "x", "y": "y"}, ["x float32[3]", "y float32[]"], None, (1,)),
    pictures: ({"x": "x_train", "y": "y_train"}, ["x uint8[8, 8]", "y int64[]"], 10, (10,)),
    photos: ({"size": [8, 16], "channels": 3}, ["x uint8[8, 16, 3]", "y int64[]"], 2, (2,)),
    records: (
        {
            "features": {
                "image/class/label": {"dtype": "int64"},
                "image/encoded": {"dtype": "uint8", "shape": [4, 5, 3], "encoding": "image"},
            },
            "x": "image/encoded",
            "y": "image/class/label",
        },
        ["x uint8[4, 5, 3]", "y int64[]"],
        3,
        (3,),
    ),
    prepared: ({"split": "train"}, ["x uint8[6, 5, 3]", "y int64[]"], 3, (3,)),
    shards: (
        {"x": "png", "y": "cls", "size": [4, 5]},
        ["x uint8[4, 5, 3]", "y int64[]"],
        12,
        (12,),
    ),
    flowers: (
        {
            "x": ["length", "width"],
            "y": "species",
            "stack": True,
            "vocabulary": {"species": ["setosa", "versicolor", "virginica"]},
        },
        ["x float32[2]", "y int64[]"],
        3,
        (3,),
    ),
    customers: (
        {
            "x": ["age", "city", "plan", "vector"],
            "y": "label",
            "fill": {"age": 0, "city": "missing"},
            "vocabulary": {"city": ["Lima", "Oslo", "missing"]},
            "shapes": {"vector": [2]},
        },
        ["x/age int64[]", "x/city int64[]", "x/plan int64[]", "x/vector float32[2]", "y bool[]"],
        None,
        (2,),
    ),
    saved: (
        {"x": "image", "y": "label", "size": [4, 5], "split": "train"},
        ["x uint8[4, 5, 3]", "y int64[]"],
        2,
        (2,),
    ),
    reviews: ({"x": "text", "y": "label"}, ["x string[]", "y int64[]"], 2, (2,)),
    book: ({"length": 64, "suffix": ".txt"}, ["x int32[64]", "y int32[64]"], None, (64, 256)),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def zeros(feature: dict[str, Any], folder: Path) -> Any:
    """Two examples of a feature, as the model gets them."""
    if feature["dtype"] == "string":
        (ids, _) = cast(Any, load_function("model.py:word_ids", folder))((tf.constant("two words"), 0), seed=None)
        return np.stack([ids, ids])
    return np.zeros((2, *feature["shape"]), feature["dtype"])


@pytest.mark.parametrize("made", FOUND, ids=lambda made: made.__name__)
def test_run_file_and_model_fit_the_data(made: Made, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options, features, classes, outputs = FOUND[made]
    path = made(folder)
    assert main(["init", "run", "--data", path, "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)["data"]
    assert [f"{each['name']} {each['dtype']}{each['shape']}" for each in seen["features"]] == features
    assert seen["classes"] == classes
    run = load_run_file(folder / "run" / "run.yaml")
    given = run.spec.data.options
    assert (run.folder / given["path"]).resolve().is_relative_to(folder / path)
    assert {key: value for key, value in given.items() if key != "path"} == options
    model = load_function("model.py:build_model", run.folder)(**run.spec.model.options)
    arrays = {each["name"]: zeros(each, run.folder) for each in seen["features"]}
    y = arrays.pop("y")
    x = arrays.get("x", {name.removeprefix("x/"): array for name, array in arrays.items()})
    predicted = model(x)
    assert predicted.shape == (2, *outputs)
    assert np.isfinite(float(model.compute_loss(x=x, y=y, y_pred=predicted)))


def test_files_that_are_not_read_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("0.csv", "1.CSV", "2.csv.json"):
        (folder / "f").mkdir(exist_ok=True)
        (folder / "f" / name).write_text("a,y\n" + "1,0\n2,1\n" * 10)
    assert main(["init", "run", "--data", "f", "--label", "y"]) == 0
    said = capsys.readouterr().out
    assert "examples  40" in said
    assert "note      f: 1 file not read: 2.csv.json" in said


def test_sets_of_their_own_are_named(folder: Path) -> None:
    for made, name in ((photos, "validation"), (pictures, "test"), (saved, "test")):
        path = made(folder)
        run = folder / f"{made.__name__}-run"
        assert main(["init", str(run), "--data", path]) == 0
        data = yaml.safe_load((run / "run.yaml").read_text())["data"]
        own = data[name]["options"]
        assert own != data["options"]
        assert (run / own["path"]).exists()


def test_inputs_have_other_names_than_layers(folder: Path) -> None:
    rows = ["dense,a b,label", *(f"{'uv'[row % 2]},{row},{row % 3}" for row in range(12))]
    (folder / "clash.csv").write_text("\n".join([*rows, ""]))
    assert main(["init", "run", "--data", "clash.csv"]) == 0
    options = load_run_file(folder / "run" / "run.yaml").spec.model.options
    model = cast(Any, load_function("model.py:build_model", folder / "run")(**options))
    assert sorted(model.input) == ["a_b", "dense_"]


def test_columns_and_classes_are_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "a", "--data", records(folder)]) == 0
    printed = capsys.readouterr().out
    assert "image/name" in printed
    assert "left out: neither numbers nor an image" in printed
    assert main(["init", "b", "--data", photos(folder)]) == 0
    assert "2 classes: cat, dog" in capsys.readouterr().out
    assert main(["init", "c", "--data", customers(folder)]) == 0
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["column", "age", "int64", "1", "null", "x"] in words
    assert ["examples", "30"] in words
    assert any(line[:2] == ["column", "clicks"] and "data.pad:" in line for line in words)


def table_with_nulls() -> pa.Table:
    return pa.table(
        {
            "truth": [True, None] * 6,
            "codes": pa.array(["a", None, "b"] * 4).dictionary_encode(),
            "nested": [[[1, 2]]] * 12,
            "views": pa.array(["u", "v", None] * 4, pa.string_view()),
            "y": list(range(12)),
        }
    )


@pytest.mark.parametrize("form", ["parquet", "arrow", "csv"])
def test_columns_of_folders_with_nulls_and_lists_are_found(form: str, folder: Path) -> None:
    for flag in ("false", "__HIVE_DEFAULT_PARTITION__"):
        (folder / "t" / f"flag={flag}").mkdir(parents=True)
        file = folder / "t" / f"flag={flag}" / f"0.{form}"
        if form == "csv":
            file.write_text("c;x;y\r" + "".join(f"{'ab'[row % 2]};{row},5;{row}\r" for row in range(12)))
        elif form == "parquet":
            parquet.write_table(table_with_nulls(), file)
        else:
            with ipc.new_file(str(file), table_with_nulls().schema) as writer:
                writer.write_table(table_with_nulls())
    assert main(["init", "run", "--data", "t"]) == 0
    given = load_run_file(folder / "run" / "run.yaml").spec.data.options
    words = {"flag": ["false", "missing"]}
    if form == "csv":
        assert (given["delimiter"], given["decimal"]) == (";", ",")
        assert given["vocabulary"] == {"c": ["a", "b"], **words}
    else:
        assert given["vocabulary"] == {"codes": ["a", "b", "missing"], "views": ["u", "v", "missing"], **words}
        assert given["shapes"] == {"nested": [1, 2]}
        assert given["fill"] == {"truth": 0, "codes": "missing", "views": "missing", "flag": "missing"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data", "nowhere.npz"], "--data: 'nowhere.npz'"),
        (["--data", "film.mp4"], "film.mp4, which no source reads"),
        (["--data", "flowers.npz", "--label", "z"], "--label z: there is no such column; available: x, y"),
        (["--data", "book.txt", "--label", "z"], "the label of text is the byte that follows"),
        (["--data", "one.npz"], "no column is named like a label; say which one is y: --label a or b"),
        (["--data", "nan.npz"], "x contains nan"),
        (["--label", "y"], "add --data PATH"),
        (["--data", "cut.parquet"], "cut.parquet"),
        (["--data", "."], "run is in the folder of the data"),
        (["--data", "customers.parquet", "--label", "age"], "age is null in 1 row"),
        (["--data", "customers.parquet", "--label", "note"], "the labels are texts"),
    ],
)
def test_what_cannot_be_used_is_refused(
    words: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measurements(folder)
    book(folder)
    customers(folder)
    (folder / "cut.parquet").write_bytes((folder / "customers.parquet").read_bytes()[:-99])
    (folder / "film.mp4").write_bytes(b"0")
    np.savez(folder / "one.npz", a=np.zeros(3), b=np.zeros(3))
    np.savez(folder / "nan.npz", x=np.full(3, np.nan), y=np.zeros(3))
    assert main(["init", "run", *words]) == 2
    assert said in capsys.readouterr().err
    assert not (folder / "run").exists()


@pytest.mark.slow
def test_written_run_trains(folder: Path) -> None:
    assert main(["init", "run", "--data", measurements(folder)]) == 0
    opened = OpenedRun.open(load_run_file(folder / "run" / "run.yaml"))
    assert train(opened, Goal.of(opened.spec), telemetry=Silent()).exit_reason == "complete"
