"""Light verbs on hostile homes, watched: they open, make and remove nothing outside of the storage, and start nothing.

All digests are right where files are JSON, as whoever wrote the home would have it.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.contracts.home_files import saved_code_path
from baton.tasks.foundation.log.files import entry_path
from tests.support.hostile_homes import ESCAPES, KINDS, HostileHome
from tests.support.light_verbs import VERBS, Outcome, run_light_verbs

PLANTED = "open({!r}, 'w').write('owned')\n"
Harm = Callable[[Path, HostileHome], object]  # of the folder of a home, which is a copy of the other one
Changes = tuple[tuple[tuple[Any, ...], Any], ...]


def named(path: str, home: HostileHome) -> str:
    """A path in the home; `TIP` is its newest checkpoint, and the others are entries of its log."""
    entries = map(entry_path, range(home.run.head.number + 1))
    changed = next(each for each in entries if home.json_of(each)["body"]["kind"] == "change")
    newest = entry_path(home.run.head.number)
    return path.replace("TIP", home.run.tip.path).replace("NEWEST", newest).replace("CHANGE", changed)


def replaced_by(make: Callable[[Path, Path], object], path: str) -> Harm:
    """Put something else in the place of a file or folder."""

    def harm(folder: Path, home: HostileHome) -> None:
        file = folder / named(path, home)
        if file.is_dir():
            shutil.rmtree(file)
        file.unlink(missing_ok=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        make(file, home.victim)

    return harm


def link_to_file(file: Path, victim: Path) -> None:
    file.symlink_to(victim / ".bashrc")


def link_to_folder(file: Path, victim: Path) -> None:
    file.symlink_to(victim)


def pipe(file: Path, _victim: Path) -> None:
    os.mkfifo(file)


def device(file: Path, _victim: Path) -> None:
    file.symlink_to("/dev/zero")


def with_python(folder: Path, home: HostileHome) -> None:
    """Put code in every place where Python or Keras might look for it."""
    code = PLANTED.format(str(home.victim / "owned"))
    files = [{"path": "model.py", "text": f"{code}def build(): ...\n"}]
    saved = json.dumps({"format": 1, "run_file": {}, "files": files})
    names = ("model.py", "sitecustomize.py", "usercustomize.py", "conftest.py", "code/__init__.py", "keras.json")
    for name, text in {**dict.fromkeys(names, code), saved_code_path(saved.encode()): saved}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def spoil(home: HostileHome, path: str, changes: Changes) -> None:
    """Change values in a JSON file, by their places; `VICTIM` in a text is the address of the folder outside."""
    name = named(path, home)
    document = home.json_of(name)
    for place, value in changes:
        at = document
        for part in place[:-1]:
            at = at[part]
        at[place[-1]] = value.replace("VICTIM", str(home.victim)) if isinstance(value, str) else value
    home.spoil_files({name: document})


FILES = (
    "log/HINT", "log/00000000.json", "NEWEST", "TIP/manifest.json", "TIP/ckpt.index", "report/index.html", "fork.json",
    f"attempts/{'a' * 32}.json", "answers/0.json", "audits/20260101T000000Z-0a.json", "code/0123456789abcdef.json",
    "proofs/20260101T000000Z-0a.json", "callbacks/log.csv",
)  # fmt: skip
FOLDERS = (
    "log", "log/blocks", "log/retained", "attempts", "attempts/closed", "answers", "audits", "proofs", "code", "report",
    "tensorboard", "confusion", "callbacks", "checkpoints", "TIP",
)  # fmt: skip
IN_PLACE: dict[str, Harm] = {
    "code in the home": with_python,
    **{f"{path} is a link to a file": replaced_by(link_to_file, path) for path in FILES},
    **{f"{path} is a link to a folder": replaced_by(link_to_folder, path) for path in FOLDERS},
    **{f"{path} is a pipe": replaced_by(pipe, path) for path in FILES},
    **{
        f"{path} is a device": replaced_by(device, path)
        for path in ("log/HINT", "NEWEST", "TIP/ckpt.index", "attempts")
    },
}
TIP, DATASET, FIRST, IDENTITY = "TIP/manifest.json", KINDS["dataset"], "log/00000000.json", ("body", "identity")
WEIGHTS = ("body", "initialized_from", "sources", 0, "place")
IN_JSON: dict[str, tuple[str, Changes]] = {
    "a file of a checkpoint leads up": (TIP, ((("files", 0, "name"), "../../../../victim/.bashrc"),)),
    "a file of a checkpoint is absolute": (TIP, ((("files", 0, "name"), "VICTIM/.bashrc"),)),
    "a shard has 9 EB": (DATASET, ((("train", 0, "size"), 2**63 - 1),)),
    "a shard has a size of 400 digits": (DATASET, ((("train", 0, "size"), 10**400),)),
    "a retired checkpoint leads up": ("NEWEST", ((("head", "retired"), [{"path": "../../victim", "at_commit": 0}]),)),
    "a lineage is outside": (FIRST, ((("body", "forked_from", "home"), "VICTIM"),)),
    "a lineage is in a bucket": (FIRST, ((("body", "forked_from", "home"), "gs://bucket/of/the/reader"),)),
    "weights are outside": ("log/00000001.json", ((WEIGHTS, "VICTIM/.bashrc"),)),
    "a dataset folder leads up": ("CHANGE", (((*IDENTITY, "data.folder"), "datasets/../../victim"),)),
    "a number of examples is negative": ("CHANGE", (((*IDENTITY, "data.train_examples"), -1),)),
    "saved code leads up": ("CHANGE", (((*IDENTITY, "code.saved"), "../../victim/manifest.json"),)),
    "a time has escapes": ("NEWEST", ((("time",), ESCAPES),)),
    "a stage took forever": (
        "log/00000002.json",
        ((("body", "seconds", "train"), 1e308), (("body", "seconds", "stage"), 1e308)),
    ),
    "a number has 400 digits": ("NEWEST", ((("head", "commits"), 10**400),)),
}
ROWS = (*IN_PLACE, *IN_JSON)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[HostileHome, Path, Outcome]]:
    """What the verbs did on each home; one process runs them all, because its start takes seconds."""
    folder = tmp_path_factory.mktemp("around")
    home = HostileHome(folder)
    copies: dict[str, Path] = {}
    for number, row in enumerate(ROWS):
        if row in IN_JSON:
            spoil(home, *IN_JSON[row])
        copies[row] = shutil.copytree(home.storage.parent, folder / "copies" / str(number)) / home.storage.name
        if row in IN_PLACE:
            IN_PLACE[row](copies[row] / home.run.name, home)
    watched = [folder, "/dev/zero", "/etc/passwd"]
    done = run_light_verbs([copy / home.run.name for copy in copies.values()], watched=watched)
    return {row: (home, copies[row], outcome) for row, outcome in zip(ROWS, done, strict=True)}


@pytest.mark.parametrize("row", ROWS)
def test_light_verbs_stay_in_the_home(row: str, outcomes: dict[str, tuple[HostileHome, Path, Outcome]]) -> None:
    home, copy, done = outcomes[row]
    assert [each for each in done.opened if each.startswith(str(copy))], "nothing is watched"
    assert [each for each in done.opened if not each.startswith(f"{copy}/") and each != str(copy)] == []
    assert done.reached == []
    assert set(done.codes) == set(VERBS)
    assert set(done.codes.values()) <= {0, 2, 4}, {verb: done.printed[verb] for verb in done.codes}
    for verb, text in done.printed.items():
        assert "Traceback" not in text, verb
        assert all(line.isprintable() for line in text.split("\n")), verb
    assert sorted(path.name for path in home.victim.iterdir()) == [".bashrc", "manifest.json"]
    assert (home.victim / ".bashrc").read_text() == "# mine\n"
    if done.codes["fork"] != 0:
        assert not (copy / "forked").exists(), done.printed["fork"]
