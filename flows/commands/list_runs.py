"""`baton list` and `baton delete`: the runs of a storage folder, and one that goes.

A list is read page by page. Sorted or filtered, all runs are read. What `--where` and `--sort` name are validation
metrics, the metadata of run files, which are the tags of runs, and `run`, `state`, `step`, `best`, `last_commit`.
"""

import operator
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Annotated, Final

import typer

from baton.flows.commands.options import RUN_FILE, AsJson, Overrides, Verbose, found
from baton.flows.commands.output import Output, Painted, save_page, say, say_json, status, uri_of
from baton.flows.facts import BriefFacts, ListedRun, RunPage, best_words, list_page
from baton.flows.opened_run import RunHome, holds_a_log, names_run_file, open_run, refuse_overrides, storage_of
from baton.tasks.foundation.contracts.log_entry import UnfinishedFork
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.errors import AnotherVersion, InvalidInput, NoSuchRun, RunAtWork, RunLogError, StorageError
from baton.tasks.foundation.log.attempts import is_alive
from baton.tasks.foundation.log.files import UNFINISHED_FORK
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.storage.opening import open_storage
from baton.tasks.foundation.telemetry.formatting import metric_words, number_words, plain_words, value_words
from baton.tasks.foundation.text import counted, message, time_words

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

Sort = Annotated[
    str | None,
    typer.Option("--sort", metavar="KEY", help="by a metric, a metadata key, step or last_commit; -KEY: largest first"),
]
Where = Annotated[
    list[str] | None,
    typer.Option("--where", metavar="KEY=VALUE", help="only such runs, as accuracy>0.9, state=failed; repeatable"),
]
Page = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="write a page of these runs, too")]

_CONDITION: Final = re.compile(r"([^<>=!]+)(<=|>=|!=|=|<|>)(.*)")
_HOLDS: Final[Mapping[str, Callable[..., bool]]] = {
    "<=": operator.le, ">=": operator.ge, "!=": operator.ne, "=": operator.eq, "<": operator.lt, ">": operator.gt
}  # fmt: skip
_FEW: Final = 3
_DRAWN: Final = 8  # as many as there are colors
_WHOLE: Final = ("run", "state", "step", "validation", "best", "entries", "last commit")
# With "at work" or "cause", which is the last column if anybody is or a run is not over, they fit 80 columns.
_SHORT: Final = ("run", "state", "step", "last commit", "best")


