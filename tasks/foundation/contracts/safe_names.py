"""Strings that become paths or file names. They come from files that others can write, so each has a strict pattern."""

import re
from typing import Annotated

from pydantic import AfterValidator, ValidationError
from pydantic_core import PydanticCustomError

from tasks.foundation.messages import abridged, visible

_NAME = r"[\w.=+@-]{1,255}"
_FILE_NAME = re.compile(rf"(?!\.){_NAME}")
_ATTEMPT = re.compile(r"[A-Za-z0-9_-]{1,128}")
_CHECKPOINT = re.compile(rf"checkpoints/(?!\.){_NAME}")
_DATASET = re.compile(rf"datasets/(?!\.){_NAME}")
_ANSWER = re.compile(rf"answers/(?!\.){_NAME}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_REFUSED = "refused_name"
_SHOWN_CHARACTERS = 120
_SHARD_CHARACTERS = 4096  # long enough for the address of an external file


def _matching(pattern: re.Pattern[str], what: str) -> AfterValidator:
    def check(text: str) -> str:
        if not pattern.fullmatch(text):
            raise _refusal(text, what)
        return text

    return AfterValidator(check)


def _shard(path: str) -> str:
    """Accept a file name in the dataset's folder, or the absolute path or address of an external file."""
    if path.startswith("/") or "://" in path:  # only read, and verified with the checksum in the manifest
        if _CONTROL.search(path) or len(path) > _SHARD_CHARACTERS:
            raise _refusal(path, "a file path: it is too long, or has control characters")
    elif not _FILE_NAME.fullmatch(path):
        raise _refusal(path, "the name of a shard in the dataset's folder")
    return path


def is_refused_name(fault: BaseException | None) -> bool:
    """Whether an error is about a name that no version of Baton writes."""
    return isinstance(fault, ValidationError) and any(each["type"] == _REFUSED for each in fault.errors())


def _refusal(name: str, what: str) -> PydanticCustomError:
    shown = repr(abridged(visible(name), _SHOWN_CHARACTERS))
    why = f"{shown} is not {what}; no version of Baton writes such a name"
    return PydanticCustomError(_REFUSED, "{why}", {"why": why})


FileName = Annotated[str, _matching(_FILE_NAME, "a file name")]
AttemptId = Annotated[str, _matching(_ATTEMPT, "an attempt id: letters, digits, '-' and '_'")]
CheckpointPath = Annotated[str, _matching(_CHECKPOINT, "the folder of a checkpoint: checkpoints/<name>")]
DatasetPath = Annotated[str, _matching(_DATASET, "the folder of a dataset: datasets/<name>")]
AnswerPath = Annotated[str, _matching(_ANSWER, "a file of a stage's result: answers/<name>")]
ShardPath = Annotated[str, AfterValidator(_shard)]
