"""`baton status`: shows the state of a run from its log, and its time by cause from its attempt records."""

import sys
import time
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, cast

import typer
from rich.console import Console

from flows.commands.options import RUN_FILE, Address, AsJson, Overrides, Verbose
from flows.commands.output import Output, Painted, say_json
from flows.commands.output import status as status_word
from flows.commands.status_json import (
    AtWorkJson,
    AuditJson,
    BestJson,
    CheckpointJson,
    CommitsJson,
    EvaluationJson,
    RunJson,
    StatusJson,
    WeightsJson,
    WholeReadJson,
    WorkerJson,
)
from flows.opened_run import Run, RunHome, open_run, target_in_run_file, target_of
from flows.summary.goodput import account_facts, account_words
from flows.summary.run_list import pace_of, state_of
from tasks.foundation.contracts.attempt import LAUNCH, AttemptRecord, utc_time
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.log_entry import Best, Entry, Head, LastEvaluation, Totals
from tasks.foundation.contracts.run_spec import EpochLength
from tasks.foundation.errors import InvalidInput
from tasks.foundation.messages import counted
from tasks.foundation.runlog.accounting import Account, account_of_log, seconds_in_log
from tasks.foundation.runlog.history import history_of
from tasks.foundation.runlog.receipts import LastAudit, audit_words, last_audit
from tasks.foundation.runlog.worker_stats import Worker, workers_from
from tasks.foundation.telemetry.formatting import (
    duration_words,
    metric_words,
    number_words,
    size_words,
    step_words,
    style_of,
)

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
        _watch(opened, verbose=verbose)
    else:
        _show(opened, opened.log.newest_seen() or opened.require_newest(), verbose=verbose, as_json=as_json)


def _watch(opened: RunHome, *, verbose: bool) -> None:
    with suppress(KeyboardInterrupt):
        while True:
            newest = opened.log.newest() or opened.require_newest()
            Console().clear()  # does nothing where the output is no terminal
            _show(opened, newest, verbose=verbose, as_json=False)
            time.sleep(_WATCH_SECONDS)


def status_facts(opened: RunHome) -> StatusJson:
    """Return what `baton status --json` prints."""
    return _facts_and_times(opened, opened.log.newest() or opened.require_newest())[0]


def _facts_and_times(opened: RunHome, newest: Entry) -> tuple[StatusJson, Account | None, LastAudit | None]:
    totals = opened.log.totals(newest)
    now = datetime.now(UTC)
    account = account_of_log(opened.attempts.read(), opened.log, newest, now=now)
    target = target_of(opened, newest)
    records = [] if account is None else [each.record for each in account.attempts if each.alive]
    at_work = [_at_work_facts(record, now, target, totals.epoch) for record in records]
    audited = last_audit(opened.home)
    facts: StatusJson = {
        **_facts(opened, newest.head, totals, account, target),
        "state": state_of(
            at_work=bool(at_work),
            ended_early=newest.head.finished is not None,
            step=newest.head.tip.step if newest.head.tip else 0,
            target=target,
        ),
        "at_work": at_work,
        "commits": _commit_facts(opened, account),
        "audit": None if audited is None else _audit_facts(audited),
    }
    return facts, account, audited


def _show(opened: RunHome, newest: Entry, *, verbose: bool, as_json: bool) -> None:
    facts, account, audited = _facts_and_times(opened, newest)
    if as_json:
        say_json(facts)
    else:
        audit_lines = [] if audited is None else [("audited", audit_words(audited))]
        out = Output.to(sys.stdout, verbose=verbose)
        other = target_in_run_file(opened, newest.head)
        other_lines = [] if other in {None, facts["target"]} else [("run file", f"its target is step {other}")]
        out.facts([*_words(facts, out), *other_lines, *audit_lines, *_time_words(facts, account)])


