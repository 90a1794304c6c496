"""`baton list`: lists the runs of a storage folder."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, NotRequired, TypedDict

import typer

from flows.commands.options import RUN_FILE, AsJson, Overrides, Verbose, found
from flows.commands.output import Output, Painted, say, say_json, status
from flows.opened_run import names_run_file, refuse_overrides, storage_of
from flows.summary.run_list import ListedRun, list_page, state_in_list
from tasks.foundation.contracts.run_file import load_run_file
from tasks.foundation.errors import AnotherVersion, NoSuchRun, RunLogError
from tasks.foundation.runlog.brief_entry import RunFacts
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.local import LocalStorage
from tasks.foundation.storage.opening import open_storage
from tasks.foundation.telemetry.formatting import metric_words, number_words

Folder = Annotated[
    str,
    typer.Argument(
        metavar="STORAGE", callback=found, help="a storage folder or URI, or a run file, whose storage is listed"
    ),
]

Limit = Annotated[int | None, typer.Option("--limit", metavar="N", min=1, help="list at most N runs")]
After = Annotated[
    str | None,
    typer.Option("--after", metavar="NAME", help="list only runs whose names come after NAME: the next page"),
]


_WHOLE: Final = ("run", "state", "step", "validation", "best", "entries", "last commit")
# With "at work", which is the last column if anybody is, they fit 80 columns.
_SHORT: Final = ("run", "state", "step", "last commit", "best")


class BestJson(TypedDict):
    """The best evaluation of a run."""

    metric: str
    value: float
    step: int


class ProcessJson(TypedDict):
    """A process that works on a run."""

    attempt: str
    host: str
    pid: int


class RunJson(TypedDict):
    """One run in the JSON output; one whose log cannot be read has `error` and `error_class` alone.

    `target` is as of the newest commit, and `at_work` is empty for a run that is over.
    """

    run: str
    home: str
    error: str | None
    error_class: NotRequired[str]
    state: NotRequired[str]
    step: NotRequired[int]
    target: NotRequired[int | None]
    validation: NotRequired[Mapping[str, float]]
    best: NotRequired[BestJson | None]
    entries: NotRequired[int]
    last_commit: NotRequired[str | None]
    at_work: NotRequired[list[ProcessJson]]


def list_runs(
    address: Folder = RUN_FILE,
    overrides: Overrides = None,
    limit: Limit = None,
    after: After = None,
    *,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """List the runs of a storage folder, by name.

    Shows state, step, best evaluation, newest commit, and the processes at work.
    Exits 2 if the folder does not exist or a newer Baton wrote a run's log, 4 if a log cannot be read.
    """
    root = _root(address, overrides)
    page = list_page(root, after=after, limit=limit)
    runs = [_facts(run) for run in page.runs]
    if as_json:
        say_json({"storage": root.uri, "runs": runs, "next": page.more_after})
    elif not runs:
        say(f"no runs below {root.uri}" + ("" if after is None else f" after {after}"))
    else:
        out = Output.to(sys.stdout, verbose=verbose)
        heading, words = (_WHOLE, _whole_words) if out.whole else (_SHORT, _short_words)
        at_work = "at work" if any(run.get("at_work") for run in runs) else ""
        headings = [Painted(word, "dim") for word in (*heading, at_work)]
        out.table([headings, *(words(run, out) for run in runs)])
        if page.more_after is not None:
            say(f"there are more runs; list them with --after {page.more_after}", aside=True)
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


def _facts(run: ListedRun) -> RunJson:
    facts: RunJson = {"run": run.name, "home": run.uri, "error": None}
    found = run.facts
    if not isinstance(found, RunFacts):
        return {**facts, "error": str(found), "error_class": type(found).__name__}
    best = found.best
    return {
        **facts,
        "state": state_in_list(found, run.at_work),
        "step": found.step,
        "target": found.target,
        "validation": found.validation,
        "best": None if best is None else {"metric": best.metric, "value": best.value, "step": best.step},
        "entries": found.entries,
        "last_commit": found.last_commit,
        "at_work": [{"attempt": each.attempt, "host": each.host, "pid": each.pid} for each in run.at_work],
    }


def _kind(run: RunJson) -> str:
    return status("newer" if run.get("error_class") == AnotherVersion.__name__ else "damaged")


def _state_words(run: RunJson) -> str:
    return "" if run["state"] == "unknown" else status(run["state"])


def _step_words(run: RunJson) -> str:
    step, target = run["step"], run["target"]
    return str(step) if target is None or step > target else f"{step}/{target}"


def _at_work_words(run: RunJson) -> str:
    return ", ".join(f"{each['pid']} on {each['host']}" for each in run["at_work"])


def _short_words(run: RunJson, out: Output) -> tuple[str, ...]:
    if run["error"]:
        return (run["run"], _kind(run), "", "", "", run["error"].partition("\n")[0])
    best = run["best"]
    return (
        run["run"],
        _state_words(run),
        _step_words(run),
        out.time(run["last_commit"]) if run["last_commit"] else "",
        metric_words({best["metric"]: best["value"]}) if best else "",
        _at_work_words(run),
    )


def _whole_words(run: RunJson, out: Output) -> tuple[str, ...]:
    if run["error"]:
        return (run["run"], _kind(run), run["error"].partition("\n")[0], "", "", "", "", "")
    best = run["best"]
    return (
        run["run"],
        _state_words(run),
        _step_words(run),
        metric_words(run["validation"]),
        f"{best['metric']} {number_words(best['value'])} at step {best['step']}" if best else "",
        str(run["entries"]),
        out.time(run["last_commit"] or ""),
        _at_work_words(run),
    )
