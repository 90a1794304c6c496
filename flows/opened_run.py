"""The opened run: its settings, its storage and its log; and the code that a home has.

A command or a flow opens a run once. Everything that it calls takes the opened run, never an address or a file.

A home has the run file and the code that its run was trained with, for what is asked of it by its address alone. That
code runs with the user's rights. It runs unasked only if nobody else can have written it: from a home on a local disk
whose folder and code this user id owns. From any other home it is refused, and what would run is named, until the user
trusts it or names a run file of their own. What is safe to be asked of any home is in `flows/homes.md`.
"""

import atexit
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from baton.flows.process_start import keep_hash_seed
from baton.tasks.foundation.contracts.home_files import (
    SAVED_CODE,
    SavedCode,
    folders_up,
    is_saved_code,
    saved_code_path,
)
from baton.tasks.foundation.contracts.log_entry import Entry, Head
from baton.tasks.foundation.contracts.placement import StagesSpec
from baton.tasks.foundation.contracts.run_file import RunFile, load_run_file
from baton.tasks.foundation.contracts.run_spec import RunSpec, TrackingSpec, needs_examples, with_recorded_examples
from baton.tasks.foundation.errors import (
    AnotherVersion,
    FileMissing,
    ForeignFile,
    InvalidInput,
    ModelError,
    NoSuchRun,
    PathRefused,
    RunLogError,
    SourceError,
    errors_worded,
)
from baton.tasks.foundation.keras_config import require_keras_file
from baton.tasks.foundation.log.attempts import AttemptReader
from baton.tasks.foundation.log.files import FIRST_ENTRY, entry_number
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.masking import MASK
from baton.tasks.foundation.model.saved_code import functions_of
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.local_files import temporary_folder
from baton.tasks.foundation.storage.opening import open_home, open_storage
from baton.tasks.foundation.text import listed, message, option


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
class OpenedRun(RunHome):
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
    def open(cls, run_file: RunFile) -> "OpenedRun":
        """Open the run that a run file describes. Reads and writes nothing.

        Raises:
            InvalidInput: the storage address cannot be used.
        """
        return cls.of(run_file.spec, run_file.folder, root=storage_of(run_file), file=run_file.path)

    @classmethod
    def of(cls, spec: RunSpec, folder: Path, *, root: Storage | None = None, file: Path | None = None) -> "OpenedRun":
        """Open the run with these settings. Reads and writes nothing.

        Args:
            folder: the folder that relative paths start from.
            root: the storage, if it is open already.
            file: the run file, if there is one.

        Raises:
            InvalidInput: the storage address cannot be used.
        """
        root = open_storage(spec.storage, relative_to=folder) if root is None else root
        home = root.at(spec.run)
        return cls(spec=spec, folder=folder, file=file, root=root, home=home, log=RunLog(home))

    @property
    def run_file(self) -> RunFile:
        """The settings with the folder of the code, for what builds the model. The file need not exist."""
        return RunFile(path=self.file or self.folder / "run.yaml", spec=self.spec)

    def with_recorded_examples(self, head: Head | None) -> "OpenedRun":
        """The run with the number of training examples that its log has, if its settings count in epochs.

        It stays as it is if the run has not begun: then the prepared dataset tells.
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
    return "://" not in address and (address.endswith((".yaml", ".yml")) or os.path.isfile(address))  # noqa: PTH113 - never raises


def open_run(address: str, overrides: Sequence[str] | None = None) -> OpenedRun | RunHome:
    """Open an existing run.

    Args:
        address: a run file, or the folder or URI of a run's home.
        overrides: `key=value` each, such as train.steps=100; only for a run file.

    Returns:
        An `OpenedRun` for a run file, a `RunHome` for a home.

    Raises:
        RunFileError: the run file cannot be used.
        InvalidInput: the storage address cannot be used, or there are overrides but no run file.
        NoSuchRun: the address holds no log.
    """
    opened: OpenedRun | RunHome
    if names_run_file(address):
        opened = OpenedRun.open(load_run_file(Path(address), overrides or ()))
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
            option("set", overrides[0])
            + f" changes a key of a run file, but {address} is not one; leave "
            + option("set")
            + " out, or name the run file (it ends in .yaml)"
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


_TRUST = "if you trust whoever wrote it, run it all the same: " + option("trust-code", True)
_OWN_CODE = "name the run file that builds the model, with its code beside it: " + option("run-file", "FILE")
_OF_DEPLOYMENTS = {"--trust-code": "trust_code: true", "--run-file FILE": "run_file: FILE"}
_NO_OTHER_FILES = (
    "run file and code are those in the home, which has no other files that they read; a run file of your own has the "
    "files beside it"
)


def open_with_code(
    address: str,
    overrides: Sequence[str] | None = None,
    *,
    run_file: Path | None = None,
    trust_code: bool = False,
    note: Callable[[str], None],
) -> OpenedRun:
    """Open a run that has begun, with the settings and the code of a run file: the home's own, if the user names none.

    Args:
        address: a run file, or a run's home.
        overrides: changes of the run file.
        run_file: the run file, if `address` is a home.
        trust_code: whether to run the code of a home that others can have written.
        note: receives a line that says where the code is from, if that is the home.

    Raises:
        InvalidInput: there is no run file, not in the home either, or there are two, or see `saved_run`.
        BatonError: see `open_run`.
    """
    is_file = names_run_file(address)
    if is_file and run_file is not None:
        leave_out = f": {address} is a run file already; leave " + option("run-file") + " out"
        raise InvalidInput(option("run-file", str(run_file)) + leave_out)
    if trust_code and (is_file or run_file is not None):
        trust = option("trust-code", True)
        used = f" is for the code in a home, but that of {run_file or address} is used; leave "
        raise InvalidInput(trust + used + trust + " out")
    opened = open_run(address, None if run_file is not None else overrides)
    head = opened.require_head()
    require_keras_file()
    if words := keep_hash_seed(head.environment.hash_seed):
        note(words)
    if isinstance(opened, OpenedRun):
        return opened
    if run_file is None:
        run = saved_run(opened, head, trust_code=trust_code)
        note(f"run file and code are those in {opened.home.uri}/{head.identity.get(SAVED_CODE)}")
        return run
    file = load_run_file(run_file, overrides or ())
    spec = file.spec.model_copy(update={"run": opened.name})
    return OpenedRun(root=opened.root, home=opened.home, log=opened.log, spec=spec, folder=file.folder, file=file.path)


def require_address(address: str) -> None:
    """Refuse an empty parameter of a deployment, which would be the address of the working folder's home.

    Raises:
        RunFileError: it is empty.
    """
    if not address:
        load_run_file(Path(address))  # says what is missing


def run_of_deployment(
    address: str, overrides: list[str] | None, *, trust_code: bool, note: Callable[[str], None]
) -> OpenedRun:
    """Open the run of a deployment's flow run, by its run file or by its home; see `open_with_code`."""
    require_address(address)
    trust_code = trust_code and not names_run_file(address)
    with errors_worded(lambda usage: _OF_DEPLOYMENTS.get(str(usage), str(usage))):
        return open_with_code(address, overrides, trust_code=trust_code, note=note)