def _facts(opened: RunHome, head: Head, totals: Totals, account: Account | None, target: int | None) -> RunJson:
    tip = head.tip
    return {
        "run": opened.name,
        "home": opened.home.uri,
        "step": tip.step if tip else 0,
        "target": target,
        "epoch": None if totals.epoch is None or tip is None else totals.epoch.after(tip.step),
        "segments": totals.segments,
        "entry": head.number,
        "base": head.base,
        "checkpoint": f"{opened.home.uri}/{tip.path}" if tip else None,
        "state_digest": tip.state_digest if tip else None,
        "last_commit": totals.last_commit,
        "metrics": {} if totals.row is None else totals.row.metrics,
        "evaluation": None if totals.evaluation is None else _evaluation_facts(totals.evaluation),
        "test": None if totals.test is None else _evaluation_facts(totals.test),
        "best": None if head.best is None else _best_facts(head.best),
        "read_whole": [cast(WholeReadJson, read.model_dump()) for read in head.read_whole],
        "retained": [_checkpoint_facts(ref) for ref in head.retained],
        "quarantined": [_checkpoint_facts(ref) for ref in head.quarantined],
        "skipped_batches": head.skipped_batches,
        "finished": None if head.finished is None else head.finished.model_dump(),
        "forked_from": None if totals.forked_from is None else totals.forked_from.model_dump(),
        "seconds": seconds_in_log(history_of(opened.log.entries(blocks="read")))
        if account is None
        else account.seconds,
        "account": None if account is None else account_facts(account),
        "initialized_from": [cast(WeightsJson, each.model_dump()) for each in totals.initialized_from],
        "workers": [_worker_facts(worker) for worker in workers_from(totals.workers)],
        "environment": head.environment.model_dump(),
    }


def _at_work_facts(record: AttemptRecord, now: datetime, target: int | None, length: EpochLength | None) -> AtWorkJson:
    """The state of a process that is training the run, as of its last heartbeat."""
    # Below 0 if the clock of the process's machine is ahead.
    silent_seconds = max((now - utc_time(record.alive)).total_seconds(), 0.0)
    keys = ("attempt", "host", "pid", "began", "alive", "doing", "from_step", "step", "committed_step", "within")
    facts = {
        **record.model_dump(include=set(keys)),
        "epoch": None if length is None else length.after(record.step),
        "silent_seconds": silent_seconds,
        **asdict(pace_of(record, target)),
    }
    return cast(AtWorkJson, facts)


def _commit_facts(opened: RunHome, account: Account | None) -> CommitsJson:
    """How often the run commits within a segment, by the run file and by the newest attempt that knows."""
    paces = [] if account is None else [each.record.commit_pace for each in account.attempts]
    newest = next((pace for pace in reversed(paces) if pace is not None), None)
    return {
        "every_seconds": opened.spec.checkpoint.every_seconds if isinstance(opened, Run) else None,
        "pace": None if newest is None else newest.model_dump(),
    }


def _audit_facts(audit: LastAudit) -> AuditJson:
    receipt = audit.receipt
    return {
        "receipt": audit.path,
        "time": None if receipt is None else receipt.time,
        "verdict": None if receipt is None else receipt.verdict,
        "steps": audit.steps,
        "first_differing_step": audit.first_differing_step,
    }


def _commit_words(commits: CommitsJson) -> str:
    every, pace = commits["every_seconds"], commits["pace"]
    if isinstance(every, float):
        return f"every {duration_words(every)} within a segment"
    if pace is None:
        return "within a segment as often as it pays; not measured yet" if every == "auto" else ""
    return (
        f"every {duration_words(pace['every_seconds'])} within a segment: one costs "
        f"{duration_words(pace['cost_seconds'])}, and a process is lost about every "
        f"{duration_words(pace['between_losses_seconds'])}"
    )


def _at_work_words(record: AtWorkJson) -> str:
    doing = "waits for a remote stage" if record["doing"] == LAUNCH else record["doing"]
    ago = duration_words(record["silent_seconds"])
    speed, left = record["steps_per_second"], record["seconds_left"]
    pace = "" if speed is None else f"  {number_words(speed)} steps/s"
    pace += "" if left is None else f", about {duration_words(left)} left"
    step = step_words(record["step"], None, record["epoch"])
    return f"{step}  {doing}{pace}  (process {record['pid']} on {record['host']}, as of {ago} ago)"


def _checkpoint_facts(ref: CheckpointRef) -> CheckpointJson:
    return {"path": ref.path, "step": ref.step, "size": ref.size, "state_digest": ref.state_digest}


def _evaluation_facts(evaluation: LastEvaluation) -> EvaluationJson:
    return {
        "step": evaluation.step,
        "path": evaluation.path,
        "metrics": evaluation.metrics,
        "examples": evaluation.examples,
    }


