"""The opened run: its settings, its storage and its log, opened once and passed on.

A command or a flow opens a run once. Everything that it calls takes the opened run, never an address or a file.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tasks.foundation.contracts.log_entry import Entry, Head
from tasks.foundation.contracts.run_file import RunFile, load_run_file
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.contracts.schedule import needs_examples, with_recorded_examples
from tasks.foundation.errors import AnotherVersion, InvalidInput, NoSuchRun, PathRefused, RunLogError
from tasks.foundation.runlog.attempts import AttemptReader
from tasks.foundation.runlog.entry_paths import FIRST_ENTRY, entry_number
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.opening import open_home, open_storage


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHome:
    """The home of a run, with its log. It needs no run file, so status, log and verify work without one.

    Attributes:
        root: the storage that holds the run and its dataset.
        home: the run's folder in it.
        log: the run's commit log.
        attempts: the records of the attempts at it.
    """

    root: Storage
    home: Storage
    log: RunLog
    attempts: AttemptReader = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "attempts", AttemptReader(self.home))

    @classmethod
    def at(cls, root: Storage, name: str) -> "RunHome":
        """Return the home of the run `name`; with an empty name, the root itself is the home."""
        home = root.at(name) if name else root
        return cls(root=root, home=home, log=RunLog(home))

    @property
    def name(self) -> str:
        """The run's name, which is the last part of its home's address."""
        return self.home.uri.rsplit("/", 1)[-1]

    def require_newest(self) -> Entry:
        """Return the newest entry.

        Raises:
            RunLogError: the newest entry, or the first one, cannot be read.
        """
        newest = self.log.newest()
        if newest is None:
            raise RunLogError(f"{self.home.uri}/{FIRST_ENTRY} is missing, but later entries exist; restore it")
        return newest

    def require_head(self) -> Head:
        """Return the folded state of the newest entry; see `require_newest`."""
        return self.require_newest().head


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(RunHome):
    """A run with its settings.

    Attributes:
        spec: the run file's content.
        folder: the folder that paths of user code and data, and a relative storage address, start from.
        file: the run file; None in a stage that received the settings in its call.
    """

    spec: RunSpec
    folder: Path
    file: Path | None

    @classmethod
    def open(cls, run_file: RunFile) -> "Run":
        """Open the run that a run file describes. Reads and writes nothing.

        Raises:
            InvalidInput: the storage address cannot be used.
        """
        return cls.of(run_file.spec, run_file.folder, root=storage_of(run_file), file=run_file.path)

    @classmethod
    def of(cls, spec: RunSpec, folder: Path, *, root: Storage | None = None, file: Path | None = None) -> "Run":
        """Open the run with these settings. Reads and writes nothing.

        Args:
            spec: the settings.
            folder: the folder that relative paths start from.
            root: the storage, if it is open already.
            file: the run file, if there is one.

        Raises:
            InvalidInput: the storage address cannot be used.
        """
        root = open_storage(spec.storage, relative_to=folder) if root is None else root
        home = root.at(spec.run)
        return cls(spec=spec, folder=folder, file=file, root=root, home=home, log=RunLog(home))

    def with_recorded_examples(self, head: Head | None) -> "Run":
        """The run with the number of training examples that its log has, if its settings count in epochs.

        It stays as it is if the run has not begun, or an earlier version began it: then the prepared dataset tells.
        """
        if head is None or not needs_examples(self.spec):
            return self
        return replace(self, spec=with_recorded_examples(self.spec, head.identity))


def storage_of(run_file: RunFile) -> Storage:
    """Open the storage root that a run file names.

    Raises:
        InvalidInput: the storage address cannot be used.
    """
    return open_storage(run_file.spec.storage, relative_to=run_file.folder)


def names_run_file(address: str) -> bool:
    """Return whether an address names a run file: it ends in .yaml or .yml, or it is a file."""
    return "://" not in address and (address.endswith((".yaml", ".yml")) or Path(address).is_file())


def open_run(address: str, overrides: Sequence[str] | None = None) -> Run | RunHome:
    """Open an existing run.

    Args:
        address: a run file, or the folder or URI of a run's home.
        overrides: `key=value` each, such as train.steps=100; only for a run file.

    Returns:
        A `Run` for a run file, a `RunHome` for a home.

    Raises:
        RunFileError: the run file cannot be used.
        InvalidInput: the storage address cannot be used, or there are overrides but no run file.
        NoSuchRun: the address holds no log.
    """
    opened: Run | RunHome
    if names_run_file(address):
        opened = Run.open(load_run_file(Path(address), overrides or ()))
        remedy = f"the run file {address} has not been run yet; start it with: baton run {address}"
    else:
        refuse_overrides(address, overrides)
        root, home = open_home(address, relative_to=Path.cwd())
        opened = RunHome(root=root, home=home, log=RunLog(home))
        remedy = "name a run file, or a run's home, <storage>/<run>; `baton list` shows the runs of a storage folder"
    if not _has_begun(opened):
        raise NoSuchRun(f"no run is at {opened.home.uri} (it holds no {FIRST_ENTRY}): {remedy}")
    return opened


def refuse_overrides(address: str, overrides: Sequence[str] | None) -> None:
    """Refuse `--set` for an address that is not a run file.

    Raises:
        InvalidInput: there are overrides.
    """
    if overrides:
        raise InvalidInput(
            f"--set {overrides[0]} changes a key of a run file, but {address} is not one; leave --set out, or name the "
            "run file (it ends in .yaml)"
        )


def _has_begun(opened: RunHome) -> bool:
    """Whether there is a log. Its newest entry is read and remembered, because most commands need nothing else."""
    try:
        if opened.log.newest() is not None:
            return True
    except (RunLogError, AnotherVersion, PathRefused):
        return True  # the command meets the same error
    return holds_a_log(opened.home)


def holds_a_log(home: Storage) -> bool:
    """Return whether a folder is a run's home."""
    # A run that lost its first entry is damaged, but it is still a run.
    return home.exists(FIRST_ENTRY) or any(entry_number(path) is not None for path in home.files("log"))
