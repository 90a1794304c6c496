"""Downloads to a local file: errors name the local disk or the source, and a short source is refused."""

from pathlib import Path
from typing import IO, Any

import pytest

from tasks.foundation.errors import FileTooShort, StorageError
from tasks.foundation.storage.download import copy_blocks, local_target


class Full:
    """A file on a full disk."""

    name = "/disk/here"

    def write(self, _: bytes) -> int:
        raise OSError(28, "No space left on device")


def test_disk_errors_differ_from_source_errors(tmp_path: Path) -> None:
    full: IO[bytes] = Full()  # type: ignore[assignment]
    with pytest.raises(StorageError, match="/disk/here: cannot write the downloaded file"):
        copy_blocks([b"1"], full, None, source="gs://b/x")

    def broken() -> Any:
        yield b"1"
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output"), local_target(tmp_path / "here") as file:
        copy_blocks(broken(), file, None, source="/other/disk")
    with pytest.raises(FileTooShort, match="/other/disk ends 2 bytes too early"):
        copy_blocks([b"1"], None, 3, source="/other/disk")
