"""Work that is done ahead, side by side, with the results in order."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_order(work: Callable[[T], R], items: Iterable[T], *, workers: int) -> Iterator[R]:
    """`work` on each item, by so many threads; at most twice as many results as threads are held.

    Args:
        work: may wait for a store, or compute outside of Python's lock.
        items: are asked for in this thread, a few ahead.
        workers: at least 1; with 1, nothing is done ahead.
    """
    if workers == 1:
        yield from map(work, items)
        return
    waiting: deque[Future[R]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="baton-source")
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) == 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        # Not waited for: the results are not needed, and the store may be away.
        pool.shutdown(wait=False, cancel_futures=True)
