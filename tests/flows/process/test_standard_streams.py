"""A closed reader, as in `baton log RUN | head`, closed streams and a missing home folder change no exit code."""

import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flows.commands.main import main
from tests.support.checkout import CHECKOUT
from tests.support.fake_run import FakeRun, flip_a_byte
from tests.support.unknown_user import can_become_unknown, command_of_unknown_user

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


@pytest.mark.parametrize("closed", [(1,), (2,), (0,), (1, 2), (0, 1, 2)])
def test_closed_streams_are_opened_before_another_file_takes_their_number(
    run: FakeRun, tmp_path: Path, closed: tuple[int, ...]
) -> None:
    words = [sys.executable, "-m", "flows.commands.main", "verify", run.address]
    shell = f"exec {' '.join(words)} {' '.join(f'{number}>&-' for number in closed)}"
    done = subprocess.run(["/bin/sh", "-c", shell], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 4, done.stderr
    assert "Error" not in done.stderr
    # The process, and a child that inherits its streams.
    program = (
        "import os, subprocess, sys; from flows.process.standard_streams import tolerate_closed_readers\n"
        "with tolerate_closed_readers():\n"
        f"    taken = open({str(tmp_path / 'taken')!r}, 'w')\n"
        "    print('here', file=sys.stdout); print('here', file=sys.stderr)\n"
        "    code = subprocess.run(['/bin/sh', '-c', 'echo there; echo there >&2']).returncode\n"
        "sys.exit(code)"
    )
    closing = " ".join(f"{number}>&-" for number in closed)
    shell = f'exec "$0" -c "$1" {closing}'
    subprocess.run(["/bin/sh", "-c", shell, sys.executable, program], cwd=CHECKOUT, capture_output=True, check=True)
    assert (tmp_path / "taken").read_text() == ""


HOME_OF_CHILD = """
import subprocess, sys
from pathlib import Path
from flows.process.exit import exits_with
from flows.process.standard_streams import has_temporary_home, provide_home_folder
provide_home_folder()
in_child = subprocess.run([sys.executable, "-c", "import pathlib; print(pathlib.Path.home())"], stdout=subprocess.PIPE)
assert in_child.stdout.decode().strip() == str(Path.home())
(Path.home() / ".prefect").mkdir()
print(Path.home(), has_temporary_home())
sys.exit(exits_with(0))
"""


@pytest.mark.skipif(not can_become_unknown(), reason="needs root and setpriv")
@pytest.mark.parametrize("home", [None, "/somewhere"])
def test_user_without_home_folder_gets_a_temporary_one(tmp_path: Path, home: str | None) -> None:
    more = {"TMPDIR": str(tmp_path), **({} if home is None else {"HOME": home})}
    tmp_path.chmod(0o777)
    if home is not None:  # it is the user's to mend
        expected = f"{home} False"
        program = HOME_OF_CHILD.replace('(Path.home() / ".prefect").mkdir()', "")
    else:
        expected, program = f"{tmp_path}/baton-home-", HOME_OF_CHILD
    command = command_of_unknown_user(sys.executable, "-c", program, **more)
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(expected)
    assert done.stdout.endswith("True\n") == (home is None)
    assert list(tmp_path.iterdir()) == []  # nothing is left of it
