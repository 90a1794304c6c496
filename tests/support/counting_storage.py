"""A store that counts its calls and can fail at one of them."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from baton.tasks.foundation.storage.interface import Storage

_CALLS = {
    *(
        "read",
        "exists",
        "create",
        "write",
        "upload",
        "write_buffers",
        "copy",
        "stat",
        "checksum",
        "local_path",
        "download",
        "read_range",
    ),
    *("files", "folders", "delete"),
}


class Counting:
    """Forwards every call to a store and counts it.

    Attributes:
        fails: given the number of a call, from 0, and its method: the exception to raise and whether the call takes
            effect first; None: the call succeeds.
    """

    def __init__(self, store: Storage) -> None:
        self._store = store
        self.calls: Counter[str] = Counter()
        self.fails: Callable[[int, str], tuple[Exception, bool] | None] = lambda _number, _verb: None

    def with_deadline(self, _seconds: float) -> "Counting":
        return self

    def __getattr__(self, verb: str) -> Any:
        inner = getattr(self._store, verb)
        if verb not in _CALLS:
            return inner

        def call(*arguments: Any, **options: Any) -> Any:
            failure = self.fails(self.calls.total(), verb)
            self.calls[verb] += 1
            if failure is not None and not failure[1]:
                raise failure[0]
            try:
                answer = inner(*arguments, **options)
            finally:
                if failure is not None:
                    raise failure[0]
            return list(answer) if verb in {"files", "folders"} else answer

        return call
