"""Every command that a hint prints is executed, and the run goes on: no hint is a dead end."""

import contextlib
import html
import io
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from baton.flows.commands.main import main
from baton.flows.commands.options import RUN_FILE
from baton.flows.commands.output import commands_to_paste
from baton.flows.commands.run import _continue_command, print_summary
from baton.flows.facts import RunFacts
from baton.flows.opened_run import OpenedRun, RunHome
from baton.flows.result import Goal, RelayResult
from baton.flows.train import train
from baton.tasks.foundation.checkpoint.fork import refuse_unfinished_fork
from baton.tasks.foundation.contracts.identity import accepted_keys
from baton.tasks.foundation.contracts.log_entry import Lineage, UnfinishedFork
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.contracts.run_spec import with_examples
from baton.tasks.foundation.errors import BatonError, IdentityChanged, InvalidInput, RunFileError, StateMismatch
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.telemetry.console import Console
from baton.tasks.foundation.telemetry.events import Silent
from tests.support.fake_run import FakeRun

MODEL = """
import keras


def build(width=5, activation="tanh"):
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(width, activation=activation), keras.layers.Dense(3)]
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class Ends(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = True


def callbacks():
    return [Ends()]
"""
DATA = """
import numpy as np


def load():
    draw = np.random.default_rng(0)
    return draw.normal(size=(40, 6)).astype("float32"), draw.integers(0, 3, size=40)
"""
SETTINGS = {
    "run": "r",
    "storage": "runs",
    "data": {"source": "data.py:load", "validation_fraction": 0},
    "model": "model.py:build",
    "train": {"epochs": 2, "global_batch_size": 8},
    "accelerator": {"kind": "cpu"},
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    (folder / "model.py").write_text(MODEL)
    (folder / "data.py").write_text(DATA)
    (folder / RUN_FILE).write_text(yaml.safe_dump(SETTINGS))
    return folder


@pytest.fixture(scope="module")
def trained(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a run that is at its target."""
    folder = shutil.copytree(written, tmp_path_factory.mktemp("trained") / "folder")
    with contextlib.chdir(folder):
        run()
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return entered(written, tmp_path, monkeypatch)


def entered(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a folder, as the working folder. Its code is imported anew, as in a new process."""
    folder = shutil.copytree(source, tmp_path / "folder", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(folder)
    return folder


def run(*words: str) -> RelayResult:
    """`baton run` with these words, without Prefect."""
    given = list(zip(words[::2], words[1::2], strict=True))
    overrides = [value for name, value in given if name == "--set"]
    accept = [key for name, value in given if name == "--accept" for key in accepted_keys(value)]
    assert {name for name, _ in given} <= {"--set", "--accept"}
    with commands_to_paste(RUN_FILE, overrides):
        opened = OpenedRun.open(load_run_file(Path(RUN_FILE), overrides))
        return train(opened, Goal.of(opened.spec), telemetry=Silent(), accept=accept)


def execute(command: str) -> RelayResult | None:
    """Execute what a person pastes, which may be two commands."""
    done = None
    for each in command.split(" && "):
        program, verb, *words = shlex.split(each)
        assert program.endswith("baton")
        if verb == "run":
            assert words.pop(0) == RUN_FILE
            done = run(*words)
        else:
            assert main([verb, *words]) == 0
    return done


def commands_of(fault: BatonError) -> list[str]:
    """The commands of the hints of an error; those in parentheses, which add to one, with it."""
    found = []
    for line in str(fault).splitlines():
        if line.startswith("hint: ") and (at := line.find("baton ")) >= 0:
            command, _, more = line[line.rfind(": ", 0, at) + 2 :].partition(" (")
            found.append(command)
            if " add --set " in more:
                found.append(f"{command} {more[more.index('--set') : -1]}")
    return found


CHANGES = {
    "width": ("width=5", "width=7"),
    "activation": ('activation="tanh"', 'activation="relu"'),
    "option of the width": ("--set", "model.options.width=7"),
    "seed": ("--set", "train.seed=1"),
}
AT_NIGHT = {"option of the activation": ("--set", "model.options.activation=relu")}


@pytest.mark.slow
@pytest.mark.parametrize("change", [*CHANGES, *(pytest.param(name, marks=pytest.mark.nightly) for name in AT_NIGHT)])
def test_hints_of_a_changed_run_go_on(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    folder = entered(trained, tmp_path, monkeypatch)
    old, new = {**CHANGES, **AT_NIGHT}[change]
    words = ("--set", "train.epochs=3")
    if old == "--set":
        words = (*words, old, new)
    else:
        (folder / "model.py").write_text(MODEL.replace(old, new, 1))
    with pytest.raises(IdentityChanged) as refused:
        run(*words)
    commands = commands_of(refused.value)
    # Weights of other shapes cannot go on: where that is known, nothing says so.
    assert any("--accept" in each for each in commands) == (change != "width")
    assert len([each for each in commands if "--set run=NEW" in each]) >= 2
    for place, printed in enumerate(commands):
        command = printed.replace("NEW", f"new-{place}")  # the user chooses the name
        if change == "option of the width" and "--accept" in command:
            assert "if all weights keep their shapes: " in str(refused.value)
            with pytest.raises(StateMismatch) as mismatch:
                execute(command)
            assert "set another name under run: to begin a new run" in str(mismatch.value)
            continue
        done = execute(command)
        assert done is not None
        assert done.step == 15, command


def summary_of(*words: str, result: RelayResult) -> str:
    """The command behind `continue` in the last lines of `baton run`."""
    overrides = list(words[1::2])
    opened = OpenedRun.open(load_run_file(Path(RUN_FILE), overrides))
    stream, newest = io.StringIO(), opened.require_newest()
    print_summary(
        Console(stream),
        RunFacts.of(opened, newest),
        exit_reason=result.exit_reason,
        report_path=None,
        report_command="baton report",
        continue_command=_continue_command(RUN_FILE, overrides, opened.with_recorded_examples(newest.head), result),
    )
    found = re.search(r"^continue +(.*)$", stream.getvalue(), re.MULTILINE)
    assert found is not None
    return found[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("--set", "train.epochs=5"),
        *(pytest.param(words, marks=pytest.mark.nightly) for words in ((), ("--set", "train.steps=23"))),
    ],
)
def test_a_run_beyond_its_files_target_goes_on(folder: Path, words: tuple[str, ...]) -> None:
    """The run file still says two epochs, of which twice as many are done already."""
    if "train.steps=23" in words:
        (folder / RUN_FILE).write_text(yaml.safe_dump({**SETTINGS, "train": {"steps": 10, "global_batch_size": 8}}))
    done = run(*words)
    again = run()
    assert (again.exit_reason, again.step) == ("nothing_to_do", done.step)
    further = execute(summary_of(result=again))
    assert further is not None
    assert further.step == 2 * done.step


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_a_run_that_unchanged_callbacks_ended_goes_on() -> None:
    words = ("--set", "train.callbacks=model.py:callbacks")
    done = run(*words)
    assert (done.exit_reason, done.step) == ("finished_early", 5)
    further = execute(summary_of(*words, result=done))
    assert further is not None
    assert (further.exit_reason, further.step) == ("complete", 10)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    monkeypatch.chdir(tmp_path)
    return FakeRun(tmp_path).train(100, 200)


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 2) -> str:
    assert main(list(words)) == code
    printed = capsys.readouterr()
    return printed.out + printed.err


def test_hints_about_addresses_help(fake: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = re.findall("`(baton list)` shows", said(capsys, "status", f"{fake.root.uri}/nowhere"))
    execute(f"{command} {fake.root.uri}")
    assert "digits" in capsys.readouterr().out
    override = ["--set", "train.steps=500"]
    assert "leave --set out, or name the run file" in said(capsys, "status", fake.address, *override)
    said(capsys, "status", fake.address, code=0)
    assert "500" in said(capsys, "status", str(fake.run_file()), *override, code=0)
    for options in ([], ["--places"]):
        said(capsys, "report", fake.address, *options, code=0)
        page = html.unescape(fake.path("report/index.html").read_text())
        (commands,) = re.findall("(baton status [^<]+)<", page)
        for each in commands.replace("HOME", fake.address).split("; "):
            execute(each)


def test_hints_of_init_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (command,) = re.findall("write one with: (.*)", said(capsys, "status"))
    execute(command)
    capsys.readouterr()
    (command,) = re.findall("start it with: (.*)", said(capsys, "status"))
    assert load_run_file(Path(shlex.split(command)[2])).spec.run == "spirals"
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.csv").write_text("x,y\n" + "1,0\n2,1\n" * 20)
    (command,) = re.findall("a folder for the run: (.*)", said(capsys, "init", "rows/run", "--data", "rows"))
    execute(command.replace("NEW", "new"))
    assert load_run_file(tmp_path / "new" / RUN_FILE).spec.data.source == "table"


def test_hints_about_unfinished_forks_help(fake: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    ref = fake.head.retained[1]
    lineage = Lineage(home=fake.address, path=ref.path, step=100, state_digest=ref.state_digest, entry=2)
    for name in ("one", "two"):
        fake.root.write(f"{name}/fork.json", UnfinishedFork(lineage=lineage).to_json())
    with pytest.raises(InvalidInput, match="copy it again: ") as refused:
        refuse_unfinished_fork(RunLog(fake.root.at("two")))
    execute(str(refused.value).partition("copy it again: ")[2])
    capsys.readouterr()
    (command,) = re.findall("finish it first: (.*)", said(capsys, "delete", fake.address, "--yes"))
    execute(command)
    for name in ("one", "two"):
        made = RunHome.at(fake.root, name)
        assert RunFacts.of(made, made.require_newest()).step == 100
    said(capsys, "delete", fake.address, "--yes", code=0)


@pytest.mark.parametrize("train", [{"steps": 150}, {"epochs": 2}])
def test_hints_about_the_target_help(fake: FakeRun, capsys: pytest.CaptureFixture[str], train: dict[str, int]) -> None:
    """What they print for a fork, and for a step beyond the run file's target, has steps left to train."""
    fake.run_file()
    given = yaml.safe_load(Path(RUN_FILE).read_text())
    Path(RUN_FILE).write_text(yaml.safe_dump({**given, "train": {**train, "global_batch_size": 32}}))
    printed = said(capsys, "fork", RUN_FILE, "--as", "new", code=0)
    if "epochs" not in train:  # how long they are is not in this log
        words = shlex.split(re.findall("^next +(.*)$", printed, re.MULTILINE)[0])
        assert words[1:3] == ["run", RUN_FILE]
        run = OpenedRun.open(load_run_file(Path(RUN_FILE), words[4::2]))
        assert (run.name, Goal.of(run.spec).reached(run.log.head(), run.spec)) == ("new", False)
    spec = with_examples(load_run_file(Path(RUN_FILE)).spec, 3200)
    with pytest.raises(RunFileError, match="lies beyond") as refused:
        Goal.of(spec, until_step=450)
    override = re.findall(r"as with --set (\S+)", str(refused.value))
    Goal.of(with_examples(load_run_file(Path(RUN_FILE), override).spec, 3200), until_step=450)


def test_hint_of_compare_helps(fake: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "fork", fake.address, "--as", "other", code=0)
    words = ["compare", fake.address, f"{fake.root.uri}/other"]
    count = re.findall(r"(\d+) equal values: --verbose prints them", said(capsys, *words, code=0))
    assert len(count) == 1
    longer = said(capsys, *words, "--verbose", code=0)
    assert "--verbose" not in longer
    assert "train.seed" in longer
