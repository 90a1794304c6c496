"""Names from a home lead nowhere but to one file or folder of it."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from baton.tasks.foundation.contracts.base import (
    AnswerPath,
    AttemptId,
    CheckpointPath,
    DatasetPath,
    FileName,
    ShardPath,
)

CHECKPOINT = "checkpoints/00000400-00000001-c4eb2eb75a12467c9a380032a25ce5ae"
KINDS: dict[str, tuple[Any, str, str]] = {  # the type, a good value, what stands before the name
    "file": (FileName, "ckpt.data-00000-of-00001", ""),
    "attempt": (AttemptId, "c4eb2eb75a12467c9a380032a25ce5ae", ""),
    "checkpoint": (CheckpointPath, CHECKPOINT, "checkpoints/"),
    "dataset": (DatasetPath, "datasets/14097d6bc51b30add9067b56", "datasets/"),
    "answer": (AnswerPath, "answers/0d9f3a.json", "answers/"),
    "shard": (ShardPath, "train-00000.tfrecord", ""),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_as_baton_writes_it_is_accepted(kind: str) -> None:
    adapter, good, _ = KINDS[kind]
    assert TypeAdapter(adapter).validate_python(good) == good


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "../a", "a/..", "a\\b", "a\n", "\x1b[2J", "é" * 256])
@pytest.mark.parametrize("kind", KINDS)
def test_a_name_that_leads_elsewhere_is_refused(kind: str, name: str) -> None:
    adapter, _, folder = KINDS[kind]
    with pytest.raises(ValidationError):
        TypeAdapter(adapter).validate_python(f"{folder}{name}")


@pytest.mark.parametrize("kind", ["checkpoint", "dataset", "answer"])
def test_a_path_of_another_folder_is_refused(kind: str) -> None:
    adapter, good, folder = KINDS[kind]
    for path in (good.removeprefix(folder), f"/{good}", f"log/{good}", f"{folder}{good}"):
        with pytest.raises(ValidationError):
            TypeAdapter(adapter).validate_python(path)


def test_an_external_shard_is_an_address_without_control_characters() -> None:
    adapter: TypeAdapter[str] = TypeAdapter(ShardPath)
    for address in ("/data/train.tfrecord", "gs://bucket/train.tfrecord"):
        assert adapter.validate_python(address) == address
    for address in ("/data/\x1b[2J", f"/{'a' * 5000}"):
        with pytest.raises(ValidationError):
            adapter.validate_python(address)
