"""How a stage that runs elsewhere answers: a file in the run's home, named for its flow run.

Whoever trains can write there, so no second place has to be shared, and nothing of it depends on Prefect's server.
"""

from collections.abc import Iterator
from typing import TypeVar

from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.segment import SegmentRequest, SegmentResult
from tasks.foundation.errors import AnotherVersion, FileMissing, RunLogError
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.best_effort_delete import discard

A = TypeVar("A", bound=Contract)

_FOLDER = "answers"


def write_answer(home: Storage, flow_run: str, answer: Contract) -> None:
    """Leave an answer; executed twice, the later answer stands, and either is good."""
    home.write(_path(flow_run), answer.to_json())


def has_answer(home: Storage, flow_run: str) -> bool:
    """Whether a flow run has left its answer."""
    return home.exists(_path(flow_run))


def take_answer(home: Storage, flow_run: str, kind: type[A]) -> A | None:
    """The answer of a flow run; None if there is none.

    It is gone then, unless it hands on what is trained: that stays until it is committed, see `drop_segment`.

    Raises:
        RunLogError: it cannot be read.
        AnotherVersion: a newer Baton wrote it; it stays.
    """
    path = _path(flow_run)
    try:
        data = home.read(path)
    except FileMissing:
        return None
    answer = kind.from_json(data, where=f"{home.uri}/{path}", error=RunLogError)
    if not (isinstance(answer, SegmentResult) and answer.staged is not None):
        discard(home, path)
    return answer


def find_segment(home: Storage, request: SegmentRequest) -> SegmentResult | None:
    """A segment that is staged on the tip and was never committed: who asked for it died before that.

    What is staged on an earlier tip, or before a change that was accepted, is of no use any more, and cleared away.

    Args:
        home: the run's home.
        request: what is about to be asked for.
    """
    for path, found in _segments(home):
        staged = found.staged
        if staged is None or staged.base > request.base or staged.step > request.until_step:
            continue
        if staged.base < request.base:
            discard(home, path)
        elif found.parent == request.start.path:
            return found
    return None


def hand_on(home: Storage, result: SegmentResult) -> str:
    """Path of a file in the run's home that hands on what is trained; it is left where it lies already."""
    if result.staged is None:
        raise AssertionError("nothing is staged, so there is nothing to commit")
    for path in _handing_on(home, result):
        return path
    path = _path(result.staged.attempt)
    home.write(path, result.to_json())
    return path


def handed_on(home: Storage, path: str) -> SegmentResult:
    """What was handed on.

    Raises:
        FileMissing: it was committed, and forgotten.
        RunLogError: it cannot be read.
    """
    return SegmentResult.from_json(home.read(path), where=f"{home.uri}/{path}", error=RunLogError)


def drop_segment(home: Storage, result: SegmentResult) -> None:
    """Forget the answer that handed this on: it is committed, or cannot be."""
    for path in _handing_on(home, result):
        discard(home, path)


def _handing_on(home: Storage, result: SegmentResult) -> Iterator[str]:
    """Paths of the answers that hand on what this result has staged."""
    for path, found in _segments(home):
        if found.staged is not None and found.staged == result.staged:
            yield path


def _segments(home: Storage) -> Iterator[tuple[str, SegmentResult]]:
    for path in sorted(home.files(_FOLDER)):
        try:
            yield path, SegmentResult.from_json(home.read(path), where=path, error=RunLogError)
        except (FileMissing, RunLogError, AnotherVersion):  # taken meanwhile, of another stage, or of a newer one
            continue


def _path(flow_run: str) -> str:
    return f"{_FOLDER}/{flow_run}.json"
