"""Requests side by side: a bounded parallel map, and one piece of work beside the caller's."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")


def parallel_map(work: Callable[[_T], _R], items: Sequence[_T], *, workers: int) -> list[_R]:
    """Run `work` on each item in up to `workers` threads.

    After the first failure, it skips items not yet started, waits for running ones, and raises the first error in item
    order. If the caller itself is interrupted, it does not wait.

    Args:
        work: called once for each item.
        items: the inputs.
        workers: the maximum number of threads, at least 1.

    Returns:
        The results, in the order of the items.
    """
    if workers == 1 or len(items) < 2:  # noqa: PLR2004 - no need for threads
        return [work(item) for item in items]
    pool = ThreadPoolExecutor(min(workers, len(items)), thread_name_prefix="baton-transfer")
    interrupted = True
    try:
        futures = [pool.submit(work, item) for item in items]
        wait(futures, return_when=FIRST_EXCEPTION)
        interrupted = False
    finally:
        pool.shutdown(wait=not interrupted, cancel_futures=True)
    failed = [future for future in futures if not future.cancelled() and future.exception() is not None]
    return [future.result() for future in failed or futures]


@contextmanager
def beside(work: Callable[[], _R]) -> Iterator[Future[_R]]:
    """Run `work` in another thread while the body runs.

    Yields:
        Its result, or its error, for after the body. If the body fails, nobody waits for it.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="baton-beside")
    try:
        yield pool.submit(work)
    finally:
        pool.shutdown(wait=False)
