"""The evaluations of a run: those of a command when they are due, and that of a committed checkpoint once more.

`Evaluations` are those of the relay. In this process, a checkpoint is evaluated while its save is in flight, because
the model is in memory; the evaluation is logged after the save. Another process needs the files, so it begins after
the commit. If no callback waits for the metrics, the training goes on meanwhile.

`evaluate_again` evaluates a committed checkpoint, as `baton evaluate` does, and compares the metrics with the log's.
"""

import dataclasses
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from pydantic import Field

from baton.flows.admit import preflight, require_free_servers
from baton.flows.opened_run import OpenedRun, holds_a_log
from baton.flows.runner import Runner
from baton.tasks.foundation.checkpoint.retention import rewind_run
from baton.tasks.foundation.checkpoint.save import wait_for_save
from baton.tasks.foundation.checkpoint.selection import select_checkpoint
from baton.tasks.foundation.contracts.base import Contract
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.data_spec import SetName
from baton.tasks.foundation.contracts.dataset import DatasetRef
from baton.tasks.foundation.contracts.identity import VALIDATION, identity_in_run_file, require_same_identity
from baton.tasks.foundation.contracts.log_entry import Commit, Entry, Evaluation, EvaluationOnTest, Head
from baton.tasks.foundation.contracts.run_spec import RunSpec, with_examples
from baton.tasks.foundation.contracts.stage_calls import EvaluateCall, PrepareDataCall
from baton.tasks.foundation.errors import BlowUp, DamagedCheckpoint, InvalidInput, NoSuchRun, RunFileError
from baton.tasks.foundation.log.appends import (
    evaluates_beside,
    evaluation_due,
    is_test_due,
    overdue_evaluation,
    require_broadcast_head,
)
from baton.tasks.foundation.log.fold import fold
from baton.tasks.foundation.log.history import evaluation_of, evaluation_on_test_of
from baton.tasks.foundation.machine.collectives import Hosts
from baton.tasks.foundation.machine.stops import Stops
from baton.tasks.foundation.machine.threads import run_uninterrupted, start_beside
from baton.tasks.foundation.stage import Place
from baton.tasks.foundation.telemetry.events import Note, Phase, Sink, Waiting, WithoutPhases
from baton.tasks.stages import EVALUATE, PREPARE_DATA

