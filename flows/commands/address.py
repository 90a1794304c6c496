"""What a verb is pointed at: a run file, or the folder or URI of a run's home."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from flows.goal import storage_of
from tasks.foundation.contracts.log_entry import Head
from tasks.foundation.contracts.run_file import RunFile, load_run_file
from tasks.foundation.errors import InvalidInput, NoSuchRun, RunLogError
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.opening import open_storage

Address = Annotated[str, typer.Argument(metavar="RUN", help="a run file, or the folder or URI of a run's home")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="change a key of the run file, as train.steps=5000; repeatable"),
]

FIRST_ENTRY = "log/00000000.json"
_ENTRY = re.compile(r"log/\d{8}\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun:
    """A run that is there."""

    root: Storage
    home: Storage
    run_file: RunFile | None
    log: RunLog

    @property
    def name(self) -> str:
        """The run's name, which is its home's last part."""
        return self.home.uri.rsplit("/", 1)[-1]

    def head(self) -> Head:
        """The folded state of the newest entry.

        Raises:
            RunLogError: the newest entry, or the first one, cannot be read.
        """
        head = self.log.head()
        if head is None:
            raise RunLogError(f"{self.home.uri}/{FIRST_ENTRY} is not there, though later entries are; restore it")
        return head


def names_run_file(address: str) -> bool:
    """Whether an address is meant as a run file: it ends like one, or is a file."""
    return "://" not in address and (address.endswith((".yaml", ".yml")) or Path(address).is_file())


def open_run(address: str, overrides: Sequence[str] | None = None) -> OpenedRun:
    """The run that an address points at.

    Raises:
        RunFileError: the run file cannot be used.
        InvalidInput: the address is no store's, or overrides come without a run file.
        NoSuchRun: no log is there.
    """
    if names_run_file(address):
        run_file = load_run_file(Path(address), overrides or ())
        root = storage_of(run_file)
        home = root.at(run_file.spec.run)
        opened = OpenedRun(root=root, home=home, run_file=run_file, log=RunLog(home))
        remedy = f"the run file {address} has not been run yet; start it with: baton run {address}"
    else:
        refuse_overrides(address, overrides)
        home = open_storage(address, relative_to=Path.cwd())
        opened = OpenedRun(root=_above(home), home=home, run_file=None, log=RunLog(home))
        remedy = "name a run file, or a run's home, <storage>/<run>; `baton list` shows the runs of a storage folder"
    if not holds_a_log(home):
        raise NoSuchRun(f"no run is at {home.uri} (it holds no {FIRST_ENTRY}): {remedy}")
    return opened


def refuse_overrides(address: str, overrides: Sequence[str] | None) -> None:
    """`--set` changes a run file's keys; an address without one has none.

    Raises:
        InvalidInput: there are overrides.
    """
    if overrides:
        raise InvalidInput(
            f"--set {overrides[0]} changes a key of a run file, but {address} is not one; leave --set out, or name the "
            "run file (it ends in .yaml)"
        )


def holds_a_log(home: Storage) -> bool:
    """Whether this is a run's home."""
    # A log that lost its first entry is a damaged run, not an absent one.
    return home.exists(FIRST_ENTRY) or any(_ENTRY.fullmatch(path) for path in home.files("log"))


def _above(home: Storage) -> Storage:
    """The storage root of a home whose run file is not known."""
    root = home.uri.rsplit("/", 1)[0]
    return open_storage(f"{root}/" if root.endswith(":/") or not root else root, relative_to=Path.cwd())
