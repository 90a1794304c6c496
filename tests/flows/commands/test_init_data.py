"""`baton init --data` says what it sees in files, and writes a run file and a model that fit them."""

import json
import os
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import yaml

from flows.commands.main import main
from tasks.foundation.contracts.run_file import load_run_file
from tasks.foundation.user_code import load_function
from tests.support import forked
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
        (1,),
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
        (ids, _) = cast(Any, load_function("model.py:word_ids", folder))(("two words", 0), seed=None)
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
    model = load_function("model.py:build_model", run.folder)()
    arrays = {each["name"]: zeros(each, run.folder) for each in seen["features"]}
    y = arrays.pop("y")
    x = arrays.get("x", {name.removeprefix("x/"): array for name, array in arrays.items()})
    predicted = model(x)
    assert predicted.shape == (2, *outputs)
    assert np.isfinite(float(model.compute_loss(x=x, y=y, y_pred=predicted)))


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
    model = cast(Any, load_function("model.py:build_model", folder / "run")())
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
    measurements(folder)
    for words in (["init", "run", "--data", "flowers.npz"], ["run", "run/run.yaml"]):
        done = forked.run(
            [sys.executable, "-m", "flows.commands.main", *words],
            cwd=folder,
            env=os.environ | {"PREFECT_HOME": str(folder / "prefect")},
            capture_output=True,
            text=True,
            check=False,
            timeout=400,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "Done: flowers is at step" in done.stdout
