"""The run file and the code that a run's home has, for what is asked of a home by its address alone.

That code runs with the user's rights. It runs unasked only if nobody else can have written it: from a home on a local
disk whose folder and code this user id owns. From any other home it is refused, and what would run is named, until the
user trusts it or names a run file of their own. What is safe to be asked of any home is in `flows/README.md`.
"""

import atexit
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from flows.opened_run import Run, RunHome, names_run_file, open_run
from flows.process.hash_seed import keep_hash_seed
from tasks.foundation.contracts.home_files import SAVED_CODE, SavedCode, folders_up, is_saved_code, saved_code_path
from tasks.foundation.contracts.log_entry import Head
from tasks.foundation.contracts.placement import StagesSpec
from tasks.foundation.contracts.run_file import RunFile, load_run_file
from tasks.foundation.contracts.run_spec import TrackingSpec
from tasks.foundation.errors import FileMissing, ForeignFile, InvalidInput, ModelError, RunLogError, SourceError
from tasks.foundation.messages import HINT, MASK, listed, message
from tasks.foundation.model.code_digest import functions_of
from tasks.foundation.storage.local_files import temporary_folder
from tasks.foundation.user_code import require_keras_file


@dataclass(frozen=True, slots=True)
class Remedies:
    """What the user can do, in the words of what they use.

    Attributes:
        trust: how to run the code of a home all the same.
        own_code: how to use a run file, and the code beside it, instead.
    """

    trust: str
    own_code: str


OF_COMMANDS = Remedies(
    "if you trust whoever wrote it, run it as yourself with --trust-code",
    "name the run file that builds the model, with its code beside it: --run-file FILE",
)
OF_DEPLOYMENTS = Remedies(
    "if you trust whoever wrote it, run it as this process's user with the parameter trust_code: true",
    "give the run file that builds the model, with its code beside it, as the parameter run_file",
)
OF_API = Remedies(
    "if you trust whoever wrote it, run it as yourself: Run(home, trust_code=True)",
    "open the run by the run file that builds the model, with its code beside it: Run('run.yaml')",
)
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
    remedies: Remedies = OF_COMMANDS,
) -> tuple[RunHome, RunFile]:
    """Open a run, and the run file that names its code: the home's own, if the user names none.

    Args:
        address: a run file, or a run's home.
        overrides: changes of the run file.
        run_file: the run file, if `address` is a home.
        trust_code: whether to run the code of a home that others can have written.
        note: receives a line that says where the code is from, if that is the home.
        remedies: for refusals.

    Raises:
        InvalidInput: there is no run file, not in the home either, or there are two, or see `saved_run`.
        BatonError: see `open_run`.
    """
    is_file = names_run_file(address)
    if is_file and run_file is not None:
        raise InvalidInput(f"--run-file {run_file}: {address} is a run file already; leave --run-file out")
    if trust_code and (is_file or run_file is not None):
        raise InvalidInput(
            f"--trust-code is for the code in a home, but that of {run_file or address} is used; leave --trust-code out"
        )
    opened = open_run(address, None if run_file is not None else overrides)
    head = opened.require_head()
    require_keras_file()
    if words := keep_hash_seed(head.environment.hash_seed):
        note(words)
    if run_file is not None:
        return opened, load_run_file(run_file, overrides or ())
    if not is_file:
        where = f"{opened.home.uri}/{head.identity.get(SAVED_CODE)}"
        opened = saved_run(opened, head, trust_code=trust_code, remedies=remedies)
        note(f"run file and code are those in {where}")
    if not isinstance(opened, Run) or opened.file is None:
        raise AssertionError("the run has no run file")
    return opened, RunFile(path=opened.file, spec=opened.spec)


def run_of_deployment(
    address: str, overrides: list[str] | None, *, trust_code: bool, note: Callable[[str], None]
) -> Run:
    """Open the run of a deployment's flow run, by its run file or by its home; see `open_with_code`."""
    if not address:
        load_run_file(Path(address))  # says what is missing; an empty address would be the working folder's home
    opened, file = open_with_code(
        address,
        overrides,
        trust_code=trust_code and not names_run_file(address),
        note=note,
        remedies=OF_DEPLOYMENTS,
    )
    root, home, log = opened.root, opened.home, opened.log
    return Run(root=root, home=home, log=log, spec=file.spec, folder=file.folder, file=file.path)


