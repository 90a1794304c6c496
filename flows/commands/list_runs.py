"""`baton list`: lists the runs of a storage folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NotRequired, TypedDict

import typer

from flows.commands.options import AsJson, Overrides
from flows.commands.output import aligned, say, say_json
from flows.run import RunHome, holds_a_log, names_run_file, refuse_overrides, storage_of
from tasks.foundation.contracts.log_entry import Commit, Entry, Evaluation, Head
from tasks.foundation.contracts.run_file import load_run_file
from tasks.foundation.errors import AnotherVersion, NoSuchRun, RunLogError
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.local import LocalStorage
from tasks.foundation.storage.opening import open_storage
from tasks.foundation.telemetry.formatting import metric_words, number_words

Folder = Annotated[
    str, typer.Argument(metavar="STORAGE", help="a storage folder or URI, or a run file, whose storage is listed")
]


class BestJson(TypedDict):
    """The best evaluation of a run."""

    metric: str
    value: float
    step: int


class RunJson(TypedDict):
    """One run in the JSON output; one whose log cannot be read has `error` and `error_class` alone."""

    run: str
    home: str
    error: str | None
    error_class: NotRequired[str]
    step: NotRequired[int]
    validation: NotRequired[Mapping[str, float]]
    best: NotRequired[BestJson | None]
    entries: NotRequired[int]
    last_commit: NotRequired[str | None]


def list_runs(address: Folder, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """List the runs of a storage folder.

    Exits 2 if the folder does not exist or a newer Baton wrote a run's log, 4 if a log cannot be read.
    """
    root = _root(address, overrides)
    runs = [_facts(home) for home in _homes(root)]
    if as_json:
        say_json({"storage": root.uri, "runs": runs})
    elif not runs:
        say(f"no runs below {root.uri}")
    else:
        heading = ("run", "step", "validation", "best", "entries", "last commit")
        for line in aligned([heading, *map(_words, runs)]):
            say(line)
    faults = {run.get("error_class") for run in runs if run["error"]}
    if faults:
        raise typer.Exit(AnotherVersion.exit_code if faults == {AnotherVersion.__name__} else RunLogError.exit_code)


def _root(address: str, overrides: list[str] | None) -> Storage:
    if names_run_file(address):
        return storage_of(load_run_file(Path(address), overrides or ()))
    refuse_overrides(address, overrides)
    root = open_storage(address, relative_to=Path.cwd())
    # Cloud Storage has no folders, so an empty prefix and a mistyped one look the same.
    if isinstance(root, LocalStorage) and not root.root.is_dir():
        raise NoSuchRun(f"{root.uri} does not exist; name a folder that holds runs, gs://bucket/prefix, or a run file")
    return root


def _homes(root: Storage) -> list[RunHome]:
    """The root itself and the folders below it that hold a log."""
    homes = (RunHome.at(root, name) for name in ["", *sorted(root.folders(""))])
    return [home for home in homes if holds_a_log(home.home)]


def _facts(run: RunHome) -> RunJson:
    facts: RunJson = {"run": run.name, "home": run.home.uri, "error": None}
    try:
        head = run.require_head()
        commit = _newest_of(run.log, Commit, at_most=head.base)
        evaluation = None if not head.evaluated else _newest_of(run.log, Evaluation, at_most=head.number)
    except (RunLogError, AnotherVersion) as fault:
        return {**facts, "error": str(fault), "error_class": type(fault).__name__}
    return {
        **facts,
        "step": head.tip.step if head.tip else 0,
        "validation": evaluation.body.metrics if evaluation and isinstance(evaluation.body, Evaluation) else {},
        "best": _best(head),
        "entries": head.number + 1,
        "last_commit": commit.time if commit else None,
    }


def _newest_of(log: RunLog, kind: type[Commit | Evaluation], *, at_most: int) -> Entry | None:
    """The newest entry of a kind, up to number `at_most`. It is usually near the end, so few files are read."""
    for number in range(at_most, -1, -1):
        entry = log.entry(number)
        if isinstance(entry.body, kind):
            return entry
    return None


def _best(head: Head) -> BestJson | None:
    best = head.best
    return None if best is None else {"metric": best.metric, "value": best.value, "step": best.checkpoint.step}


def _words(run: RunJson) -> tuple[str, ...]:
    if run["error"]:
        kind = "newer" if run["error_class"] == AnotherVersion.__name__ else "damaged"
        return (run["run"], kind, run["error"].partition("\n")[0], "", "", "")
    best = run["best"]
    return (
        run["run"],
        str(run["step"]),
        metric_words(run["validation"]),
        f"{best['metric']} {number_words(best['value'])} at step {best['step']}" if best else "",
        str(run["entries"]),
        run["last_commit"] or "",
    )
