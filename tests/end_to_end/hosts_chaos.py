"""The kill table of several hosts: each host, each signal, each place of a run, and the same result.

`python -m tests.end_to_end.hosts_chaos [--seed 0] [--cases 60] [--only KILL] [--lanes 1]`, or `make chaos`.

Hosts are processes on this machine that train one run (MultiWorkerMirroredStrategy on loopback). One of them is held at
a moment of its work (`moments.py`), and the chief, a worker or both get SIGTERM, SIGKILL or SIGSTOP there. All other
processes must end by themselves, with exit code 3, or 0 after a SIGTERM that came too late; what was stopped is killed
then. All hosts start again. At the end the run is that of hosts that were never interrupted.

All 45 triples run on two hosts. Fifteen more run on three, where one host survives what hits both.
"""

import argparse
import itertools
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.end_to_end.chaos import ALWAYS, run_and_print
from tests.support.chaos_tally import HomeChecker, Tally
from tests.support.homes import commits_in, entries_of, head_of
from tests.support.moments import MOMENTS, VARIABLE, hold_at
from tests.support.training_child import Child
from tests.support.worker_processes import Workers

SIGNALS = {"TERM": signal.SIGTERM, "KILL": signal.SIGKILL, "STOP": signal.SIGSTOP}
TARGETS = ("chief", "worker", "both")
# Only the chief commits; a worker is hit while the chief does.
OF_CHIEF = frozenset({"commit"})
SHAPE = ["train.segment_steps=4", "train.log_every_steps=4", "train.global_batch_size=96", "evaluate.every_steps=8"]
# Enough on a busy machine, to end and to train. A frozen host is lost after half a minute.
_BOUND_SECONDS, _LONGEST_SECONDS = 120.0, 1200.0
_POLL_SECONDS = 0.05
_MOST_CHARACTERS = 1500


@dataclass(frozen=True, slots=True)
class Case:
    """One interruption: the signal, who gets it, and at which moment."""

    signal: str
    target: str
    moment: str
    hosts: int = 2

    @property
    def kind(self) -> str:
        """Its row of the table."""
        on = "" if self.hosts == 2 else f", {self.hosts} hosts"
        return f"{self.signal} {self.target}, {self.moment}{on}"

    def exit_codes(self, *, hit: bool) -> set[int]:
        """Those that a host may end with."""
        if self.signal == "TERM":
            return {0, 3, -signal.SIGTERM} if hit else {0, 3}
        return {-signal.SIGKILL} if hit else {3}


