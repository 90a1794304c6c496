"""Run several writers against one store in every possible order of their storage calls.

Each thread of a writer is a greenlet that stops before every storage call until it is its turn. An execution is a list
of turns and can be replayed. `explore` walks all of them depth first. The order of two calls of different writers does
not matter if they touch different paths or both change nothing. The threads of one writer share its memory, so between
them every order matters. Sleep sets (Godefroid, 1996) leave out orders that differ only in such pairs; the rest is
complete and small.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import greenlet

from baton.tasks.foundation.errors import StorageError
from baton.tasks.foundation.storage.interface import FileStat, Storage

_CHANGING = {"create", "write", "write_buffers", "upload", "copy", "delete"}


class Call(NamedTuple):
    """A storage call that a writer is about to make.

    Attributes:
        verb: the method.
        path: what it touches.
        writer: number of the writer; None: no other call is of the same writer.
    """

    verb: str
    path: str
    writer: int | None = None

    @property
    def changes(self) -> bool:
        return self.verb in _CHANGING

    def meets(self, other: "Call") -> bool:
        """Whether the order of the two can matter."""
        if self.writer is not None and self.writer == other.writer:
            return True
        if not (self.changes or other.changes):
            return False
        one, two = f"{self.path}/".lstrip("/"), f"{other.path}/".lstrip("/")
        return one.startswith(two) or two.startswith(one)


class Stepped:
    """A store or a folder of it; every call waits for the writer's turn."""

    def __init__(self, execution: "Execution", number: int, folder: str = "") -> None:
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

    def trains(self) -> None:
        """Let the other threads of the writer run, and other writers, as training does."""
        self._execution.turn(Call("trains", f"memory of {self._number}", self._number))

    def read(self, path: str) -> bytes:
        self._turn("read", path)
        return self._store.read(path)

    def exists(self, path: str) -> bool:
        self._turn("exists", path)
        return self._store.exists(path)

    def create(self, path: str, data: bytes) -> None:
        call = self._turn("create", path)
        self._store.create(path, data)
        self._execution.finish_call(call)

    def write(self, path: str, data: bytes) -> None:
        self._turn("write", path)
        self._store.write(path, data)

    def upload(self, source: Path, path: str) -> FileStat:
        self._turn("upload", path)
        return self._store.upload(source, path)

    def write_buffers(self, path: str, buffers: Sequence[memoryview]) -> FileStat:
        self._turn("write_buffers", path)
        return self._store.write_buffers(path, buffers)

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

    def delete(self, folder: str, *, files: Sequence[str] | None = None) -> None:
        self._turn("delete", folder)
        self._store.delete(folder, files=files)

    def probe(self, home: str = "") -> list[str]:  # noqa: ARG002
        return []

    def _turn(self, verb: str, path: str) -> Call:
        call = Call(verb, f"{self._folder}/{path}".lstrip("/"), self._number)
        self._execution.turn(call)
        return call


@dataclass
class Writer:
    """One process of the protocol and its faults.

    Attributes:
        work: called with the store.
        dies_after: number of changing calls after which it makes no more calls. A death between reading calls leaves
            the same files as a death after the last change, so these are all the moments.
        loses: raised once in place of the response to its first create that took effect.
        fails_at: number of its changing call, from 0, that the store refuses.
    """

    work: Callable[[Any], object]
    dies_after: int | None = None
    loses: Exception | None = None
    fails_at: int | None = None


class Thread(greenlet.greenlet):
    """A thread of a writer. Its number is that of the writer, if it is the writer's first."""

    def __init__(self, execution: "Execution", writer: int, number: int, work: Callable[[], object]) -> None:
        super().__init__(work, execution.hub)
        self.execution, self.writer, self.number = execution, writer, number

    @classmethod
    def current(cls) -> Self:
        """The thread that runs."""
        found: Self = greenlet.getcurrent()
        return found

    def wait(self) -> None:
        """Let others run until somebody lets this thread run again."""
        self.execution.hub.switch()
        if self.execution.is_over:
            raise greenlet.GreenletExit


@dataclass
class Execution:
    """An execution of one order of turns."""

    store: Storage
    writers: list[Writer]
    results: dict[int, object] = field(default_factory=dict)
    faults: dict[int, BaseException] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.hub = greenlet.getcurrent()
        self.is_over = False
        self._pending: dict[int, Call] = {}
        self._changes: Counter[int] = Counter()
        self._threads: dict[int, Thread] = {}
        self._ready: deque[Thread] = deque()
        for number in range(len(self.writers)):
            self.start_thread(number, lambda number=number: self._run(number))  # type: ignore[misc]
        self._settle()

    def start_thread(self, writer: int, work: Callable[[], object]) -> None:
        """Start a thread of a writer; it runs when the thread that starts it waits."""
        number = writer
        while number in self._threads:
            number += len(self.writers)
        self._threads[number] = Thread(self, writer, number, work)
        self._ready.append(self._threads[number])

    def wake(self, thread: Thread) -> None:
        """Let a thread that waits for another one of its writer run on."""
        self._ready.append(thread)

    def changes(self, writer: int) -> int:
        """Number of changing calls that a writer has made."""
        return self._changes[writer]

    def pending(self) -> dict[int, Call]:
        """The next call of every thread that can make one."""
        return dict(self._pending)

    def step(self, number: int) -> None:
        """Let one thread make its call and run to its next."""
        call = self._pending.pop(number)
        self._threads[number].switch()
        self._settle()
        writer = call.writer
        if writer is not None and self._is_dead(writer):
            for other in [other for other, each in self._pending.items() if each.writer == writer]:
                del self._pending[other]
                self.dead.add(writer)

    def run(self) -> None:
        """Run to the end, in any order."""
        while self._pending:
            self.step(min(self._pending))

    def end(self) -> None:
        """Unwind the threads that still wait."""
        self.is_over = True
        for each in self._threads.values():
            if not each.dead:
                each.throw()

    def turn(self, call: Call) -> None:
        """Wait for the thread's turn before its call.

        Raises:
            StorageError: the store refuses this call.
        """
        thread = Thread.current()
        if self.is_over:
            raise greenlet.GreenletExit
        if self._is_dead(thread.writer):
            self.dead.add(thread.writer)
        else:
            self._pending[thread.number] = call
        thread.wait()
        writer = self.writers[thread.writer]
        refused = call.changes and writer.fails_at == self._changes[thread.writer]
        self._changes[thread.writer] += call.changes
        if refused:
            raise StorageError(f"{call.verb} {call.path} failed")

    def finish_call(self, call: Call) -> None:
        """Called when a writer's call has taken effect."""
        writer = self.writers[Thread.current().writer]
        lost = writer.loses
        if lost is not None and call.verb == "create":
            # Each execution has new writers, so this changes no other execution.
            writer.loses = None
            raise lost

    def _is_dead(self, writer: int) -> bool:
        return self.writers[writer].dies_after == self._changes[writer]

    def _settle(self) -> None:
        """Run every thread that waits for no call."""
        while self._ready:
            thread = self._ready.popleft()
            if not self.is_over and thread.writer not in self.dead:
                thread.switch()

    def _run(self, number: int) -> None:
        try:
            self.results[number] = self.writers[number].work(Stepped(self, number))
        except Exception as fault:  # noqa: BLE001 - `check` receives it
            self.faults[number] = fault


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
