"""A clock that tests set."""

from datetime import UTC, datetime, timedelta

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


class FakeClock:
    """Monotonic seconds and the time of day.

    Attributes:
        seconds: what calling the clock returns.
        day: what `now` returns.
    """

    def __init__(self, seconds: float = 1000.0) -> None:
        self.seconds = seconds
        self.day = NOON

    def __call__(self) -> float:
        return self.seconds

    def now(self) -> datetime:
        return self.day

    def advance(self, seconds: float) -> None:
        """Move both forward."""
        self.seconds += seconds
        self.day += timedelta(seconds=seconds)
