"""How many bytes this process has downloaded: a slow download that goes on is told from one that hangs."""


class ByteCount:
    """A count that only grows. Threads may add at the same time; only whether it has grown matters.

    Attributes:
        bytes: so far.
    """

    def __init__(self) -> None:
        self.bytes = 0

    def add(self, size: int) -> None:
        """Add `size` bytes."""
        self.bytes += size


# A module global on purpose: whatever a process waits for, it is alive while bytes arrive.
DOWNLOADED = ByteCount()
