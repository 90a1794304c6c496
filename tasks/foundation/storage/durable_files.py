"""Writes files that survive a power cut to a local disk."""

import os
import shutil
from pathlib import Path


def write_durably(file: Path, data: bytes) -> None:
    """Write a file and sync it."""
    with file.open("wb") as opened:
        opened.write(data)
        opened.flush()
        os.fsync(opened.fileno())


def copy_durably(source: Path, target: Path) -> None:
    """Copy a file and sync the copy."""
    shutil.copyfile(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())


def make_durably(folder: Path) -> None:
    """Create a folder and its parents, and sync each: a file is no safer than the folders above it."""
    if not folder.is_dir():
        make_durably(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder: a file's name is durable only after this."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
