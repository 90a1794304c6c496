"""A SIGTERM handler that raises, like Prefect's."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def sigterm_raises(error: type[BaseException]) -> Iterator[None]:
    """Install the handler during the block."""

    def handle(*_: object) -> None:
        raise error

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
