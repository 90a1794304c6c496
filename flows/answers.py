"""How a stage that runs elsewhere answers: a file in the run's home, named for its flow run.

Whoever trains can write there, so no second place has to be shared, and nothing of it depends on Prefect's server.
"""

from typing import TypeVar

from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.segment import SegmentRequest, SegmentResult
from tasks.foundation.errors import FileMissing, RunLogError
from tasks.foundation.storage.base import Storage

A = TypeVar("A", bound=Contract)

_FOLDER = "answers"


def write_answer(home: Storage, flow_run: str, answer: Contract) -> None:
    """Leave an answer; executed twice, the later answer stands, and either is good."""
    home.write(_path(flow_run), answer.to_json())


def take_answer(home: Storage, flow_run: str, kind: type[A]) -> A | None:
    """The answer of a flow run, which is then gone; None if there is none.

    Raises:
        RunLogError: it cannot be read.
    """
    path = _path(flow_run)
    try:
        data = home.read(path)
    except FileMissing:
        return None
    answer = kind.from_json(data, where=f"{home.uri}/{path}", error=RunLogError)
    home.delete(path)
    return answer


def find_segment(home: Storage, request: SegmentRequest) -> SegmentResult | None:
    """A segment that is staged on the tip, and that nobody has taken: who asked for it died before it was done.

    Args:
        home: the run's.
        request: what is about to be asked for.
    """
    for path in sorted(home.files(_FOLDER)):
        try:
            found = SegmentResult.from_json(home.read(path), where=path, error=RunLogError)
        except (FileMissing, RunLogError):  # taken meanwhile, or of another stage
            continue
        staged = found.staged
        if staged is None or staged.base != request.base or staged.step > request.until_step:
            continue
        if found.parent == request.start.path:
            home.delete(path)
            return found
    return None


def _path(flow_run: str) -> str:
    return f"{_FOLDER}/{flow_run}.json"
