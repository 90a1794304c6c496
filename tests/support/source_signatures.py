"""The signatures of the sources."""

import ast
import re
from collections.abc import Iterator


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
