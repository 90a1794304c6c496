"""How a stage that runs elsewhere answers: a file in the run's home, named for its flow run.

Whoever trains can write there, so no second place has to be shared, and nothing of it depends on Prefect's server.
"""

from typing import TypeVar

from tasks.foundation.contracts.base import Contract
from tasks.foundation.errors import FileMissing, RunLogError
from tasks.foundation.storage.base import Storage

A = TypeVar("A", bound=Contract)


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


def _path(flow_run: str) -> str:
    return f"answers/{flow_run}.json"
