"""A checkpoint: its files, its manifest, the reference to it, and what happened to initial weights in its model."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

from pydantic import Field

from baton.tasks.foundation.contracts.base import AttemptId, CheckpointPath, Contract, FileName


class FileRecord(Contract):
    """One file of a checkpoint."""

    name: FileName
    size: int = Field(ge=0, description="bytes")
    crc32c: str = Field(pattern=r"^[0-9a-f]{8}$")
    sha256: str | None = Field(
        default=None, description="of files that may stay the same until the next checkpoint; None: not computed"
    )


class VariableRecord(Contract):
    """One variable of the train state."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    per_replica: bool = Field(description="saved once for each replica, below <path>/replica_<i>")

    def keys(self, replicas: int) -> tuple[str, ...]:
        """Return the keys of the variable in a checkpoint of `replicas` replicas."""
        return tuple(replica_key(self.path, index) for index in range(replicas)) if self.per_replica else (self.path,)


def replica_key(path: str, index: int) -> str:
    """Return the key of one replica's copy of a variable."""
    return f"{path}/replica_{index}"


# In the order of computation, so that the first of several variables that differ is nearest to the cause.
_GROUPS = ("model", "variables", "seeds", "generators", "optimizer", "optimizers", "metrics")
_DIGITS = re.compile(r"(\d+)")


