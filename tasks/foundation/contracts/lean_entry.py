"""An entry as it is in its file: nothing is repeated that another file of the log has."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

from pydantic import ConfigDict, Field

from tasks.foundation.contracts.base import AttemptId, CheckpointPath, Contract
from tasks.foundation.contracts.checkpoint import CheckpointRef, WholeRead, base_in_folder_name
from tasks.foundation.contracts.log_entry import Body, Environment, Finished, Retired, Totals

_IN_FULL = ("path", "state_digest", "manifest_digest", "size")
_DIGEST = r"^[0-9a-f]{32}$"


class LeanRef(Contract):
    """A checkpoint. What its path says already is left out."""

    path: CheckpointPath
    step: int | None = Field(default=None, ge=0)
    base: int | None = Field(default=None, ge=0)
    attempt: AttemptId | None = None
    state_digest: str
    manifest_digest: str
    size: int = Field(ge=0, description="bytes of all files")

    def ref(self) -> CheckpointRef:
        """Return the whole reference.

        Raises:
            ValueError: the path does not say what is left out.
        """
        given = {key: getattr(self, key) for key in ("step", "base", "attempt") if getattr(self, key) is not None}
        return CheckpointRef.model_validate(
            {**_in_path(self.path), **given, **{key: getattr(self, key) for key in _IN_FULL}}
        )


class KeptRef(LeanRef):
    """A retained checkpoint."""

    evaluated: bool = False
    border: bool = Field(default=False, description="it lies on a segment border")


class KeptPage(Contract):
    """`log/retained/<digest>.json`: retained checkpoints that no longer stand in each entry. Its name is its digest."""

    format: Literal[1] = 1
    checkpoints: tuple[KeptRef, ...]


class PageRef(Contract):
    """A page, and which of its checkpoints are no longer retained."""

    digest: str = Field(pattern=_DIGEST, description="sha256 of the page's file, the first 32 digits")
    count: int = Field(ge=1, lt=1 << 31, description="number of its checkpoints")
    gone: tuple[int, ...] = Field(default=(), description="positions of those that are no longer retained")


class LeanRetained(Contract):
    """The retained checkpoints: older ones in pages, then the newest."""

    pages: tuple[PageRef, ...] = Field(default=(), description="oldest first")
    evaluated: int = Field(default=0, ge=0, lt=1 << 31, description="how many of those in pages were evaluated")
    borders: int = Field(default=0, ge=0, lt=1 << 31, description="how many of those in pages lie on segment borders")
    newest_base: int = Field(default=-1, description="the highest base in the pages")
    recent: tuple[KeptRef, ...] = ()


class SetIn(Contract):
    """The identity, which another entry has, or this one."""

    entry: int = Field(ge=0, description="number of the entry that set it")
    digest: str = Field(pattern=_DIGEST, description="sha256 of its JSON with sorted keys, the first 32 digits")
    in_run_file: str = Field(pattern=_DIGEST, description="the same of the keys that stand in the run file")


class LeanBest(Contract):
    """The best evaluation so far."""

    checkpoint: LeanRef | CheckpointPath = Field(description="path: one of the newest retained checkpoints")
    metric: str
    mode: Literal["max", "min"]
    value: float


class LeanHead(Contract):
    """The folded state."""

    base: int = Field(ge=0)
    commits: int = Field(ge=0)
    tip: LeanRef | Literal["newest"] | None = Field(default="newest", description="newest: the last retained one")
    retained: LeanRetained = LeanRetained()
    retired: tuple[Retired, ...] = ()
    quarantined: tuple[LeanRef, ...] = ()
    best: LeanBest | None = None
    skipped_batches: int = Field(default=0, ge=0)
    rewinds: int = Field(default=0, ge=0)
    blown_up_at: int | None = None
    finished: Finished | None = None
    tested: tuple[CheckpointPath, ...] = ()
    read_whole: dict[str, int | str] = Field(
        default={},
        description="by base of one of the newest retained checkpoints, or by path: seconds since 1970, or ISO 8601",
    )
    identity: SetIn
    environment: Environment


class LeanEntry(Contract):
    """One file of the log."""

    model_config = ConfigDict(title="Entry")

    format: Literal[1] = 1
    number: int = Field(ge=0)
    time: str
    attempt: AttemptId
    body: Body
    head: LeanHead
    totals: Totals | None = Field(default=None, description="without what the body has too")


def left_out(ref: CheckpointRef) -> dict[str, object]:
    """Return the fields of a `LeanRef` for a checkpoint: those that its path says are left out."""
    said = _in_path(ref.path)
    fields = {key: getattr(ref, key) for key in ("step", "base", "attempt") if said.get(key) != getattr(ref, key)}
    return {**fields, **{key: getattr(ref, key) for key in _IN_FULL}}


def lean_reads(reads: Sequence[WholeRead], recent: Sequence[KeptRef]) -> dict[str, int | str]:
    """Return `LeanHead.read_whole`.

    Args:
        reads: of the folded state.
        recent: the retained checkpoints that stand in the entry in full.
    """
    bases = {one.path: str(base) for one in recent if (base := base_in_folder_name(one.path)) is not None}
    return {bases.get(read.path, read.path): _seconds(read.time) for read in reads}


def whole_reads(lean: dict[str, int | str], recent: Sequence[KeptRef]) -> tuple[WholeRead, ...]:
    """Return what `lean_reads` was made of.

    Raises:
        ValueError: no checkpoint has such a base or such a path.
    """
    paths = {str(base_in_folder_name(one.path)): one.path for one in recent}
    return tuple(
        WholeRead(path=paths.get(key, key), time=when if isinstance(when, str) else _iso_8601(when))
        for key, when in lean.items()
    )


def _seconds(time: str) -> int | str:
    """The time in seconds since 1970, if nothing is lost."""
    try:
        seconds = int(datetime.fromisoformat(time).timestamp())
    except ValueError:
        return time
    return seconds if _iso_8601(seconds) == time else time


def _iso_8601(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def step_in_path(path: str) -> int | None:
    """Return the step that the path of a checkpoint says; None if Baton did not name it."""
    step = _in_path(path).get("step")
    return step if isinstance(step, int) else None


def _in_path(path: str) -> dict[str, object]:
    """What the path of a checkpoint says; empty if Baton did not name it."""
    parts = path.rsplit("/", 1)[-1].split("-", 2)
    if len(parts) != 3 or not (parts[0].isdecimal() and parts[1].isdecimal()):  # noqa: PLR2004
        return {}
    return {"step": int(parts[0]), "base": int(parts[1]), "attempt": parts[2]}
