"""A reader that closes its end, as in `baton log RUN | head`, causes no error and changes no exit code."""

import io
import os
import sys
import threading

import pytest

from flows.commands.main import main
from tests.support.fake_run import FakeRun, flip_a_byte

VERBS = {
    "log": (["log", "RUN"], 0),
    "log-json": (["log", "RUN", "--json"], 0),
    "status": (["status", "RUN"], 0),
    "status-json": (["status", "RUN", "--json"], 0),
    "list": (["list", "STORAGE"], 0),
    "verify": (["verify", "RUN"], 4),
    "verify-json": (["verify", "RUN", "--json"], 4),
    "fork": (["fork", "RUN", "--as", "other", "--at-step", "100"], 0),
    "help": (["--help"], 0),
    "version": (["--version"], 0),
    "refused": (["status", "nowhere", "--json"], 2),
    "usage": (["nonsense"], 2),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> FakeRun:
    """A run with a damaged checkpoint, and a log that is longer than any output buffer."""
    run = FakeRun(tmp_path_factory.mktemp("storage")).train(*range(100, 6100, 100))
    flip_a_byte(run.path(run.tip.path) / "ckpt.index")
    return run


def pipe(buffering: int) -> tuple[int, io.TextIOWrapper]:
    """Return a pipe's reading end, and a standard stream on its writing end; buffering 0 is that of `python -u`."""
    reader, writer = os.pipe()
    return reader, io.TextIOWrapper(os.fdopen(writer, "wb", buffering), write_through=buffering == 0)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("buffering", [-1, 0])
def test_output_without_a_reader_is_dropped(
    verb: str, buffering: int, run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, code = VERBS[verb]
    places = {"RUN": run.address, "STORAGE": str(run.root.root)}
    for name in ("stdout", "stderr"):
        reader, stream = pipe(buffering)
        os.close(reader)
        monkeypatch.setattr(sys, name, stream)
    assert main([places.get(word, word) for word in words]) == code


def test_a_reader_that_closes_after_one_line(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pipe breaks in the middle: the reader gets a correct line, and standard error stays empty."""
    reader, stream = pipe(-1)
    monkeypatch.setattr(sys, "stdout", stream)
    lines: list[str] = []

    def head() -> None:
        with os.fdopen(reader, encoding="utf-8") as file:
            lines.append(file.readline())

    thread = threading.Thread(target=head)
    thread.start()
    assert main(["log", run.address]) == 0
    thread.join()
    assert " origin " in lines[0]
    assert capsys.readouterr().err == ""


def test_a_full_disk_is_not_treated_as_a_closed_reader(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", os.fdopen(os.open("/dev/full", os.O_WRONLY), "w"))
    assert main(["log", run.address]) == 1
