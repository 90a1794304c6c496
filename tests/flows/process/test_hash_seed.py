"""The process of a command starts itself anew with the hash seed of its run; others are warned."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows.process.hash_seed import keep_hash_seed
from tasks.foundation.process import hash_seed

COMMAND = """
import sys
from flows.process.hash_seed import begin_with_fixed_hashes, keep_hash_seed

verb, recorded, *_ = sys.argv[1:]
begin_with_fixed_hashes(verb)
warning = keep_hash_seed(None if recorded == "none" else int(recorded))

import os
from tasks.foundation.process import hash_seed

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
    (tmp_path / "flows").symlink_to(Path(__file__).parents[3] / "flows")
    (tmp_path / "tasks").symlink_to(Path(__file__).parents[3] / "tasks")
    seed, _, rest = of_command(tmp_path, *options, verb=verb, recorded="7")
    assert seed == "None"
    assert "sets have another order here" in rest
    assert "PYTHONHASHSEED=7, and this one has none; start it with PYTHONHASHSEED=7 too" in rest


def test_process_of_no_command_is_warned() -> None:
    own = hash_seed()
    assert keep_hash_seed(None) == ""
    assert own is None or keep_hash_seed(own) == ""
    assert f"which have PYTHONHASHSEED={(own or 0) + 1}" in keep_hash_seed((own or 0) + 1)


@pytest.mark.parametrize(("text", "expected"), [("0", None), ("random", None), ("", None), ("12", 12)])
def test_zero_set_after_the_start_has_no_effect(
    text: str, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", text)
    assert hash_seed() == (expected if sys.flags.hash_randomization else 0)
