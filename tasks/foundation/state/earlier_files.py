"""The data files of the checkpoint that a train state was last saved to or restored from."""

from collections.abc import Sequence

from tasks.foundation.contracts.checkpoint import FileRecord


class EarlierFiles:
    """Remembers them, so that a save need not write the same bytes again. They may be deleted at any time.

    The training thread restores, and the thread that saves writes, but never both at once.
    """

    def __init__(self) -> None:
        self._home = ""
        self._files: tuple[tuple[str, FileRecord], ...] = ()

    def remember(self, home: str, folder: str, files: Sequence[FileRecord]) -> None:
        """Remember the files of one checkpoint in place of the one before.

        Args:
            home: address of the run's home.
            folder: of the checkpoint, relative to the home.
            files: from its manifest.
        """
        self._home, self._files = home, tuple((f"{folder}/{file.name}", file) for file in files)

    def of_size(self, home: str, size: int) -> tuple[tuple[str, FileRecord], ...]:
        """Return path and record of the files in this home with this size."""
        return tuple(found for found in self._files if found[1].size == size) if home == self._home else ()
