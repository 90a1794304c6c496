"""The rules of the house, read from the imports: which way the arrows run, and who may know what."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.checkout import CHECKOUT as ROOT


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


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def shown(wrong: list[Import]) -> str:
    return "\n".join(map(str, wrong))


def modules_of(*folders: str) -> dict[str, str]:
    """Module name -> file, below the folders."""
    files = [file.relative_to(ROOT).as_posix() for folder in folders for file in (ROOT / folder).rglob("*.py")]
    return {file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): file for file in files}


def runs_as_main(node: ast.stmt) -> bool:
    """Whether this is `if __name__ == "__main__":`; a module that is run is another one than the module imported."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def graph_of_imports() -> dict[str, set[str]]:
    """Module -> modules that it imports, also within functions."""
    modules = modules_of("flows", "tasks")
    graph = {}
    for module, file in modules.items():
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"), file)
        tree.body = [node for node in tree.body if not runs_as_main(node)]
        imported = {found.module for found in imports_of(ast.unparse(tree), file)}
        named = imported | {name.rpartition(".")[0] for name in imported}
        graph[module] = {name for name in named if name in modules and not modules[name].endswith("__init__.py")}
    return graph


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; empty if there is none."""
    finished: set[str] = set()
    path: list[str] = []

    def visit(module: str) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in finished:
            return []
        path.append(module)
        for imported in sorted(graph[module]):
            if circle := visit(imported):
                return circle
        path.pop()
        finished.add(module)
        return []

    return next((circle for module in graph if (circle := visit(module))), [])


def annotations_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.expr]:
    given = function.args
    parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    yield from (each.annotation for each in parameters if each is not None and each.annotation is not None)
    if function.returns is not None:
        yield function.returns


def names_any(annotation: ast.expr) -> bool:
    """Whether an annotation has `Any` in it, also within quotes."""
    for node in ast.walk(annotation):
        match node:
            case ast.Name(id="Any") | ast.Attribute(attr="Any"):
                return True
            case ast.Constant(value=str(text)) if re.search(r"\bAny\b", text):
                return True
    return False


def functions_with_any(text: str) -> list[str]:
    """Functions, also inner ones and methods, with `Any` in their signature."""
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [function.name for function in functions if any(map(names_any, annotations_of(function)))]


ROOMS = ("prepare_data", "init_or_restore", "train_segment", "checkpoint_to_gcs", "evaluate")
HEAVY = {"tensorflow", "keras", "tensorflow_datasets", "jax", "torch"}

# What may be imported from where, besides itself, the standard library and installed packages.
ALLOWED = {
    "contracts": {"errors", "messages"},
    "errors": {"messages"},
    "messages": set(),
    "storage": {"contracts", "errors", "messages"},
    "log": {"contracts", "errors", "machine", "messages", "storage", "telemetry"},
    "checkpoint": {
        *("contracts", "errors", "machine", "messages", "model", "log", "state", "storage", "telemetry"),
    },
    "state": {
        *("contracts", "dataset", "errors", "machine", "messages", "model", "storage", "user_code"),
    },
    "dataset": {"contracts", "errors", "machine", "messages", "model", "storage", "user_code", "user_errors"},
    "model": {
        *("contracts", "errors", "machine", "messages", "seeding", "storage", "telemetry", "user_code", "user_errors"),
    },
    "seeding": set(),
    "user_errors": {"messages"},
    "child_imports": {"seeding", "storage"},
    "user_code": {"child_imports", "contracts", "errors", "messages", "seeding", "user_errors"},
    "stage": {"checkpoint", "contracts", "log", "storage", "telemetry"},
    "machine": {"contracts", "errors", "messages", "storage", "telemetry", "user_code"},
}
# Of the checkpoint: what commits, selects, retires and forks needs no TensorFlow.
LIGHT_CHECKPOINT = (
    "fork",
    "retention",
    "save",
    "selection",
    "verify",
)
# Of the machine: what stops and watches a process, and what is read before TensorFlow is imported.
LIGHT_MACHINE = ("environment", "hang", "hosts", "metadata_server", "processes", "stops", "threads")
# Files that only move files need: an image without TensorFlow holds them.
LIGHT = (
    "contracts/",
    "errors.py",
    "messages.py",
    "storage/",
    "log/",
    *(f"checkpoint/{name}.py" for name in LIGHT_CHECKPOINT),
    "stage.py",
    *(f"machine/{name}.py" for name in LIGHT_MACHINE),
    "user_errors.py",
    "telemetry/__init__.py",
    "telemetry/tensorboard.py",
    "telemetry/events.py",
    "telemetry/ledger.py",
    "telemetry/tensorboard.py",
)


IMPORTS = imports_below("flows", "tasks")


# What was reached on the way to a house that one head can hold. A change lowers them; a feature that needs more says
# so.
MOST_MODULES = 235
MOST_LINES = 66_405


def test_the_house_does_not_grow() -> None:
    files = [file for folder in ("flows", "tasks") for file in (ROOT / folder).rglob("*.py")]
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    assert (len(files) <= MOST_MODULES, lines <= MOST_LINES) == (True, True), (len(files), lines)


def test_a_file_name_stands_once() -> None:
    """Apart from `__init__.py`, the `stage.py` of each room, and the verbs of the command."""
    names = Counter(
        file.name
        for folder in ("flows", "tasks")
        for file in (ROOT / folder).rglob("*.py")
        if file.name not in {"__init__.py", "stage.py"} and file.parent != ROOT / "flows" / "commands"
    )
    assert {name for name, times in names.items() if times > 1} == set()


def test_there_is_something_to_read() -> None:
    for name in LIGHT:
        assert (ROOT / "tasks" / "foundation" / name).exists(), name
    files = {found.file for found in IMPORTS}
    assert "tasks/foundation/log/log.py" in files
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
    assert not wrong, shown(wrong)


def test_tasks_never_import_flows() -> None:
    wrong = [found for found in IMPORTS if found.file.startswith("tasks/") and within(found.module, "flows")]
    assert not wrong, shown(wrong)


def test_the_ground_knows_no_room() -> None:
    wrong = [
        found
        for found in IMPORTS
        if found.file.startswith("tasks/foundation/")
        and within(found.module, "tasks")
        and not within(found.module, "tasks.foundation")
    ]
    assert not wrong, shown(wrong)


def test_only_with_prefect_imports_prefect() -> None:
    wrong = [
        found
        for found in IMPORTS
        if found.module.split(".")[0] in {"prefect", "prefect_gcp"} and not found.file.startswith("flows/with_prefect/")
    ]
    assert not wrong, shown(wrong)


def test_what_only_moves_files_knows_no_tensorflow() -> None:
    wrong = [
        found
        for found in IMPORTS
        if found.file.startswith(tuple(f"tasks/foundation/{name}" for name in LIGHT))
        and found.module.split(".")[0] in HEAVY
    ]
    assert not wrong, shown(wrong)


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
    assert not wrong, shown(wrong)


def test_the_run_log_knows_of_telemetry_the_events_only() -> None:
    wrong = [
        found
        for found in IMPORTS
        if found.file.startswith("tasks/foundation/log/")
        and within(found.module, "tasks.foundation.telemetry")
        and not within(found.module, "tasks.foundation.telemetry.events")
    ]
    assert not wrong, shown(wrong)


# Room or file of flows/ -> what of flows/ it may import. The flows and the commands, at the top, may import all of it.
ARROWS_OF_FLOWS = {
    "process_start": {"process"},
    "process": set(),
    "opened_run": {"process_start"},
    "verification": {"opened_run"},
    "facts": {"opened_run"},
    "comparison": {"facts", "opened_run"},
    "result": {"facts", "opened_run"},
    "agreed": {"opened_run"},
    "admit": {"agreed", "opened_run", "process_start", "result"},
    "runner": set(),
    "evaluating": {"admit", "opened_run", "runner"},
    "relay": {"admit", "agreed", "evaluating", "opened_run", "process", "result", "runner"},
    "bare_process": {"process"},
    "proof": {"admit", "bare_process", "opened_run"},
    "doctor": {"admit", "opened_run", "process_start"},
}
ATOP_OF_FLOWS = {"commands", "with_prefect", "without_prefect", "api"}


def room_of(module: str) -> str:
    return module.split(".")[1]


def test_arrows_within_flows_run_one_way() -> None:
    graph = {
        module: {name for name in imported if within(name, "flows")}
        for module, imported in graph_of_imports().items()
        if within(module, "flows") and module != "flows"
    }
    assert {room_of(module) for module in graph} == set(ARROWS_OF_FLOWS) | ATOP_OF_FLOWS
    wrong = [
        f"{module} imports {name}"
        for module, imported in graph.items()
        for name in sorted(imported)
        if room_of(module) in ARROWS_OF_FLOWS
        if room_of(name) not in {room_of(module), *ARROWS_OF_FLOWS[room_of(module)]}
    ]
    assert not wrong, "\n".join(wrong)
    below = [module for module in graph if room_of(module) in {"with_prefect", "without_prefect"}]
    assert not any(room_of(name) == "commands" for module in below for name in graph[module])


def test_no_circle_of_imports() -> None:
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]
    assert circle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert circle_in(graph_of_imports()) == []


def test_one_file_imports_private_modules_of_prefect() -> None:
    private = [
        found
        for found in IMPORTS
        if within(found.module, "prefect") and any(part.startswith("_") for part in found.module.split("."))
    ]
    assert private, "nothing imports a private module of Prefect any more; so this rule can go"
    wrong = [found for found in private if found.file != "flows/with_prefect/internals.py"]
    assert not wrong, shown(wrong)


# Files of flows/ and stages whose signatures may have `Any`, and what it stands for.
ANY_IN_SIGNATURES = {
    "flows/api.py": "JSON",
    "flows/commands/fitting_run.py": "keys of a run file",
    "flows/commands/init.py": "JSON",
    "flows/commands/main.py": "commands of Typer, which have no public type",
    "flows/doctor/data_checks.py": "tensors",
    "flows/doctor/model_checks.py": "graphs, tensors",
    "flows/doctor/device_checks.py": "tensors",
    "flows/facts.py": "JSON",
}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("def f(a: Any): ...", ["f"]),
        ("async def f(*, a: dict[str, typing.Any]): ...", ["f"]),
        ("def f(*a: Any, **b: int): ...", ["f"]),
        ("def f() -> 'Flow[..., Any]': ...", ["f"]),
        ("class A:\n    def f(self):\n        def g() -> Any: ...", ["g"]),
        ("def f(a: Anything) -> int:\n    b: Any = a", []),
    ],
)
def test_any_in_a_signature_is_found(text: str, names: list[str]) -> None:
    assert functions_with_any(text) == names


def test_signatures_of_flows_and_stages_have_types() -> None:
    files = [*(ROOT / "flows").rglob("*.py"), *(ROOT / "tasks").glob("*/stage.py")]
    found = {
        file.relative_to(ROOT).as_posix(): functions
        for file in files
        if (functions := functions_with_any(file.read_text(encoding="utf-8")))
    }
    wrong = {file: functions for file, functions in found.items() if file not in ANY_IN_SIGNATURES}
    assert not wrong
    assert set(ANY_IN_SIGNATURES) <= set(found), "a listed file has no such signature any more; remove it from the list"


def test_folders_of_tests_mirror_folders_of_sources() -> None:
    folders = {file.parent.relative_to(ROOT / "tests") for file in (ROOT / "tests").rglob("test_*.py")}
    own = {"end_to_end", "homes", "fakes", "containers", "deploy", "benchmarks", "gallery", "protocol"}
    for folder in sorted(folders):
        if folder.parts and folder.parts[0] not in own:
            source = ROOT / folder if folder.parts[0] == "flows" else ROOT / "tasks" / folder
            assert source.is_dir(), f"tests/{folder} mirrors no folder of the sources"


@pytest.mark.parametrize(
    "document",
    ["ARCHITECTURE.md", "CONTRIBUTING.md", "README.md", "flows/README.md", "flows/homes.md", "tasks/README.md"],
)
def test_documents_name_files_that_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[\w.]+/)*[\w]+\.py)`", text))
    files = [
        "/" + file.relative_to(ROOT).as_posix()
        for folder in ("flows", "tasks", "tests")
        for file in (ROOT / folder).rglob("*.py")
    ]
    users = {"model.py", "data.py", "callbacks.py", "weights.py", "tasks.py"}
    missing = [name for name in sorted(named - users) if not any(file.endswith(f"/{name}") for file in files)]
    assert not missing


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
    assert not loaded_after("import flows.commands.main") & {*HEAVY, "prefect", "fastapi", "sklearn"}


@pytest.mark.parametrize("module", LIGHT_CHECKPOINT)
def test_committed_checkpoints_need_no_tensorflow(module: str) -> None:
    assert not loaded_after(f"import tasks.foundation.checkpoint.{module}") & {*HEAVY, "prefect"}


def test_reading_a_run_file_and_a_log_needs_neither() -> None:
    modules = ("contracts.run_file", "log.appends", "user_code")
    statement = "; ".join(f"import tasks.foundation.{module}" for module in modules)
    assert not loaded_after(statement) & {*HEAVY, "prefect"}
