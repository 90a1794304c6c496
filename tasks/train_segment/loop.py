"""The loop of a segment: inner loops of about a second, and what comes between them.

Steps are counted absolutely, and nothing is read or reset where a run is cut. Before each inner loop all hosts decide
together what comes next: a stop, the segment's end, a commit, or a number of steps. Clocks and signals differ between
hosts, and a host that ran one step more than the others would wait for them forever.
"""

import math
from dataclasses import dataclass

from baton.tasks.foundation.checkpoint.snapshot import reserve_memory
from baton.tasks.foundation.contracts.log_entry import (
    BorderReason,
    MetricRow,
    SegmentRequest,
    SegmentResult,
    StopReason,
)
from baton.tasks.foundation.contracts.run_spec import EpochLength, is_row_due, next_row
from baton.tasks.foundation.log.history import recent_rows
from baton.tasks.foundation.machine.collectives import Hosts
from baton.tasks.foundation.machine.stops import Stops, first_reason, number_of
from baton.tasks.foundation.stage import Place
from baton.tasks.foundation.storage.transfers import PROCESS_DEADLINE
from baton.tasks.foundation.telemetry.events import Training, Waiting
from baton.tasks.foundation.telemetry.ledger import seconds_between
from baton.tasks.train_segment.callbacks import MEDIAN_ROWS, LossWatch
from baton.tasks.train_segment.host_stats import InnerLoop
from baton.tasks.train_segment.interval import CommitInterval
from baton.tasks.train_segment.trainer import Trainer

# An inner loop is not longer than this, so that the progress bar moves.
_INNER_LOOP_SECONDS = 1.0


def train(
    trainer: Trainer, request: SegmentRequest, interval: CommitInterval, stops: Stops, place: Place
) -> SegmentResult:
    """Run inner loops up to the segment's end. Each ends at every absolute step where something is due.

    Args:
        trainer: has the state at the segment's start, and the compiled step.
        request: says where the segment ends.
        interval: commits on the way and at the end.
        place: where the run's home is.

    Returns:
        The work since the last commit.

    Raises:
        BlowUp: the loss blew up, or loss or weights are NaN or infinite.
        StepFailed: a step or a callback failed.
        StaleWriter: another writer moved the tip before a commit in the segment's middle.
    """
    spec, train, clock = request.spec, request.spec.train, place.clock
    began = clock()
    # Half of the promised response time, because the next inner loop may be slower than the last.
    longest = min(_INNER_LOOP_SECONDS, spec.stop.answer_seconds / 2)
    steps_per_second = 0.0
    watch = _loss_watch(trainer, interval, place)
    epoch = EpochLength(
        train_examples=request.dataset.train_examples,
        global_batch_size=train.global_batch_size,
        drop_remainder=train.drop_remainder,
    )
    reason: BorderReason = "segment_end"
    step = trainer.state.step  # counted here: each look at the variable takes as long as a small step
    trainer.pace.enter()
    while step < request.until_step:
        end = min(request.until_step, next_row(spec, step))
        stop = stops.requested
        steps_to_trace = place.profiler.steps_left(step, place.home, place.telemetry)
        decision = LoopDecision(
            stop=None if stop is None else stop.reason,
            grace_left=stops.grace_left(),
            segment_is_over=train.segment_seconds is not None
            and clock() - began >= train.segment_seconds
            and step > interval.start.step,
            commit_is_due=interval.commit_is_due(step, trainer.cadence),
            steps=int(min(end - step, max(1, int(longest * steps_per_second)), steps_to_trace)),
            save_failed=place.saves is not None and place.saves.failed,
            pace=trainer.pace.numbers(),
        ).agreed(trainer.accelerator)
        interval.work.add_interval(trainer.pace.gathered(decision.pace, step, place.telemetry))
        if decision.save_failed:
            interval.raise_failed_save(trainer.accelerator)
        if decision.stop is not None:
            return _stop(decision.stop, decision.grace_left, trainer, interval)
        if decision.segment_is_over:
            reason = "segment_seconds"
            break
        if decision.commit_is_due:
            trainer.pace.leave()
            interval.commit(trainer, "interval")
            interval.work.begin_cause("train")
            trainer.pace.enter()
        inner, inner_seconds = _run_inner_loop(decision.steps, trainer, request, interval, place)
        step += decision.steps
        steps_per_second = decision.steps / max(inner_seconds, 1e-9)
        place.profiler.end_if_done(step, place.home, place.telemetry)
        if is_row_due(spec, step) and _take_row(trainer, interval, watch, place):
            break  # the next segment starts here, and logs that the run is finished
        place.telemetry.emit(
            Training(
                step=step,
                target=train.target,
                epoch=epoch.after(step),
                segment=request.number,
                metrics=interval.work.metrics,
                loss=inner.loss,
                examples_per_second=steps_per_second * train.global_batch_size,
                input_wait_seconds=inner.input_wait_seconds,
            )
        )
    trainer.pace.leave()
    return interval.end(trainer, reason)


