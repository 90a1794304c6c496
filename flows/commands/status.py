"""`baton status`: shows the state of a run from its log, and its time by cause from its attempt records."""

import json
import sys
import time
from contextlib import suppress
from typing import Annotated

import typer
from rich.console import Console

from baton.flows.commands.options import RUN_FILE, Address, AsJson, Overrides, Verbose
from baton.flows.commands.output import Output, Painted, say_json
from baton.flows.commands.output import status as status_word
from baton.flows.facts import AtWork, RunStatus, hung_words
from baton.flows.opened_run import open_run
from baton.tasks.foundation.contracts.attempt import LAUNCH, UNATTRIBUTED
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.log_entry import Totals, WorkerStats
from baton.tasks.foundation.errors import InvalidInput
from baton.tasks.foundation.log.accounting import Account
from baton.tasks.foundation.log.receipts import audit_words
from baton.tasks.foundation.telemetry.formatting import (
    duration_words,
    metric_words,
    number_words,
    plain_words,
    size_words,
    step_words,
    style_of,
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
            *_checkpoints(facts, out),
            *([] if other in {None, facts.target} else [("run file", f"its target is step {other}")]),
            *([] if facts.audit is None else [("audited", audit_words(facts.audit))]),
            *_times(facts),
        ]
    )


def _progress(facts: RunStatus, out: Output) -> list[tuple[str, str]]:
    head, tip, last_commit = facts.head, facts.head.tip, facts.totals.last_commit
    return [
        ("run", facts.run.name),
        ("state", "" if facts.state == "unknown" else status_word(facts.state)),
        ("cause", facts.cause),
        ("home", facts.run.home.uri),
        ("step", step_words(facts.step, facts.target, facts.epoch).removeprefix("step ")),
        *(("at work", _at_work_words(process)) for process in facts.at_work),
        ("devices", head.environment.devices if head.environment.hosts > 1 or head.environment.servers else ""),
        ("segments", str(facts.totals.segments)),
        ("log", f"entry {head.number}, base {head.base}"),
        ("tip", out.path(f"{facts.run.home.uri}/{tip.path}") if tip else "no checkpoint to continue from"),
        ("committed", out.time(last_commit) if last_commit else ""),
        ("digest", out.id(tip.state_digest if tip else "")),
        ("training", metric_words(facts.training)),
        *_partial(facts.totals),
        ("commits", _commit_words(facts)),
    ]


def _partial(totals: Totals) -> list[tuple[str, str]]:
    """The metrics of the steps after the newest row, if the tip has such steps."""
    partial = totals.partial
    if partial is None:
        return []
    since = "" if totals.row is None else f", since step {totals.row.step}"
    return [("partial", f"{metric_words(partial.metrics)}  (step {partial.step}{since})")]


def _results(facts: RunStatus, out: Output) -> list[tuple[str, str]]:
    lines, head, totals, best = list[tuple[str, str]](), facts.head, facts.totals, facts.head.best
    for label, evaluation in (("validation", totals.evaluation), ("test", totals.test)):
        if evaluation is not None:
            words = f"{counted(evaluation.examples, 'example')}, step {evaluation.step}"
            lines.append((label, f"{metric_words(evaluation.metrics)}  ({words})"))
    if best is not None:
        words = f"validation {best.metric} {number_words(best.value)}  ({best.mode}, step {best.checkpoint.step})"
        lines.append(("best", f"{words}  {out.path(best.checkpoint.path)}"))
    if head.finished is not None:
        lines.append(("finished", f"early, at step {head.finished.step}: {head.finished.reason}"))
    lines += [
        ("weights", f"{counted(source.variables, 'variable')} began as in {source.place}")
        for source in totals.initialized_from
    ]
    lines += [("worker", _worker_words(worker)) for worker in facts.workers]
    lines += [("slow", slow.words) for slow in facts.slow_hosts]
    if head.skipped_batches:
        lines.append(("skipped", f"{counted(head.skipped_batches, 'global batch', 'global batches')}, by rewinds"))
    if totals.logged is not None:
        lines.append(
            ("logged", f"{plain_words(totals.logged.values)}  ({totals.logged.on}, step {totals.logged.step})")
        )
    lines += [
        ("metadata", f"{name}: {value if isinstance(value, str) else json.dumps(value)}")
        for name, value in totals.metadata.items()
    ]
    if totals.forked_from is not None:
        lines.append(("forked", f"from step {totals.forked_from.step} of {totals.forked_from.home}"))
    return lines


def _checkpoints(facts: RunStatus, out: Output) -> list[tuple[str, str]]:
    head = facts.head
    return [
        *(("retained", _checkpoint_words(ref, "retained", out)) for ref in head.retained),
        *(("quarantined", _checkpoint_words(ref, "quarantined", out)) for ref in head.quarantined),
    ]


def _checkpoint_words(ref: CheckpointRef, label: str, out: Output) -> str:
    words = f"{out.path(ref.path)}  {size_words(ref.size)}"
    return Painted(words, style_of(label)) if style_of(label) else words


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


def _worker_words(worker: WorkerStats) -> str:
    speed = worker.examples / worker.train_seconds if worker.train_seconds > 0 else 0.0
    words = [
        f"host {worker.host}",
        counted(worker.replicas, "replica"),
        f"{speed:,.0f} examples/s",
        f"{1000 * worker.step_seconds:.3g} ms a step",
        f"input wait {worker.input_wait_share:.1%}",
    ]
    if worker.losses:
        words.append(f"loss {', '.join(map(number_words, worker.losses))}")
    return "  ".join(words)


def _times(facts: RunStatus) -> list[tuple[str, str]]:
    if facts.account is not None:
        return _account_words(facts.account)
    seconds = ", ".join(f"{cause} {duration_words(amount)}" for cause, amount in facts.seconds.items())
    return [("time", seconds), ("attempts", "not recorded: the time is that of committed segments alone")]


def _account_words(account: Account) -> list[tuple[str, str]]:
    def words(cause: str, amount: float) -> str:
        return f"{cause} {duration_words(amount)} ({account.share(amount):.1%})"

    count, total = len(account.attempts), duration_words(account.total_seconds)
    alive = sum(attempt.alive for attempt in account.attempts)
    silent = sum(attempt.silent for attempt in account.attempts)
    hung = [attempt for attempt in account.attempts if attempt.hung]
    states = ((alive, "at work"), (silent, "killed or crashed"), (len(hung), "hung"))
    standing = ", ".join(f"{number} {state}" for number, state in states if number)
    bad = {cause: amount for cause, amount in account.bad_seconds.items() if amount > 0 or cause == UNATTRIBUTED}
    attempts = counted(count, "attempt") + (f" ({standing})" if standing else "")
    good = duration_words(account.good_seconds)
    lines = [
        ("time", f"{total} in {attempts}"),
        ("goodput", f"{account.share(account.good_seconds):.1%}  {good} of training that counts"),
        ("badput", "  ".join(words(cause, amount) for cause, amount in bad.items())),
    ]
    if hung:
        newest = hung[-1].record
        lines.append(("hung", f"{time_words(newest.alive)}  {hung_words(newest)}"))
    if account.away_seconds:
        lines.append(("away", f"{duration_words(account.away_seconds)} between attempts, no process at work"))
    if account.unreadable:
        are = "is" if account.unreadable == 1 else "are"
        lines.append(("left out", f"{counted(account.unreadable, 'file')} below attempts/ {are} no attempt's record"))
    return lines