def saved_run(opened: RunHome, head: Head, *, trust_code: bool = False, remedies: Remedies = OF_COMMANDS) -> Run:
    """Open a run with the run file and the code that its home has.

    The code is written into a scratch folder, which is deleted when the process ends, and is loaded from there like any
    user's code. The run keeps the home's name and storage, and its stages run in this process.

    Args:
        opened: the home.
        head: the folded state whose code is wanted: the newest, or that of an earlier entry.
        trust_code: whether to run code that others can have written.
        remedies: for refusals.

    Raises:
        InvalidInput: the home has no code, because an earlier version of Baton made it, or the file is missing; or
            others can have written it, and `trust_code` is false.
        RunLogError: the saved code is damaged.
        AnotherVersion: a newer version of Baton wrote it.
    """
    path, data = _read(opened, head, remedies)
    where = f"{opened.home.uri}/{path}"
    saved = _parsed(data, where)
    if not trust_code:
        _require_own(opened, path, data, saved, remedies)
    if MASK in saved.run_file.model.model_dump_json():
        raise InvalidInput(
            message(
                f"{where} has no secrets, and model.options had one, so its model cannot be built as it was",
                hints=[remedies.own_code],
            )
        )
    # What is asked of a home sends no curves.
    changes = {"storage": opened.root.uri, "stages": StagesSpec(), "tracking": TrackingSpec()}
    spec = saved.run_file.model_copy(update={"run": opened.name, **changes})
    folder = _scratch_folder(saved, where)
    return Run(root=opened.root, home=opened.home, log=opened.log, spec=spec, folder=folder, file=folder / "run.yaml")


def has_own_code(opened: RunHome, head: Head) -> bool:
    """Return whether a home has code that nobody but this user can have written."""
    path = head.identity.get(SAVED_CODE)
    try:
        return is_saved_code(path) and bool(opened.home.read_own(str(path)))
    except (FileMissing, ForeignFile):
        return False


def write_run_file(run: Run) -> None:
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
        raise type(fault)(f"{fault}\n{HINT}{_NO_OTHER_FILES}") from fault


def read_saved_code(opened: RunHome, head: Head) -> SavedCode:
    """Read the run file and the code that a home has, whoever wrote them; see `saved_run`."""
    path, data = _read(opened, head, OF_COMMANDS)
    return _parsed(data, f"{opened.home.uri}/{path}")


def _read(opened: RunHome, head: Head, remedies: Remedies) -> tuple[str, bytes]:
    """The path and the bytes of the saved code; they have the digest in its name."""
    path, hints = str(head.identity.get(SAVED_CODE)), [remedies.own_code]
    if not is_saved_code(path):
        raise InvalidInput(
            message(
                f"{opened.home.uri} has no run file and no code: an earlier version began or last changed it",
                hints=hints,
            )
        )
    where = f"{opened.home.uri}/{path}"
    try:
        data = opened.home.read(path)
    except FileMissing as fault:
        raise InvalidInput(message(f"{where} is missing, which has the run file and the code", hints=hints)) from fault
    if path != saved_code_path(data):
        raise RunLogError(message(f"{where} is damaged: its content does not have the digest in its name", hints=hints))
    return path, data


def _parsed(data: bytes, where: str) -> SavedCode:
    return SavedCode.from_json(data, where=where, error=RunLogError, unknown_keys="forbid")


def _require_own(opened: RunHome, path: str, data: bytes, saved: SavedCode, remedies: Remedies) -> None:
    """Refuse to run code that somebody else can have written, and name what would run."""
    try:
        if opened.home.read_own(path) == data:
            return
        why = f"{opened.home.uri}/{path} changed while it was read"
    except ForeignFile as fault:
        why = str(fault)
    raise InvalidInput(
        message(
            f"{opened.home.uri} has code that would run with your rights, and others can have written it: {why}",
            details=[
                f"{opened.home.uri}/{path} (sha256 {hashlib.sha256(data).hexdigest()})",
                f"its files: {listed([file.path for file in saved.files]) or 'none'}",
                f"it calls: {listed(functions_of(saved.run_file))}",
            ],
            hints=[remedies.trust, remedies.own_code],
        )
    )


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
