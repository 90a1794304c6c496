"""Answers of stages in other processes: files in the run's home, named after the flow run that wrote them.

Every process of a run can write to its home, so no second shared folder is needed, and no answer depends on Prefect's
server. An error is a file beside the answers.
"""

from collections.abc import Iterator
from typing import TypeVar

from baton.tasks.foundation.contracts.base import Contract
from baton.tasks.foundation.contracts.log_entry import SegmentRequest, SegmentResult
from baton.tasks.foundation.contracts.stage_calls import ErrorReport
from baton.tasks.foundation.errors import AnotherVersion, FileMissing, FileTooLarge, RunLogError
from baton.tasks.foundation.storage.interface import Storage, discard

A = TypeVar("A", bound=Contract)

_FOLDER = "answers"
_ERROR_SUFFIX = ".error.json"


def write_answer(home: Storage, flow_run: str, answer: Contract) -> None:
    """Write an answer. If a stage runs twice, the later answer replaces the first; both are valid."""
    home.write(_path(flow_run), answer.to_json())


def has_answer(home: Storage, flow_run: str) -> bool:
    """Whether a flow run has written its answer."""
    return home.exists(_path(flow_run))


def take_answer(home: Storage, flow_run: str, kind: type[A]) -> A | None:
    """Read the answer of a flow run, and delete it; None if there is none.

    An answer with a staged checkpoint is kept until it is committed, see `drop_segment`.

    Raises:
        RunLogError: it cannot be read.
        AnotherVersion: a newer Baton wrote it; it is kept.
    """
    path = _path(flow_run)
    answer = _read(home, path, kind)
    if answer is not None and not (isinstance(answer, SegmentResult) and answer.staged is not None):
        discard(home, path)
    return answer


def write_error(home: Storage, flow_run: str, report: ErrorReport) -> None:
    """Write the error that ended a flow run."""
    home.write(_error_path(flow_run), report.to_json())


def take_error(home: Storage, flow_run: str) -> ErrorReport | None:
    """Read the error that ended a flow run, and delete it; None if there is none.

    Raises:
        RunLogError: it cannot be read.
        AnotherVersion: a newer Baton wrote it; it is kept.
    """
    path = _error_path(flow_run)
    report = _read(home, path, ErrorReport)
    if report is not None:
        discard(home, path)
    return report


def _read(home: Storage, path: str, kind: type[A]) -> A | None:
    try:
        data = home.read(path)
    except FileMissing:
        return None
    return kind.from_json(data, where=f"{home.uri}/{path}", error=RunLogError)


def find_segment(home: Storage, request: SegmentRequest) -> SegmentResult | None:
    """Find a segment that was staged on the tip and never committed, because its attempt ended before that.

    A segment that was staged on an earlier tip, or before an accepted change, cannot be committed. It is deleted.

    Args:
        request: the segment that is about to be trained.
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
    """Path of a file in the home that holds a staged result; an existing file is used."""
    if result.staged is None:
        raise AssertionError("nothing is staged, so there is nothing to commit")
    for path in _paths_of(home, result):
        return path
    path = _path(result.staged.attempt)
    home.write(path, result.to_json())
    return path


def handed_on(home: Storage, path: str) -> SegmentResult:
    """Read the result at a path that `hand_on` returned.

    Raises:
        FileMissing: the result is committed, and its file deleted.
        RunLogError: it cannot be read.
    """
    return SegmentResult.from_json(home.read(path), where=f"{home.uri}/{path}", error=RunLogError)


def drop_segment(home: Storage, result: SegmentResult) -> None:
    """Delete the answers that hold a staged result: it is committed, or cannot be."""
    for path in _paths_of(home, result):
        discard(home, path)


def _paths_of(home: Storage, result: SegmentResult) -> Iterator[str]:
    """Paths of the answers that hold the checkpoint that this result staged."""
    for path, found in _segments(home):
        if found.staged is not None and found.staged == result.staged:
            yield path


def _segments(home: Storage) -> Iterator[tuple[str, SegmentResult]]:
    for path in sorted(home.files(_FOLDER)):
        if path.endswith(_ERROR_SUFFIX):
            continue
        try:
            yield path, SegmentResult.from_json(home.read(path), where=path, error=RunLogError)
        # Deleted by now, of another stage, or of a newer version.
        except (FileMissing, FileTooLarge, RunLogError, AnotherVersion):
            continue


def _path(flow_run: str) -> str:
    return f"{_FOLDER}/{flow_run}.json"


def _error_path(flow_run: str) -> str:
    return f"{_FOLDER}/{flow_run}{_ERROR_SUFFIX}"
