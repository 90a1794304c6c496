"""Typical mistakes, and what Baton says: mistakes.md has the message of each one.

Run as a program, this file writes that page.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

import pytest

from baton.flows.commands.main import main
from tests.support import forked
from tests.support.checkout import CHECKOUT

PAGE = Path(__file__).with_name("mistakes.md")
REGENERATE = "PYTHONPATH=. .venv/bin/python tests/flows/commands/test_mistakes.py"
PROGRAM = CHECKOUT / "tests" / "support" / "refused_runs.py"

# file -> (text in it, what stands there instead); None: the file is missing.
Changes = Mapping[str, Sequence[tuple[str, str]] | None]


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake in the run that `baton init` writes.

    Attributes:
        what: the mistake, in words.
        words: of the command.
        changes: of the files.
    """

    what: str
    words: Sequence[str] = ("run",)
    changes: Changes = field(default_factory=dict)


def run_file(text: str, instead: str) -> Changes:
    return {"run.yaml": [(text, instead)]}


def added(line: str, text: str, *, before: bool = False) -> Changes:
    return run_file(line, text + line if before else line + text)


_BEST = "checkpoint: {{keep_best: {{metric: {}, mode: {}}}}}\n"


def data(instead: str) -> Changes:
    return {"data.py": [("    return (x + random", f"    return {instead}\n    return (x + random")]}


def model(text: str, instead: str) -> Changes:
    return {"model.py": [(text, instead)]}


# Found without TensorFlow.
EARLY = [
    Mistake("a verb that does not exist", ["runn"]),
    Mistake("an option that does not exist", ["run", "--steps", "5"]),
    Mistake("a run file that does not exist", ["run", "spirals.yaml"]),
    Mistake("no run file in the folder", ["run"], {"run.yaml": None}),
    Mistake("a run that was never started", ["status"]),
    Mistake("a folder that does not exist", ["list", "nowhere"]),
    Mistake("a home that is none", ["log", "."]),
    Mistake("a key that does not exist", changes=added("train:\n", "  segment_step: 500\n")),
    Mistake("a key that does not exist, by --set", ["run", "--set", "train.step=10"]),
    Mistake("--set without a value", ["run", "--set", "train.steps"]),
    Mistake("words in place of a number", changes=run_file("epochs: 20", "steps: many")),
    Mistake("a number that is too small", changes=run_file("epochs: 20", "steps: 0")),
    Mistake("steps and epochs", ["run", "--set", "train.steps=1500"]),
    Mistake("a missing key", changes=run_file("model: model.py:build_model ", "# model: ")),
    Mistake("a tab in the run file", changes=run_file("  epochs: 20", "\tepochs: 20")),
    Mistake("a name that is no folder", changes=run_file("run: spirals ", "run: my/spirals ")),
    Mistake("a storage that is not supported", changes=run_file("./runs ", "s3://bucket/runs ")),
    Mistake("a batch that replicas cannot share", ["run", "--set", "accelerator={kind: cpu, replicas: 3}"]),
    Mistake("an accelerator that does not exist", ["run", "--set", "accelerator.kind=cuda"]),
    Mistake("a mode that does not exist", changes=added("train:\n", _BEST.format("accuracy", "highest"), before=True)),
    Mistake("a source without its function", changes=run_file("data.py:load ", "data.py ")),
    Mistake("a source that does not exist", changes=run_file("data.py:load ", "digit ")),
    Mistake("a target behind the begin", ["run", "--until-step", "-5"]),
    Mistake("a step that is none", ["evaluate", "--step", "last"]),
    Mistake("a format that does not exist", ["export", "--format", "coreml", "--to", "spirals.mlmodel"]),
]
# Found when the user's code runs.
IN_CODE = [
    Mistake("a data file that does not exist", changes={"data.py": None}),
    Mistake("a function that does not exist", changes=run_file("data.py:load ", "data.py:loda ")),
    Mistake("a syntax error", changes={"data.py": [("y = np.arange(examples) % 3", "y = np.arange(examples % 3")]}),
    Mistake("data that is nothing", changes=data("None")),
    Mistake("x and y of different lengths", changes=data("x, y[:-1]")),
    Mistake("a training and a validation set", changes=data("(x[:9], y[:9]), (x[9:], y[9:])")),
    Mistake("no labels", changes=data("x")),
    Mistake("labels that are text", changes=data("x, y.astype(str)")),
    Mistake("a column for each class, and a sparse loss", changes=data("x, np.eye(3)[y]")),
    Mistake("NaN in the data", changes=data("x * np.nan, y")),
    Mistake("a model that is not compiled", changes=model("    model.compile(", "    (lambda *a, **k: None)(")),
    Mistake("a build function that returns nothing", changes=model("    return model", "    model.summary")),
    Mistake("another input shape than the data's", changes=model("keras.Input((2,))", "keras.Input((5,))")),
    Mistake("an optimizer that does not exist", changes=model("keras.optimizers.Adam(3e-3)", "'adamm'")),
    Mistake("a module that is not installed", changes=model("import keras\n", "import keras\nimport torchvision\n")),
    Mistake("a metric that the model does not have", changes=added("train:\n", _BEST.format("f1", "max"), before=True)),
    Mistake("a label that is no class", changes=run_file("validation_fraction: 0.1", "classes: 2")),
]


