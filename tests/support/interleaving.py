"""Runs several writers against one store in every order that their storage calls can come in.

Each writer is a coroutine (a greenlet: the code under test knows nothing of it) that stops before every storage call
until it is given the turn, so an execution is a list of turns and can be played again. `explore` walks all of them
depth first. Two calls that do not touch the same path, or that both change nothing, may come in either order with the
same result; sleep sets (Godefroid, 1996) leave out the orders that differ only in such pairs, so that what remains is
complete and small.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from greenlet import greenlet

from tasks.foundation.storage.base import Storage, Stored

_CHANGING = {"create", "write", "upload", "copy", "delete"}


class Call(NamedTuple):
    """A storage call that a writer is about to make."""

    verb: str
    path: str

    @property
    def changes(self) -> bool:
        return self.verb in _CHANGING

    def meets(self, other: "Call") -> bool:
        """Whether the order of the two can matter."""
        if not (self.changes or other.changes):
            return False
        one, two = f"{self.path}/".lstrip("/"), f"{other.path}/".lstrip("/")
        return one.startswith(two) or two.startswith(one)


@dataclass
class Writer:
    """One process of the protocol: what it does, and what is done to it.

    Attributes:
        work: is given the store.
        dies_after: so many changing calls later, it never makes another call. Dying between calls that only read
            leaves nothing else behind than dying after the last change, so these are all the moments there are.
        loses: raised, once, in place of the answer to its first create that took effect.
    """

    work: Callable[[Storage], object]
    dies_after: int | None = None
    loses: Exception | None = None


@dataclass
class Execution:
    """One order of turns, being played."""

    store: Storage
    writers: list[Writer]
    results: dict[int, object] = field(default_factory=dict)
    faults: dict[int, BaseException] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._pending: dict[int, Call] = {}
        self._changes = dict.fromkeys(range(len(self.writers)), 0)
        self._greenlets = [greenlet(self._run) for _ in self.writers]
        for number, one in enumerate(self._greenlets):
            one.switch(number)

    def pending(self) -> dict[int, Call]:
        """The next call of every writer that is neither done nor dead."""
        return dict(self._pending)

    def step(self, number: int) -> None:
        """Let one writer make its call and run on to its next."""
        del self._pending[number]
        self._greenlets[number].switch()

    def end(self) -> None:
        """Unwind what still waits."""
        for one in self._greenlets:
            if not one.dead:
                one.throw()

    def _run(self, number: int) -> None:
        try:
            self.results[number] = self.writers[number].work(Stepped(self, number))
        except Exception as fault:  # noqa: BLE001 - looked at by the check
            self.faults[number] = fault

    def turn(self, number: int, call: Call) -> None:
        """A writer waits here before its call."""
        if self.writers[number].dies_after == self._changes[number]:
            self.dead.add(number)
        else:
            self._pending[number] = call
        greenlet.getcurrent().parent.switch()
        self._changes[number] += call.changes

    def answer(self, number: int, call: Call) -> None:
        """Called when a writer's call has taken effect."""
        lost = self.writers[number].loses
        if lost is not None and call.verb == "create":
            # A fresh list of writers is made for each execution, so this one's loss is its own.
            self.writers[number].loses = None
            raise lost


