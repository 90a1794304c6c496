"""A handler of SIGTERM, as Prefect's is one: it raises."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def sigterm_raises(error: type[BaseException]) -> Iterator[None]:
    def handle(*_: object) -> None:
        raise error

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