_NAME: Final = "baton-evaluation"
_POLL_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What a command runs its stages with, and the head that all of its hosts see.

    While a save is in flight, the command plans with the head as it will be. That head is never written anywhere.

    Attributes:
        spec: the run file.
        runner: runs the stages.
        place: where they run.
        hosts: of the run; only the chief commits.
    """

    spec: RunSpec
    runner: Runner
    place: Place
    hosts: Hosts

    def head_of_log(self) -> Head:
        """The newest head. With several hosts, the chief reads it and broadcasts it."""
        newest = self.place.log.require_head() if self.hosts.is_chief else None
        return require_broadcast_head(self.place.log, newest, self.hosts)

    def wait_for_save(self, head: Head) -> Head:
        """Wait for the save in flight. With several hosts, all of them call it.

        Args:
            head: as it will be once the save is committed.

        Returns:
            The head of the log. If the save has found weights that are not finite, the run is rewound.

        Raises:
            NonFinite: such weights, and `train.on_blowup` is stop, or no rewind is left.
            BatonError: the save failed.
        """
        if not is_in_flight(head):
            return head
        self.place.telemetry.emit(Phase(cause="commit"))
        try:
            wait_for_save(self.place.saves, self.hosts)
        except BlowUp as fault:
            return self.rewound(head, fault)
        return self.head_of_log()

    def rewound(self, head: Head, fault: BlowUp) -> Head:
        """Rewind the run after its save in flight has found weights that are not finite.

        Args:
            head: as it would have been once the save was committed.
            fault: what the save found.

        Raises:
            NonFinite: `fault`, if `train.on_blowup` is stop, or no rewind is left.
        """
        if self.spec.train.on_blowup == "stop" or head.tip is None:
            raise fault
        if self.hosts.is_chief:
            rewind_run(self.place.log, fault, base=head.tip.base, spec=self.spec, telemetry=self.place.telemetry)
        return self.head_of_log()


def is_in_flight(head: Head) -> bool:
    """Whether a head is one that will be, because the save of its tip is in flight."""
    return head.tip is not None and head.tip.is_in_flight


class Evaluations:
    """Evaluates checkpoints when they are due; in another process at most one at a time, in the order of steps.

    If this process ends before an evaluation in another one, that goes on by itself. If it never began, it is overdue
    in the next attempt.
    """

    def __init__(self, command: Command, dataset: DatasetRef) -> None:
        """Begin with none.

        Args:
            command: whose evaluations they are.
        """
        self._command = command
        self._dataset = dataset
        self._begun: set[str] = set()  # paths of the checkpoints whose evaluation in another process has begun
        self._started = False
        self._ended: threading.Event | None = None  # of the newest of them; None once it was joined
        self._faults: list[BaseException] = []

    def evaluate_what_is_due(self, head: Head, *, nothing_to_train: bool) -> Head:
        """Evaluate what is due on the validation set, and at the end of the run on the test set.

        Args:
            head: may be one that will be, because the save of its tip is in flight.
            nothing_to_train: whether the goal is trained; then this waits for an evaluation in another process.

        Returns:
            The head after the evaluations in line.

        Raises:
            BatonError: an evaluation failed, or the save before it; or the evaluation in another process before it.
            StageStopped: an evaluation in another process was stopped.
        """
        command = self._command
        head = self._validate(head)
        if nothing_to_train and self._ended is not None:
            command.wait_for_save(head)
            self.join()
            head = command.head_of_log()
        return self._test(head) if is_test_due(head, command.spec) else head

    def _test(self, head: Head) -> Head:
        """Evaluate the tip on the test set, in line: nothing is left to train. Its metrics decide nothing."""
        command = self._command
        self.join()
        head = command.wait_for_save(head)
        if not is_test_due(head, command.spec) or head.tip is None:  # its save has failed, and the run was rewound
            return head
        command.place.telemetry.emit(Phase(cause="evaluate"))
        self._evaluate(head, command.place, head.tip, on="test")
        return command.head_of_log()

    def _validate(self, head: Head) -> Head:
        command = self._command
        remote = EVALUATE.name in command.runner.remote
        if remote and evaluates_beside(command.spec) and command.hosts.hosts == 1:
            self._begin_what_is_due(head)
            return head
        if remote and evaluation_due(head, command.spec):
            head = command.wait_for_save(head)
        if head.tip is None or not evaluation_due(head, command.spec):
            return head
        command.place.telemetry.emit(Phase(cause="evaluate"))
        try:
            evaluation = self._evaluate(head, command.place, head.tip)
        except BlowUp as fault:  # of the save in flight, which is waited for if the model in memory is another one
            return command.rewound(head, fault)
        if is_in_flight(head) and evaluation.checkpoint.is_in_flight:
            return fold(head, evaluation)
        return command.head_of_log()

    def join(self) -> None:
        """Wait for the evaluation in another process, if there is one. A signal that arrives meanwhile stops it.

        If it was to begin after a commit that failed, there is none.

        Raises:
            BatonError: it failed.
            StageStopped: it was stopped.
        """
        command, saves = self._command, self._command.place.saves
        ended, self._ended = self._ended, None
        if ended is None:
            return
        if not ended.is_set():
            command.place.telemetry.emit(Phase(cause="evaluate"))
            command.place.telemetry.emit(Waiting(on="a remote stage"))

        def wait(_stops: Stops) -> None:
            while not ended.wait(_POLL_SECONDS):
                waits_for_commit = saves is not None and saves.busy
                if not waits_for_commit and not self._started:
                    return

        run_uninterrupted(wait, command.spec.stop)
        if self._faults:
            raise self._faults.pop()

    def _begin_what_is_due(self, head: Head) -> None:
        """Begin what is due, one after the other; the training goes on during the last one."""
        spec, place = self._command.spec, self._command.place
        there = dataclasses.replace(place, telemetry=WithoutPhases(place.telemetry), saves=None)
        tip = head.tip if evaluation_due(head, spec) else None
        for ref in (overdue_evaluation(head, spec), tip):
            if ref is not None and ref.path not in self._begun:
                self.join()
                self._begin(ref, partial(self._evaluate, head, there))

    def _begin(self, checkpoint: CheckpointRef, evaluate: Callable[[CheckpointRef], object]) -> None:
        """Begin an evaluation in another thread; if its checkpoint is in flight, after the commit."""
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

        def start(committed: CheckpointRef) -> None:
            self._started = True
            start_beside(lambda: work(committed), name=_NAME)

        def follow(entry: Entry) -> None:
            if not isinstance(entry.body, Commit):
                raise TypeError(f"entry {entry.number} of the log is no commit")
            start(entry.body.checkpoint)

        saves = self._command.place.saves
        if not checkpoint.is_in_flight:
            start(checkpoint)
        elif saves is not None:
            saves.then(follow)

    def _evaluate(
        self, head: Head, place: Place, checkpoint: CheckpointRef, *, on: SetName = "validation"
    ) -> Evaluation:
        spec = self._command.spec
        call = EvaluateCall(
            spec=spec,
            dataset=self._dataset,
            checkpoint=checkpoint,
            recorded=head.environment,
            on=on,
            confusion_matrix=checkpoint.step == spec.train.target,
        )
        return self._command.runner.run(EVALUATE, call, place)


# Other devices, or another number of them, add in another order.
_RELATIVE_TOLERANCE = 1e-5

_NO_SET: Mapping[SetName, str] = {
    "validation": "data.validation_fraction is 0, so there are no validation examples to evaluate on; set it, or name "
    "a set under data.validation",
    "test": "data.test is left out, so there is no test set to evaluate on; name one under data.test",
}

Step = int | Literal["best"] | None


class FreshEvaluation(Contract):
    """Metrics of a committed checkpoint, compared with those in the log."""

    schema_version: Literal[1] = 1
    run: str
    home: str
    step: int
    checkpoint: str = Field(description="address of the checkpoint's folder")
    on: SetName = Field(default="validation", description="the set")
    examples: int = Field(description="number of its examples, each used once")
    metrics: dict[str, float]
    logged: dict[str, float] | None = Field(
        description="None: the log had no evaluation of the checkpoint on this set; now it has this one"
    )
    agrees: bool | None = Field(
        description="whether metrics and logged differ by at most 1e-5, relative; None: nothing was logged"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A checkpoint to evaluate, and its metrics in the log, if it was evaluated on this set before."""

    head: Head
    checkpoint: CheckpointRef
    logged: dict[str, float] | None
    on: SetName = "validation"
    test: EvaluationOnTest | None = None  # the newest one of it in the log, perhaps on an earlier test set


