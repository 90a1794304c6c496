"""`baton status`: shows the state of a run from its log, and its time by cause from its attempt records."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import cast

from flows.commands.options import Address, AsJson, Overrides
from flows.commands.output import aligned, say, say_json
from flows.commands.status_json import (
    AtWorkJson,
    BestJson,
    CheckpointJson,
    EvaluationJson,
    RunJson,
    StatusJson,
    WeightsJson,
    WorkerJson,
)
from flows.run import Run, RunHome, open_run
from flows.summary.goodput import account_facts, account_words
from tasks.foundation.contracts.attempt import LAUNCH, AttemptRecord, utc_time
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.log_entry import Best, Evaluation, Head, Origin
from tasks.foundation.runlog.accounting import Account, account_of, seconds_in_log
from tasks.foundation.runlog.attempts import read_attempts
from tasks.foundation.runlog.history import History, commit_of, history_of
from tasks.foundation.runlog.worker_stats import Worker, workers_of
from tasks.foundation.telemetry.formatting import duration_words, metric_words, number_words, size_words, step_words


def status(address: Address, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Show the state of a run."""
    opened = open_run(address, overrides)
    entries = list(opened.log.entries())
    history = history_of(entries)
    now = datetime.now(UTC)
    account = account_of(read_attempts(opened.home), entries, history, now=now)
    at_work = [] if account is None else [_at_work_facts(each.record, now) for each in account.attempts if each.alive]
    facts: StatusJson = {**_facts(opened, history, history.head or opened.require_head(), account), "at_work": at_work}
    if as_json:
        say_json(facts)
    else:
        lines = [*_words(facts), *_time_words(facts, account)]
        for line in aligned([(label, text) for label, text in lines if text]):
            say(line)


def _facts(opened: RunHome, history: History, head: Head, account: Account | None) -> RunJson:
    tip = head.tip
    evaluation = history.evaluations[-1] if history.evaluations else None
    origin = opened.log.entry(0).body
    forked_from = origin.forked_from if isinstance(origin, Origin) else None
    return {
        "run": opened.name,
        "home": opened.home.uri,
        "step": tip.step if tip else 0,
        "target": opened.spec.train.steps if isinstance(opened, Run) else None,
        "segments": history.segments,
        "entry": head.number,
        "base": head.base,
        "checkpoint": f"{opened.home.uri}/{tip.path}" if tip else None,
        "state_digest": tip.state_digest if tip else None,
        "metrics": history.rows[-1].metrics if history.rows else {},
        "evaluation": None if evaluation is None else _evaluation_facts(evaluation),
        "best": None if head.best is None else _best_facts(head.best),
        "retained": [_checkpoint_facts(ref) for ref in head.retained],
        "quarantined": [_checkpoint_facts(ref) for ref in head.quarantined],
        "skipped_batches": head.skipped_batches,
        "finished": None if head.finished is None else head.finished.model_dump(),
        "forked_from": None if forked_from is None else forked_from.model_dump(),
        "seconds": seconds_in_log(history) if account is None else account.seconds,
        "account": None if account is None else account_facts(account),
        "initialized_from": _weights_facts(history),
        "workers": [_worker_facts(worker) for worker in workers_of(history)],
        "environment": head.environment.model_dump(),
    }


def _at_work_facts(record: AttemptRecord, now: datetime) -> AtWorkJson:
    """The state of a process that is training the run, as of its last heartbeat."""
    # Below 0 if the clock of the process's machine is ahead.
    silent_seconds = max((now - utc_time(record.alive)).total_seconds(), 0.0)
    keys = ("attempt", "host", "pid", "began", "alive", "doing", "from_step", "step", "committed_step", "within")
    return cast(AtWorkJson, {**record.model_dump(include=set(keys)), "silent_seconds": silent_seconds})


def _at_work_words(record: AtWorkJson) -> str:
    doing = "waits for a remote stage" if record["doing"] == LAUNCH else record["doing"]
    ago = duration_words(record["silent_seconds"])
    return f"step {record['step']}  {doing}  (process {record['pid']} on {record['host']}, as of {ago} ago)"


