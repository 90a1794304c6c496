"""Finds the user's own line behind an operation of a traced function."""

import linecache
import sys
from pathlib import Path
from typing import Any

from tasks.foundation.user_errors import USER_PACKAGE_PREFIX

IN_THE_GRAPH = " in the graph)"


def line_that_made(operation: Any) -> str:
    """Return text such as `, data.py, line 12: x = tf.random.uniform([])`; "" if no line is the user's.

    Args:
        operation: a `tf.Operation` of a traced graph.
    """
    files = {getattr(module, "__file__", None) for name, module in list(sys.modules.items()) if _is_user_module(name)}
    frames = [frame for frame in operation.traceback or () if frame.filename in files]
    return f", {_shown(frames[-1].filename, frames[-1].lineno)}" if frames else ""


def place_of(operation: Any) -> str:
    """The user's line behind an operation; if there is none, its name in the graph, which has the layer's."""
    return line_that_made(operation) or f" ({operation.name}{IN_THE_GRAPH}"


def _shown(file: str, number: int) -> str:
    code = linecache.getline(file, number).strip()
    return f"{Path(file).name}, line {number}" + (f": {code}" if code else "")


def _is_user_module(name: str) -> bool:
    return name.startswith(USER_PACKAGE_PREFIX)