def _best_facts(best: Best) -> BestJson:
    return {
        "step": best.checkpoint.step,
        "path": best.checkpoint.path,
        "metric": best.metric,
        "mode": best.mode,
        "value": best.value,
    }


def _worker_facts(worker: Worker) -> WorkerJson:
    derived = {"step_seconds": worker.step_seconds, "input_wait_share": worker.input_wait_share}
    return cast(WorkerJson, {**asdict(worker), **derived})


def _worker_words(worker: WorkerJson) -> str:
    speed = worker["examples"] / worker["train_seconds"] if worker["train_seconds"] > 0 else 0.0
    words = [
        f"host {worker['host']}",
        counted(worker["replicas"], "replica"),
        f"{speed:,.0f} examples/s",
        f"{1000 * worker['step_seconds']:.3g} ms a step",
        f"input wait {worker['input_wait_share']:.1%}",
    ]
    if worker["losses"]:
        words.append(f"loss {', '.join(map(number_words, worker['losses']))}")
    if worker["straggles"]:
        words.append("the others wait for its input")
    return "  ".join(words)


def _words(facts: StatusJson, out: Output) -> list[tuple[str, str]]:
    best = facts["best"]
    lines = [
        ("run", facts["run"]),
        ("home", facts["home"]),
        ("step", step_words(facts["step"], facts["target"], facts["epoch"]).removeprefix("step ")),
        ("state", "" if facts["state"] == "unknown" else status_word(facts["state"])),
        *(("at work", _at_work_words(record)) for record in facts["at_work"]),
        ("segments", str(facts["segments"])),
        ("log", f"entry {facts['entry']}, base {facts['base']}"),
        ("tip", out.path(facts["checkpoint"]) if facts["checkpoint"] else "no checkpoint to continue from"),
        ("committed", out.time(facts["last_commit"]) if facts["last_commit"] else ""),
        ("digest", out.id(facts["state_digest"] or "")),
        ("training", metric_words(facts["metrics"])),
        ("commits", _commit_words(facts["commits"])),
    ]
    for label, evaluation in (("validation", facts["evaluation"]), ("test", facts["test"])):
        if evaluation is not None:
            words = f"{counted(evaluation['examples'], 'example')}, step {evaluation['step']}"
            lines.append((label, f"{metric_words(evaluation['metrics'])}  ({words})"))
    if best is not None:
        words = f"validation {best['metric']} {number_words(best['value'])}  ({best['mode']}, step {best['step']})"
        lines.append(("best", f"{words}  {out.path(best['path'])}"))
    if facts["finished"] is not None:
        lines.append(("finished", f"early, at step {facts['finished']['step']}: {facts['finished']['reason']}"))
    lines += [
        ("weights", f"{counted(source['variables'], 'variable')} began as in {source['place']}")
        for source in facts["initialized_from"]
    ]
    lines += [("worker", _worker_words(worker)) for worker in facts["workers"]]
    if facts["skipped_batches"]:
        lines.append(("skipped", f"{counted(facts['skipped_batches'], 'global batch', 'global batches')}, by rewinds"))
    if facts["forked_from"] is not None:
        lines.append(("forked", f"from step {facts['forked_from']['step']} of {facts['forked_from']['home']}"))
    for read in facts["read_whole"][-1:]:
        lines.append(("read whole", f"{out.path(read['path'])}  (the newest that was, {out.time(read['time'])})"))
    for label, refs in (("retained", facts["retained"]), ("quarantined", facts["quarantined"])):
        lines += [(label, _checkpoint_words(ref, label, out)) for ref in refs]
    return lines


def _checkpoint_words(ref: CheckpointJson, label: str, out: Output) -> str:
    words = f"{out.path(ref['path'])}  {size_words(ref['size'])}"
    return Painted(words, style_of(label)) if style_of(label) else words


def _time_words(facts: StatusJson, account: Account | None) -> list[tuple[str, str]]:
    if account is not None:
        return account_words(account)
    seconds = ", ".join(f"{cause} {duration_words(amount)}" for cause, amount in facts["seconds"].items())
    return [("time", seconds), ("attempts", "not recorded: the time is that of committed segments alone")]