def evaluate_again(
    run: OpenedRun, step: Step, evaluate: Callable[[Chosen], Evaluation], telemetry: Sink, *, on: SetName = "validation"
) -> FreshEvaluation:
    """Choose a checkpoint, evaluate it, and compare.

    Args:
        step: which checkpoint, see `chosen_of`.
        evaluate: evaluates it, and logs the metrics if the log has no evaluation of it.
        telemetry: receives a warning if the metrics differ from the log.

    Raises:
        DamagedCheckpoint: the checkpoint's bytes differ from the log. It is not quarantined here; the next attempt to
            train decides that.
        BatonError: as `chosen_of`.
    """
    chosen = chosen_of(run, step, on)
    while True:
        try:
            done = evaluate(chosen)
            break
        except DamagedCheckpoint as fault:
            # Another process may train the run and have retired the checkpoint; then the log names another one by now.
            again = chosen_of(run, step, on)
            if again.checkpoint == chosen.checkpoint:
                raise
            telemetry.emit(Note(text=f"{fault}; reading the log again", warning=True))
            chosen = again
    ref, logged = chosen.checkpoint, _logged_on_same_set(run, chosen)
    found = "" if logged is None else differences(done.metrics, logged)
    if found:
        text = f"step {ref.step} differs from its log: {found}; check whether the model's code or the devices changed"
        telemetry.emit(Note(text=text, warning=True))
    return FreshEvaluation(
        run=run.spec.run,
        home=run.home.uri,
        step=ref.step,
        checkpoint=f"{run.home.uri}/{ref.path}",
        on=on,
        examples=done.examples,
        metrics=done.metrics,
        logged=logged,
        agrees=None if logged is None else not found,
    )