def saved_run(opened: RunHome, head: Head, *, trust_code: bool = False) -> OpenedRun:
    """Open a run with the run file and the code that its home has.

    The code is written into a scratch folder, which is deleted when the process ends, and is loaded from there like any
    user's code. The run keeps the home's name and storage, and its stages run in this process.

    Args:
        head: the folded state whose code is wanted: the newest, or that of an earlier entry.
        trust_code: whether to run code that others can have written.

    Raises:
        InvalidInput: the log names no code, or the file is missing; or others can have written it, and `trust_code`
            is false.
        RunLogError: the saved code is damaged.
        AnotherVersion: a newer version of Baton wrote it.
    """
    path, data, foreign = _read(opened, head)
    where = f"{opened.home.uri}/{path}"
    saved = SavedCode.from_json(data, where=where, error=RunLogError, unknown_keys="forbid")
    if foreign is not None and not trust_code:
        raise InvalidInput(
            message(
                f"{opened.home.uri} has code that would run with your rights, and others can have written it: "
                f"{foreign}",
                details=[
                    f"{where} (sha256 {hashlib.sha256(data).hexdigest()})",
                    f"its files: {listed([file.path for file in saved.files]) or 'none'}",
                    f"it calls: {listed(functions_of(saved.run_file))}",
                ],
                hints=[_TRUST, _OWN_CODE],
            )
        )
    if MASK in saved.run_file.model.model_dump_json():
        raise InvalidInput(
            message(
                f"{where} has no secrets, and model.options had one, so its model cannot be built as it was",
                hints=[_OWN_CODE],
            )
        )
    # What is asked of a home sends no curves.
    changes = {"storage": opened.root.uri, "stages": StagesSpec(), "tracking": TrackingSpec()}
    spec = saved.run_file.model_copy(update={"run": opened.name, **changes})
    folder = _scratch_folder(saved, where)
    return OpenedRun(
        root=opened.root, home=opened.home, log=opened.log, spec=spec, folder=folder, file=folder / "run.yaml"
    )


