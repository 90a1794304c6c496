"""The run file and the code that a run's home has, for what is asked of a home by its address alone."""

import atexit
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from flows.run import Run, RunHome
from tasks.foundation.contracts.log_entry import Head
from tasks.foundation.contracts.placement import StagesSpec
from tasks.foundation.contracts.saved_code import SAVED_CODE, SavedCode, folders_up, is_saved_code
from tasks.foundation.errors import FileMissing, InvalidInput, ModelError, RunLogError, SourceError
from tasks.foundation.messages import HINT, message

_HINTS = ("name the run file that builds the model, with its code beside it: --run-file FILE",)
_NO_OTHER_FILES = (
    "run file and code are those in the home, which has no other files that they read; --run-file FILE uses a run file "
    "with the files beside it"
)


def saved_run(opened: RunHome, head: Head) -> Run:
    """Open a run with the run file and the code that its home has.

    The code is written into a scratch folder, which is deleted when the process ends, and is loaded from there like any
    user's code. The run keeps the home's name and storage, and its stages run in this process.

    Args:
        opened: the home.
        head: the folded state whose code is wanted: the newest, or that of an earlier entry.

    Raises:
        InvalidInput: the home has no code, because an earlier version of Baton made it, or the file is missing.
        RunLogError: the saved code is damaged.
        AnotherVersion: a newer version of Baton wrote it.
    """
    saved = read_saved_code(opened, head)
    where = f"{opened.home.uri}/{head.identity[SAVED_CODE]}"
    spec = saved.run_file.model_copy(update={"run": opened.name, "storage": opened.root.uri, "stages": StagesSpec()})
    folder = _scratch_folder(saved, where)
    return Run(root=opened.root, home=opened.home, log=opened.log, spec=spec, folder=folder, file=folder / "run.yaml")


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
    """Read the run file and the code that a home has; see `saved_run`."""
    path = head.identity.get(SAVED_CODE)
    if not is_saved_code(path):
        raise InvalidInput(
            message(
                f"{opened.home.uri} has no run file and no code: an earlier version began or last changed it",
                hints=_HINTS,
            )
        )
    where = f"{opened.home.uri}/{path}"
    try:
        data = opened.home.read(str(path))
    except FileMissing as fault:
        raise InvalidInput(message(f"{where} is missing, which has the run file and the code", hints=_HINTS)) from fault
    if path != f"code/{hashlib.sha256(data).hexdigest()[:16]}.json":
        raise RunLogError(
            message(f"{where} is damaged: its content does not have the digest in its name", hints=_HINTS)
        )
    return SavedCode.from_json(data, where=where, error=RunLogError, unknown_keys="forbid")


def _scratch_folder(saved: SavedCode, where: str) -> Path:
    """Write the files of the code, and return the folder that stands for the run file's."""
    scratch = Path(tempfile.mkdtemp(prefix="baton-code-")).resolve()
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
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
