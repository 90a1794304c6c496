"""The files of a home beside its log and checkpoints, and how large each kind of file may be.

A home may come from a stranger, or be damaged. A file of some gigabytes in the place of a small one must not fill the
memory of whoever lists the runs of a folder. So every store asks here before it reads a whole file, and again before it
writes one: nothing is written that a reader refuses. What is read in pieces (checkpoints, shards) has no limit, nor has
what is only written (reports, curves).

Bytes alone do not bound memory: `[],` has three, and takes hundreds once it is parsed. So the lists, mappings and
values of JSON are counted too. The parser bounds how deeply they are nested; `MOST_NESTED` is the bound for what people
nest in a run file, which other files repeat within their own levels.

Beside the limits stand the contracts of saved code, with the layers and parameters of the model, of confusion matrices,
and of the receipts of `baton prove` and `baton audit`.
"""

import base64
import hashlib
import json
import posixpath
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, Field, NonNegativeInt, StringConstraints, model_validator

from baton.tasks.foundation.contracts.base import CheckpointPath, Contract
from baton.tasks.foundation.contracts.log_entry import Environment
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import FileTooLarge, TooLargeToWrite
from baton.tasks.foundation.masking import masked_values

_KB, _MB = 1 << 10, 1 << 20

# Path below a home or a storage root -> largest number of bytes.
_LIMITS: Final = {
    r"log/HINT": _KB,
    r"log/\d+\.json": 16 * _MB,
    r"log/blocks/[^/]+\.json": 64 * _MB,
    r"checkpoints/[^/]+/manifest\.json": 32 * _MB,
    r"datasets/[^/]+/manifest\.json": 32 * _MB,
    r"code/[^/]+\.json": 32 * _MB,
    r"attempts/closed/[^/]+\.json": 32 * _MB,
    r"attempts/[^/]+\.json": _MB,
    r"answers/[^/]+\.json": 32 * _MB,
    r"(?:audits|proofs)/[^/]+\.json": 4 * _MB,
    r"confusion/[^/]+\.json": _MB,
    r"fork\.json": _MB,
    r"profile\.json": _MB,
}
_OTHER_BYTES: Final = 32 * _MB
_MOST_LISTS, _MOST_VALUES = 200_000, 1_000_000
MOST_NESTED: Final = 64

_BLOCK: Final = re.compile(r"(?:.*/)?log/blocks/[^/]+")
_KNOWN: Final = re.compile("|".join(rf"((?:^|.*/){path})" for path in _LIMITS))
_BYTES: Final = tuple(_LIMITS.values())
# Possessive, so that a file of backslashes takes no memory.
_TEXT: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


def most_bytes(path: str) -> int:
    """Return the largest number of bytes that a file may have to be read whole, by its path or address."""
    known = _known(path)
    return _OTHER_BYTES if known is None else known


def require_readable(path: str, data: bytes) -> None:
    """Check what was read of a file, at most one byte more than its limit.

    Args:
        path: the file's path or address.

    Raises:
        FileTooLarge: they are more than its kind may have, or JSON of more lists or values than is read.
    """
    excess = _excess(path, data)
    if excess:
        raise FileTooLarge(f"{path} has {excess} than such a file may have; it is damaged, or was made to do harm")


def refuse_unreadable(path: str, data: bytes) -> None:
    """Check a file of a known kind before it is written.

    Raises:
        TooLargeToWrite: no reader would read it.
    """
    excess = _excess(path, data) if _known(path) is not None else ""
    if excess:
        raise TooLargeToWrite(
            f"{path} would have {excess} than such a file may have ({len(data)} bytes); make smaller what goes "
            "into it: options in the run file, variables of the model, metrics and logged rows, or shards of the data"
        )


def too_large(path: str, most: int | None = None) -> FileTooLarge:
    """Return the error for a file with more bytes than `most`, or its kind may have, of which not all were read."""
    return FileTooLarge(
        f"{path} has more than {most or most_bytes(path)} bytes, which no such file has; it is damaged, or was made to "
        "do harm"
    )


def _excess(path: str, data: bytes) -> str:
    """What there is too much of, as words before `than`; empty if there is not."""
    if len(data) > most_bytes(path):
        return f"more than {most_bytes(path)} bytes, more"
    if not path.endswith(".json") or _BLOCK.fullmatch(path):  # a block's entries are checked one by one
        return ""
    # Counted quickly first; brackets and commas in texts, such as saved code, do not count.
    if not _is_full([data]) or not _is_full(_between_texts(data)):
        return ""
    return f"more than {_MOST_LISTS} lists or {_MOST_VALUES} values, more"


def _is_full(parts: Iterable[bytes]) -> bool:
    lists = values = 0
    for part in parts:
        lists += part.count(b"[") + part.count(b"{")
        values += part.count(b",")
        if lists > _MOST_LISTS or values > _MOST_VALUES:
            return True
    return False


