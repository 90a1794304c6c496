"""The rules of the house, read from the imports: which way the arrows run, and who may know what."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support.checkout import CHECKOUT as ROOT
from tests.support.imports import Import, imports_below, imports_in, imports_of, modules_of, parsed, within


def shown(wrong: list[Import]) -> str:
    return "\n".join(map(str, wrong))


def runs_as_main(node: ast.stmt) -> bool:
    """Whether this is `if __name__ == "__main__":`; a module that is run is another one than the module imported."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def graph_of_imports() -> dict[str, set[str]]:
    """Module -> modules that it imports, also within functions."""
    modules = modules_of("flows", "tasks")
    graph = {}
    for module, file in modules.items():
        tree = parsed(file)
        tree.body = [node for node in tree.body if not runs_as_main(node)]
        imported = {found.module for found in imports_in(tree, file)}
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
    "contracts": {"errors", "masking", "text"},
    "errors": {"masking", "text"},
    "masking": set(),
    "text": {"masking"},
    "storage": {"contracts", "errors", "masking", "text"},
    "log": {"contracts", "errors", "machine", "masking", "text", "storage", "telemetry"},
    "checkpoint": {
        *("contracts", "errors", "machine", "masking", "text", "model", "log", "state", "storage", "telemetry"),
    },
    "state": {
        *(
            "contracts",
            "dataset",
            "errors",
            "machine",
            "masking",
            "text",
            "model",
            "storage",
            "keras_config",
            "user_functions",
        ),
    },
    "dataset": {
        "contracts",
        "errors",
        "machine",
        "masking",
        "text",
        "model",
        "storage",
        "keras_config",
        "user_functions",
        "user_traceback",
    },
    "model": {
        *(
            "contracts",
            "errors",
            "machine",
            "masking",
            "text",
            "seeding",
            "storage",
            "telemetry",
            "keras_config",
            "user_functions",
            "user_traceback",
        ),
    },
    "seeding": set(),
    "user_traceback": {"text"},
    "child_imports": {"seeding", "storage"},
    "keras_config": {"contracts", "errors", "text"},
    "user_functions": {"child_imports", "contracts", "errors", "keras_config", "seeding", "text", "user_traceback"},
    "stage": {"checkpoint", "contracts", "log", "storage", "telemetry"},
    "machine": {"contracts", "errors", "masking", "text", "storage", "telemetry", "keras_config", "user_functions"},
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
LIGHT_MACHINE = ("collectives", "environment", "hang", "metadata_server", "processes", "stops", "threads")
# Files that only move files need: an image without TensorFlow holds them.
LIGHT = (
    "contracts/",
    "errors.py",
    "masking.py",
    "text.py",
    "storage/",
    "log/",
    *(f"checkpoint/{name}.py" for name in LIGHT_CHECKPOINT),
    "stage.py",
    *(f"machine/{name}.py" for name in LIGHT_MACHINE),
    "user_traceback.py",
    "telemetry/__init__.py",
    "telemetry/tensorboard.py",
    "telemetry/events.py",
    "telemetry/ledger.py",
    "telemetry/tensorboard.py",
)


IMPORTS = imports_below("flows", "tasks")


# What was reached on the way to a house that one head can hold, and 1 % more. A change lowers it; a feature that needs
# more says so.
MOST_MODULES = 240
# Statements by folder, not lines: no text is squeezed to fit.
MOST_STATEMENTS = {
    "flows": 3260,
    "flows/commands": 1580,
    "flows/doctor": 762,
    "flows/package": 14,
    "flows/proof": 560,
    "flows/with_prefect": 1190,
    "tasks": 72,
    "tasks/checkpoint_to_gcs": 17,
    "tasks/evaluate": 1044,
    "tasks/evaluate/report": 745,
    "tasks/foundation": 910,
    "tasks/foundation/checkpoint": 1446,
    "tasks/foundation/contracts": 2391,
    "tasks/foundation/dataset": 2542,
    "tasks/foundation/log": 1384,
    "tasks/foundation/machine": 2170,
    "tasks/foundation/model": 2912,
    "tasks/foundation/state": 834,
    "tasks/foundation/storage": 894,
    "tasks/foundation/storage/gcs": 974,
    "tasks/foundation/telemetry": 1310,
    "tasks/init_or_restore": 566,
    "tasks/init_or_restore/weights": 649,
    "tasks/prepare_data": 1534,
    "tasks/prepare_data/sources": 4034,
    "tasks/train_segment": 1187,
}


