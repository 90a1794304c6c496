"""The hosts of a run: which of them writes, and how they exchange numbers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Hosts(Protocol):
    """The hosts that train one run together. `Accelerator` is one implementation, `OneHost` another.

    Both exchanges are collective: all hosts call them, in the same order.
    """

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the log; true on exactly one host."""

    @property
    def hosts(self) -> int:
        """Number of hosts."""

    def broadcast_from_chief(self, number: int) -> int:
        """The chief's number, on every host; waits for the chief."""

    def gather_from_hosts(self, numbers: Sequence[float]) -> "npt.NDArray[np.float64]":
        """The numbers of every host, float64 [hosts, len(numbers)]."""


class OneHost:
    """A single host without an accelerator, for a process whose stages all run in other processes."""

    is_chief = True
    hosts = 1

    def broadcast_from_chief(self, number: int) -> int:
        """The number itself."""
        return number

    def gather_from_hosts(self, numbers: Sequence[float]) -> "npt.NDArray[np.float64]":
        """The numbers of the only host, float64 [1, len(numbers)]."""
        import numpy as np  # commands that only read a log need no arrays

        return np.asarray([numbers], np.float64)
