"""Finding the head of a run on gs:// with 10 log entries and with many: requests, and time in pairs.

`head.py [--rounds 30] [--entries 10000]`
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("NO_GCE_CHECK", "true")

from baton.tasks.foundation.log.files import entry_path
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.opening import open_storage
from tests.fakes.gcs.server import FakeGcs
from tests.support.small_logs import begin, signed, train

HINTS = {"right": lambda entries: entries - 1, "behind by 3": lambda entries: entries - 4, "missing": lambda _: None}


def fill(server: FakeGcs, entries: int) -> Any:
    """Write a log of `entries` entries, copies of one: only the newest is read, because it has its own digest."""
    home = open_storage(f"gs://bucket/{entries}", relative_to=Path.cwd())
    log = begin(home)
    train(log, 10)
    newest = log.head()
    if newest is None:
        raise AssertionError
    entry = json.loads(home.read(entry_path(newest.number)))
    for number in range(newest.number + 1, entries):
        data = signed(entry | {"number": number})
        server.store.put("bucket", f"{entries}/log/{number:08d}.json", data)
    return home


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--entries", type=int, default=10_000)
    options = parser.parse_args()
    sizes = (10, options.entries)
    with FakeGcs() as server:
        os.environ["STORAGE_EMULATOR_HOST"] = server.url
        homes = {entries: fill(server, entries) for entries in sizes}
        for name, hint in HINTS.items():
            requests: dict[int, int] = {}
            took: dict[int, list[float]] = {entries: [] for entries in sizes}
            for _ in range(options.rounds):
                for entries, home in homes.items():
                    place = hint(entries)
                    home.delete("log/HINT") if place is None else home.write("log/HINT", str(place).encode())
                    server.reset_counters()
                    began = time.perf_counter()
                    head = RunLog(home).head()
                    took[entries].append(time.perf_counter() - began)
                    requests[entries] = sum(server.counts.values())
                    if head is None or head.number != entries - 1:
                        raise AssertionError(head)
            for ratio in (after / before for before, after in zip(*took.values(), strict=True)):
                sys.stdout.write(f"value HINT {name}: seconds over those of 10 entries = {ratio}\n")
            sys.stdout.write(f"value HINT {name}: requests = {requests[options.entries]}\n")


if __name__ == "__main__":
    main()