def statements_of(text: str) -> int:
    """How many statements a file has, without its docstrings."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    return sum(not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in nodes)


def test_the_house_does_not_grow() -> None:
    files = [file.relative_to(ROOT) for folder in ("flows", "tasks") for file in (ROOT / folder).rglob("*.py")]
    found = Counter[str]()
    for file in files:
        found[file.parent.as_posix()] += statements_of((ROOT / file).read_text(encoding="utf-8"))
    grown = {folder: (found[folder], most) for folder, most in MOST_STATEMENTS.items() if found[folder] > most}
    assert (grown, found.keys() - MOST_STATEMENTS.keys()) == ({}, set())
    assert len(files) <= MOST_MODULES


def test_only_the_installed_package_is_imported() -> None:
    """`flows.x` beside `baton.flows.x` would be a second module: its classes are other ones."""
    everywhere = [*IMPORTS, *imports_below("containers", "deploy", "tests")]
    wrong = [found for found in everywhere if within(found.module, "flows") or within(found.module, "tasks")]
    assert not wrong, shown(wrong)


def test_every_folder_of_modules_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    folders = [name for name, file in modules_of("flows", "tasks").items() if file.endswith("/__init__.py")]
    assert listed == sorted(folders)


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
        if any(within(found.module, f"baton.tasks.{other}") for other in ROOMS if other != room)
    ]
    assert not wrong, shown(wrong)


def test_tasks_never_import_flows() -> None:
    wrong = [found for found in IMPORTS if found.file.startswith("tasks/") and within(found.module, "baton.flows")]
    assert not wrong, shown(wrong)


def test_the_ground_knows_no_room() -> None:
    wrong = [
        found
        for found in IMPORTS
        if found.file.startswith("tasks/foundation/")
        and within(found.module, "baton.tasks")
        and not within(found.module, "baton.tasks.foundation")
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
        and within(found.module, "baton.tasks.foundation")
        and found.module.split(".")[3] not in below
    ]
    assert not wrong, shown(wrong)


def test_the_run_log_knows_of_telemetry_the_events_only() -> None:
    wrong = [
        found
        for found in IMPORTS
        if found.file.startswith("tasks/foundation/log/")
        and within(found.module, "baton.tasks.foundation.telemetry")
        and not within(found.module, "baton.tasks.foundation.telemetry.events")
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
    "host_checks": {"opened_run", "result"},
    "admit": {"host_checks", "opened_run", "process_start", "result"},
    "runner": {"process"},
    "stage_process": {"process_start", "runner"},
    "remote_stage": {"runner"},
    "evaluating": {"admit", "opened_run", "runner"},
    "relay": {"admit", "host_checks", "evaluating", "opened_run", "process", "result", "runner"},
    "supervisor": {"process"},
    "proof": {"admit", "opened_run", "supervisor"},
    "doctor": {"admit", "opened_run", "process_start"},
}
ATOP_OF_FLOWS = {"commands", "with_prefect", "train", "api"}


def room_of(module: str) -> str:
    return module.split(".")[2]


def test_arrows_within_flows_run_one_way() -> None:
    graph = {
        module: {name for name in imported if within(name, "baton.flows")}
        for module, imported in graph_of_imports().items()
        if within(module, "baton.flows") and module != "baton.flows"
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
    below = [module for module in graph if room_of(module) in {"with_prefect", "train"}]
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
        ("from baton.tasks import evaluate", "tasks/x/y.py", ["baton.tasks.evaluate"]),
        ("from . import z", "tasks/x/y.py", ["baton.tasks.x.z"]),
        ("from ..evaluate.stage import z", "tasks/x/y.py", ["baton.tasks.evaluate.stage.z"]),
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
    assert not loaded_after("import baton.flows.commands.main") & {*HEAVY, "prefect", "fastapi", "sklearn"}


@pytest.mark.parametrize("module", LIGHT_CHECKPOINT)
def test_committed_checkpoints_need_no_tensorflow(module: str) -> None:
    assert not loaded_after(f"import baton.tasks.foundation.checkpoint.{module}") & {*HEAVY, "prefect"}


def test_reading_a_run_file_and_a_log_needs_neither() -> None:
    modules = ("contracts.run_file", "log.appends", "user_functions")
    statement = "; ".join(f"import baton.tasks.foundation.{module}" for module in modules)
    assert not loaded_after(statement) & {*HEAVY, "prefect"}