def _run_inner_loop(
    steps: int, trainer: Trainer, request: SegmentRequest, interval: CommitInterval, place: Place
) -> tuple[InnerLoop, float]:
    """Run an inner loop and count it. Returns what it did, and its seconds."""
    began = place.clock()
    with place.profiler.inner_loop(steps):
        inner = trainer.run(steps, segment=request.number)
    seconds = seconds_between(began, place.clock())
    interval.work.add_inner_loop(inner, seconds)
    trainer.pace.add(inner)
    if place.saves is not None:
        reserve_memory(trainer.state)
    return inner, seconds


def _take_row(trainer: Trainer, interval: CommitInterval, watch: LossWatch, place: Place) -> bool:
    """Read the metrics since the last row, and log them. Returns whether callbacks end the run here."""
    row = trainer.read_metrics()
    watch.check(row)
    interval.work.log(row)
    if trainer.callbacks is not None:
        place.telemetry.emit(Waiting(on="callbacks"))
    ends = trainer.take_row(row)
    interval.work.log_values(trainer.take_logged())
    return ends


def _stop(reason: StopReason, grace_left: float, trainer: Trainer, interval: CommitInterval) -> SegmentResult:
    """Commit what was trained, if the grace period is long enough, and wait for what is in flight."""
    if math.isfinite(grace_left):
        PROCESS_DEADLINE.start(grace_left)  # the notice may be for another host
    if trainer.state.step > interval.start.step:
        interval.commit_if_it_fits(trainer, reason, grace_left=grace_left)
    interval.wait_for_save(trainer.accelerator)
    return interval.result(reason)


def _loss_watch(trainer: Trainer, interval: CommitInterval, place: Place) -> LossWatch:
    """The losses before the state in memory: kept from the segment before, or read from the log."""
    if trainer.loss_watch is not None:
        return trainer.loss_watch
    factor = trainer.recipe.spec.train.blowup_factor
    rows: list[MetricRow] = []
    if factor is not None:
        interval.wait_for_save(trainer.accelerator)
        rows = recent_rows(place.log, place.log.entry(interval.base).head, MEDIAN_ROWS)
    watch = LossWatch(factor, rows)
    trainer.keep_watch(watch)
    return watch


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopDecision:
    """The decision of one host, or of all hosts once they agree.

    Attributes:
        stop: why to stop now; None to continue.
        grace_left: seconds until this machine may end; infinite if no end is announced.
        segment_is_over: whether the segment's seconds are used up.
        commit_is_due: whether to commit first.
        steps: number of steps of the inner loop.
        save_failed: whether an async save failed.
        pace: see `HostPace.numbers`; of all hosts, one after the other, once they agree.
    """

    stop: StopReason | None
    grace_left: float
    segment_is_over: bool
    commit_is_due: bool
    steps: int
    save_failed: bool = False
    pace: tuple[float, ...] = ()

    def agreed(self, hosts: Hosts) -> "LoopDecision":
        """The decision of all hosts: a stop of any host, the shortest grace period, otherwise the chief's decision."""
        values = [
            number_of(self.stop),
            self.grace_left,
            self.segment_is_over,
            self.commit_is_due,
            self.steps,
            self.save_failed,
        ]
        of_hosts = hosts.gather_from_hosts([*values, *self.pace])
        _, _, over, due, steps, failed, *_ = of_hosts[0].tolist()
        return LoopDecision(
            stop=first_reason(of_hosts[:, 0].tolist()),
            grace_left=float(of_hosts[:, 1].min()),
            segment_is_over=bool(over),
            commit_is_due=bool(due),
            steps=int(steps),
            save_failed=bool(failed),
            pace=tuple(of_hosts[:, len(values) :].ravel().tolist()),
        )
