"""A process that dies at any request of a commit in a remote store loses nothing, and what it left is deleted."""

import threading
from typing import Any

import pytest

from baton.tasks.foundation.checkpoint.save import commit_staged
from baton.tasks.foundation.contracts.log_entry import Retire
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.memory import MemoryStorage
from baton.tasks.foundation.telemetry.events import Silent
from tests.foundation.checkpoint.test_requests import spec_of
from tests.support.small_logs import assert_sound, begin, committing, folders, head_of, stage

Call = tuple[str, str]
_CALLS = {"read", "exists", "create", "write", "files", "folders", "delete"}


class Died(BaseException):
    """The process is dead; it makes no more calls."""


class MortalStore:
    """A remote store whose process dies at one call, before or after the call takes effect.

    Attributes:
        calls: verb and path of each call so far.
        dies_at: the call; None: it lives.
    """

    transfers = 4

    def __init__(self, store: Storage, *, effect: bool = False) -> None:
        self._store, self._effect = store, effect
        self._dead = threading.Event()
        self.calls: list[Call] = []
        self.dies_at: Call | None = None

    def with_deadline(self, _seconds: float) -> "MortalStore":
        return self

    def __getattr__(self, verb: str) -> Any:
        inner = getattr(self._store, verb)
        if verb not in _CALLS:
            return inner

        def call(path: str, *rest: Any, **options: Any) -> Any:
            if self._dead.is_set():
                raise Died
            self.calls.append((verb, path))
            last = (verb, path) == self.dies_at
            if last:
                self._dead.set()
                if not self._effect:
                    raise Died
            result = inner(path, *rest, **options)
            result = list(result) if verb in {"files", "folders"} else result
            if last:
                raise Died
            return result

        return call


def commit_at(store: Any, log: RunLog, step: int, attempt: str) -> None:
    head = log.head()
    assert head is not None
    staged = stage(store, step, head.base, attempt)
    body = committing(staged, parent=head.tip.path if head.tip else None)
    commit_staged(log, body, spec=spec_of(1), telemetry=Silent(), verified=True)


def at_work(home: Storage, *, effect: bool = False) -> tuple[Any, RunLog]:
    """A process that has committed step 30, and its store.

    Its next commit, entry 8, retires a checkpoint, deletes one, and records that one is deleted.
    """
    store: Any = MortalStore(home, effect=effect)
    begin(home)
    log = RunLog(store)
    for step in (10, 20, 30):
        commit_at(store, log, step, "dying")
    assert log.is_swept
    store.calls.clear()
    return store, log


def next_process(store: Storage) -> list[int]:
    """Continue the run; the steps whose files are left."""
    log = RunLog(store)
    for step in (50, 60, 70):
        commit_at(store, log, step, "next")
        assert_sound(store)
    return sorted(int(folder.removeprefix("checkpoints/").split("-")[0]) for folder in folders(store))


@pytest.fixture
def calls(memory: MemoryStorage) -> list[Call]:
    """The calls of the commit of step 40."""
    home = memory.at("straight")
    store, log = at_work(home)
    commit_at(store, log, 40, "dying")
    assert next_process(home) == [50, 60, 70]
    return list(dict.fromkeys(store.calls))


@pytest.mark.parametrize("effect", [False, True], ids=["before", "after"])
def test_death_at_any_request_loses_nothing(memory: MemoryStorage, calls: list[Call], effect: bool) -> None:
    assert {"create", "delete", "exists", "files", "write"} <= {verb for verb, _ in calls}
    for number, call in enumerate(calls):
        home = memory.at(f"crashed-{number}")
        store, log = at_work(home, effect=effect)
        store.dies_at = call
        with pytest.raises(Died):
            commit_at(store, log, 40, "dying")
        tip = head_of(RunLog(home)).tip
        assert tip is not None
        assert tip.step == (40 if home.exists("log/00000008.json") else 30), call
        assert_sound(home)
        assert next_process(home) == [50, 60, 70], call
        retired = [entry.body for entry in assert_sound(home) if isinstance(entry.body, Retire)]
        deleted = [path for body in retired for path in body.deleted]
        assert len(deleted) == len(set(deleted)), call
