"""`baton list`: lists the runs of a storage folder."""

import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from flows.commands.options import RUN_FILE, AsJson, Overrides, Verbose, found
from flows.commands.output import Output, Painted, say, say_json, status
from flows.facts import BriefFacts, ListedRun, list_page
from flows.opened_run import names_run_file, refuse_overrides, storage_of
from tasks.foundation.contracts.run_file import load_run_file
from tasks.foundation.errors import AnotherVersion, NoSuchRun, RunLogError
from tasks.foundation.storage.interface import Storage
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
    if as_json:
        say_json({"storage": root.uri, "runs": [run.json() for run in page.runs], "next": page.more_after})
    elif not page.runs:
        say(f"no runs below {root.uri}" + ("" if after is None else f" after {after}"))
    else:
        out = Output.to(sys.stdout, verbose=verbose)
        at_work = "at work" if any(run.at_work for run in page.runs) else ""
        headings = [Painted(word, "dim") for word in (*(_WHOLE if out.whole else _SHORT), at_work)]
        out.table([headings, *(_row(run, out) for run in page.runs)])
        if page.more_after is not None:
            say(f"there are more runs; list them with --after {page.more_after}", aside=True)
    faults = {type(run.facts) for run in page.runs if not isinstance(run.facts, BriefFacts)}
    if faults:
        raise typer.Exit(AnotherVersion.exit_code if faults == {AnotherVersion} else RunLogError.exit_code)


def _root(address: str, overrides: list[str] | None) -> Storage:
    if names_run_file(address):
        return storage_of(load_run_file(Path(address), overrides or ()))
    refuse_overrides(address, overrides)
    root = open_storage(address, relative_to=Path.cwd())
    # Cloud Storage has no folders, so an empty prefix and a mistyped one look the same.
    if isinstance(root, LocalStorage) and not root.root.is_dir():
        raise NoSuchRun(f"{root.uri} does not exist; name a folder that holds runs, gs://bucket/prefix, or a run file")
    return root


def _kind(run: ListedRun) -> str:
    return status("newer" if isinstance(run.facts, AnotherVersion) else "damaged")


def _row(run: ListedRun, out: Output) -> tuple[str, ...]:
    """The cells below `_WHOLE` or `_SHORT`, and the processes at work."""
    facts = run.facts
    if not isinstance(facts, BriefFacts):
        error = str(facts).partition("\n")[0]
        return (run.name, _kind(run), error, *[""] * 5) if out.whole else (run.name, _kind(run), *[""] * 3, error)
    best, is_over = facts.best, facts.target is None or facts.step > facts.target
    state = "" if run.state == "unknown" else status(run.state)
    step = str(facts.step) if is_over else f"{facts.step}/{facts.target}"
    committed = out.time(facts.last_commit) if facts.last_commit else ""
    at_work = ", ".join(f"{each.pid} on {each.host}" for each in run.at_work)
    if not out.whole:
        words = metric_words({best.metric: best.value}) if best else ""
        return (run.name, state, step, committed, words, at_work)
    words = f"{best.metric} {number_words(best.value)} at step {best.checkpoint.step}" if best else ""
    return (run.name, state, step, metric_words(facts.validation), words, str(facts.entries), committed, at_work)
