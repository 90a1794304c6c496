"""A command's process loses readers, streams, a home folder or its parent, and masks what libraries print."""

import io
import logging
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from baton.flows import process_start
from baton.flows.commands.main import main
from baton.flows.process import mask_library_output
from baton.tasks.foundation.log.attempts import read_attempts
from baton.tasks.foundation.machine.threads import CLEAR_LINE
from tests.support import forked
from tests.support.checkout import CHECKOUT
from tests.support.fake_run import FakeRun, flip_a_byte
from tests.support.terminal import terminal
from tests.support.training_process import wait_for
from tests.support.unknown_user import can_become_unknown, command_of_unknown_user

SLEEPS = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]

# The child is started in a thread that ends at once, like the thread that starts Prefect's server.
PARENT = """
import sys, threading, time
from baton.flows.process import start_child
started = []

def start():
    started.append(start_child(sys.argv[1:]))

thread = threading.Thread(target=start)
thread.start()
thread.join()
print(started[0].pid, flush=True)
time.sleep(600)
"""

RECORDER = """
import subprocess, time
from baton.flows.process import start_module
print(start_module("baton.flows.with_prefect.recorder", stdin=subprocess.PIPE).pid, flush=True)
time.sleep(600)
"""

# Another host is gone, and the signal arrives while TensorFlow makes the error.
STOPPED_IN_ERROR = """
import signal
import tensorflow as tf
from baton.flows.process import Terminated, sigterm_raises

tf.errors.InvalidArgumentError.__init__ = lambda *given: signal.raise_signal(signal.SIGTERM)
try:
    with sigterm_raises():
        tf.function(tf.reshape)(tf.zeros(3), tf.constant([2, 2]))
except Terminated:
    print("stopped")
"""

PROOF = """
import subprocess, sys, time
from pathlib import Path
from baton.flows.proof.choose import training_of
from baton.flows.supervisor import Trainer
from baton.tasks.foundation.contracts.run_file import load_run_file

folder = Path(sys.argv[1])
run = load_run_file(folder / "run.yaml")
trial = training_of(run, (), name="straight", storage=folder / "scratch", steps=4, segment_steps=4)
trainer = Trainer(trial.arguments(), [], output=subprocess.DEVNULL, own_session=True)
print(trainer.process.pid, flush=True)
time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in {"Z", "X"}
    return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def child_of_a_killed_parent(code: str, *words: str, **environment: str) -> int:
    """Start a process that starts a child, kill the process, and return the child's process id."""
    command = [sys.executable, "-c", code, *words]
    parent = forked.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=CHECKOUT,
        env={**os.environ, **environment},
    )
    assert parent.stdout is not None
    try:
        child = int(parent.stdout.readline())
        assert is_alive(child)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    return child


def assert_child_ends(child: int) -> None:
    try:
        wait_until(lambda: not is_alive(child))
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def test_a_child_outlives_its_thread_but_not_its_parent() -> None:
    assert_child_ends(child_of_a_killed_parent(PARENT, *SLEEPS))


def test_the_embedded_server_ends_with_a_killed_command() -> None:
    assert_child_ends(child_of_a_killed_parent(RECORDER))  # a thread of this process serves


