"""A process whose training hangs: `hanging_process.py HOME HOW`; it trains for two seconds first.

HOW is one of: blocks; blocks with a store and a log that never answer; blocks while a save lands; blocks while a save
hangs.
"""

import os
import select
import sys
import threading
import time
from pathlib import Path
from typing import Any

from baton.tasks.foundation.contracts.run_spec import StopSpec
from baton.tasks.foundation.machine.hang import HangWatch
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.telemetry.events import Committed, Event, Hung, Phase, Several, Training
from baton.tasks.foundation.telemetry.ledger import Ledger
from tests.support.event_recorder import EventRecorder
from tests.support.ledger_records import head_at

HANG_SECONDS = 1.0


class _SilentStore(LocalStorage):
    """Accepts one write, and then never answers."""

    answers = True

    def write(self, path: str, data: bytes) -> Any:
        if not self.answers:
            _block()
        return super().write(path, data)

    def with_deadline(self, _seconds: float) -> "_SilentStore":
        return self


class _SilentLog(EventRecorder):
    """Never answers when the process hangs."""

    def emit(self, event: Event) -> None:
        if isinstance(event, Hung):
            _block()


def main(home: str, how: str) -> None:
    sink = _SilentLog() if "store" in how else EventRecorder()
    store = _SilentStore(Path(home))
    spec = StopSpec(hang_seconds=HANG_SECONDS)
    with Ledger() as ledger, HangWatch(spec, ledger=ledger, telemetry=sink) as watch:
        ledger.open(store, head_at(0))
        _SilentStore.answers = "store" not in how
        events = Several((ledger, watch))
        events.emit(Phase(cause="train"))
        for step in range(1, 41):
            time.sleep(0.05)
            events.emit(Training(step=step, target=99, examples_per_second=1.0))
            sys.stdout.write(f"{step}\n")
            sys.stdout.flush()
        landed = threading.Event()
        if "save" in how:
            watch.follow_saves(lambda: not landed.is_set(), lambda: 3600.0 if "hangs" in how else 0.0)
        if "lands" in how:
            threading.Thread(target=_land, args=(events, landed), daemon=True).start()
        if "hangs" in how:
            events.emit(Phase(cause="commit"))
        _block()


def _land(events: Several, landed: threading.Event) -> None:
    time.sleep(2 * HANG_SECONDS)  # later than the limit
    events.emit(Committed(step=40, path="p", size=1, metrics={}))
    landed.set()


def _block() -> None:
    reader, _ = os.pipe()
    select.select([reader], [], [])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