def has_own_code(opened: RunHome, head: Head) -> bool:
    """Return whether a home has code that nobody but this user can have written."""
    path = head.identity.get(SAVED_CODE)
    try:
        return is_saved_code(path) and bool(opened.home.read_own(str(path)))
    except (FileMissing, ForeignFile):
        return False


def write_run_file(run: OpenedRun) -> None:
    """Write the run file of a `saved_run` beside its code, for processes that read it; do nothing if it exists."""
    if run.file is not None and not run.file.exists():
        # Not as JSON, which YAML does not quite contain: it reads 1e-05 as a text.
        run.file.write_text(yaml.safe_dump(json.loads(run.spec.to_json()), sort_keys=False), encoding="utf-8")


@contextmanager
def hint_at_other_files(run_file: Path) -> Iterator[None]:
    """Add to errors about code and data where they are from, if that is a home: the files that they read are not in it.

    Args:
        run_file: the run file; that of `saved_run` does not exist, or only after `write_run_file`.
    """
    is_from_home = not run_file.exists()
    try:
        yield
    except (ModelError, SourceError) as fault:
        if not is_from_home:
            raise
        raise type(fault)(message(str(fault), hints=[_NO_OTHER_FILES])) from fault


def _read(opened: RunHome, head: Head) -> tuple[str, bytes, ForeignFile | None]:
    """The path and the bytes of the saved code, with the digest in its name; and why others can have written it."""
    path, hints = str(head.identity.get(SAVED_CODE)), [_OWN_CODE]
    if not is_saved_code(path):
        raise InvalidInput(message(f"{opened.home.uri} has no run file and no code: its log names none", hints=hints))
    where = f"{opened.home.uri}/{path}"
    foreign = None
    try:
        try:
            data = opened.home.read_own(path)
        except ForeignFile as fault:
            data, foreign = opened.home.read(path), fault
    except FileMissing as fault:
        raise InvalidInput(message(f"{where} is missing, which has the run file and the code", hints=hints)) from fault
    if path != saved_code_path(data):
        raise RunLogError(message(f"{where} is damaged: its content does not have the digest in its name", hints=hints))
    return path, data, foreign


def _scratch_folder(saved: SavedCode, where: str) -> Path:
    """Write the files of the code, and return the folder that stands for the run file's."""
    kept = ExitStack()
    scratch = kept.enter_context(temporary_folder("baton-code-")).resolve()
    atexit.register(kept.close)
    # Code may lie above the run file's folder, as ../shared/model.py.
    deep = max((folders_up(file.path) for file in saved.files), default=0)
    folder = scratch.joinpath(*["folder"] * (deep + 1))
    folder.mkdir(parents=True)
    for file in saved.files:
        target = Path(*_normalized(folder, file.path))
        if not target.is_relative_to(scratch):
            raise RunLogError(f"{where}: {file.path} is outside the run file's folder; the file is not a saved code's")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.content)
    return folder


def _normalized(folder: Path, path: str) -> tuple[str, ...]:
    up = folders_up(path)
    base = folder.parents[up - 1] if up else folder
    return (*base.parts, *path.split("/")[up:])