def _logged_on_same_set(run: OpenedRun, chosen: Chosen) -> dict[str, float] | None:
    """The metrics to compare with. A changed test set has a new entry in the log, and nothing to compare with."""
    if chosen.on == "validation":
        return chosen.logged
    newest = evaluation_on_test_of(run.log, run.require_head(), chosen.checkpoint.path)
    return chosen.logged if newest is not None and newest == chosen.test else None


def chosen_of(run: OpenedRun, step: Step, on: SetName = "validation") -> Chosen:
    """Choose a checkpoint. Writes nothing, and needs no TensorFlow.

    Args:
        step: a step, None for the newest checkpoint, or "best".

    Raises:
        NoSuchRun: the run has not begun.
        InvalidInput: it has no such checkpoint or no validation examples, or its run file cannot be used.
        IdentityChanged: the run on disk differs from the run file.
        RunLogError: the log cannot be read.
    """
    preflight(run)
    spec, home = run.spec, run.home
    if not holds_a_log(home):
        raise NoSuchRun(
            f"no run is at {home.uri}: the run file has not been run yet; start it with: baton run {run.file}"
        )
    head = run.require_head()
    require_same_identity(head.identity, identity_in_run_file(spec), home=home.uri)
    if on not in spec.data.is_evaluated_on:
        raise RunFileError(_NO_SET[on])
    ref = select_checkpoint(home, step, error=InvalidInput)
    if on == "test":
        test = evaluation_on_test_of(run.log, head, ref.path)
        logged = None if test is None else dict(test.metrics)
        return Chosen(head=head, checkpoint=ref, logged=logged, on=on, test=test)
    known = evaluation_of(run.log, head, ref.path)
    return Chosen(head=head, checkpoint=ref, logged=None if known is None else dict(known.metrics))


def run_stages(run: OpenedRun, chosen: Chosen, runner: Runner, telemetry: Sink) -> Evaluation:
    """Prepare the data, and evaluate the chosen checkpoint, each where `runner` runs it."""
    spec, recorded = run.spec, chosen.head.environment
    place = Place(root=run.root, home=run.home, log=run.log, code_folder=run.folder, telemetry=telemetry)
    if EVALUATE.name not in runner.remote:
        require_free_servers(run, telemetry)
        from baton.tasks.foundation.machine.devices import acquire  # imports TensorFlow

        # Before any user code: the user's `load` may use TensorFlow.
        acquire(spec.accelerator, recorded, deterministic=spec.train.deterministic)
    dataset = runner.run(PREPARE_DATA, PrepareDataCall(spec=spec), place)
    found: dict[str, object] = {"data.content_digest": dataset.content_digest}
    if chosen.on == "validation":
        found[VALIDATION] = None if dataset.validation is None else dataset.validation.content_digest
    from baton.tasks.foundation.dataset.manifest import changed_files

    files = partial(changed_files, run.root, chosen.head.identity, dataset)
    require_same_identity(chosen.head.identity, found, home=run.home.uri, files=files)
    spec = with_examples(spec, dataset.train_examples)
    call = EvaluateCall(
        spec=spec,
        dataset=dataset,
        checkpoint=chosen.checkpoint,
        recorded=recorded,
        on=chosen.on,
        confusion_matrix=True,
    )
    return runner.run(EVALUATE, call, place)


def differences(metrics: Mapping[str, float], logged: Mapping[str, float]) -> str:
    """The metrics that differ by more than float tolerance, as text; empty if none does."""
    found = []
    for name in dict.fromkeys([*logged, *metrics]):
        before, now = logged.get(name), metrics.get(name)
        if before is None or now is None or not _equal(before, now):
            found.append(f"{name} is {_number(now)}, the log has {_number(before)}")
    return "; ".join(found)


def _equal(before: float, now: float) -> bool:
    both_undefined = math.isnan(before) and math.isnan(now)
    return both_undefined or math.isclose(before, now, rel_tol=_RELATIVE_TOLERANCE)


def _number(value: float | None) -> str:
    return "absent" if value is None else f"{value:.8g}"
