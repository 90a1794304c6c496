"""The evaluations of a command: with the model in memory, or in another process while the training goes on."""

import dataclasses
from dataclasses import dataclass
from functools import partial

from flows.commits import Commits, is_in_flight
from flows.evaluation_beside import EvaluationBeside
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.dataset import DatasetRef
from tasks.foundation.contracts.evaluation_sets import SetName
from tasks.foundation.contracts.log_entry import Evaluation, Head
from tasks.foundation.contracts.stage_calls import EvaluateCall
from tasks.foundation.errors import BlowUp
from tasks.foundation.runlog.commits import evaluates_beside, evaluation_due, is_test_due, overdue_evaluation
from tasks.foundation.runlog.folding import fold
from tasks.foundation.stage import Place
from tasks.foundation.telemetry.events import Phase, Waiting, WithoutPhases
from tasks.stages import EVALUATE


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
