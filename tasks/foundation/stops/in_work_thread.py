"""Run work on the model in the work thread of the process, where training runs."""

import contextvars
import functools
import threading
from collections.abc import Callable
from typing import TypeVar

from tasks.foundation.stops.work_thread import WorkThreadTask

T = TypeVar("T")


def run_in_work_thread(work: Callable[[], T]) -> T:
    """Run work that loses nothing if it is abandoned, such as an evaluation; see `run_uninterrupted` for other work.

    The main thread waits where signals arrive, so that a signal is handled at once, even if the work is inside one
    TensorFlow call. An exception of its handler is raised at once, and the work is abandoned: it runs on until the
    process ends. In another thread than the main one, the work runs in that thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    task = WorkThreadTask(functools.partial(contextvars.copy_context().run, work))
    try:
        while not task.outcome:
            task.begin()
            task.wait()
        return task.result()
    finally:
        if task.outcome:
            task.close()
