"""A sweeper of another process may come at any moment of the making of a temporary folder."""

import os
from pathlib import Path

import pytest

from tasks.foundation.storage.temporary_files import temporary_folder


def test_a_folder_that_is_swept_before_it_is_opened_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    real, swept = os.open, []

    def sweeps_first(path: str, *rest: int, **named: int) -> int:
        if not swept and Path(path).name.startswith("baton-race-"):
            swept.append(path)
            Path(path).rmdir()
        return real(path, *rest, **named)

    monkeypatch.setattr(os, "open", sweeps_first)
    with temporary_folder("baton-race-") as folder:
        assert folder.is_dir()
        assert str(folder) not in swept
    assert swept
    assert list(tmp_path.iterdir()) == []
