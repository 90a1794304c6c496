"""How a stage runs: one Protocol for all ways, and the simplest of them."""

from typing import Protocol, TypeVar

from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.stage_calls import StageCall
from tasks.foundation.stage import Place, Stage

C = TypeVar("C", bound=StageCall)
A = TypeVar("A", bound=Contract)


class Runner(Protocol):
    """Runs stages: in this process, as Prefect tasks of this process, or as Prefect deployments."""

    @property
    def remote(self) -> frozenset[str]:
        """Names of the stages that run in other processes."""

    def run(self, stage: Stage[C, A], call: C, place: Place) -> A:
        """Run a stage and return its answer.

        Args:
            stage: one of tasks/stages.py.
            call: what the stage is to do.
            place: where it runs. In another process it has a place of its own, with the same home.

        Raises:
            BatonError: what the stage raised.
            StageStopped: it runs in another process, and was stopped there.
        """


class InProcess:
    """Runs every stage as a plain function of this process."""

    remote: frozenset[str] = frozenset()

    def run(self, stage: Stage[C, A], call: C, place: Place) -> A:
        """Call the stage; it is imported now."""
        return stage.load()(call, place)


class StageStopped(Exception):
    """A stage in another process was stopped, together with this command or by a person.

    Attributes:
        reason: an exit reason of the command.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
