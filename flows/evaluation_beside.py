"""Evaluations in another process, while the training goes on."""

import threading
from collections.abc import Callable
from typing import Final

from tasks.foundation.checkpoint.committer import Committer
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.log_entry import Commit, Entry
from tasks.foundation.contracts.run_spec import StopSpec
from tasks.foundation.stops.beside import start_beside
from tasks.foundation.stops.stops import Stops
from tasks.foundation.stops.uninterrupted import run_uninterrupted

_NAME: Final = "baton-evaluation"
_POLL_SECONDS: Final = 0.1


class EvaluationBeside:
    """Runs at most one evaluation at a time, in the order of steps. Errors are raised by `join`.

    If this process ends first, the evaluation goes on by itself. If it never began, it is overdue in the next attempt.
    """

    def __init__(self) -> None:
        self._begun: set[str] = set()
        self._started = False
        self._ended: threading.Event | None = None
        self._faults: list[BaseException] = []

    def has_begun(self, checkpoint: CheckpointRef) -> bool:
        """Whether this command has begun to evaluate a checkpoint."""
        return checkpoint.path in self._begun

    def begin(
        self, checkpoint: CheckpointRef, evaluate: Callable[[CheckpointRef], object], *, committer: Committer | None
    ) -> None:
        """Begin an evaluation; the one before must have been joined.

        Args:
            checkpoint: the checkpoint; if it is in flight, its evaluation begins after its commit.
            evaluate: evaluates the committed checkpoint.
            committer: has the save in flight.
        """
        self._begun.add(checkpoint.path)
        self._started = False
        ended = self._ended = threading.Event()

        def work(committed: CheckpointRef) -> None:
            try:
                evaluate(committed)
            except BaseException as fault:  # noqa: BLE001 - raised by `join`
                self._faults.append(fault)
            finally:
                ended.set()

        def follow(entry: Entry) -> None:
            if not isinstance(entry.body, Commit):
                raise TypeError(f"entry {entry.number} of the log is no commit")
            committed = entry.body.checkpoint
            self._started = True
            start_beside(lambda: work(committed), name=_NAME)

        if not checkpoint.is_in_flight:
            self._started = True
            start_beside(lambda: work(checkpoint), name=_NAME)
        elif committer is not None:
            committer.then(follow)

    @property
    def running(self) -> bool:
        """Whether an evaluation has begun and not ended."""
        return self._ended is not None and not self._ended.is_set()

    @property
    def unjoined(self) -> bool:
        """Whether an evaluation has begun that `join` has not waited for; it may have ended."""
        return self._ended is not None

    def join(self, committer: Committer | None, stop: StopSpec) -> None:
        """Wait for the evaluation, if there is one. A signal that arrives meanwhile stops it.

        Args:
            committer: has the save in flight, if the evaluation begins after a commit. If that fails, there is no
                evaluation.
            stop: of the run file.

        Raises:
            BatonError: the evaluation failed.
            StageStopped: it was stopped.
        """
        ended, self._ended = self._ended, None
        if ended is None:
            return

        def wait(_stops: Stops) -> None:
            while not ended.wait(_POLL_SECONDS):
                waits_for_commit = committer is not None and committer.busy
                if not waits_for_commit and not self._started:
                    return

        run_uninterrupted(wait, stop)
        if self._faults:
            raise self._faults.pop()
