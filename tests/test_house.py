"""The rules of the house, read from the imports: which way the arrows run, and who may know what."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.checkout import CHECKOUT

ROOT = CHECKOUT
ROOMS = ("prepare_data", "init_or_restore", "train_segment", "checkpoint_to_gcs", "evaluate")
HEAVY = {"tensorflow", "keras", "tensorflow_datasets", "jax", "torch"}

# What may be imported from where, besides itself, the standard library and installed packages.
ALLOWED = {
    "contracts": {"errors", "messages"},
    "errors": set(),
    "messages": set(),
    "storage": {"contracts", "errors", "messages"},
    "process": set(),
    "runlog": {"contracts", "errors", "messages", "process", "storage", "telemetry"},
    "seeding": set(),
    "user_code": {"errors", "seeding"},
    "stops": {"contracts", "errors", "storage", "telemetry"},
}
# Files that only move files need: an image without TensorFlow holds them.
LIGHT = (
    "contracts/",
    "errors.py",
    "messages.py",
    "process.py",
    "storage/",
    "runlog/",
    "stops/",
    "user_code.py",
    "telemetry/__init__.py",
    "telemetry/events.py",
    "telemetry/ledger.py",
    "telemetry/lost_work.py",
    "telemetry/measured.py",
    "telemetry/stopwatch.py",
    "telemetry/tensorboard.py",
)


class Import(NamedTuple):
    file: str
    line: int
    module: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def imports_of(text: str, file: str) -> Iterator[Import]:
    """Every import of a file, those within functions and under `if TYPE_CHECKING` too."""
    package = list(Path(file).parent.parts)
    for node in ast.walk(ast.parse(text, file)):
        if isinstance(node, ast.Import):
            yield from (Import(file, node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            # `from tasks import evaluate` names a module too.
            yield from (Import(file, node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            first = node.args[0] if node.args else None
            if function in {"import_module", "__import__"} and isinstance(first, ast.Constant):
                yield Import(file, node.lineno, str(first.value))


def imports_below(*folders: str) -> list[Import]:
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    return [
        found
        for file in files
        for found in imports_of(file.read_text(encoding="utf-8"), file.relative_to(ROOT).as_posix())
    ]


IMPORTS = imports_below("flows", "tasks")


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def told(wrong: list[Import]) -> str:
    return "\n".join(map(str, wrong))


def test_there_is_something_to_read() -> None:
    files = {found.file for found in IMPORTS}
    assert "tasks/foundation/runlog/log.py" in files
    assert len(files) > 10
    for room in (*ROOMS, "foundation"):
        assert (ROOT / "tasks" / room).is_dir()


def test_rooms_never_import_each_other() -> None:
    wrong = [
        found
        for found in IMPORTS
        for room in ROOMS
        if found.file.startswith(f"tasks/{room}/")
        if any(within(found.module, f"tasks.{other}") for other in ROOMS if other != room)
    ]
    assert not wrong, told(wrong)


def test_tasks_never_import_flows() -> None:
    wrong = [found for found in IMPORTS if found.file.startswith("tasks/") and within(found.module, "flows")]
    assert not wrong, told(wrong)


def test_the_ground_knows_no_room() -> None:
    wrong = [
        found
        for found in IMPORTS
        if found.file.startswith("tasks/foundation/")
        and within(found.module, "tasks")
        and not within(found.module, "tasks.foundation")
    ]
    assert not wrong, told(wrong)


def test_prefect_is_known_to_flows_and_to_task_files_only() -> None:
    wrong = [
        found
        for found in IMPORTS
        if found.module.split(".")[0] in {"prefect", "prefect_gcp"}
        and found.file not in {f"tasks/{room}/task.py" for room in ROOMS}
        and not found.file.startswith("flows/")
    ]
    assert not wrong, told(wrong)


def test_what_only_moves_files_knows_no_tensorflow() -> None:
    wrong = [
        found
        for found in IMPORTS
        if found.file.startswith(tuple(f"tasks/foundation/{name}" for name in LIGHT))
        and found.module.split(".")[0] in HEAVY
    ]
    assert not wrong, told(wrong)


@pytest.mark.parametrize("part", ALLOWED)
def test_arrows_within_the_ground_run_one_way(part: str) -> None:
    below = {part, *ALLOWED[part]}
    wrong = [
        found
        for found in IMPORTS
        if found.file.startswith((f"tasks/foundation/{part}/", f"tasks/foundation/{part}.py"))
        and within(found.module, "tasks.foundation")
        and found.module.split(".")[2] not in below
    ]
    assert not wrong, told(wrong)


def test_the_run_log_knows_of_telemetry_the_events_only() -> None:
    wrong = [
        found
        for found in IMPORTS
        if found.file.startswith("tasks/foundation/runlog/")
        and within(found.module, "tasks.foundation.telemetry")
        and not within(found.module, "tasks.foundation.telemetry.events")
    ]
    assert not wrong, told(wrong)


def test_python_lives_in_the_folders_of_the_house() -> None:
    allowed = {"flows", "tasks", "containers", "deploy", "tests"}
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],  # noqa: S607 - git is where it is
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    files = listed.stdout.splitlines() if listed.returncode == 0 else [entry.name for entry in ROOT.glob("*.py")]
    wrong = [file for file in files if file.endswith(".py") and file.split("/")[0] not in allowed]
    folders = {file.split("/")[0] for file in files if "/" in file and not file.startswith(".")}
    assert not wrong
    assert folders <= allowed


@pytest.mark.parametrize(
    ("text", "file", "modules"),
    [
        ("import a.b, c as d", "tasks/x/y.py", ["a.b", "c"]),
        ("from a.b import c", "tasks/x/y.py", ["a.b.c"]),
        ("from tasks import evaluate", "tasks/x/y.py", ["tasks.evaluate"]),
        ("from . import z", "tasks/x/y.py", ["tasks.x.z"]),
        ("from ..evaluate.stage import z", "tasks/x/y.py", ["tasks.evaluate.stage.z"]),
        ("def f():\n    import keras", "tasks/x/y.py", ["keras"]),
        ("def f():\n    importlib.import_module('tensorflow')", "tasks/x/y.py", ["tensorflow"]),
        ("x = 'import keras'", "tasks/x/y.py", []),
    ],
)
def test_every_kind_of_import_is_seen(text: str, file: str, modules: list[str]) -> None:
    assert [found.module for found in imports_of(text, file)] == modules


def loaded_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_command_starts_without_tensorflow_and_prefect() -> None:
    assert (ROOT / "flows" / "commands" / "main.py").is_file(), "flows/commands/main.py, the command, is missing"
    assert not loaded_after("import flows.commands.main") & {*HEAVY, "prefect", "fastapi", "matplotlib", "sklearn"}


def test_reading_a_run_file_and_a_log_needs_neither() -> None:
    statement = "import tasks.foundation.contracts.run_file, tasks.foundation.runlog.commits"
    assert not loaded_after(statement) & {*HEAVY, "prefect"}
