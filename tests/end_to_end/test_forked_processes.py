"""Processes that `forked` starts are as separate as fresh ones."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from baton.flows.with_prefect.server import set_quiet_defaults
from tests.support import forked

PRINT_STATE = """
import json, os, random, sys, numpy
state = {"pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "cwd": os.getcwd(), "argv": sys.argv,
    "hash": hash("a"), "numpy": numpy.random.randint(1 << 30), "tensorflow": "tensorflow" in sys.modules,
    "early": sorted({"prefect", "gcsfs"} & set(sys.modules)), "threads": len(os.listdir("/proc/self/task")),
    "variable": os.environ.get("BATON_TEST_VARIABLE"), "open": sorted(os.listdir("/proc/self/fd"))}
print(json.dumps(state))
"""
SLEEPER = """
import time
print("here", flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
"""


PREFECT_SETTINGS = """
import json, sys
from prefect.settings import get_current_settings
settings = get_current_settings()
from prefect.main import flow
from prefect.logging.configuration import PROCESS_LOGGING_CONFIG
print(json.dumps([str(settings.home), settings.api.url, PROCESS_LOGGING_CONFIG["loggers"]["prefect"]["level"],
    flow.__module__, sys.modules["prefect"].__spec__.name, "prefect.server.api.server" in sys.modules]))
"""
REFUSED_SETTINGS = """
import prefect
for _ in range(2):
    try:
        from prefect.settings import get_current_settings
        get_current_settings()
    except ValueError as fault:
        print(type(fault).__name__)
"""


def run_code(code: str, *words: str, **named: object) -> "subprocess.CompletedProcess[str]":
    return forked.run([sys.executable, "-c", code, *words], capture_output=True, text=True, **named)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_fork_has_its_own_process_state(tmp_path: Path) -> None:
    # Variables that this process sets itself must not cause fresh processes.
    for name in ("tensorflow", "prefect"):
        importlib.import_module(name)
    set_quiet_defaults()
    environment = os.environ | {"BATON_TEST_VARIABLE": "yes"}
    processes = [
        json.loads(run_code(PRINT_STATE, "a", cwd=tmp_path, env=environment, start_new_session=True).stdout),
        *(json.loads(run_code(PRINT_STATE).stdout) for _ in range(2)),
    ]
    first, *others = processes
    assert first["tensorflow"], "this was a fresh process"
    assert not first["early"], "their settings are read when they are imported"
    assert (first["cwd"], first["argv"], first["variable"]) == (str(tmp_path), ["-c", "a"], "yes")
    assert first["session"] == first["pid"]
    assert [other["variable"] for other in others] == [None, None]
    assert {other["session"] for other in others} == {os.getsid(0)}
    assert len({each["pid"] for each in processes}) == 3
    assert {each["threads"] for each in processes} == {1}, "a fork of a process with threads"
    assert {tuple(each["open"]) for each in processes} == {("0", "1", "2", "3")}, "3 is the folder that is being listed"
    # Unseeded generators differ, as in fresh processes.
    assert len({each["numpy"] for each in processes}) == 3
    assert processes[0]["parent"] != processes[1]["parent"]
    # As a command does, whose process starts itself anew.
    assert len({each["hash"] for each in processes}) == 1
    program = (
        "import sys; from baton.tasks.foundation.machine.processes import hash_seed; "
        "print(hash_seed(), sys.orig_argv[3:])"
    )
    assert run_code(program, "a").stdout == "0 ['a']\n"


def test_kept_prefect_reads_the_settings_of_the_fork(tmp_path: Path) -> None:
    wanted = {"PREFECT_HOME": str(tmp_path), "PREFECT_API_URL": "http://here/api", "PREFECT_LOGGING_LEVEL": "ERROR"}
    environment = os.environ | wanted
    forks, fresh = (
        json.loads(run([sys.executable, "-c", PREFECT_SETTINGS], capture_output=True, env=environment).stdout)
        for run in (forked.run, subprocess.run)
    )
    *forks, was_kept = forks
    *fresh, was_imported = fresh
    assert forks == fresh == [str(tmp_path), "http://here/api", "ERROR", "prefect.flows", "prefect"]
    assert was_kept
    assert not was_imported
    refused = environment | {"PREFECT_API_ENABLE_HTTP2": "perhaps"}
    assert run_code(REFUSED_SETTINGS, env=refused).stdout.split() == ["ValidationError"] * 2


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('no')", 1),
        ("1 / 0", 1),
        ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()", 0),
    ],
)
def test_fork_exits_as_the_interpreter_does(code: str, expected: int) -> None:
    forks, fresh = (
        run_code(code),
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False),
    )
    assert forks.returncode == fresh.returncode == expected
    assert forks.stdout == fresh.stdout
    assert forks.stderr.splitlines()[-1:] == fresh.stderr.splitlines()[-1:]


def test_signals_reach_a_fork() -> None:
    with forked.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[0] == "interrupted\n"
        assert process.returncode == 0
    sleeper = forked.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    began = time.monotonic()
    sleeper.kill()
    assert sleeper.wait(30) == sleeper.poll() == -signal.SIGKILL
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "TF_DETERMINISTIC_OPS", "OMP_NUM_THREADS", "KERAS_BACKEND", "HOME"])
def test_variable_read_at_import_needs_a_fresh_process(name: str) -> None:
    done = run_code("import sys; print('tensorflow' in sys.modules)", env=os.environ | {name: "1"})
    assert done.stdout == "False\n"


def test_other_programs_are_not_forked() -> None:
    assert forked.run(["cat"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE).returncode == 0
    isolated = forked.run([sys.executable, "-I", "-c", "import sys; print(sys.flags.isolated)"], stdout=subprocess.PIPE)
    assert isolated.stdout == b"1\n"