def _checkpoint_facts(ref: CheckpointRef) -> CheckpointJson:
    return {"path": ref.path, "step": ref.step, "size": ref.size, "state_digest": ref.state_digest}


def _evaluation_facts(evaluation: Evaluation) -> EvaluationJson:
    return {
        "step": evaluation.checkpoint.step,
        "path": evaluation.checkpoint.path,
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


def _weights_facts(history: History) -> list[WeightsJson]:
    """The sources of the initial weights, as recorded in the first commit of the lineage."""
    report = commit_of(history.commits[0]).initialized_from if history.commits else None
    sources = () if report is None else report.sources
    return [{"source": each.source, "place": each.place, "variables": len(each.loaded)} for each in sources]


def _worker_facts(worker: Worker) -> WorkerJson:
    derived = {"step_seconds": worker.step_seconds, "input_wait_share": worker.input_wait_share}
    return cast(WorkerJson, {**asdict(worker), **derived})


def _worker_words(worker: WorkerJson) -> str:
    speed = worker["examples"] / worker["train_seconds"] if worker["train_seconds"] > 0 else 0.0
    words = [
        f"host {worker['host']}",
        f"{worker['replicas']} replicas" if worker["replicas"] > 1 else "1 replica",
        f"{speed:,.0f} examples/s",
        f"{1000 * worker['step_seconds']:.3g} ms a step",
        f"input wait {worker['input_wait_share']:.1%}",
    ]
    if worker["losses"]:
        words.append(f"loss {', '.join(map(number_words, worker['losses']))}")
    if worker["straggles"]:
        words.append("the others wait for its input")
    return "  ".join(words)


def _words(facts: StatusJson) -> list[tuple[str, str]]:
    best, evaluation = facts["best"], facts["evaluation"]
    lines = [
        ("run", facts["run"]),
        ("home", facts["home"]),
        ("step", _step_words(facts["step"], facts["target"])),
        *(("at work", _at_work_words(record)) for record in facts["at_work"]),
        ("segments", str(facts["segments"])),
        ("log", f"entry {facts['entry']}, base {facts['base']}"),
        ("tip", facts["checkpoint"] or "no checkpoint to continue from"),
        ("digest", facts["state_digest"] or ""),
        ("training", metric_words(facts["metrics"])),
    ]
    if evaluation is not None:
        words = f"{metric_words(evaluation['metrics'])}  ({evaluation['examples']} examples, step {evaluation['step']})"
        lines.append(("validation", words))
    if best is not None:
        words = f"{best['metric']} {number_words(best['value'])}  ({best['mode']}, step {best['step']})  {best['path']}"
        lines.append(("best", words))
    if facts["finished"] is not None:
        lines.append(("finished", f"early, at step {facts['finished']['step']}: {facts['finished']['reason']}"))
    lines += [
        ("weights", f"{source['variables']} variables began as in {source['place']}")
        for source in facts["initialized_from"]
    ]
    lines += [("worker", _worker_words(worker)) for worker in facts["workers"]]
    if facts["skipped_batches"]:
        lines.append(("skipped", f"{facts['skipped_batches']} global batches, by rewinds"))
    if facts["forked_from"] is not None:
        lines.append(("forked", f"from step {facts['forked_from']['step']} of {facts['forked_from']['home']}"))
    for label, refs in (("retained", facts["retained"]), ("quarantined", facts["quarantined"])):
        lines += [(label, f"{ref['path']}  {size_words(ref['size'])}") for ref in refs]
    return lines


def _step_words(step: int, target: int | None) -> str:
    return str(step) if target is None else step_words(step, target).removeprefix("step ")


def _time_words(facts: StatusJson, account: Account | None) -> list[tuple[str, str]]:
    if account is not None:
        return account_words(account)
    seconds = ", ".join(f"{cause} {duration_words(amount)}" for cause, amount in facts["seconds"].items())
    return [("time", seconds), ("attempts", "not recorded: the time is that of committed segments alone")]
