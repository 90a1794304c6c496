"""The run file and the user's code as they are saved in a run's home."""

import base64
import hashlib
import json
import posixpath
import re
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field, StringConstraints

from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.model_summary import ModelSummary
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.masking import masked_values

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

    schema_version: Literal[1] = 1
    run_file: RunSpec = Field(description="every key with its value, after --set")
    files: tuple[SavedFile, ...] = Field(description="what lies in the run file's folder; no installed packages")
    revision: GitRevision | None = Field(default=None, description="None: the files were in no Git checkout")
    model: ModelSummary | None = Field(default=None, description="None: an earlier version saved the code")

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