class Stepped:
    """A store, or a folder of it, that waits for the writer's turn before every call."""

    def __init__(self, execution: Execution, number: int, folder: str = "") -> None:
        self._execution, self._number, self._folder = execution, number, folder
        self._store = execution.store.at(folder) if folder else execution.store

    @property
    def uri(self) -> str:
        return self._store.uri

    @property
    def transfers(self) -> int:
        return 1

    def with_deadline(self, _seconds: float) -> Storage:
        return self

    def at(self, folder: str) -> Storage:
        return Stepped(self._execution, self._number, f"{self._folder}/{folder}".lstrip("/"))

    def read(self, path: str) -> bytes:
        self._turn("read", path)
        return self._store.read(path)

    def exists(self, path: str) -> bool:
        self._turn("exists", path)
        return self._store.exists(path)

    def create(self, path: str, data: bytes) -> None:
        call = self._turn("create", path)
        self._store.create(path, data)
        self._execution.answer(self._number, call)

    def write(self, path: str, data: bytes) -> None:
        self._turn("write", path)
        self._store.write(path, data)

    def upload(self, source: Path, path: str) -> Stored:
        self._turn("upload", path)
        return self._store.upload(source, path)

    def copy(self, path: str, target: str) -> None:
        # Nobody changes what is copied.
        self._turn("copy", target)
        self._store.copy(path, target)

    def stat(self, path: str) -> Stored:
        self._turn("stat", path)
        return self._store.stat(path)

    def checksum(self, path: str, *, begin: int = 0, size: int | None = None) -> Stored:
        self._turn("checksum", path)
        return self._store.checksum(path, begin=begin, size=size)

    def local_path(self, path: str) -> Path | None:
        self._turn("local_path", path)
        return self._store.local_path(path)

    def download(self, path: str, target: Path, *, begin: int = 0, size: int | None = None) -> Stored:
        self._turn("download", path)
        return self._store.download(path, target, begin=begin, size=size)

    def read_range(self, path: str, begin: int, size: int) -> bytes:
        self._turn("read_range", path)
        return self._store.read_range(path, begin, size)

    def files(self, folder: str) -> Iterator[str]:
        self._turn("files", folder)
        return iter(list(self._store.files(folder)))

    def folders(self, folder: str) -> Iterator[str]:
        self._turn("folders", folder)
        return iter(list(self._store.folders(folder)))

    def delete(self, folder: str) -> None:
        self._turn("delete", folder)
        self._store.delete(folder)

    def probe(self) -> list[str]:
        return []

    def _turn(self, verb: str, path: str) -> Call:
        call = Call(verb, f"{self._folder}/{path}".lstrip("/"))
        self._execution.turn(self._number, call)
        return call


@dataclass
class _Node:
    """A state on the way down: what could be done there, what need not be, what has been."""

    pending: dict[int, Call]
    asleep: set[int]
    taken: int
    tried: set[int] = field(default_factory=set)


def explore(
    start: Callable[[], Execution],
    check: Callable[[Execution], None],
    *,
    reduced: bool = True,
) -> int:
    """Play every order of storage calls.

    Args:
        start: a fresh execution of the same writers on the same state.
        check: looks at an execution that has run to its end.
        reduced: leave out orders that differ from one played only in calls that do not meet.

    Returns:
        How many executions were checked.
    """
    path: list[_Node] = []
    checked = 0
    while True:
        execution = start()
        try:
            for node in path:
                execution.step(node.taken)
            if _descend(execution, path, reduced=reduced):
                check(execution)
                checked += 1
        finally:
            execution.end()
        while path:
            node = path[-1]
            node.tried.add(node.taken)
            left = [number for number in node.pending if number not in node.tried | node.asleep]
            if left:
                node.taken = left[0]
                break
            path.pop()
        else:
            return checked


def sample(start: Callable[[], Execution], check: Callable[[Execution], None], *, executions: int, seed: int) -> None:
    """Play random orders of storage calls, where there are too many to `explore`. Arguments: see there."""
    draw = random.Random(seed)
    for _ in range(executions):
        execution = start()
        try:
            while pending := execution.pending():
                execution.step(draw.choice(sorted(pending)))
            check(execution)
        finally:
            execution.end()


def _descend(execution: Execution, path: list[_Node], *, reduced: bool) -> bool:
    """Go on to the end, noting the way; False if all that is left was seen in another order."""
    while pending := execution.pending():
        asleep: set[int] = set()
        if path and reduced:
            above = path[-1]
            call = above.pending[above.taken]
            asleep = {number for number in above.asleep | above.tried if not above.pending[number].meets(call)}
        awake = [number for number in pending if number not in asleep]
        if not awake:
            return False
        path.append(_Node(pending, asleep, awake[0]))
        execution.step(awake[0])
    return True
