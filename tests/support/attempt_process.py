"""A process that records an attempt: `attempt_process.py HOME COMMITS HOW`, with HOW one of ends, hangs, raises.

It "trains" for 0.6 s before each commit. Then it ends, hangs for an hour or raises.
"""

import sys
import time
from pathlib import Path

from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.telemetry.events import Committed, Phase, Training
from baton.tasks.foundation.telemetry.ledger import Ledger
from tests.support.ledger_records import head_at


def main(home: str, commits: int, how: str) -> None:
    with Ledger() as ledger:
        ledger.open(LocalStorage(Path(home)), head_at(0))
        ledger.emit(Phase(cause="compile"))
        time.sleep(0.4)
        for number in range(1, commits + 1):
            ledger.emit(Phase(cause="train"))
            time.sleep(0.6)
            ledger.emit(Training(step=number, target=99, examples_per_second=1.0))
            ledger.emit(Phase(cause="commit"))
            ledger.emit(Committed(step=number, path="p", size=1, metrics={}))
        ledger.emit(Phase(cause="train"))
        if how == "hangs":
            time.sleep(3600)
        time.sleep(1.0)
        if how == "raises":
            raise ValueError("no")
        ledger.end("complete")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
