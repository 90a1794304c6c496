"""Run several writers against one store in every possible order of their storage calls.

Each writer is a greenlet that stops before every storage call until it is its turn. An execution is a list of turns and
can be replayed. `explore` walks all of them depth first. The order of two calls does not matter if they touch different
paths or both change nothing. Sleep sets (Godefroid, 1996) leave out orders that differ only in such pairs; the rest is
complete and small.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from greenlet import greenlet

from tasks.foundation.storage.base import FileStat, Storage

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
    """One process of the protocol and its faults.

    Attributes:
        work: called with the store.
        dies_after: number of changing calls after which it makes no more calls. A death between reading calls leaves
            the same files as a death after the last change, so these are all the moments.
        loses: raised once in place of the response to its first create that took effect.
    """

    work: Callable[[Storage], object]
    dies_after: int | None = None
    loses: Exception | None = None


@dataclass
class Execution:
    """An execution of one order of turns."""

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
        """The next call of every writer that still runs."""
        return dict(self._pending)

    def step(self, number: int) -> None:
        """Let one writer make its call and run to its next."""
        del self._pending[number]
        self._greenlets[number].switch()

    def end(self) -> None:
        """Unwind the writers that still wait."""
        for one in self._greenlets:
            if not one.dead:
                one.throw()

    def _run(self, number: int) -> None:
        try:
            self.results[number] = self.writers[number].work(Stepped(self, number))
        except Exception as fault:  # noqa: BLE001 - `check` receives it
            self.faults[number] = fault

    def turn(self, number: int, call: Call) -> None:
        """Wait for the writer's turn before its call."""
        if self.writers[number].dies_after == self._changes[number]:
            self.dead.add(number)
        else:
            self._pending[number] = call
        greenlet.getcurrent().parent.switch()
        self._changes[number] += call.changes

    def finish_call(self, number: int, call: Call) -> None:
        """Called when a writer's call has taken effect."""
        lost = self.writers[number].loses
        if lost is not None and call.verb == "create":
            # Each execution has new writers, so this changes no other execution.
            self.writers[number].loses = None
            raise lost


class Stepped:
    """A store or a folder of it; every call waits for the writer's turn."""

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
        self._execution.finish_call(self._number, call)

    def write(self, path: str, data: bytes) -> None:
        self._turn("write", path)
        self._store.write(path, data)

    def upload(self, source: Path, path: str) -> FileStat:
        self._turn("upload", path)
        return self._store.upload(source, path)

    def copy(self, path: str, target: str) -> None:
        # No writer changes the source of a copy.
        self._turn("copy", target)
        self._store.copy(path, target)

    def stat(self, path: str) -> FileStat:
        self._turn("stat", path)
        return self._store.stat(path)

    def checksum(self, path: str, *, begin: int = 0, size: int | None = None) -> FileStat:
        self._turn("checksum", path)
        return self._store.checksum(path, begin=begin, size=size)

    def local_path(self, path: str) -> Path | None:
        self._turn("local_path", path)
        return self._store.local_path(path)

    def download(self, path: str, target: Path, *, begin: int = 0, size: int | None = None) -> FileStat:
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
    """A state of the search: the pending calls, those to skip, those taken."""

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
        start: returns a new execution of the same writers on the same state.
        check: called with each finished execution.
        reduced: skip orders that differ from another only in calls whose order does not matter.

    Returns:
        The number of executions checked.
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
    """Play random orders of storage calls, if there are too many for `explore`, which describes the arguments."""
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
    """Run to the end and extend the path; returns False if every remaining order was played before."""
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
