"""The `baton` command: each error becomes a message and an exit code; light verbs import no heavy packages."""

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest

from baton.flows import opened_run as opening
from baton.flows import train as trainer
from baton.flows.commands import status
from baton.flows.commands.main import main
from baton.tasks.foundation import errors
from baton.tasks.foundation.machine.stops import PROCESS_STOP
from tests.support.fake_run import FakeRun

HEAVY = ("tensorflow", "keras", "prefect", "numpy", "gcsfs")


def all_errors(base: type[errors.BatonError]) -> list[type[errors.BatonError]]:
    return [base, *(below for each in base.__subclasses__() for below in all_errors(each))]


def make_command_raise(monkeypatch: pytest.MonkeyPatch, fault: BaseException) -> None:
    def load(*_: object) -> NoReturn:
        raise fault

    monkeypatch.setattr(opening, "load_run_file", load)


@pytest.mark.parametrize("kind", all_errors(errors.BatonError), ids=lambda kind: kind.__name__)
def test_each_error_has_its_exit_code_and_text(
    kind: type[errors.BatonError], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"step": 7} if issubclass(kind, errors.BlowUp) else {}
    make_command_raise(monkeypatch, kind("train.steps = 0 [bold]is[/bold] too few; use 1", **more))
    assert main(["status", "run.yaml", "--json"]) == kind.exit_code
    captured = capsys.readouterr()
    assert captured.err == "error: train.steps = 0 [bold]is[/bold] too few; use 1\n"
    assert json.loads(captured.out) == {
        "schema_version": 1,
        "error": kind.__name__,
        "message": "train.steps = 0 [bold]is[/bold] too few; use 1",
        "exit_code": kind.exit_code,
    }


def test_without_json_stdout_stays_empty(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make_command_raise(monkeypatch, errors.RunFileError("no"))
    assert main(["status", "run.yaml"]) == 2
    assert capsys.readouterr().out == ""


def test_an_unexpected_error_is_named_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_command_raise(monkeypatch, ZeroDivisionError("by zero"))
    assert main(["status", "run.yaml", "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ZeroDivisionError: by zero")
    assert "BATON_DEBUG=1" in captured.err
    assert "Traceback" not in captured.err
    assert json.loads(captured.out)["error"] == "ZeroDivisionError"
    monkeypatch.setenv("BATON_DEBUG", "1")
    assert main(["status", "run.yaml"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGTERM, "stopped by SIGTERM; run"), (signal.SIGHUP, "stopped by the closed terminal (SIGHUP); run")],
)
def test_the_stop_signal_is_named(
    number: signal.Signals, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(PROCESS_STOP, "terminal_closed", False)
    before = signal.signal(number, signal.SIG_DFL)

    def interrupt(*_: object) -> None:
        signal.raise_signal(number)

    monkeypatch.setattr(status, "open_run", interrupt)
    try:
        assert main(["status", "x"]) == 3
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert words in capsys.readouterr().err


def test_ctrl_c_during_the_first_checks_of_a_run_exits_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def admit(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "admit", admit)
    assert trainer.main([str(FakeRun(tmp_path).run_file())]) == 3
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "stopped: sigint\n")


def test_ctrl_c_exits_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make_command_raise(monkeypatch, KeyboardInterrupt())
    assert main(["status", "run.yaml", "--json"]) == 130
    captured = capsys.readouterr()
    assert captured.err.startswith("error: interrupted")
    assert json.loads(captured.out)["exit_code"] == 130


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "nonsense"),
        (["rn"], "No such command 'rn'. Did you mean 'run'?\nhint: see baton --help\n"),
        (["status", "x", "--nonsense"], "--nonsense"),
        (["run", "x.yaml", "--until-step", "many"], "--until-step"),
    ],
)
def test_usage_errors_exit_2(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert words in err
    assert "--help" in err
    assert main([*arguments, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2


def test_long_messages_wrap_only_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Uses a real terminal device with 60 columns."""
    monkeypatch.setenv("NO_COLOR", "1")
    text = f"the checkpoint is of another model: {'a variable that differs, ' * 100}and so on; put the file back"
    make_command_raise(monkeypatch, errors.StateMismatch(f"{text}\nhint: {'look at it, ' * 10}"))
    terminal, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    with os.fdopen(side, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        assert main(["status", "run.yaml", "--json"]) == 2
        seen = b""
        os.set_blocking(terminal, False)
        with suppress(BlockingIOError):
            while True:
                seen += os.read(terminal, 4096)
    os.close(terminal)
    lines = seen.decode().splitlines()
    assert lines[0].startswith("error: the checkpoint is of another model: a variable")
    assert max(map(len, lines)) <= 60
    assert sum(map(len, lines)) < 1300
    assert "put the file back" in " ".join(lines)
    assert sum(line.startswith("hint: ") for line in lines) == 1
    assert json.loads(capsys.readouterr().out)["message"].startswith(f"{text}\nhint: ")


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("baton ")
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for verb in ("run", "status", "list", "log", "verify", "fork", "export", "report", "audit", "doctor"):
        assert f"  {verb} " in out
        assert main([verb, "--help"]) == 0
        assert "--json" in capsys.readouterr().out


def test_json_is_strict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = FakeRun(tmp_path).train(100)
    run.evaluate(float("nan"))

    def refuse(constant: str) -> NoReturn:
        raise ValueError(constant)

    assert main(["status", run.address, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert facts["evaluation"]["metrics"] == {"accuracy": None}


def test_light_verbs_import_no_tensorflow_or_prefect(tmp_path: Path) -> None:
    run = FakeRun(tmp_path).train(100)
    verbs = [["--help"], *([verb, run.address] for verb in ("status", "verify", "list", "log"))]
    script = (
        "import sys\n"
        "from baton.flows.commands.main import main\n"
        f"codes = [main(words) for words in {verbs!r}]\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], codes)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] [0, 0, 0, 0, 0]"


def test_the_installed_command_runs(tmp_path: Path) -> None:
    command = Path(sys.executable).parent / "baton"
    done = subprocess.run([command, "status", tmp_path / "none", "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"] == "NoSuchRun"
    assert done.stderr.startswith("error: no run is at ")


@pytest.mark.parametrize("debug", ["", "1"])
def test_no_password_of_a_url_is_printed(
    debug: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_DEBUG", debug)
    assert main(["list", "http://me:secret@host/runs", "--json"]) == 2
    printed = capsys.readouterr()
    assert "http://***@host/runs" in printed.err
    assert "http://***@host/runs" in json.loads(printed.out)["message"]
    assert "secret" not in printed.out + printed.err
