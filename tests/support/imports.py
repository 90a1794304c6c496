"""What the files of this checkout import, read from their text."""

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


def imports_in(tree: ast.AST, file: str) -> Iterator[Import]:
    """Every import of a file or of a part of it, those within functions and under `if TYPE_CHECKING` too."""
    package = ["baton", *Path(file).parent.parts]
    for node in ast.walk(tree):
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


def imports_of(text: str, file: str) -> Iterator[Import]:
    """Every import of a file's text."""
    return imports_in(ast.parse(text, file), file)


def imports_below(*folders: str) -> list[Import]:
    return [found for file in sorted(modules_of(*folders).values()) for found in imports_in(parsed(file), file)]


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def module_of(file: str) -> str:
    """The name by which the module of a file is imported: of `flows/` and `tasks/` as they are installed."""
    name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name if within(name, "tests") else "baton" if name == "flows.package" else f"baton.{name}"


def modules_of(*folders: str) -> dict[str, str]:
    """Module name -> file, below the folders."""
    files = [file.relative_to(ROOT).as_posix() for folder in folders for file in (ROOT / folder).rglob("*.py")]
    return {module_of(file): file for file in files}


def parsed(file: str) -> ast.Module:
    """The syntax of a file of the checkout."""
    return ast.parse((ROOT / file).read_text(encoding="utf-8"), file)
