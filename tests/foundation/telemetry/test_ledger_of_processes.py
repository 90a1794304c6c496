"""Ledgers of real processes, some of them killed, compared with the test's own clock."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from baton.tasks.foundation.contracts.attempt import UNATTRIBUTED, AttemptRecord
from baton.tasks.foundation.errors import NoProgress
from baton.tasks.foundation.log.accounting import GOOD, LOST, Account, account_of
from baton.tasks.foundation.log.attempts import read_attempts, require_progress
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.storage.memory import MemoryStorage
from baton.tasks.foundation.telemetry.ledger import heartbeat_interval
from tests.support import forked
from tests.support.checkout import CHECKOUT
from tests.support.ledger_records import head_at
from tests.support.small_logs import begin

ROOT = CHECKOUT
SCRIPT = CHECKOUT / "tests" / "support" / "attempt_process.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}"}
INTERVAL = heartbeat_interval(0)
NEW = begin(MemoryStorage("ledgers"))  # the log of a run that has not trained
LEAVING = 0.3  # seconds that an interpreter or a killed process may take to end on a busy machine

Until = Callable[[LocalStorage], bool]


def lasted(home: LocalStorage, commits: int, how: str, kill: Until | None = None) -> float:
    """Seconds from the start of the process to its end, by the test's clock."""
    began = time.monotonic()
    with forked.Popen(
        [sys.executable, str(SCRIPT), str(home.root), str(commits), how], env=ENVIRONMENT, stderr=subprocess.PIPE
    ) as child:
        while kill is not None and not kill(home):
            assert child.poll() is None, child.communicate()
            time.sleep(0.02)
        if kill is not None:
            child.send_signal(signal.SIGKILL)
        child.wait(timeout=300)
        return time.monotonic() - began


def newest(home: LocalStorage) -> AttemptRecord:
    return read_attempts(home).records[-1]


def account(home: LocalStorage) -> Account:
    head_entry = NEW.newest()
    assert head_entry is not None
    found = account_of(read_attempts(home), NEW, head_entry, now=datetime.now(UTC))
    assert found is not None
    return found


def trains_after(commits: int, attempts: int) -> Until:
    """Whether the newest of `attempts` has trained for more than a second after its commits."""

    def met(home: LocalStorage) -> bool:
        records = read_attempts(home).records
        if len(records) < attempts:
            return False
        return records[-1].committed_step == commits and records[-1].uncommitted_seconds > 1.0

    return met


def test_process_is_counted_to_its_end(tmp_path: Path) -> None:
    home = LocalStorage(tmp_path)
    outside = lasted(home, 2, "ends")
    measured = account(home)
    record = newest(home)
    assert (record.ended, record.committed_step) == ("complete", 2)
    # The interpreter's end after the last heartbeat is not counted. The kernel's clock has a resolution of 10 ms.
    assert outside - 0.03 * outside - LEAVING < measured.total_seconds <= outside + 0.05
    assert measured.share(measured.unattributed_seconds) < 0.03
    assert 1.19 < measured.seconds[GOOD] < 1.2 + 0.8
    assert 0.99 < measured.seconds[LOST] < 2.0
    assert 0.39 < measured.seconds["compile"] < 1.2


@pytest.mark.slow
def test_killed_attempts_lose_uncommitted_work(tmp_path: Path) -> None:
    home = LocalStorage(tmp_path)
    outside = lasted(home, 1, "hangs", kill=trains_after(1, attempts=1))
    outside += lasted(home, 0, "hangs", kill=trains_after(0, attempts=2))
    outside += lasted(home, 1, "raises")
    outside += lasted(home, 1, "ends")
    measured = account(home)
    assert [each.silent for each in measured.attempts] == [True, True, False, False]
    assert [each.record.ended for each in measured.attempts] == [None, None, "ValueError", "complete"]
    assert all(0.99 < each.lost_seconds < 1.0 + 4 * INTERVAL for each in measured.attempts)
    missed = 2 * INTERVAL + 4 * LEAVING  # after the last heartbeats of two attempts
    assert outside - missed - 0.03 * outside < measured.total_seconds <= outside + 0.05
    assert measured.seconds[UNATTRIBUTED] <= 0.03 * measured.total_seconds
    assert 1.79 < measured.seconds[GOOD] < 1.8 + 3 * 1.0
    assert measured.seconds[LOST] > 3.99
    assert measured.away_seconds < outside
    assert read_attempts(home).unreadable == 0


def test_dead_process_on_the_same_machine_is_known_at_once(tmp_path: Path) -> None:
    home = LocalStorage(tmp_path)
    for number in range(2):
        lasted(home, 0, "hangs", kill=trains_after(0, attempts=number + 1))
    head = head_at(0)
    require_progress(home, head, limit=3, now=datetime.now(UTC))
    with pytest.raises(NoProgress, match="all 2 attempts were killed or crashed in train"):
        require_progress(home, head, limit=2, now=datetime.now(UTC))


def test_open_ledger_does_not_keep_the_process_alive(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom tests.support.ledger_records import head_at\n"
        "from baton.tasks.foundation.storage.local import LocalStorage\n"
        "from baton.tasks.foundation.telemetry.ledger import Ledger\n"
        "ledger = Ledger().__enter__()\nledger.open(LocalStorage(Path(sys.argv[1])), head_at(0))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=ENVIRONMENT, capture_output=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