def _between_texts(data: bytes) -> Iterator[bytes]:
    """Yield what is outside of texts, one by one: a file may have millions."""
    end = 0
    for text in _TEXT.finditer(data):
        yield data[end : text.start()]
        end = text.end()
    yield data[end:]


def _known(path: str) -> int | None:
    found = _KNOWN.fullmatch(path)
    return None if found is None or found.lastindex is None else _BYTES[found.lastindex - 1]


class LayerSummary(Contract):
    """One layer of a model."""

    name: str
    kind: str = Field(description="its class")
    output_shape: str | None = Field(default=None, description="with None for the batch; None: Keras does not know it")
    parameters: int = Field(ge=0, description="numbers in its weights, which another layer may share")


class ModelSummary(Contract):
    """What `model.summary()` of Keras shows. A variable that several layers share counts once in the sums."""

    layers: tuple[LayerSummary, ...] = Field(description="the layers of the model itself, without those inside of them")
    trainable: int = Field(ge=0, description="numbers in trainable weights")
    frozen: int = Field(ge=0, description="numbers in other weights, such as the means of batch normalization")
    optimizer: int = Field(ge=0, description="numbers in the optimizer's variables")

    @property
    def parameters(self) -> int:
        """Numbers in all weights."""
        return self.trainable + self.frozen


# The key of a recorded identity that names the saved code; for information, so it is never compared.
SAVED_CODE: Final = "code.saved"
_PATH = re.compile(r"code/[0-9a-f]{16}\.json")
_MOST_FOLDERS_UP = 16


def _check_file(path: str) -> str:
    """Accept a normalized relative path; only its beginning may lead up."""
    up = folders_up(path)
    if path != posixpath.normpath(path) or posixpath.isabs(path) or up > _MOST_FOLDERS_UP or not path.endswith(".py"):
        raise ValueError("is not a relative path of a Python file")
    if "\0" in path or "\\" in path:
        raise ValueError("is not a file path")
    return path


def folders_up(path: str) -> int:
    """Return how many folders a normalized path begins with going up."""
    parts = path.split("/")
    return next((index for index, part in enumerate(parts) if part != ".."), len(parts))


def saved_code_path(data: bytes) -> str:
    """Return where a home has these bytes of saved code."""
    return f"code/{hashlib.sha256(data).hexdigest()[:16]}.json"


def is_saved_code(path: object) -> bool:
    """Return whether a recorded value is the path of saved code in a home."""
    return isinstance(path, str) and _PATH.fullmatch(path) is not None


class SavedFile(Contract):
    """One file of the user's code."""

    path: Annotated[str, AfterValidator(_check_file)] = Field(description="relative to the run file's folder")
    text: str | None = Field(default=None, description="its content, if it is UTF-8")
    base64: str | None = Field(default=None, description="its content, if it is not")

    @classmethod
    def of(cls, path: str, content: bytes) -> "SavedFile":
        """Return a file with this content."""
        try:
            return cls(path=path, text=content.decode())
        except UnicodeDecodeError:
            return cls(path=path, base64=base64.b64encode(content).decode())

    @property
    def content(self) -> bytes:
        """The file's bytes."""
        return self.text.encode() if self.text is not None else base64.b64decode(self.base64 or "")


class GitRevision(Contract):
    """What was checked out where the user's code was."""

    commit: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40,64}$")] = Field(description="its whole hash")
    changed: bool = Field(description="whether a file of the code differs from it, or is not in it")

    def __str__(self) -> str:
        return f"{self.commit[:12]}{', with changes that are not committed' if self.changed else ''}"


class SavedCode(Contract):
    """A resolved run file, the files of the functions that it names, and what they build."""

    format: Literal[1] = 1
    run_file: RunSpec = Field(description="every key with its value, after --set")
    files: tuple[SavedFile, ...] = Field(description="what lies in the run file's folder; no installed packages")
    revision: GitRevision | None = Field(default=None, description="None: the files were in no Git checkout")
    model: ModelSummary | None = Field(default=None, description="None: not known")

    @property
    def text_files(self) -> dict[str, str]:
        """The text of each file that is text, by its path."""
        return {file.path: file.text for file in self.files if file.text is not None}

    @classmethod
    def of(
        cls,
        spec: RunSpec,
        files: dict[str, bytes],
        revision: GitRevision | None = None,
        model: ModelSummary | None = None,
    ) -> "SavedCode":
        """Return the saved form of a run file with its code, by path. Secrets in the run file are not saved."""
        train = spec.train.model_copy(update={"epoch_examples": None})  # follows from the data
        values = spec.model_copy(update={"train": train}).model_dump(mode="json", by_alias=True)
        without_secrets = masked_values(values)
        run_file = spec.model_copy(update={"train": train})
        if without_secrets != values:
            run_file = RunSpec.model_validate_json(json.dumps(without_secrets))
        saved = tuple(SavedFile.of(path, files[path]) for path in sorted(files))
        return cls(run_file=run_file, files=saved, revision=revision, model=model)


