"""A store whose worker dies at one of its calls, and pauses at another."""

import random
import time
from dataclasses import dataclass
from typing import Any, NoReturn

_CALLS = {
    *("read", "exists", "create", "write", "upload", "write_buffers", "copy"),
    *("stat", "checksum", "download", "read_range"),
    *("files", "folders", "delete"),
}


class Died(BaseException):
    """The worker is dead; it makes no more calls."""


class CrashingStore:
    """Forwards calls to a store. Its worker dies at one call and pauses at another.

    Args:
        store: receives the calls.
        chance: draws the length of the pause, and whether the worker dies before or after the call takes effect.
        dies_at: number of the call that kills the worker, from 0.
        pauses_at: number of the call that pauses first, from 0.
        shared: what a folder of the store has in common with it; None: this is not a folder.
    """

    def __init__(
        self, store: Any, chance: random.Random, *, dies_at: int, pauses_at: int, shared: "_Shared | None" = None
    ) -> None:
        self._store, self._chance = store, chance
        self._dies_at, self._pauses_at = dies_at, pauses_at
        self._after = chance.random() < 0.5
        self._shared = _Shared() if shared is None else shared

    @property
    def died_in_flight(self) -> bool:
        """Whether the worker died between the first file of a save and its log entry."""
        return self._shared.died_in_flight

    def at(self, folder: str) -> "CrashingStore":
        return self._same(self._store.at(folder))

    def with_deadline(self, seconds: float) -> "CrashingStore":
        return self._same(self._store.with_deadline(seconds))

    def _same(self, store: Any) -> "CrashingStore":
        return CrashingStore(store, self._chance, dies_at=self._dies_at, pauses_at=self._pauses_at, shared=self._shared)

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._store, name)
        if name not in _CALLS:
            return inner

        def call(*arguments: Any, **options: Any) -> Any:
            number = self._shared.count()
            self._shared.before(name, arguments)
            if number == self._pauses_at:
                time.sleep(self._chance.uniform(0, 0.2))
            if number >= self._dies_at and not (number == self._dies_at and self._after):
                self._shared.die(first=number == self._dies_at)
            result = inner(*arguments, **options)
            result = iter(list(result)) if name in {"files", "folders"} else result
            self._shared.after(name, arguments)
            if number == self._dies_at:
                self._shared.die(first=True)
            return result

        return call


@dataclass
class _Shared:
    """What all folders of a store count together."""

    calls: int = 0
    in_flight: bool = False
    died_in_flight: bool = False

    def count(self) -> int:
        """The number of this call, from 0."""
        self.calls += 1
        return self.calls - 1

    def before(self, call: str, arguments: tuple[Any, ...]) -> None:
        """A call is about to be made."""
        self.in_flight |= call == "upload" and "checkpoints/" in str(arguments[1])

    def after(self, call: str, arguments: tuple[Any, ...]) -> None:
        """A call has taken effect."""
        if call == "create" and str(arguments[0]).startswith("log/"):
            self.in_flight = False

    def die(self, *, first: bool) -> NoReturn:
        """The worker dies at this call, or has died before it."""
        if first:
            self.died_in_flight = self.in_flight
        raise Died
