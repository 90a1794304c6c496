"""What a piece of code asks of Cloud Storage: its requests, and which of them wait for each other."""

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from tests.fakes.gcs.server import NAME_BYTES, FakeGcs, Sent
from tests.fakes.gcs.wire import Call, Request, Response

# Seconds; only a failing test waits this long.
_PATIENCE = 10


@dataclass
class Requests:
    """The requests that a block of code sent, in the order in which they began."""

    sent: list[Sent] = field(default_factory=list)

    def of(self, kind: str, path: str = "") -> list[Sent]:
        return [one for one in self.sent if one.kind.startswith(kind) and re.search(path, one.path)]

    def in_series(self) -> int:
        """The length of the longest chain of requests, each of which began when the one before had its response."""
        return max(_levels(self.sent), default=0)

    def after(self, kind: str, path: str) -> "Requests":
        """The requests that began after the last of these had its response."""
        last = max(_ended(one) for one in self.of(kind, path))
        return Requests([one for one in self.sent if one.began > last])

    def words(self) -> list[str]:
        """One line a request, with its level: requests of one level do not wait for each other."""
        levels = _levels(self.sent)
        return [f"{level:3} {one.kind} {one.path}" for one, level in zip(self.sent, levels, strict=True)]


def _levels(sent: Sequence[Sent]) -> list[int]:
    levels: list[int] = []
    for index, one in enumerate(sent):
        before = (levels[other] for other in range(index) if _ended(sent[other]) < one.began)
        levels.append(1 + max(before, default=0))
    return levels


def _ended(one: Sent) -> int:
    return one.began if one.ended is None else one.ended


@contextmanager
def requests_of(server: FakeGcs) -> Iterator[Requests]:
    """Record the requests of a block."""
    begin = len(server.tally.sent)
    recorded = Requests()
    try:
        yield recorded
    finally:
        with server.tally.lock:
            recorded.sent += server.tally.sent[begin:]


@contextmanager
def responding_together(server: FakeGcs, *groups: Sequence[tuple[str, str]]) -> Iterator[None]:
    """Hold the responses to the requests of a group until all of them are there.

    Otherwise, a request may have its response before the thread of another one has started. Requests that wait for
    each other are held for a while, and then go on in series.

    Args:
        server: the fake.
        groups: kind and regular expression of the path of each request; a request belongs to the first group that
            still misses it.
    """
    missing = [list(group) for group in groups]
    changed = threading.Condition()
    respond = server.service.respond

    def together(call: Call, request: Request) -> Response:
        path = call.path
        if call.kind == "object.insert" and not call.name:
            name = server.service.transfers.name_in_body(request, request.body[:NAME_BYTES])
            path = Call(call.kind, call.bucket, name).path
        with changed:
            found = next(((group, one) for group in missing for one in group if _is(one, call.kind, path)), None)
            if found is not None:
                group, one = found
                group.remove(one)
                changed.notify_all()
                changed.wait_for(lambda: not group, _PATIENCE)
        return respond(call, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.service, "respond", together)
        yield


def _is(one: tuple[str, str], kind: str, path: str) -> bool:
    return kind == one[0] and re.search(one[1], path) is not None
