"""The tree in the docstring of `errors.py` against the classes."""

import inspect

from baton.tasks.foundation import errors
from baton.tasks.foundation.errors import BatonError

_INDENT = 4


def drawn_tree() -> dict[str, tuple[str | None, int]]:
    """Base class and exit code of each class, as drawn."""
    tree: dict[str, tuple[str | None, int]] = {}
    bases: dict[int, str] = {}
    for line in str(errors.__doc__).splitlines():
        if " exit " not in line or not line.startswith(" " * _INDENT) or "=" in line:
            continue
        name, _, rest = line.lstrip(" │├└─").partition(" ")
        depth = (len(line) - len(line.lstrip(" │├└─"))) // _INDENT
        tree[name] = (bases.get(depth - 1), int(rest.split()[1]))
        bases[depth] = name
    return tree


def test_drawn_tree_is_the_tree_of_classes() -> None:
    classes = {name: kind for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, BatonError)}
    assert drawn_tree() == {
        name: (kind.__base__.__name__ if kind is not BatonError else None, kind.exit_code)
        for name, kind in classes.items()
    }


def test_every_error_has_a_docstring() -> None:
    for name in drawn_tree():
        assert getattr(errors, name).__dict__["__doc__"], name


def test_fields_are_the_keyword_arguments() -> None:
    fault = errors.NonFinite("NaN", step=7)
    assert fault.fields == {"step": 7}
    assert type(fault)(str(fault), **fault.fields).fields == fault.fields
    assert errors.StaleWriter("another").fields == {}
