"""Train states that live in a process that trains and evaluates: `train_states.py RUN_FILE`.

Bytes of all live `tf.Variable`s, over those of one checkpoint: while it trains, and at their peak.
"""

import sys
import weakref
from pathlib import Path
from typing import Any

from baton.flows.train import train  # isort: skip - it quiets TensorFlow

from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable  # no public hook notes variables

from baton.flows.opened_run import OpenedRun
from baton.flows.result import Goal
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.telemetry.events import Committed, Event, Training


class _Variables:
    """A sink that measures at every event."""

    def __init__(self) -> None:
        self._live: dict[int, weakref.ref[Any]] = {}
        _note_variables(self._live)
        self.peak = 0
        self.first_step = 0
        self.last_step = 0
        self.state = 0

    def emit(self, event: Event) -> None:
        """Count."""
        bytes_ = _bytes_of(self._live)
        self.peak = max(self.peak, bytes_)
        if isinstance(event, Training):
            self.first_step = self.first_step or bytes_
            self.last_step = bytes_
        elif isinstance(event, Committed):
            self.state = event.size


def _note_variables(live: dict[int, "weakref.ref[Any]"]) -> None:
    """Add every variable that is made from now on; `gc.get_objects` breaks tuples that other threads are building."""
    initialize = BaseResourceVariable.__init__

    def noting(variable: Any, *given: Any, **settings: Any) -> None:
        initialize(variable, *given, **settings)
        live[id(variable)] = weakref.ref(variable)

    BaseResourceVariable.__init__ = noting


def _bytes_of(live: dict[int, "weakref.ref[Any]"]) -> int:
    found = [variable for known in list(live.values()) if (variable := known()) is not None]
    # One variable can have several Python objects.
    handles = {id(one.handle): one.shape.num_elements() * one.dtype.size for one in found if one.shape.rank is not None}
    return sum(handles.values())


def main() -> None:
    run = OpenedRun.open(load_run_file(Path(sys.argv[1])))
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
