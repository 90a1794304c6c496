"""Train states that live in a process that trains and evaluates: `train_states.py RUN_FILE`.

Bytes of all live `tf.Variable`s, over those of one checkpoint: while it trains, and at their peak.
"""

import gc
import sys
from pathlib import Path

from flows.without_prefect import train  # isort: skip - it quiets TensorFlow

import tensorflow as tf

from flows.goal import Goal
from flows.run import Run
from tasks.foundation.contracts.run_file import load_run_file
from tasks.foundation.telemetry.events import Committed, Event, Training


class _Variables:
    """A sink that measures at every event."""

    def __init__(self) -> None:
        self.peak = 0
        self.first_step = 0
        self.last_step = 0
        self.state = 0

    def emit(self, event: Event) -> None:
        """Count."""
        bytes_ = _bytes_of_variables()
        self.peak = max(self.peak, bytes_)
        if isinstance(event, Training):
            self.first_step = self.first_step or bytes_
            self.last_step = bytes_
        elif isinstance(event, Committed):
            self.state = event.size


def _bytes_of_variables() -> int:
    handles: dict[int, int] = {}
    for one in gc.get_objects():
        if not issubclass(type(one), tf.Variable):
            continue
        # Another thread may be making it: then it has no handle so far.
        handle, shape = getattr(one, "handle", None), getattr(one, "shape", None)
        if handle is not None and shape is not None and shape.rank is not None:
            handles[id(handle)] = shape.num_elements() * one.dtype.size  # one variable can have several Python objects
    return sum(handles.values())


def main() -> None:
    run = Run.open(load_run_file(Path(sys.argv[1])))
    counter = _Variables()
    train(run, Goal.of(run.spec), telemetry=counter)
    for name, value in (
        ("before the first step", counter.first_step),
        ("after evaluations", counter.last_step),
        ("peak", counter.peak),
    ):
        sys.stdout.write(f"value {name} = {value / counter.state}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
