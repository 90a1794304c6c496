"""How much training is not committed yet: what a death at this moment would lose."""


class Uncommitted:
    """Follows steps and commits along the seconds that went to training; not thread-safe.

    A commit covers what was trained up to its step, not up to the moment when it is known: training may go on while
    the commit is under way.
    """

    def __init__(self) -> None:
        self.step = 0
        self.discarded = 0.0  # seconds whose work this process gave up
        self._settled = 0.0  # seconds whose work is committed or given up
        self._reached: list[tuple[int, float]] = []  # not settled yet: a step, and the seconds of training up to it

    def starts(self, step: int) -> None:
        """The run stands at `step` when this process takes it up."""
        self.step = step

    def reached(self, step: int, train_seconds: float) -> None:
        """Training got to `step`, after so many seconds of it in this process."""
        if self._reached and step < self._reached[-1][0]:
            # The state was taken back to a checkpoint: a rewind, or a segment that is begun again.
            given_up = self._reached[-1][1]
            self.discarded += given_up - self._settled
            self._settled = given_up
            self._reached.clear()
        self._reached.append((step, train_seconds))
        self.step = step

    def committed(self, step: int, train_seconds: float, *, training: bool) -> None:
        """The work up to `step` is in the log.

        Args:
            step: the checkpoint's.
            train_seconds: of this process, up to now.
            training: whether time goes to training at this moment.
        """
        if step > self.step or (step == self.step and not training):
            self._settled = train_seconds
        else:
            self._settled = max([self._settled, *(seconds for at, seconds in self._reached if at <= step)])
        self._reached = [mark for mark in self._reached if mark[0] > step]
        self.step = max(self.step, step)

    def uncommitted(self, train_seconds: float) -> float:
        """Seconds of training that nothing has settled yet."""
        return max(train_seconds - self._settled, 0.0)
