"""Iterates over what a user's function returned, in the run file's folder, and reports its errors."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

from tasks.foundation.errors import SourceError
from tasks.foundation.user_errors import user_error

T = TypeVar("T")
# Entered while the user's code runs.
Surroundings = Callable[[], AbstractContextManager[None]]


def call_user(reference: str, work: Callable[[], T], surroundings: Surroundings, *, what: str = "") -> T:
    """Call the user's code.

    Args:
        reference: the user's function, for messages.
        work: calls it.
        surroundings: entered meanwhile.
        what: text such as ` (example 3)`, for messages.

    Raises:
        SourceError: it raised; names the error, the file and the line.
    """
    with surroundings():
        try:
            return work()
        except StopIteration:
            raise
        except (Exception, SystemExit) as fault:
            raise SourceError(user_error(f"{reference}: raised", fault, end=what)) from fault


def user_items(
    reference: str, items: Iterable[object], surroundings: Surroundings, *, what: str
) -> Iterator[tuple[str, object]]:
    """Yield the items with their place, such as `data.py:load, example 3`.

    Args:
        reference: the user's function, for messages.
        items: what it returned.
        surroundings: entered while the next item is made.
        what: what an item is: `example` or `batch`.

    Raises:
        SourceError: see `call_user`.
    """
    iterator = call_user(reference, lambda: iter(items), surroundings)
    index = 0
    while True:
        try:
            item = call_user(reference, lambda: next(iterator), surroundings, what=f" ({what} {index})")
        except StopIteration:
            return
        yield f"{reference}, {what} {index}", item
        index += 1
