"""Sources of weights that cannot be used."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.contracts.run_spec import InitSpec, WeightsSource
from baton.tasks.foundation.errors import InvalidInput, WeightsError
from baton.tasks.init_or_restore.weights.loading import load_weights
from baton.tasks.init_or_restore.weights.location import locate_weights
from tests.support.lab import Lab
from tests.support.weights_lab import (
    SOURCE,
    fresh,
)


def cut_short(lab: Lab) -> str:
    shutil.copytree(lab.code / "graph", lab.code / "cut", dirs_exist_ok=True)
    file = lab.code / "cut" / "ckpt-1.data-00000-of-00001"
    file.write_bytes(file.read_bytes()[:100])
    return "cut"


def without_data(lab: Lab) -> str:
    (lab.code / "bodiless").mkdir(exist_ok=True)
    shutil.copy(lab.code / "graph" / "ckpt-1.index", lab.code / "bodiless" / "ckpt-1.index")
    return "bodiless/ckpt-1"


def two_checkpoints(lab: Lab) -> str:
    for name in ("a-1", "b-2"):
        (lab.code / "two").mkdir(exist_ok=True)
        (lab.code / "two" / f"{name}.index").touch()
    return "two/"


def written(name: str) -> Callable[[Lab], str]:
    def write(lab: Lab) -> str:
        (lab.code / name).write_bytes(b"no weights at all")
        return name

    return write


def checkpoint_of_a_run(lab: Lab) -> str:
    head = lab.log(SOURCE).head()
    assert head is not None
    assert head.tip is not None
    return str(lab.folder(SOURCE, head.tip))


def empty_folder(lab: Lab) -> str:
    (lab.code / "empty").mkdir(exist_ok=True)
    return "empty"


WRONG: dict[str, tuple[Any, list[str]]] = {
    "missing": ("nowhere.keras", ["nowhere.keras does not exist; ", "kept.keras"]),
    "unknown": (written("weights.bin"), ["is unknown; name a .weights.h5"]),
    "no hdf5": (written("torn.weights.h5"), ["torn.weights.h5 cannot be read as Keras weights", "save them again"]),
    "no archive": (written("torn.keras"), ["torn.keras cannot be read as Keras weights"]),
    "empty folder": (empty_folder, ["holds no weights of a known kind"]),
    "two checkpoints": (two_checkpoints, ["holds 2 checkpoints (a-1, b-2); name one of them, such as two/b-2"]),
    "checkpoint cut short": (cut_short, ["cannot be read as a TensorFlow checkpoint", "all its files are present"]),
    "checkpoint without data": (without_data, ["cannot be read as a TensorFlow checkpoint"]),
    "within a run": (checkpoint_of_a_run, ["is a checkpoint of a Baton run; name the run's home, and set step:"]),
    "no function": ("weights.py:lode", ["weights.py defines no function lode; it has: load"]),
    "no file": ("weight.py:load", ["weight.py does not exist"]),
    "raising": ("weights.py:raising", ["weights.py, line 10, in raising:", "raising raised KeyError: 'bucket'"]),
    "listing": ("weights.py:listing", ["returned list; return a dict of arrays"]),
    "texts": ("weights.py:texts", ["returned 'head/bias': str; return a dict of arrays"]),
    "step": ({"source": "kept.keras", "step": 3}, ["is a .keras file, but step: 3 is for Baton runs; remove it"]),
    "include": (
        {"source": "kept.keras", "include": ["hed/*"]},
        ["include: hed/* matches no variable; similar names: head"],
    ),
    "rename": ({"source": "kept.keras", "rename": {"hed": "x"}}, ["rename: hed: x: the model has no variable hed"]),
    "renamed away": (
        {"source": "kept.keras", "rename": {"head": "top"}},
        ["missing in the source: 2 variables: head/kernel, head/bias", "missing in the model: 2 variables"],
    ),
    "address": ("ftp://host/kept.keras", ["ftp:// is unknown"]),
}  # fmt: skip


def test_only_the_folder_itself_is_looked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`init.weights: /` walked through the whole machine."""
    (tmp_path / "models" / "deep").mkdir(parents=True)
    (tmp_path / "models" / "deep" / "a.index").touch()
    entered: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: entered.append(str(path)) or scandir(path))
    with pytest.raises(WeightsError, match="holds no weights of a known kind"):
        locate_weights(WeightsSource(source="models"), tmp_path)
    assert entered == [str(tmp_path / "models")]


@pytest.mark.parametrize("case", WRONG)
def test_unusable_sources_are_refused(lab: Lab, case: str) -> None:
    source, words = WRONG[case]
    state = fresh(lab)
    before = state.digest().root
    init = InitSpec.model_validate({"weights": ["kept.keras", source(lab) if callable(source) else source]})
    with pytest.raises(InvalidInput) as refused:
        load_weights(state, init, code_folder=lab.code, telemetry=lab.recorder)
    assert refused.value.exit_code == 2
    for word in words:
        assert word in str(refused.value)
    assert state.digest().root == before
