"""The process of a command starts itself anew with the hash seed of its run; others are warned."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows.process.hash_seed import keep_hash_seed
from tasks.foundation.machine.processes import hash_seed
from tests.support.unknown_user import can_become_unknown, command_of_unknown_user

CHECKOUT = Path(__file__).parents[3]
COMMAND = """
import sys
from flows.process.hash_seed import begin_with_fixed_hashes, keep_hash_seed

verb, recorded, *_ = sys.argv[1:]
begin_with_fixed_hashes(verb)
warning = keep_hash_seed(None if recorded == "none" else int(recorded))

import os
from tasks.foundation.machine.processes import hash_seed

print(os.getpid(), hash_seed(), sys.flags.safe_path, sys.argv[1:], hash("a"), warning)
"""


def of_command(folder: Path, *options: str, verb: str = "run", recorded: str = "none", **variables: str) -> list[str]:
    """What a command prints, without its process id, which must be that of the process that was started."""
    (folder / "command.py").write_text(COMMAND, encoding="utf-8")
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    command = [sys.executable, *options, "command.py", verb, recorded, "a b"]
    process = subprocess.Popen(command, cwd=folder, env=inherited | variables, stdout=subprocess.PIPE, text=True)
    pid, rest = process.communicate(timeout=60)[0].strip().split(" ", 1)
    assert process.returncode == 0
    assert pid == str(process.pid)
    return rest.split(" ", 2)


@pytest.mark.parametrize(
    ("variables", "recorded", "expected"),
    [
        ({}, "none", "0"),
        ({"PYTHONHASHSEED": "random"}, "none", "0"),
        ({"PYTHONHASHSEED": "0"}, "0", "0"),
        ({"PYTHONHASHSEED": "5"}, "none", "5"),
        ({}, "7", "7"),
        ({"PYTHONHASHSEED": "5"}, "7", "7"),
        ({"PYTHONHASHSEED": "5"}, "0", "0"),
    ],
)
def test_command_has_the_seed_of_its_run(
    tmp_path: Path, variables: dict[str, str], recorded: str, expected: str
) -> None:
    seed, safe_path, rest = of_command(tmp_path, "-P", recorded=recorded, **variables)
    assert (seed, safe_path) == (expected, "True")
    arguments, hashed = rest.rsplit(" ", 1)
    assert arguments == str(["run", recorded, "a b"])
    assert hashed == of_command(tmp_path, PYTHONHASHSEED=expected)[2].rsplit(" ", 1)[1]


@pytest.mark.parametrize("options", [(), ("-E",)])
def test_process_that_may_not_or_cannot_start_anew_goes_on(tmp_path: Path, options: tuple[str, ...]) -> None:
    """A verb that runs no code of the user; Python that ignores the variable."""
    verb = "run" if options else "status"
    (tmp_path / "flows").symlink_to(CHECKOUT / "flows")
    (tmp_path / "tasks").symlink_to(CHECKOUT / "tasks")
    seed, _, rest = of_command(tmp_path, *options, verb=verb, recorded="7")
    assert seed == "None"
    assert "sets have another order here" in rest
    assert "PYTHONHASHSEED=7, and this one has none; start it with PYTHONHASHSEED=7 too" in rest


def test_process_of_no_command_is_warned() -> None:
    own = hash_seed()
    assert keep_hash_seed(None) == ""
    assert own is None or keep_hash_seed(own) == ""
    assert f"which have PYTHONHASHSEED={(own or 0) + 1}" in keep_hash_seed((own or 0) + 1)


@pytest.mark.parametrize("inherited", ["3", "0", None])
def test_variable_set_after_the_start_has_no_effect(inherited: str | None) -> None:
    """Many a `seed_everything` sets it."""
    program = """
import os
from tasks.foundation.machine.processes import hash_seed
os.environ["PYTHONHASHSEED"] = "42"
print(hash_seed())
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    environment |= {} if inherited is None else {"PYTHONHASHSEED": inherited}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(inherited)


@pytest.mark.parametrize("recorded", ["none", "7"])
def test_process_with_closed_streams_starts_anew(tmp_path: Path, recorded: str) -> None:
    (tmp_path / "command.py").write_text(f"{COMMAND}\nopen('seed', 'w').write(str(hash_seed()))\n", encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    shell = f"exec {sys.executable} command.py run {recorded} >&- 2>&-"
    assert subprocess.run(["/bin/sh", "-c", shell], cwd=tmp_path, env=environment, check=False).returncode == 0
    assert (tmp_path / "seed").read_text() == recorded.replace("none", "0")


@pytest.mark.skipif(not can_become_unknown(), reason="needs root and setpriv")
def test_temporary_home_stays_with_the_program_that_made_it(tmp_path: Path) -> None:
    program = """
import os, pathlib, sys
from flows.process.hash_seed import begin_with_fixed_hashes, keep_hash_seed
from flows.process.standard_streams import provide_home_folder
begin_with_fixed_hashes()
provide_home_folder()
keep_hash_seed(7)
print(len(list(pathlib.Path(os.environ["TMPDIR"]).iterdir())), pathlib.Path.home().is_dir())
"""
    tmp_path.chmod(0o777)
    command = command_of_unknown_user(sys.executable, "-c", program, TMPDIR=str(tmp_path), PYTHONPATH=str(CHECKOUT))
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "1 True\n"
    assert not list(tmp_path.iterdir())
