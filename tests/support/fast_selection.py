"""The test files of `make test-fast`: those that start next to nothing, and those that what changed can reach.

A light file imports, however indirectly, neither TensorFlow nor Prefect, and starts no process itself. Imports within
functions count for tests and their support, and not for Baton, which imports what is heavy where it is used. What
changed are the files that Git sees changed in the checkout, or in commits that the upstream branch does not have. The
rules of the house and of the documents always run.
"""

import ast
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from tests.support.checkout import CHECKOUT
from tests.support.imports import imports_in, module_of, modules_of, parsed

_HEAVY = {"keras", "prefect", "tensorflow"}
_STARTING = {"subprocess", "tests.support.forked"}


@cache
def fast_files() -> frozenset[str]:
    """The test files, relative to the checkout."""
    graph, changed = _graph(), _changed_files()
    changed_modules = {module_of(each) for each in changed}
    fast = set()
    for module, file in modules_of("tests").items():
        reached = _reached(module, graph)
        light = not reached & _HEAVY and not any(
            graph[each] & _STARTING for each in reached if each.startswith("tests.") and each in graph
        )
        if light or reached & changed_modules or file.count("/") == 1:
            fast.add(file)
    return frozenset(file for file in fast if Path(file).name.startswith("test_"))


@cache
def _graph() -> Mapping[str, frozenset[str]]:
    """Module -> modules and packages that it imports."""
    modules = modules_of("flows", "tasks", "tests")
    graph = {}
    for module, file in modules.items():
        tree = parsed(file)
        if not file.startswith("tests/"):
            tree.body = list(_at_import(tree.body))
        named = {found.module for found in imports_in(tree, file)}
        inside = {name for each in named for name in (each, each.rpartition(".")[0]) if name in modules}
        graph[module] = frozenset(inside | {each.partition(".")[0] for each in named})
    return graph


def _at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a module is imported."""
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _at_import(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node


def _reached(module: str, graph: Mapping[str, frozenset[str]]) -> set[str]:
    reached, waiting = {module}, [module]
    while waiting:
        found = graph.get(waiting.pop(), frozenset()) - reached
        reached |= found
        waiting.extend(found)
    return reached


def _changed_files() -> set[str]:
    """Changed Python files by Git; none where the checkout has no Git."""
    found: set[str] = set()
    since = (["diff", "--name-only", "HEAD"], ["diff", "--name-only", "@{upstream}"])
    for words in (*since, ["ls-files", "--others", "--exclude-standard"]):
        done = subprocess.run(["git", *words], cwd=CHECKOUT, capture_output=True, text=True, check=False)  # noqa: S607
        found |= {line for line in done.stdout.splitlines() if line.endswith(".py")} if done.returncode == 0 else set()
    return found
