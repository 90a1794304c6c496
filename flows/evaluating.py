"""The evaluations of a command: with the model in memory, or in another process while the training goes on."""

import dataclasses
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from flows.commits import Commits, is_in_flight
from tasks.foundation.checkpoint.committer import Committer
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.data_spec import SetName
from tasks.foundation.contracts.dataset import DatasetRef
from tasks.foundation.contracts.log_entry import Commit, Entry, Evaluation, Head
from tasks.foundation.contracts.run_spec import StopSpec
from tasks.foundation.contracts.stage_calls import EvaluateCall
from tasks.foundation.errors import BlowUp
from tasks.foundation.machine.stops import Stops
from tasks.foundation.machine.threads import run_uninterrupted, start_beside
from tasks.foundation.runlog.commits import evaluates_beside, evaluation_due, is_test_due, overdue_evaluation
from tasks.foundation.runlog.folding import fold
from tasks.foundation.stage import Place
from tasks.foundation.telemetry.events import Phase, Waiting, WithoutPhases
from tasks.stages import EVALUATE

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """Evaluates checkpoints when they are due.

    Attributes:
        commits: of the command.
        beside: the evaluation that runs beside the training.
    """

    commits: Commits
    beside: EvaluationBeside

    def evaluate_what_is_due(self, dataset: DatasetRef, head: Head, *, nothing_to_train: bool) -> Head:
        """Evaluate what is due on the validation set, and at the end of the run on the test set.

        If nothing is left to train, this waits for an evaluation in another process. For the other arguments, result
        and errors see `_validate`.
        """
        head = self._validate(dataset, head)
        if nothing_to_train and self.beside.unjoined:
            self.commits.landed(head)
            self.join()
            head = self.commits.agreed_head()
        return self._test(dataset, head) if is_test_due(head, self.commits.spec) else head

    def _test(self, dataset: DatasetRef, head: Head) -> Head:
        """Evaluate the tip on the test set, in line: nothing is left to train. Its metrics decide nothing."""
        self.join()
        head = self.commits.landed(head)
        if not is_test_due(head, self.commits.spec) or head.tip is None:  # its save has failed, and the run was rewound
            return head
        self.commits.place.telemetry.emit(Phase(cause="evaluate"))
        self._evaluate(dataset, head, self.commits.place, head.tip, on="test")
        return self.commits.agreed_head()

    def _validate(self, dataset: DatasetRef, head: Head) -> Head:
        """Evaluate what is due at a head, which may be one that will be, because the save of its tip is in flight.

        In this process, the tip may be in flight: the model is in memory. Another process needs its files. If no
        callback waits for the metrics, the training goes on meanwhile.

        Returns:
            The head after the evaluations in line.

        Raises:
            BatonError: an evaluation failed, or the save before it; or the evaluation beside the training before it.
            StageStopped: an evaluation in another process was stopped.
        """
        commits = self.commits
        remote = EVALUATE.name in commits.runner.remote
        if remote and evaluates_beside(commits.spec) and commits.hosts.hosts == 1:
            self._begin(dataset, head)
            return head
        if remote and evaluation_due(head, commits.spec):
            head = commits.landed(head)
        if head.tip is None or not evaluation_due(head, commits.spec):
            return head
        commits.place.telemetry.emit(Phase(cause="evaluate"))
        try:
            evaluation = self._evaluate(dataset, head, commits.place, head.tip)
        except BlowUp as fault:  # of the save in flight, which is waited for if the model in memory is another one
            return commits.rewound(head, fault)
        if is_in_flight(head) and evaluation.checkpoint.is_in_flight:
            return fold(head, evaluation)
        return commits.agreed_head()

    def join(self) -> None:
        """Wait for the evaluation that runs beside the training, if there is one.

        Raises:
            BatonError: it failed.
            StageStopped: it was stopped.
        """
        if self.beside.running:
            self.commits.place.telemetry.emit(Phase(cause="evaluate"))
            self.commits.place.telemetry.emit(Waiting(on="a remote stage"))
        self.beside.join(self.commits.place.committer, self.commits.spec.stop)

    def _begin(self, dataset: DatasetRef, head: Head) -> None:
        """Begin what is due, one after the other; only the last one runs beside the training."""
        spec, committer = self.commits.spec, self.commits.place.committer
        place = dataclasses.replace(
            self.commits.place, telemetry=WithoutPhases(self.commits.place.telemetry), committer=None
        )
        tip = head.tip if evaluation_due(head, spec) else None
        for ref in (overdue_evaluation(head, spec), tip):
            if ref is not None and not self.beside.has_begun(ref):
                self.join()
                self.beside.begin(ref, partial(self._evaluate, dataset, head, place), committer=committer)

    def _evaluate(
        self, dataset: DatasetRef, head: Head, place: Place, checkpoint: CheckpointRef, *, on: SetName = "validation"
    ) -> Evaluation:
        spec = self.commits.spec
        call = EvaluateCall(
            spec=spec,
            dataset=dataset,
            checkpoint=checkpoint,
            recorded=head.environment,
            on=on,
            confusion_matrix=checkpoint.step == spec.train.target,
        )
        return self.commits.runner.run(EVALUATE, call, place)