def test_a_trial_ends_with_a_killed_proof(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import time\ntime.sleep(600)\n\n\ndef build():\n    pass\n")
    (tmp_path / "run.yaml").write_text(
        "run: mine\nstorage: ./runs\ndata: {source: digits}\nmodel: model.py:build\n"
        "train: {steps: 10, global_batch_size: 8}\n"
    )
    assert_child_ends(child_of_a_killed_parent(PROOF, str(tmp_path)))


def test_a_child_started_after_its_parents_death_exits(tmp_path: Path) -> None:
    wanted = [sys.executable, "-c", f"open({str(tmp_path / 'ran')!r}, 'w')"]
    script = [sys.executable, "-I", "-S", process_start.__file__]
    orphan = subprocess.run([*script, "1", "9", *wanted], check=False)  # the parent is this process, not process 1
    assert orphan.returncode == 1
    assert not (tmp_path / "ran").exists()
    assert subprocess.run([*script, str(os.getpid()), "9", *wanted], check=False).returncode == 0
    assert (tmp_path / "ran").exists()


def test_sigterm_while_tensorflow_makes_an_error_is_a_stop() -> None:
    stopped = forked.run([sys.executable, "-c", STOPPED_IN_ERROR], capture_output=True, text=True, check=False)
    assert (stopped.returncode, stopped.stdout) == (0, "stopped\n"), stopped.stderr


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


def test_a_full_disk_is_not_treated_as_a_closed_reader(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", os.fdopen(os.open("/dev/full", os.O_WRONLY), "w"))
    assert main(["log", run.address]) == 1


KILLED = """
import sys, time
from pathlib import Path
from baton.flows.process import last_lines, tolerate_closed_readers
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.telemetry.ledger import Ledger

home = LocalStorage(Path(sys.argv[1]))
with tolerate_closed_readers(), Ledger(last_lines=last_lines) as ledger:
    ledger.open(home, RunLog(home).require_head())
    print(*(f"line {number}" for number in range(60)), sep="\\n")
    print("10%\\r\\x1b[2K90%\\r\\x1b[1mstep 7\\x1b[0m <of> 9")
    print("asked with api_key='hunter2'", file=sys.stderr)
    print("not ended", end="")
    time.sleep(3600)
"""


def test_last_lines_of_a_killed_process_are_in_the_report(tmp_path: Path) -> None:
    run = FakeRun(tmp_path).train(100)
    # Standard output is a file here, so that what is printed is still in the buffer of the process that is killed.
    with (tmp_path / "printed").open("wb") as file:
        killed = subprocess.Popen([sys.executable, "-c", KILLED, run.address], cwd=CHECKOUT, stdout=file, stderr=file)

    def is_recorded() -> bool:
        records = read_attempts(run.home).records
        return any("not ended" in record.last_lines and record.usage for record in records)

    try:
        wait_for(is_recorded)
    finally:
        killed.kill()
        killed.wait()
    (record,) = read_attempts(run.home).records
    assert record.last_lines == (
        *(f"line {number}" for number in range(13, 60)), "step 7 <of> 9", "asked with api_key='***'", "not ended",
    )  # fmt: skip
    assert record.usage[-1].memory_bytes > 10e6
    assert record.usage[-1].cpu > 0
    assert main(["report", run.address]) == 0
    page = run.home.read("report/index.html").decode()
    assert "step 7 &lt;of&gt; 9\nasked with api_key=&#39;***&#39;\nnot ended</pre>" in page
    assert "<figcaption>memory" in page


@pytest.mark.parametrize("closed", [(1,), (2,), (0,), (1, 2), (0, 1, 2)])
def test_closed_streams_are_opened_before_another_file_takes_their_number(
    run: FakeRun, tmp_path: Path, closed: tuple[int, ...]
) -> None:
    words = [sys.executable, "-m", "baton.flows.commands.main", "verify", run.address]
    shell = f"exec {' '.join(words)} {' '.join(f'{number}>&-' for number in closed)}"
    done = subprocess.run(["/bin/sh", "-c", shell], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 4, done.stderr
    assert "Error" not in done.stderr
    # The process, and a child that inherits its streams.
    program = (
        "import os, subprocess, sys; from baton.flows.process import tolerate_closed_readers\n"
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


def test_a_process_of_no_command_ends_as_python_ends_it() -> None:
    """A notebook that has trained with Baton: its code is not Baton's, nor how its process ends."""
    program = "import sys, baton.flows.process; sys.modules['tensorflow'] = sys"
    done = subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupt_that_was_handled_does_not_change_the_exit_code(tmp_path: Path) -> None:
    """Dataclasses are made by `exec` of a text, so imports are: an interrupt that comes in one is kept by Python."""
    program = "import sys; from baton.flows.process import exits_with\n"
    program += "try: exec('raise KeyboardInterrupt')\nexcept KeyboardInterrupt: sys.exit(exits_with(3))\n"
    (tmp_path / "ends.py").write_text(program)
    command = [sys.executable, "-m", "ends"]
    environment = {**os.environ, "PYTHONPATH": f"{CHECKOUT}{os.pathsep}{tmp_path}"}
    assert subprocess.run(command, cwd=tmp_path, env=environment, check=False).returncode == 3


HOME_OF_CHILD = """
import subprocess, sys
from pathlib import Path
from baton.flows.process import exits_with
from baton.flows.process import has_temporary_home, provide_home_folder
provide_home_folder()
in_child = subprocess.run([sys.executable, "-c", "import pathlib; print(pathlib.Path.home())"], stdout=subprocess.PIPE)
assert in_child.stdout.decode().strip() == str(Path.home())
(Path.home() / ".prefect").mkdir()
print(Path.home(), has_temporary_home())
sys.exit(exits_with(0))
"""


def test_a_log_record_that_fails_at_the_exit_prints_no_traceback() -> None:
    program = """
import logging, sys
from baton.flows.process import exits_with

class AfterShutdown(logging.Handler):
    def emit(self, record):
        try:
            raise RuntimeError("can't register atexit after shutdown")
        except RuntimeError:
            self.handleError(record)

code = exits_with(0)
logging.getLogger().addHandler(AfterShutdown())
logging.error("recorded")
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert done.stderr == ""


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


ADDRESS = "https://me:hunter2/with blank@host/x"


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What a library's handler prints."""
    before = logging.getLogRecordFactory()
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    mask_library_output()
    text, logger = io.StringIO(), logging.getLogger("library")
    handler = logging.StreamHandler(text)
    logger.addHandler(handler)
    yield text
    logger.removeHandler(handler)
    logging.setLogRecordFactory(before)


def test_messages_and_tracebacks_are_masked(printed: io.StringIO) -> None:
    logger = logging.getLogger("library")
    logger.warning("asked %s with %r", ADDRESS, {"api_key": "hunter2"})
    try:
        raise OSError(f"{ADDRESS} refused")  # noqa: TRY301 - a library does
    except OSError:
        logger.exception("no answer")
    assert "hunter2" not in printed.getvalue()
    assert "asked https://***@host/x with {'api_key': '***'}" in printed.getvalue()
    assert "OSError: https://***@host/x refused" in printed.getvalue()


@pytest.mark.usefixtures("printed")
def test_warnings_are_masked() -> None:
    text = warnings.formatwarning(f"{ADDRESS} is slow", UserWarning, "library.py", 3, f"get('{ADDRESS}')")  # type: ignore[arg-type]
    assert text == "library.py:3: UserWarning: https://***@host/x is slow\n  get('https://***@host/x')\n"


@pytest.mark.parametrize("beside_bar", [True, False])
def test_lines_begin_in_place_of_another_processes_bar(beside_bar: bool) -> None:
    code = (
        "from baton.flows.process import tolerate_closed_readers\n"
        f"with tolerate_closed_readers(beside_bar={beside_bar}):\n    print('a'); print('b', end=''); print('c')"
    )
    command = [sys.executable, "-c", code]
    with terminal(80) as (descriptor, screen):
        subprocess.run(command, stdout=descriptor, check=True)
    begin = CLEAR_LINE if beside_bar else ""
    assert screen.text == f"{begin}a\n{begin}bc\n"
    assert subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout == b"a\nbc\n"
