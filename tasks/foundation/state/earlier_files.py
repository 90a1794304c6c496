"""The data files of the checkpoint that a train state was last saved to or restored from."""

from collections.abc import Sequence

from tasks.foundation.contracts.checkpoint import FileRecord


class EarlierFiles:
    """Remembers them, so that a save need not write the same bytes again. They may be deleted at any time.

    The training thread restores, and the thread that saves writes, but never both at once.
    """

    def __init__(self) -> None:
        self._files: tuple[tuple[str, FileRecord], ...] = ()

    def remember(self, folder: str, files: Sequence[FileRecord]) -> None:
        """Remember the files of one checkpoint in place of the one before.

        Args:
            folder: of the checkpoint, relative to the home.
            files: from its manifest.
        """
        self._files = tuple((f"{folder}/{file.name}", file) for file in files)

    def of_size(self, size: int) -> list[tuple[str, FileRecord]]:
        """Return path and record of the files with this size. No other checkpoint, in any home, has these paths."""
        return [found for found in self._files if found[1].size == size]
