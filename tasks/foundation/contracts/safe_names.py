"""Strings that become paths or names of files. Whoever wrote a home chose them, so each has its pattern."""

import re
from typing import Annotated

from pydantic import AfterValidator

_NAME = r"[\w.=+@-]{1,255}"
_FILE_NAME = re.compile(rf"(?!\.){_NAME}")
_ATTEMPT = re.compile(r"[A-Za-z0-9_-]{1,128}")
_CHECKPOINT = re.compile(rf"checkpoints/(?!\.){_NAME}")
_DATASET = re.compile(rf"datasets/(?!\.){_NAME}")
_ANSWER = re.compile(rf"answers/(?!\.){_NAME}")
_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_SHARD_CHARACTERS = 4096  # an address of somebody else's file


def _matching(pattern: re.Pattern[str], what: str) -> AfterValidator:
    def check(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(f"is not {what}")
        return text

    return AfterValidator(check)


def _shard(path: str) -> str:
    """Relative to the dataset's folder; or absolute, or an address, as that of a file of the user's."""
    if path.startswith("/") or "://" in path:  # only ever read, and compared with the manifest's checksum
        if _UNSEEN.search(path) or len(path) > _SHARD_CHARACTERS:
            raise ValueError("is no path of a file: it has control characters, or is too long")
    elif not _FILE_NAME.fullmatch(path):
        raise ValueError("is no name of a shard in the dataset's folder")
    return path


FileName = Annotated[str, _matching(_FILE_NAME, "the name of one file")]
AttemptId = Annotated[str, _matching(_ATTEMPT, "an attempt's id: letters, digits, '-' and '_'")]
CheckpointPath = Annotated[str, _matching(_CHECKPOINT, "checkpoints/<name>, a checkpoint's folder")]
DatasetPath = Annotated[str, _matching(_DATASET, "datasets/<name>, a dataset's folder")]
AnswerPath = Annotated[str, _matching(_ANSWER, "answers/<name>, a file of an answer")]
ShardPath = Annotated[str, AfterValidator(_shard)]
