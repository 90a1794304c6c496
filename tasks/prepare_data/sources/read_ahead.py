"""Applies a function to items in parallel, ahead of the reader, with results in order."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def map_ahead(work: Callable[[T], R], items: Iterable[T], *, workers: int) -> Iterator[R]:
    """Apply `work` to each item in threads; yield the results in order, holding at most 2 * workers of them.

    Args:
        work: releases Python's lock while it runs, as requests and TensorFlow do.
        items: consumed in the calling thread, a few ahead.
        workers: number of threads, at least 1; with 1, `work` runs in the calling thread, and not ahead.
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
        # Do not wait: the results are not needed, and the store may be unreachable.
        pool.shutdown(wait=False, cancel_futures=True)
