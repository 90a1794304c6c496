"""Runs the cells of a notebook within a running event loop, as a kernel does."""

import ast
import asyncio
import json
from pathlib import Path
from typing import Any


def cells_of(notebook: Path) -> list[str]:
    """The code of a notebook, which must have no outputs."""
    content = json.loads(notebook.read_text(encoding="utf-8"))
    if content["nbformat"] != 4 or any(cell.get("outputs") for cell in content["cells"]):
        raise AssertionError(f"{notebook} is not a notebook of format 4 without outputs")
    return ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code"]


def shown_values(notebook: str) -> list[Any]:
    """Run all cells; return what a notebook would show of each, as JSON: the value of its last line, or its text."""
    names: dict[str, Any] = {}

    async def run_cells() -> list[Any]:
        return [_value_of(cell, names) for cell in cells_of(Path(notebook))]

    values = asyncio.run(run_cells())
    return json.loads(json.dumps(values, default=str))  # type: ignore[no-any-return]


def _value_of(cell: str, names: dict[str, Any]) -> Any:
    *statements, last = ast.parse(cell).body
    if not isinstance(last, ast.Expr):
        exec(cell, names)  # noqa: S102 - the repository's own notebook
        return None
    exec(compile(ast.Module(statements, []), "cell", "exec"), names)  # noqa: S102
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)  # noqa: S307
