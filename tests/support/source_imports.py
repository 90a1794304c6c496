"""The imports of the sources, as a list and as a graph."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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