def kill_table() -> list[Case]:
    """The sixty interruptions."""
    triples = [Case(*words) for words in itertools.product(SIGNALS, TARGETS, MOMENTS)]
    # Each signal at each moment, with the targets in turn.
    on_three = [
        Case(name, TARGETS[(row + column) % len(TARGETS)], moment, hosts=3)
        for row, name in enumerate(SIGNALS)
        for column, moment in enumerate(MOMENTS)
    ]
    return triples + on_three


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The size of a kill table.

    Attributes:
        cases: the interruptions.
        folder: an empty folder for the runs.
        seed: determines all random choices.
        lanes: number of runs at the same time.
        steps: of a run, four for each commit. The default is enough for fifteen interruptions.
    """

    cases: Sequence[Case]
    folder: Path
    seed: int = 0
    lanes: int = 1
    steps: int = 120

    def start(self, hosts: int, storage: Path, held: int = 0, hold: dict[str, str] | None = None) -> Workers:
        """Start all hosts of a run, the one of index `held` with more variables."""
        extra = [f"train.steps={self.steps}", *SHAPE, *ALWAYS]
        env = {host: {VARIABLE: ""} for host in range(hosts)} | {held: hold or {VARIABLE: ""}}
        return Workers(hosts, storage, extra=extra, notes=self.folder, env=env)


def hosts_chaos(plan: Plan, print_line: Callable[[str], None]) -> Tally:
    """Interrupt, check and compare runs; `print_line` receives one line for each event."""
    tally = Tally(print_line)
    straight = {}
    for hosts in sorted({case.hosts for case in plan.cases}):
        workers = plan.start(hosts, plan.folder / f"straight-{hosts}")
        workers.finish()
        straight[hosts] = workers.home
    groups: dict[tuple[int, str], list[Case]] = {}
    for case in plan.cases:
        groups.setdefault((case.hosts, case.target if case.hosts == 2 else "some"), []).append(case)
    with ThreadPoolExecutor(plan.lanes) as lanes:
        runs = list(lanes.map(lambda name: _lane(plan, groups[name], straight[name[0]], name[1], tally), groups))
    tally.log(f"{sum(runs)} runs were finished and compared")
    return tally


def _lane(plan: Plan, cases: Sequence[Case], straight: Path, name: str, tally: Tally) -> int:
    """Make all interruptions of a group; returns the number of runs that it took."""
    hosts = cases[0].hosts
    chance = random.Random(f"{plan.seed}/{hosts}/{name}")
    left = chance.sample(cases, len(cases))
    known = {ref.step: ref.state_digest for ref in commits_in(entries_of(straight))}
    number = 0
    while left:
        number, before = number + 1, len(left)
        storage = plan.folder / f"{hosts}-{name}-{number}"
        shutil.copytree(straight.parent / "datasets", storage / "datasets")
        checker = HomeChecker(storage / straight.name, known, tally)
        while left and _interrupt(plan, left[0], storage, chance, checker):
            left.pop(0)
        workers = plan.start(hosts, storage)
        try:
            _wait_for_end(workers.children, "continuing", checker, seconds=_LONGEST_SECONDS)
        finally:
            workers.end()
        if any(child.process.returncode for child in workers.children):
            checker.fault("other", f"continuing to the end failed: {_said(workers.children)}")
        else:
            checker.compare(straight)
        if len(left) == before:
            checker.fault("other", f"{left.pop(0).kind}: a whole run never comes to this moment")
        shutil.rmtree(storage)
    return number


def _interrupt(plan: Plan, case: Case, storage: Path, chance: random.Random, checker: HomeChecker) -> bool:
    """Interrupt the hosts of a run once, and check what is left; False if the run ended before."""
    worker = chance.randrange(1, case.hosts)
    hit = {"chief": [0], "worker": [worker], "both": [0, worker]}[case.target]
    held = 0 if case.moment in OF_CHIEF else chance.choice(hit)
    side, call = chance.choice(["before", "after"]), chance.randrange(1, 3)
    file = plan.folder / f"held-{time.monotonic_ns()}"
    workers = plan.start(case.hosts, storage, held, hold_at(case.moment, side, call, file))
    children = workers.children
    try:
        _wait(lambda: file.exists() or not all(child.alive for child in children))
        if not file.exists():
            _wait_for_end(children, case.kind, checker)
            if any(child.process.returncode != 0 for child in children):
                checker.fault("other", f"{case.kind}: ended before the moment: {_said(children)}")
            with checker.tally.row(case.kind) as row:
                row.missed += 1
            return any(child.process.returncode for child in children)
        began = time.monotonic()
        for host in hit:
            children[host].process.send_signal(SIGNALS[case.signal])
        if case.signal == "STOP":
            for host in hit:
                children[host].stop()
        file.unlink()
        waits = [child for host, child in enumerate(children) if case.signal != "STOP" or host not in hit]
        _wait_for_end(waits, case.kind, checker)
        seconds = time.monotonic() - began
    finally:
        workers.end()
        file.unlink(missing_ok=True)
    with checker.tally.row(case.kind) as row:
        row.hit += 1
        row.in_flight += case.moment in {"upload", "commit"}
    checker.check(case.kind)
    codes = [child.process.returncode for child in children]
    for host, code in enumerate(codes):
        if code not in case.exit_codes(hit=host in hit):
            checker.fault("other", f"host {host} ended with {code}: {_said([children[host]])}")
    head = head_of(checker.home)
    checker.tally.log(
        f"{checker.tally.hits:4d}  {case.kind:<32} host {held} held {side} call {call}: exit codes {codes} after "
        f"{seconds:.1f} s, {head.commits if head else 0} commits"
    )
    return True


def _wait_for_end(
    children: Sequence[Child], kind: str, checker: HomeChecker, *, seconds: float = _BOUND_SECONDS
) -> None:
    """Wait until processes have ended by themselves; one that hangs is a fault, and is killed."""
    if _wait(lambda: not any(child.alive for child in children), seconds):
        return
    hanging = [child for child in children if child.alive]
    for child in hanging:
        child.process.send_signal(signal.SIGUSR1)  # the stacks of its threads
    time.sleep(1)
    said = "\n".join(child.stderr[-20 * _MOST_CHARACTERS :] for child in hanging)
    checker.fault("other", f"{kind}: {len(hanging)} processes hang: {said}")
    for child in hanging:
        child.kill()


def _wait(condition: Callable[[], bool], seconds: float = _LONGEST_SECONDS) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _said(children: Sequence[Child]) -> str:
    return "\n".join(f"{child.process.returncode}: {child.stderr[-_MOST_CHARACTERS:]}" for child in children)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=60, help="how many; fewer than 60 are drawn from the table")
    parser.add_argument("--only", default="", help="only cases whose row contains this text")
    parser.add_argument("--lanes", type=int, default=1, help="runs at the same time")
    options = parser.parse_args()
    table = [case for case in kill_table() if options.only in case.kind]
    cases = random.Random(options.seed).sample(table, min(options.cases, len(table)))
    return run_and_print(
        lambda folder, print_line: hosts_chaos(
            Plan(cases=cases, folder=folder, seed=options.seed, lanes=options.lanes), print_line
        )
    )


if __name__ == "__main__":
    sys.exit(main())