def list_runs(
    address: Folder = RUN_FILE,
    overrides: Overrides = None,
    *,
    limit: Limit = None,
    after: After = None,
    sort: Sort = None,
    where: Where = None,
    html: Page = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """List the runs of a storage folder, by name.

    Shows state, step, best evaluation, newest commit, and the processes at work, or why there are none.
    Exits 2 if the folder does not exist or a newer Baton wrote a run's log, 4 if a log cannot be read.
    """
    root = _root(address, overrides)
    if after is not None and (sort or where):
        raise InvalidInput("--after is for a list by name; leave --sort and --where out, or --after")
    chosen = sort or where
    page = list_page(root, after=after, limit=None if chosen else limit)
    if chosen:
        page = RunPage(runs=_chosen(page.runs, sort, where or ())[:limit], more_after=None)
    if html is not None:
        _write_page(html, root, page.runs)
    if as_json:
        runs = [run.json() for run in page.runs]
        say_json({"storage": root.uri, "runs": runs, "next": page.more_after, "page": uri_of(html)})
    elif not page.runs:
        say(f"no {'such runs' if where else 'runs'} below {root.uri}" + ("" if after is None else f" after {after}"))
    else:
        out = Output.to(sys.stdout, verbose=verbose)
        last = {"at work": any(run.at_work for run in page.runs), "cause": any(run.cause for run in page.runs)}
        words = " / ".join(word for word, is_there in last.items() if is_there)
        tags = "metadata" if any(isinstance(run.facts, BriefFacts) and run.facts.metadata for run in page.runs) else ""
        headings = [Painted(word, "dim") for word in (*((*_WHOLE, tags) if out.whole else _SHORT), words)]
        out.table([headings, *(_row(run, out) for run in page.runs)])
        if page.more_after is not None:
            say(f"there are more runs; list them with --after {page.more_after}", aside=True)
    if html is not None and not as_json:
        say(f"page: {uri_of(html)}")
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


def _chosen(runs: Sequence[ListedRun], sort: str | None, where: Sequence[str]) -> list[ListedRun]:
    """The runs for which all conditions hold, in the order of `sort`; those without its key come last.

    Raises:
        InvalidInput: a condition cannot be read, or no run has a key.
    """
    conditions = []
    for text in where:
        condition = _CONDITION.fullmatch(text)
        if condition is None:
            raise InvalidInput(f"--where {text} is no condition; write KEY=VALUE, KEY!=VALUE, KEY<VALUE or KEY>VALUE")
        conditions.append(condition)
    known = dict.fromkeys(key for run in runs for key in run.values)
    key = (sort or "").removeprefix("-")
    for name in [*(each[1] for each in conditions), *([key] if key else [])]:
        if runs and name not in known:
            raise InvalidInput(f"no run has {name}; they have: {', '.join(known)}")
    kept = [run for run in runs if all(_holds(run.values.get(each[1]), each) for each in conditions)]
    if not key:
        return kept
    have = [run for run in kept if run.values.get(key) is not None]
    numbers = all(isinstance(run.values[key], int | float) for run in have)
    have.sort(key=lambda run: run.values[key] if numbers else str(run.values[key]), reverse=(sort or "")[:1] == "-")
    return [*have, *(run for run in kept if run not in have)]


def _holds(value: object, condition: re.Match[str]) -> bool:
    """Whether a condition holds for a value: as numbers where both are, as text otherwise; `!=` without a value."""
    _, sign, text = condition.groups()
    if value is None:
        return sign == "!="
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return _HOLDS[sign](value, float(text))
        except ValueError:
            return sign == "!="
    return _HOLDS[sign](value_words(value), text)


def _write_page(page: Path, root: Storage, runs: Sequence[ListedRun]) -> None:
    """All runs in one table, whose headings sort it, and the curves of the first ones."""
    from baton.flows.comparison import compared
    from baton.tasks.evaluate.report.page import comparison_page
    from baton.tasks.evaluate.report.sections import Cell, Mark, Section, Table, number, with_host_words

    def row(run: ListedRun) -> list[Cell]:
        facts, start = run.facts, Cell(run.name, strong=True)
        if not isinstance(facts, BriefFacts):
            return [start, Cell(marks=(Mark(word=_kind(run)),)), Cell(str(facts).partition("\n")[0], "wrap"),
                    *[Cell()] * (len(headings) - 3)]  # fmt: skip
        # A page is often sent to others, so it names no host.
        cause = with_host_words(run.cause, {} if run.last is None else {run.last.host: "its host"})
        return [
            start, Cell(marks=(Mark(word=run.state),)), Cell(cause, "wrap"),
            number(f"{facts.step:,}", facts.step), number("" if facts.target is None else f"{facts.target:,}"),
            *(number(number_words(facts.validation[name]) if name in facts.validation else "") for name in metrics),
            Cell(best_words(facts.best)),
            Cell("" if facts.last_commit is None else time_words(facts.last_commit)),
            *(Cell(value_words(facts.metadata.get(name, "")), "wrap") for name in tags),
        ]  # fmt: skip

    readable = [run.facts for run in runs if isinstance(run.facts, BriefFacts)]
    counts = Counter(name for facts in readable for name in facts.validation)
    metrics = [name for name in counts if counts[name] > 1 or len(readable) == 1]  # those that can be compared
    tags = list(dict.fromkeys(name for facts in readable for name in facts.metadata))
    headings = ["run", "state", "cause", "step", "target", *(f"validation {name}" for name in metrics), "best",
                "last commit, UTC", *tags]  # fmt: skip
    homes = [RunHome.at(root, "" if run.uri == root.uri else run.name) for run in runs if run.facts in readable]
    drawn = compared(homes[:_DRAWN])
    counts = Counter(name for run in drawn for name in run.history.metric_names)
    text = comparison_page(
        title=f"{root.uri.rpartition('/')[2]}: {counted(len(runs), 'run')}",
        address="",
        storage=root.uri,
        runs={run.name: run.history for run in drawn},
        metrics=[name for name in counts if counts[name] > 1 or len(drawn) == 1],
        lead=[Section(heading="Runs", table=Table(headings=headings, rows=[row(run) for run in runs]))],
    )
    save_page(page, text)


def _kind(run: ListedRun) -> str:
    return status("newer" if isinstance(run.facts, AnotherVersion) else "damaged")


def _row(run: ListedRun, out: Output) -> tuple[str, ...]:
    """The cells below `_WHOLE` or `_SHORT`, and the processes at work, or why there are none."""
    facts = run.facts
    if not isinstance(facts, BriefFacts):
        error = str(facts).partition("\n")[0]
        return (run.name, _kind(run), *[""] * (6 if out.whole else 3), error)
    best, is_over = facts.best, facts.target is None or facts.step > facts.target
    state = "" if run.state == "unknown" else status(run.state)
    step = str(facts.step) if is_over else f"{facts.step}/{facts.target}"
    committed = out.time(facts.last_commit) if facts.last_commit else ""
    at_work = ", ".join(f"{each.pid} on {each.host}" for each in run.at_work) or run.cause
    if not out.whole:
        words = metric_words({best.metric: best.value}) if best else ""
        return (run.name, state, step, committed, words, at_work)
    words, tags = best_words(best), plain_words(facts.metadata)
    return (run.name, state, step, _few(facts.validation), words, str(facts.entries), committed, tags, at_work)


def _few(metrics: Mapping[str, float]) -> str:
    """The first metrics: one run with many would make all lines long. `--json` has them all."""
    more = len(metrics) - _FEW
    return metric_words(dict(islice(metrics.items(), _FEW))) + (f"  and {more} more" if more > 0 else "")


def delete(
    address: Annotated[str, typer.Argument(metavar="RUN", help="a run file, or the folder or URI of a run's home")],
    overrides: Overrides = None,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="even if a process trains the run, or an unfinished fork reads it")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Delete a run: its home with the log and all checkpoints.

    Says what goes, and asks. Datasets stay, and so do forks, which have copies of their own.
    """
    opened = open_run(address, overrides)
    home = opened.home
    forks, unfinished = _forks_of(opened)
    below = [name for name in home.folders("") if holds_a_log(home.at(name))]
    if below:
        raise InvalidInput(f"{home.uri} holds other runs ({', '.join(below)}); move them to another folder first")
    if unfinished and not force:
        name, step = next(iter(unfinished.items()))
        again = f"baton fork {shlex.quote(home.uri)} --at-step {step} --as {name}"
        hints = [f"finish it first: {again}", "or delete the run all the same, with --force"]
        raise InvalidInput(message(f"{home.uri}: the unfinished fork {name} still reads it", hints=hints))
    files = list(home.files(""))
    counts = Counter(path.partition("/")[0] for path in files)
    if not as_json:
        out = Output.to(sys.stderr)
        goes = ", ".join(f"{name} ({counted(number, 'file')})" for name, number in sorted(counts.items()))
        copies = f"{', '.join(forks)}: complete without it; reports lose the curve before the fork" if forks else ""
        out.facts([("run", opened.name), ("home", home.uri), ("goes", goes), ("forks", copies)])
    _require_idle(opened, force=force)
    if not yes:
        if as_json or not sys.stdin.isatty():
            raise InvalidInput(f"{home.uri} is not deleted without a question or --yes; add --yes")
        if not typer.confirm(f"delete {counted(len(files), 'file')}?", err=True):
            raise typer.Exit(1)
        _require_idle(opened, force=force)
    # The log goes last: a deletion that was cut is still a run, and the same command goes on with it.
    for name in sorted(counts, key=lambda name: name == "log"):
        home.delete(name)
    opened.root.delete(opened.name)
    if as_json:
        say_json({"run": opened.name, "home": home.uri, "deleted": len(files), "forks": forks})
    else:
        say(f"deleted {home.uri}")


def _require_idle(run: RunHome, *, force: bool) -> None:
    """Refuse to delete a run that a process trains, as far as is known."""
    now = datetime.now(UTC)
    alive = [each for each in run.attempts.read().records if is_alive(each, now=now)]
    if alive and not force:
        where = f"process {alive[0].pid} on {alive[0].host}, step {alive[0].step}"
        hints = ["stop it first", "or delete the run all the same, with --force: the process fails at its next commit"]
        raise RunAtWork(message(f"{run.name} is at work: {where}", hints=hints))


def _forks_of(run: RunHome) -> tuple[list[str], dict[str, int]]:
    """Names of forks beside a run that have a checkpoint of their own; and of others, with the step they begin at."""
    whole, unfinished = list[str](), dict[str, int]()
    for name in sorted(run.root.folders("")):
        try:
            newest = RunLog(run.root.at(name)).newest_stored()
            if newest is not None:
                lineage = None if newest.totals is None else newest.totals.forked_from
            else:
                path = f"{name}/{UNFINISHED_FORK}"
                lineage = UnfinishedFork.from_json(run.root.read(path), where=path, error=RunLogError).lineage
        except (StorageError, RunLogError, AnotherVersion):  # no fork, or one of which nothing is known
            continue
        if lineage is None or lineage.home != run.home.uri:
            continue
        if newest is None:
            unfinished[name] = lineage.step
        else:
            whole.append(name)
    return whole, unfinished
