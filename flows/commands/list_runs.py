"""`baton list`: the runs below a storage folder."""

from pathlib import Path
from typing import Annotated, Any

import typer

from flows.commands.address import OpenedRun, Overrides, holds_a_log, names_run_file, refuse_overrides
from flows.commands.output import AsJson, aligned, say, say_json
from flows.goal import storage_of
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


def list_runs(address: Folder, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """List the runs below a storage folder.

    Exits 2 if the folder is not there or a newer Baton wrote the log of a run, 4 if such a log cannot be read.
    """
    root = _root(address, overrides)
    runs = [_facts(root, name) for name in _names(root)]
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
    # On Cloud Storage there is nothing but names: a prefix below which nothing lies is no other than a mistyped one.
    if isinstance(root, LocalStorage) and not root.root.is_dir():
        raise NoSuchRun(f"{root.uri} is not there; name a folder that holds runs, gs://bucket/prefix, or a run file")
    return root


def _names(root: Storage) -> list[str]:
    """Folders below the root that hold a log, "" for the root itself."""
    candidates = ["", *sorted(root.folders(""))]
    return [name for name in candidates if holds_a_log(root.at(name) if name else root)]


def _facts(root: Storage, name: str) -> dict[str, Any]:
    home = root.at(name) if name else root
    log = RunLog(home)
    facts: dict[str, Any] = {"run": name or home.uri.rsplit("/", 1)[-1], "home": home.uri, "error": None}
    try:
        head = OpenedRun(root=root, home=home, run_file=None, log=log).head()
        commit = _newest_of(log, Commit, at_most=head.base)
        evaluation = None if not head.evaluated else _newest_of(log, Evaluation, at_most=head.number)
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
    """The newest entry of a kind; near the end of the log as a rule, so few files are read."""
    for number in range(at_most, -1, -1):
        entry = log.entry(number)
        if isinstance(entry.body, kind):
            return entry
    return None


def _best(head: Head) -> dict[str, Any] | None:
    best = head.best
    return None if best is None else {"metric": best.metric, "value": best.value, "step": best.checkpoint.step}


def _words(run: dict[str, Any]) -> tuple[str, ...]:
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
