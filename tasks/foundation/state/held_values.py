"""Values of the train state that are put back, bit for bit, after something has used the model."""

from collections.abc import Iterable

from tasks.foundation.model.variables import Leaf


class HeldValues:
    """The values of some leaves at one moment.

    TensorFlow shares a variable's memory with the value that is read from it, and copies only when the variable is
    written. So this takes no memory for variables that are not written.
    """

    def __init__(self, leaves: Iterable[Leaf]) -> None:
        self._values = [(part, part.read_value()) for leaf in leaves for part in leaf.components]

    def put_back(self) -> None:
        """Give every variable the value that it had."""
        for part, value in self._values:
            part.assign(value)
