"""Seconds of training that are not committed yet, and would be lost if the process died now."""


class Uncommitted:
    """Assigns seconds of training to steps and commits; not thread-safe.

    A commit covers the training up to its step. Training may continue during the commit.
    """

    def __init__(self) -> None:
        self.step = 0
        self.discarded = 0.0  # seconds of training that this process discarded
        self._settled = 0.0  # seconds of training that are committed or discarded
        self._reached: list[tuple[int, float]] = []  # uncommitted steps, and seconds of training up to them

    def begin(self, step: int) -> None:
        """This process continues the run from `step`."""
        self.step = step

    def reached(self, step: int, train_seconds: float) -> None:
        """Training reached `step` after `train_seconds` of training in this process."""
        if self._reached and step < self._reached[-1][0]:
            # A rewind, or a segment that starts again, went back to a checkpoint.
            discarded = self._reached[-1][1]
            self.discarded += discarded - self._settled
            self._settled = discarded
            self._reached.clear()
        self._reached.append((step, train_seconds))
        self.step = step

    def committed(self, step: int, train_seconds: float, *, training: bool) -> None:
        """A commit of `step` is in the log.

        Args:
            step: step of the checkpoint.
            train_seconds: seconds of training in this process so far.
            training: whether the process is training at this moment.
        """
        if step > self.step or (step == self.step and not training):
            self._settled = train_seconds
        else:
            self._settled = max([self._settled, *(seconds for at, seconds in self._reached if at <= step)])
        self._reached = [mark for mark in self._reached if mark[0] > step]
        self.step = max(self.step, step)

    def uncommitted(self, train_seconds: float) -> float:
        """Seconds of training that are neither committed nor discarded."""
        return max(train_seconds - self._settled, 0.0)
