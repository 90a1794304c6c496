"""`baton status`: shows the state of a run from its log, and its time by cause from its attempt records."""

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated

import typer
from rich.console import Console

from baton.flows.commands.options import RUN_FILE, Address, AsJson, Overrides, Verbose
from baton.flows.commands.output import Output, Painted, say_json
from baton.flows.commands.output import status as status_word
from baton.flows.facts import AtWork, RunStatus, best_words, hung_words
from baton.flows.opened_run import open_run
from baton.tasks.evaluate.report.sections import goodput_words, worker_cells
from baton.tasks.foundation.contracts.attempt import LAUNCH, UNATTRIBUTED
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.errors import InvalidInput
from baton.tasks.foundation.log.receipts import audit_words
from baton.tasks.foundation.telemetry.formatting import (
    BAD,
    duration_words,
    metric_words,
    number_words,
    plain_words,
    size_words,
    step_words,
    value_words,
)
from baton.tasks.foundation.text import counted, time_words

_WATCH_SECONDS = 2.0


def status(
    address: Address = RUN_FILE,
    overrides: Overrides = None,
    *,
    watch: Annotated[bool, typer.Option("--watch", help="show it again every two seconds, until Ctrl-C")] = False,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Show the state of a run."""
    if watch and as_json:
        raise InvalidInput("--watch and --json exclude each other; leave one of them out")
    opened = open_run(address, overrides)
    if watch:
        with suppress(KeyboardInterrupt):
            while True:
                facts = RunStatus.read(opened)
                Console().clear()  # does nothing where the output is no terminal
                _print(facts, Output.to(sys.stdout, verbose=verbose))
                time.sleep(_WATCH_SECONDS)
        return
    facts = RunStatus.read(opened, opened.log.newest_seen())
    if as_json:
        say_json(facts.json())
    else:
        _print(facts, Output.to(sys.stdout, verbose=verbose))


def _print(facts: RunStatus, out: Output) -> None:
    other = facts.target_in_run_file
    out.facts(
        [
            *_progress(facts, out),
            *_results(facts, out),
            *(("retained", _checkpoint_words(ref, out)) for ref in facts.head.retained),
            *(("quarantined", Painted(_checkpoint_words(ref, out), BAD)) for ref in facts.head.quarantined),
            ("run file", "" if other in {None, facts.target} else f"its target is step {other}"),
            ("audited", "" if facts.audit is None else audit_words(facts.audit)),
            *_times(facts),
        ]
    )


def _progress(facts: RunStatus, out: Output) -> Iterator[tuple[str, str]]:
    head, tip, totals = facts.head, facts.head.tip, facts.totals
    yield "run", facts.run.name
    yield "state", "" if facts.state == "unknown" else status_word(facts.state)
    yield "cause", facts.cause
    yield "home", facts.run.home.uri
    yield "step", step_words(facts.step, facts.target, facts.epoch).removeprefix("step ")
    yield from (("at work", _at_work_words(process)) for process in facts.at_work)
    yield "devices", head.environment.devices if head.environment.hosts > 1 or head.environment.servers else ""
    yield "segments", str(totals.segments)
    yield "log", f"entry {head.number}, base {head.base}"
    yield "tip", out.path(f"{facts.run.home.uri}/{tip.path}") if tip else "no checkpoint to continue from"
    yield "committed", out.time(totals.last_commit) if totals.last_commit else ""
    yield "digest", out.id(tip.state_digest if tip else "")
    yield "training", metric_words(facts.training)
    if totals.partial is not None:  # of the steps after the newest row
        since = "" if totals.row is None else f", since step {totals.row.step}"
        yield "partial", f"{metric_words(totals.partial.metrics)}  (step {totals.partial.step}{since})"
    yield "commits", _commit_words(facts)


def _results(facts: RunStatus, out: Output) -> Iterator[tuple[str, str]]:
    head, totals, best = facts.head, facts.totals, facts.head.best
    for label, evaluation in (("validation", totals.evaluation), ("test", totals.test)):
        if evaluation is not None:
            words = f"{counted(evaluation.examples, 'example')}, step {evaluation.step}"
            yield label, f"{metric_words(evaluation.metrics)}  ({words})"
    if best is not None:
        yield "best", f"validation {best_words(best)}  ({best.mode})  {out.path(best.checkpoint.path)}"
    if head.finished is not None:
        yield "finished", f"early, at step {head.finished.step}: {head.finished.reason}"
    for source in totals.initialized_from:
        yield "weights", f"{counted(source.variables, 'variable')} began as in {source.place}"
    for worker in facts.workers:
        yield "worker", "  ".join(f"{name} {cell.text}" for name, cell in worker_cells(worker).items() if cell.text)
    yield from (("slow", slow.words) for slow in facts.slow_hosts)
    skipped = f"{counted(head.skipped_batches, 'global batch', 'global batches')}, by rewinds"
    yield "skipped", skipped if head.skipped_batches else ""
    if totals.logged is not None:
        yield "logged", f"{plain_words(totals.logged.values)}  ({totals.logged.on}, step {totals.logged.step})"
    for name, value in totals.metadata.items():
        yield "metadata", f"{name}: {value_words(value)}"
    if totals.forked_from is not None:
        yield "forked", f"from step {totals.forked_from.step} of {totals.forked_from.home}"


def _checkpoint_words(ref: CheckpointRef, out: Output) -> str:
    return f"{out.path(ref.path)}  {size_words(ref.size)}"


def _commit_words(facts: RunStatus) -> str:
    every, pace = facts.commit_every, facts.commit_pace
    if isinstance(every, float):
        return f"every {duration_words(every)} within a segment"
    if pace is None:
        return "within a segment as often as it pays; not measured yet" if every == "auto" else ""
    return (
        f"every {duration_words(pace.every_seconds)} within a segment: one costs {duration_words(pace.cost_seconds)}, "
        f"and a process is lost about every {duration_words(pace.between_losses_seconds)}"
    )


def _at_work_words(process: AtWork) -> str:
    record, speed, left = process.record, process.steps_per_second, process.seconds_left
    doing = "waits for a remote stage" if record.doing == LAUNCH else record.doing
    pace = "" if speed is None else f"  {number_words(speed)} steps/s"
    about = "about" if record.seconds.get("evaluate") else "at least"  # how long one takes is not known before it
    pace += "" if left is None else f", {about} {duration_words(left)} left"
    step, ago = step_words(record.step, None, process.epoch), duration_words(process.silent_seconds)
    return f"{step}  {doing}{pace}  (process {record.pid} on {record.host}, as of {ago} ago)"


def _times(facts: RunStatus) -> Iterator[tuple[str, str]]:
    account = facts.account
    if account is None:
        yield "time", ", ".join(f"{cause} {duration_words(amount)}" for cause, amount in facts.seconds.items())
        yield "attempts", "not recorded: the time is that of committed segments alone"
        return
    alive = sum(attempt.alive for attempt in account.attempts)
    silent = sum(attempt.silent for attempt in account.attempts)
    hung = [attempt.record for attempt in account.attempts if attempt.hung]
    states = ((alive, "at work"), (silent, "killed or crashed"), (len(hung), "hung"))
    standing = ", ".join(f"{number} {state}" for number, state in states if number)
    attempts = counted(len(account.attempts), "attempt") + (f" ({standing})" if standing else "")
    yield "time", f"{duration_words(account.total_seconds)} in {attempts}"
    yield "goodput", f"{goodput_words(account)}  {duration_words(account.good_seconds)} of training that counts"
    bad = {cause: amount for cause, amount in account.bad_seconds.items() if amount > 0 or cause == UNATTRIBUTED}
    words = (f"{cause} {duration_words(amount)} ({account.share(amount):.1%})" for cause, amount in bad.items())
    yield "badput", "  ".join(words)
    if hung:
        yield "hung", f"{time_words(hung[-1].alive)}  {hung_words(hung[-1])}"
    if account.away_seconds:
        yield "away", f"{duration_words(account.away_seconds)} between attempts, no process at work"
    if account.unreadable:
        are = "is" if account.unreadable == 1 else "are"
        yield "left out", f"{counted(account.unreadable, 'file')} below attempts/ {are} no attempt's record"
