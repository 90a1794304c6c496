"""Notices a source that never ends, before it fills the disk."""

import ast
import inspect
import itertools
import operator
import textwrap
from collections.abc import Iterator
from types import CodeType, GeneratorType

from tasks.foundation.errors import SourceError
from tasks.foundation.messages import message

# A source without end shows itself by its number of examples, if nothing else does.
WARN_AT_EXAMPLES = 1_000_000
_HINT = "set data.examples: N to take the first N examples, or let the source end after one pass over the data"


def require_end(reference: str, returned: object) -> None:
    """Refuse an iterable that certainly has no end: a repeated dataset, `itertools.cycle`, `while True` with no exit.

    Args:
        reference: the user's function, for messages.
        returned: what it returned.

    Raises:
        SourceError: it has no end; names data.examples.
    """
    reason = _reason(returned)
    if reason is not None:
        raise endless_error(reference, reason)


def endless_error(reference: str, reason: str) -> SourceError:
    """Return the error for a source that has no end."""
    return SourceError(message(f"{reference}: its examples have no end ({reason})", hints=[_HINT]))


def endless_warning(reference: str, examples: int) -> str:
    """Return the warning for a source that may have no end."""
    return f"{reference}: {examples:,} examples so far, and no end; if it has none, stop and {_HINT}"


def _reason(returned: object) -> str | None:
    cardinality = getattr(returned, "cardinality", None)
    if callable(cardinality) and type(returned).__module__.startswith("tensorflow"):
        return "a tf.data.Dataset with repeat()" if int(cardinality()) == -1 else None
    if isinstance(returned, itertools.cycle | itertools.count):
        return f"itertools.{type(returned).__name__}"
    if isinstance(returned, itertools.repeat) and operator.length_hint(returned, -1) == -1:
        return "itertools.repeat"
    if isinstance(returned, GeneratorType):
        line = _endless_loop(returned.gi_code)
        return None if line is None else f"line {line}: while True without break or return"
    return None


def _endless_loop(code: CodeType) -> int | None:
    """Return the line of a loop of a generator function that yields and has no exit; None if there is none."""
    try:
        lines, first = inspect.getsourcelines(code)
        function = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, SyntaxError):
        return None  # its source cannot be read, or it is an expression
    for node in _within(function):
        if isinstance(node, ast.While) and isinstance(node.test, ast.Constant) and node.test.value:
            inside = list(_within(node))
            exits = any(isinstance(each, ast.Return | ast.Raise | ast.Break) for each in inside)
            if not exits and any(isinstance(each, ast.Yield | ast.YieldFrom) for each in inside):
                return first + node.lineno - 1
    return None


def _within(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes in a function or loop, without those of functions that it defines."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield child
            yield from _within(child)
