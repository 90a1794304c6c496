"""`baton log`: the entries of a run, newest last."""

from typing import Any

from flows.commands.address import Address, Overrides, open_run
from flows.commands.output import AsJson, aligned, say, say_json
from tasks.foundation.contracts.log_entry import Change, Commit, Entry, Evaluation, Origin, Quarantine, Retire
from tasks.foundation.telemetry.wording import metric_words, short_path, size_words


def log(address: Address, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print the entries of a run's log, newest last."""
    opened = open_run(address, overrides)
    entries = list(opened.log.entries())
    if not entries:
        opened.head()  # says which entry is lost
    if as_json:
        say_json({"run": opened.name, "home": opened.home.uri, "entries": [_facts(entry) for entry in entries]})
        return
    for line in aligned([_words(entry) for entry in entries]):
        say(line)


def _facts(entry: Entry) -> dict[str, Any]:
    # Without the folded state: it repeats, in every entry, what the entries before it say.
    return {
        "number": entry.number,
        "time": entry.time,
        "attempt": entry.attempt,
        "step": _step(entry),
        "base": entry.head.base,
        **entry.body.model_dump(),
    }


def _words(entry: Entry) -> tuple[str, ...]:
    step = _step(entry)
    return (f"{entry.number:>6}", entry.time, entry.body.kind, "" if step is None else f"{step:>8}", _what(entry))


def _step(entry: Entry) -> int | None:
    """The step that an entry is about."""
    return entry.body.checkpoint.step if isinstance(entry.body, Commit | Evaluation) else None


def _what(entry: Entry) -> str:
    match entry.body:
        case Origin(environment=environment) | Change(environment=environment):
            return (
                f"{environment.accelerator}, {environment.replicas} replicas, threads "
                f"{environment.intra_op_threads}/{environment.inter_op_threads}"
            )
        case Commit() as commit:
            metrics = metric_words(commit.history[-1].metrics) if commit.history else ""
            words = (
                short_path(commit.checkpoint.path),
                size_words(commit.checkpoint.size),
                commit.exit_reason,
                metrics,
            )
            return "  ".join(word for word in words if word)
        case Evaluation() as evaluation:
            return f"{metric_words(evaluation.metrics)}  ({evaluation.examples} examples)"
        case Quarantine() as quarantine:
            return f"{short_path(quarantine.path)}  {quarantine.reason}"
        case Retire() as retire:
            parts = (("retired", retire.paths), ("deleted", retire.deleted))
            return "; ".join(f"{verb} {', '.join(map(short_path, paths))}" for verb, paths in parts if paths)
