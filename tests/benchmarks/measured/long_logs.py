"""What a commit, a start, a tick, `status`, `list` and `log` cost after few commits and after many.

`long_logs.py [--commits 10 1000 10000] [--milliseconds 50]` prints a table in Markdown: requests, kilobytes,
milliseconds and megabytes, in a local folder and on a fake gs:// that delays each request. Requests and bytes are
exact; on a local disk, requests are calls of the store, which are counted of the first and the last line only.
"""

import argparse
import contextlib
import io
import os
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("NO_GCE_CHECK", "true")

from baton.flows.commands.main import main as command
from baton.tasks.foundation.checkpoint.save import commit_staged
from baton.tasks.foundation.contracts.identity import identity_in_run_file
from baton.tasks.foundation.contracts.log_entry import Change
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.gcs.storage import CloudStorage
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.telemetry.events import Silent
from tests.fakes.gcs.server import FakeGcs, FaultPlan
from tests.support.counting_storage import Counting
from tests.support.fake_run import FakeRun
from tests.support.small_logs import committing, stage

_ATTEMPTS_PER_COMMITS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one operation.

    Attributes:
        requests: sent to the store.
        kilobytes: that it sent and received.
        milliseconds: taken.
        megabytes: peak of memory that Python allocated for it.
    """

    requests: int
    kilobytes: float
    milliseconds: float
    megabytes: float


def complete_run(folder: Path, commits: int) -> FakeRun:
    """Make a run that has nothing to do, with an attempt for every few commits."""
    run = FakeRun(folder)
    (folder / "model.py").write_text("def build_model(): ...\n", encoding="utf-8")
    head, spec = run.head, load_run_file(run.run_file()).spec
    identity = {**head.identity, **identity_in_run_file(spec)}
    run.log.append(lambda _: Change(environment=head.environment, identity=identity), attempt="a")
    for number in range(commits - 2):
        run.train(1 + number * 300 // commits).retire(keep_last=2)
    run.train(400).evaluate(0.9)
    run.retire(keep_last=2)
    for number in range(max(1, commits // _ATTEMPTS_PER_COMMITS)):
        run.attempt(f"{number:032x}", ended="complete", uncommitted_seconds=0.0)
    return run


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _run(*words: str) -> None:
    with _quiet():
        code = command(list(words))
    if code:
        raise AssertionError((words, code))


def _measured(work: Callable[[], object], counted: Callable[[], tuple[int, float]]) -> Cost:
    """Run work once for its memory, which is slow, and once more for the rest."""
    work()
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    requests, kilobytes = counted()
    began = time.perf_counter()
    work()
    took = time.perf_counter() - began
    after = counted()
    return Cost(
        requests=after[0] - requests, kilobytes=after[1] - kilobytes, milliseconds=took * 1000, megabytes=peak / 1e6
    )


def _operations(run_file: Path, storage: str, home: Any, name: str) -> dict[str, Callable[[], object]]:
    spec = load_run_file(run_file).spec
    log = RunLog(home)
    log.head()
    step = iter(range(10**6, 10**7))

    def commit() -> None:
        head = log.require_head()
        staged = stage(home, next(step), head.base, "b")
        body = committing(staged, parent=head.tip.path if head.tip else None)
        commit_staged(log, body, spec=spec, telemetry=Silent(), verified=True)

    at = f"{storage}/{name}"
    return {
        "find the head (start)": lambda: RunLog(home).head(),
        "tick, nothing to do": lambda: _run("run", str(run_file), "--set", f"storage={storage}", "--json"),
        "status": lambda: _run("status", at, "--json"),
        "list": lambda: _run("list", storage, "--json"),
        "log": lambda: _run("log", at, "--json"),
        "commit and retirement": commit,
    }


def _local(folder: Path, run: FakeRun) -> dict[str, Cost]:
    calls = Counting(LocalStorage(folder / "runs").at(run.name))
    costs = {}
    for name, work in _operations(run.run_file(), str(folder / "runs"), calls, run.name).items():
        own = name.startswith(("find", "commit"))
        costs[name] = _measured(work, lambda own=own: (calls.calls.total() if own else 0, 0.0))
    return costs


def _cloud(run: FakeRun, milliseconds: int) -> dict[str, Cost]:
    with FakeGcs(("bucket",)) as server:
        os.environ["STORAGE_EMULATOR_HOST"] = server.url
        for path in run.root.files(""):
            server.store.put("bucket", f"team/{path}", run.root.read(path))
        home = CloudStorage("bucket", f"team/{run.name}")
        server.faults = FaultPlan.on("", "slow", times=None, delay_seconds=milliseconds / 1000)
        tally = server.tally

        def counted() -> tuple[int, float]:
            return len(tally.sent), (tally.bytes_in + tally.bytes_out) / 1000

        works = _operations(run.run_file(), "gs://bucket/team", home, run.name)
        return {name: _measured(work, counted) for name, work in works.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--commits", type=int, nargs="+", default=[10, 1000, 10_000])
    parser.add_argument("--milliseconds", type=int, default=50)
    options = parser.parse_args()
    os.fsync = lambda _: None  # making the homes takes long, and reading does not sync
    found: dict[tuple[str, str], dict[int, Cost]] = {}
    for commits in options.commits:
        with tempfile.TemporaryDirectory(prefix="baton-long-logs-") as name:
            folder = Path(name)
            run = complete_run(folder, commits)
            cloud = _cloud(run, options.milliseconds)
            for place, costs in (("local", _local(folder, run)), (f"gs://, {options.milliseconds} ms", cloud)):
                for what, cost in costs.items():
                    found.setdefault((place, what), {})[commits] = cost
    head = ["", "", *(f"{commits:,} commits" for commits in options.commits)]
    sys.stdout.write(f"| {' | '.join(head)} |\n| {' | '.join('---' for _ in head)} |\n")
    for (place, what), costs in found.items():
        cells = [
            f"{cost.requests} requests, {cost.kilobytes:.0f} kB, {cost.milliseconds:.0f} ms, {cost.megabytes:.1f} MB"
            for cost in costs.values()
        ]
        sys.stdout.write(f"| {place} | {what} | {' | '.join(cells)} |\n")


if __name__ == "__main__":
    main()
