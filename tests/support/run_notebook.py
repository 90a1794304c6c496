"""Runs the cells of a notebook within a running event loop, as a kernel does, and keeps what a notebook shows of each.

Run as a program, this file writes deploy/runs/notebook.ipynb anew, with its outputs.
"""

import ast
import asyncio
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from pprint import pformat
from types import ModuleType, SimpleNamespace
from typing import Any, cast

from tests.support.checkout import CHECKOUT

RUNS = CHECKOUT / "deploy" / "runs"
NOTEBOOK = RUNS / "notebook.ipynb"
REGENERATE = "PYTHONPATH=. .venv/bin/python -m tests.support.run_notebook"
# What the notebook's outputs have in place of the folder where it was run.
_SHOWN_FOLDER = "/home/me/baton/deploy/runs"
_DATA = re.compile(r"data:image/svg\+xml;base64,[\w+/=]+")
_DIFFERS = re.compile(r"\b[0-9a-f]{8}\b|[\d,]+ examples/s|started in [^\\]*|\d+\.\d+(?:e-?\d+)?|\d+ ms/step")


class _Kernel:
    """What of IPython a program in a notebook uses: it tells that it is one, and shows outputs that can be updated."""

    def __init__(self) -> None:
        self.outputs: list[dict[str, Any]] = []
        self.modules = {"IPython": ModuleType("IPython"), "IPython.display": ModuleType("IPython.display")}
        vars(self.modules["IPython"])["get_ipython"] = lambda: SimpleNamespace(kernel=self)
        vars(self.modules["IPython.display"])["display"] = self._display

    def _display(self, data: dict[str, str], *, raw: bool, display_id: bool) -> SimpleNamespace:
        assert (raw, display_id) == (True, True)
        shown = {"output_type": "display_data", "data": data, "metadata": {}}
        self.outputs.append(shown)
        return SimpleNamespace(update=lambda data, raw: shown.update(data=data) if raw else None)


def with_outputs(notebook: str) -> dict[str, Any]:
    """Run all cells in the working folder; return the notebook with their outputs, as JSON."""
    content = json.loads(Path(notebook).read_text(encoding="utf-8"))
    kernel, names = _Kernel(), dict[str, Any]()
    sys.modules.update(kernel.modules)

    async def run_cells() -> None:
        codes = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
        for number, cell in enumerate(codes, start=1):
            kernel.outputs = []
            printed, warned = io.StringIO(), io.StringIO()
            with redirect_stdout(printed), redirect_stderr(warned):
                value = _value_of("".join(cell["source"]), names)
            for name, stream in (("stdout", printed), ("stderr", warned)):
                if stream.getvalue():
                    kernel.outputs.append({"output_type": "stream", "name": name, "text": stream.getvalue()})
            if value is not None:
                data = {"text/plain": pformat(value, width=79, sort_dicts=False)}
                data |= {"text/html": value._repr_html_()} if hasattr(value, "_repr_html_") else {}
                result = {"output_type": "execute_result", "execution_count": number, "data": data, "metadata": {}}
                kernel.outputs.append(result)
            cell["execution_count"], cell["outputs"] = number, kernel.outputs

    asyncio.run(run_cells())
    text = json.dumps(content, ensure_ascii=False)
    return cast("dict[str, Any]", json.loads(text.replace(os.fspath(Path.cwd()), _SHOWN_FOLDER)))


def _value_of(cell: str, names: dict[str, Any]) -> Any:
    *statements, last = ast.parse(cell).body
    if not isinstance(last, ast.Expr):
        exec(cell, names)  # noqa: S102 - the repository's own notebook
        return None
    exec(compile(ast.Module(statements, []), "cell", "exec"), names)  # noqa: S102
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)  # noqa: S307


def comparable(notebook: dict[str, Any]) -> list[str]:
    """The cells of a notebook, without what differs from one execution, or one processor, to another."""
    return [
        _DIFFERS.sub("*", _DATA.sub("*", json.dumps(cell, ensure_ascii=False, sort_keys=True)))
        for cell in notebook["cells"]
    ]


def copy_of_runs(folder: Path) -> Path:
    """Copy the shipped runs to a folder, without what training them here has left."""
    shutil.copytree(RUNS, folder, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    return folder


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = copy_of_runs(Path(folder) / "deploy")
        words = ["-m", "tests.support.call_function", "tests.support.run_notebook", "with_outputs"]
        path = os.pathsep.join(filter(None, [os.fspath(CHECKOUT), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [sys.executable, *words, json.dumps({"notebook": NOTEBOOK.name})],
            cwd=runs,
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    notebook = json.loads(done.stdout.partition("result: ")[2])
    NOTEBOOK.write_text(f"{json.dumps(notebook, indent=1, ensure_ascii=False)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