CONFUSION: Final = "confusion"  # the folder in a home


def confusion_path(checkpoint: str) -> str:
    """Return the file's path in the home, from the checkpoint's."""
    return f"{CONFUSION}/{checkpoint.rpartition('/')[2]}.json"


class ConfusionMatrix(Contract):
    """How often a classifier takes one class for another, over the validation examples."""

    format: Literal[1] = 1
    checkpoint: CheckpointPath
    step: int = Field(ge=0)
    counts: tuple[tuple[NonNegativeInt, ...], ...] = Field(
        description="examples; a row for each label, a column for each predicted class"
    )
    class_names: tuple[str, ...] = Field(default=(), description="in the order of the counts; empty: not known")

    @model_validator(mode="after")
    def _is_square(self) -> Self:
        if any(len(row) != len(self.counts) for row in self.counts):
            raise ValueError("the rows of counts have different lengths")
        if len(self.class_names) not in {0, len(self.counts)}:
            raise ValueError(f"{len(self.class_names)} class names for {len(self.counts)} classes")
        return self


Verdict = Literal["same", "different"]
Agreement = Literal["log", "first", "neither"]
OnlyIn = Literal["", "straight", "cut", "log", "execution"]


class VariableDifference(Contract):
    """A variable of the train state whose values differ between two trainings."""

    path: str = Field(description="its key in the checkpoint")
    dtype: str
    shape: tuple[int, ...]
    values: int = Field(ge=0, description="number of its values that differ")
    bits: int | None = Field(
        default=None, description="number of its bits that differ; None: other shapes, or only in one of the two"
    )
    largest: float | None = Field(description="largest absolute difference of finite values, if any")
    only_in: OnlyIn = Field(default="", description="the only one of the two that has the variable")


class TrainingEnd(Contract):
    """Digests of the final state of a training and of its data."""

    state_digest: str
    content_digest: str = Field(description="sha256 of the prepared examples, in their order")


class Receipt(Contract):
    """What the receipts of proofs and audits both say."""

    format: Literal[1] = 1
    time: str = Field(description="UTC, ISO 8601")
    verdict: Verdict
    run: str
    run_file: str = Field(description="name of the run file")
    spec_digest: str = Field(description="sha256 of the run file with all overrides and defaults, as JSON")
    baton: str = Field(description="version")


class ProofReceipt(Receipt):
    """What a proof compared, in which environment, and its verdict; below `proofs/`."""

    identity: dict[str, Any] = Field(description="identity keys, as the log of a run of this file records them")
    environment: Environment
    steps: int = Field(ge=1)
    cuts: tuple[int, ...] = Field(description="steps of the commits between the first step and the last")
    killed_at_step: int = Field(ge=1, description="step of the tip when SIGKILL ended the first process")
    data_prepared: Literal["for each trial", "once"]
    straight: TrainingEnd
    cut: TrainingEnd
    variables: int = Field(ge=0, description="number of compared variables")
    differing: int = Field(ge=0)
    first_difference: VariableDifference | None
    metric_rows: int = Field(ge=0, description="number of compared rows")
    first_differing_step: int | None = Field(description="first step whose logged metrics differ")
    repeatable: bool | None = Field(description="whether two straight trainings agree; None if only one was made")
    causes: tuple[str, ...] = Field(description="usual causes of such a difference, with remedies")


class AuditedStretch(Contract):
    """What the execution of the steps between two retained checkpoints gave."""

    start: int = Field(ge=0, description="step of the checkpoint that it started from")
    end: int = Field(ge=1, description="step of the next retained checkpoint")
    verdict: Verdict
    commits: int = Field(ge=1, description="commits of the log from start to end")
    compared: int = Field(
        ge=1, description="those whose digest was compared: the last one, and those at the same steps"
    )
    first_differing_step: int | None = None
    second_agrees_with: Agreement | None = Field(
        default=None, description="what a second execution agrees with; None: the first one agrees with the log"
    )
    variables: int = Field(default=0, ge=0, description="compared variables; 0 if no digest differs at the end")
    differing: int = Field(default=0, ge=0)
    first_difference: VariableDifference | None = None
    environment: tuple[str, ...] = Field(default=(), description="how the environment differs from the log's")


class AuditReceipt(Receipt):
    """What an audit executed, and its verdict; below `audits/`."""

    seed: int | None = Field(description="that drew the sample; None: --last or --all")
    auditable: int = Field(ge=1, description="stretches between retained checkpoints that could be executed")
    stretches: tuple[AuditedStretch, ...]
    left_out: tuple[str, ...] = Field(default=(), description="stretches that cannot be executed again, and why")