def prepared(folder: Path, mistake: Mistake) -> Path:
    """Write the files of `baton init`, with a mistake."""
    for name, template in (("run.yaml", "run.yaml"), ("model.py", "model.py.txt"), ("data.py", "data.py.txt")):
        text = (files("baton.flows.commands") / "new_run" / template).read_text("utf-8")
        changes = mistake.changes.get(name, ())
        for old, new in changes or ():
            assert old in text, (mistake.what, old)
            text = text.replace(old, new)
        if changes is not None:
            (folder / name).write_text(text, encoding="utf-8")
    return folder


def printed_early(mistake: Mistake) -> tuple[int, str]:
    with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(io.StringIO()):
        code = main(list(mistake.words))
    return code, errors.getvalue()


def page(root: Path) -> str:
    """mistakes.md, a function of the code. Each run is made below `root`, which must be empty."""
    folders = {mistake.what: root / str(number) for number, mistake in enumerate((*EARLY, *IN_CODE))}
    for mistake in (*EARLY, *IN_CODE):
        folders[mistake.what].mkdir()
        prepared(folders[mistake.what], mistake)
    before = Path.cwd()
    said = {}
    try:
        for mistake in EARLY:
            os.chdir(folders[mistake.what])
            said[mistake.what] = printed_early(mistake)
    finally:
        os.chdir(before)
    names = [str(folders[mistake.what]) for mistake in IN_CODE]
    done = forked.run([sys.executable, str(PROGRAM), *names], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    said |= {mistake.what: tuple(found[str(folders[mistake.what])]) for mistake in IN_CODE}
    parts = ["# Mistakes, and what Baton says\n"]
    for mistake in (*EARLY, *IN_CODE):
        code, text = said[mistake.what]
        text = text.replace(str(folders[mistake.what]), "~/spirals").rstrip()
        parts.append(f"## {mistake.what}\n\n```\n$ baton {' '.join(mistake.words)}\n{text}\n```\n\nexit code {code}\n")
        assert not list(folders[mistake.what].glob("runs/*/log/*")), "something was written"
    return "\n".join(parts)


@pytest.mark.slow
def test_messages_of_typical_mistakes(tmp_path: Path) -> None:
    assert len(EARLY) + len(IN_CODE) >= 30
    assert PAGE.read_text(encoding="utf-8") == page(tmp_path), f"look at the difference, then: {REGENERATE}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        PAGE.write_text(page(Path(name)), encoding="utf-8")