def sorted_keys(keys: Iterable[str]) -> list[str]:
    """Sort keys of the train state in the order of computation, the model's first; numbers in keys sort by value."""

    def position(key: str) -> tuple[int, list[tuple[int, str]]]:
        group = key.partition("/")[0]
        parts = [(int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS.split(key)]
        return (_GROUPS.index(group) if group in _GROUPS else len(_GROUPS), parts)

    return sorted(keys, key=position)


def differing_keys(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Compare the leaves of two states.

    Args:
        one: a text for each leaf of a state, by its key: `CheckpointManifest.leaves`, or the digests alone.
        other: the same of another state.

    Returns:
        The keys of the leaves that differ, or that one of them lacks, in the order of computation.
    """
    return sorted_keys(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))


class OptimizerRecord(Contract):
    """What the slots of an optimizer mean, besides their names."""

    kind: str = Field(description="its class")
    accumulates: int = Field(default=1, ge=1, description="gradient_accumulation_steps")


class CarriedState(Contract):
    """What becomes of a checkpoint's variables in a model with others: each variable of both is named."""

    kept: dict[str, str] = Field(description="path of each variable that keeps its value -> its path in the checkpoint")
    fresh: tuple[str, ...] = Field(description="paths of the model's variables that begin as they are built")
    dropped: tuple[str, ...] = Field(description="paths in the checkpoint of values that nothing takes")

    @property
    def words(self) -> str:
        """The numbers of variables, in one line."""
        parts = {"kept": _by_owner(self.kept), "fresh": _by_owner(self.fresh), "dropped": _by_owner(self.dropped)}
        return "; ".join(f"{what}: {words}" for what, words in parts.items() if words)


def _by_owner(paths: Iterable[str]) -> str:
    """`4 of the model, 8 of the optimizer`; empty if there are none."""
    of = {"model": "of the model", "optimizer": "of the optimizer", "metrics": "of metrics", "other": "of others"}
    # `optimizers/` and `variables/` are those that Keras's own lists miss.
    groups = {**{name: name for name in of}, "optimizers": "optimizer", "variables": "model", "step": "model"}
    found = Counter(groups.get(path.partition("/")[0], "other") for path in paths)
    return ", ".join(f"{found[owner]} {words}" for owner, words in of.items() if found[owner])


class CheckpointManifest(Contract):
    """Written after the files that it lists, so its existence means that they are complete."""

    format: Literal[1] = 1
    step: int = Field(ge=0)
    base: int = Field(ge=0, description="number of the log entry that the training started from")
    attempt: AttemptId
    replicas: int = Field(ge=1)
    state_digest: str = Field(
        description="sha256 over the sorted (path, dtype, shape, sha256 of the bytes) of every leaf of the train state"
    )
    signature: tuple[VariableRecord, ...]
    leaf_digests: dict[str, str] = Field(description="sha256 of the bytes of each leaf, by its key")
    configured: dict[str, float] = Field(
        default_factory=dict, description="compiled learning rates, by path of their variable"
    )
    optimizers: dict[str, OptimizerRecord] = Field(
        default_factory=dict,
        description="by the path of their variables, without position",
    )
    files: tuple[FileRecord, ...]

    @property
    def leaves(self) -> dict[str, str]:
        """Dtype, shape and digest of each leaf as one text, by its key: equal texts are equal values."""
        records = {key: record for record in self.signature for key in record.keys(self.replicas)}
        return {
            key: f"{record.dtype}{list(record.shape)} {self.leaf_digests.get(key)}" for key, record in records.items()
        }


class CheckpointRef(Contract):
    """A reference to a checkpoint in a run's home; no other attempt uses the same path."""

    path: CheckpointPath = Field(description="checkpoints/<step>-<base>-<attempt>, relative to the run's home")
    step: int = Field(ge=0)
    base: int = Field(ge=0)
    attempt: AttemptId
    state_digest: str
    manifest_digest: str = Field(description="sha256 of manifest.json as it was written")
    size: int = Field(ge=0, description="bytes of all files")

    @classmethod
    def of(cls, manifest: CheckpointManifest, data: bytes) -> "CheckpointRef":
        """The reference to a staged checkpoint.

        Args:
            data: the manifest as it is written.
        """
        return cls(
            path=checkpoint_folder(step=manifest.step, base=manifest.base, attempt=manifest.attempt),
            step=manifest.step,
            base=manifest.base,
            attempt=manifest.attempt,
            state_digest=manifest.state_digest,
            manifest_digest=manifest_digest(data),
            size=sum(file.size for file in manifest.files) + len(data),
        )

    @classmethod
    def in_flight(cls, *, step: int, base: int, attempt: str) -> "CheckpointRef":
        """A reference to a checkpoint that is being written; its digests and its size are not known yet."""
        path = checkpoint_folder(step=step, base=base, attempt=attempt)
        return cls(path=path, step=step, base=base, attempt=attempt, state_digest="", manifest_digest="", size=0)

    @property
    def is_in_flight(self) -> bool:
        """Whether this is a reference to a checkpoint that is being written. Such a reference is never logged."""
        return not self.manifest_digest


def manifest_digest(data: bytes) -> str:
    """The sha256 of a manifest's bytes."""
    return hashlib.sha256(data).hexdigest()


def checkpoint_folder(*, step: int, base: int, attempt: str) -> str:
    """Return the folder of a checkpoint. The base in the name decides whether the folder is garbage."""
    return f"checkpoints/{step:08d}-{base:08d}-{attempt}"


def step_in_folder_name(folder: str) -> int:
    """Return the step in a checkpoint folder's name; 0 for a folder that Baton did not create."""
    step = folder.rsplit("/", 1)[-1].split("-", maxsplit=1)[0]
    return int(step) if step.isdecimal() else 0


def base_in_folder_name(folder: str) -> int | None:
    """Return the base in a checkpoint folder's name; None for a folder that Baton did not create."""
    parts = folder.rsplit("/", 1)[-1].split("-")
    if len(parts) != 3 or not (parts[0].isdecimal() and parts[1].isdecimal() and parts[2].isalnum()):  # noqa: PLR2004
        return None
    return int(parts[1])


class SourceReport(Contract):
    """One source of initial weights, and what was used of it."""

    source: str = Field(description="address as in the run file")
    kind: str = Field(description="kind of the source, in words")
    place: str = Field(description="where the weights were found; for a Baton run, the checkpoint's folder")
    step: int | None = Field(default=None, description="step of the checkpoint, for a Baton run")
    loaded: dict[str, str] = Field(description="path of each loaded variable -> its name in the source")
    missing: tuple[str, ...] = Field(description="requested variables that are not in the source")
    unused: tuple[str, ...] = Field(description="weights in the source that match no requested variable")
    misfits: tuple[str, ...] = Field(description="variables with another shape or type in the source, in words")
    cast: tuple[str, ...] = Field(description="variables cast from another floating type, in words")
    remarks: tuple[str, ...] = Field(description="how names that are not equal were matched, in words")
    not_asked: int = Field(ge=0, description="variables of the source that the patterns exclude")
    ignored: int = Field(ge=0, description="entries of the source that are not weights: optimizer, counters, metrics")


class WeightsReport(Contract):
    """What a run was initialized from, besides its seed."""

    sources: tuple[SourceReport, ...]
    left: tuple[str, ...] = Field(description="variables that keep their seeded initial value")
    overlaid: tuple[str, ...] = Field(description="variables in several sources; the last source wins")
    digest: str = Field(
        description="sha256 over the sorted (path, dtype, shape, sha256 of the bytes) of each variable that was loaded"
    )
