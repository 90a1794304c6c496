"""Replay losses of machines, and write PREEMPTIONS.md and preemptions.svg.

    python -m tests.benchmarks.preemptions                        about an hour on an idle machine
    python -m tests.benchmarks.preemptions --up-times week.txt    a schedule of your own: seconds, a line each
    python -m tests.benchmarks.preemptions --trial                every path once, tiny; the figures mean nothing

First it measures what a start, a step and a commit cost each arm. From these it simulates long schedules. Then it
replays a short one with real processes and SIGKILL, beside a simulation of the same one.
"""

import argparse
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.tasks.foundation.checkpoint.cadence import young_interval
from baton.tasks.foundation.log.attempts import Losses
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.local import LocalStorage
from tests.benchmarks.bench import LOOKS, Bench
from tests.benchmarks.environments import Baton, peer_python
from tests.benchmarks.machine import machine_words
from tests.benchmarks.preemptions.measure import BATON, PEERS, Measured, measure, replay_really, with_whole_commits
from tests.benchmarks.preemptions.page import ORACLE, RealReplay, Scenario, Table, document, picture
from tests.benchmarks.preemptions.schedules import Schedule, exponential, from_file, scaled, weibull
from tests.benchmarks.preemptions.simulation import fastest_costs, oracle, replay
from tests.benchmarks.process import Arm
from tests.benchmarks.workloads import MEDIUM, TINY, TRANSFORMER_250MB, Workload
from tests.support.checkout import CHECKOUT

_FOLDER = Path(__file__).resolve().parents[1]
_MACHINES = 400
_MAX_OVERHEAD = 0.02  # checkpoint.max_overhead of a run file that does not name it
_EPOCH_SECONDS = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured, and how long.

    Attributes:
        large: of the simulation.
        small: of the real replay.
        large_rows, small_rows: steps between rows of metrics.
        interval: seconds between commits while costs are measured, of the large one.
        short: the same for the small one, and of the real replay.
        rounds: of the measurements.
        large_turns, small_turns: of each arm, for its speed, in a round.
        lives: machines of the real replay.
        mean: seconds that they live.
    """

    large: Workload
    small: Workload
    large_rows: int
    small_rows: int
    interval: float
    short: float
    rounds: int
    large_turns: int
    small_turns: int
    lives: int
    mean: float


WHOLE = Plan(
    large=TRANSFORMER_250MB,
    small=MEDIUM,
    large_rows=50,
    small_rows=50,
    interval=12.0,
    short=1.5,
    rounds=5,
    large_turns=10,
    small_turns=4,
    lives=5,
    mean=25.0,
)
TRIAL = Plan(
    large=TINY,
    small=TINY,
    large_rows=20,
    small_rows=20,
    interval=1.0,
    short=1.0,
    rounds=1,
    large_turns=2,
    small_turns=2,
    lives=1,
    mean=25.0,
)


def simulate(schedule: Schedule, notice: float, measured: Mapping[str, Measured]) -> Scenario:
    """Replay a schedule with every arm. Peers know the mean of the schedule, or commit at the end of long epochs."""
    ours = measured[BATON].costs

    def adaptive(losses: int, seconds: float) -> float:
        between = Losses(count=losses, seconds=seconds).mean_seconds
        # Baton counts the processors' time of a save as well, which is at most the time until it is durable.
        return young_interval(ours.durable, between, max_overhead=_MAX_OVERHEAD)

    fastest = fastest_costs([each.costs for each in measured.values()])
    seconds = {
        ORACLE: oracle(schedule.up_times, fastest),
        BATON: replay(schedule.up_times, ours, adaptive, notice=notice),
    }
    for name in PEERS:
        if name in measured:
            costs = measured[name].costs
            best = math.sqrt(2 * costs.commit * schedule.mean)
            for words, interval in ((", best interval", best), (", each half hour", _EPOCH_SECONDS)):
                between: Callable[[int, float], float] = lambda *_, interval=interval: interval  # noqa: E731
                seconds[name + words] = replay(schedule.up_times, costs, between, notice=notice)
    return Scenario(schedule=schedule, notice=notice, seconds=seconds, measured=measured)


def same_bits(bench: Bench, arm: Arm) -> bool:
    """Whether the newest checkpoint of a replayed run has the digest of a run that nothing interrupted."""
    tip = RunLog(LocalStorage(arm.folder / "runs" / "bench")).require_head().tip
    if tip is None:
        return False
    straight = bench.fresh()
    for name in ("run.yaml", "model.py"):
        shutil.copy(arm.folder / name, straight / name)
    words = bench.batons[0].without_prefect(straight / "run.yaml", "--until-step", str(tip.step))
    Arm(name="straight", command=words, folder=straight, environment=bench.batons[0].environment()).run(
        lambda trace: tip.step in trace.commits
    )
    found = RunLog(LocalStorage(straight / "runs" / "bench")).require_head().tip
    return found is not None and (found.step, found.state_digest) == (tip.step, tip.state_digest)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, simulate, replay, and write the page.

    Returns:
        The exit code: 1 if Baton's bits differ.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.preemptions", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--up-times", type=from_file, action="append", default=[], metavar="FILE", help="a schedule")
    parser.add_argument(
        "--trial", action="store_true", help="tiny models and no peers; only shows that everything runs"
    )
    parser.add_argument("--no-peers", action="store_true", help="only Baton and the oracle")
    parser.add_argument("--output", type=Path, default=_FOLDER, metavar="FOLDER", help="default: beside this package")
    options = parser.parse_args(arguments)
    plan = TRIAL if options.trial else WHOLE
    machine = machine_words()
    folder = Path(tempfile.mkdtemp(prefix="preemptions-"))
    try:
        peers = not (options.trial or options.no_peers)
        bench = Bench(
            folder=folder,
            batons=[Baton(label="", checkout=CHECKOUT, prefect_home=folder / "prefect")],
            peer_python=peer_python() if peers else sys.executable,
            rounds=plan.rounds,
            peers=peers,
            patience=0 if options.trial else LOOKS,
        )
        measured = measure(
            bench, plan.large, interval=plan.interval, rows=plan.large_rows, rounds=plan.rounds, turns=plan.large_turns
        )
        schedules = options.up_times or [
            exponential(1200, _MACHINES),
            exponential(3000, _MACHINES),
            weibull(3000, _MACHINES),
            exponential(6 * 3600, _MACHINES),
        ]
        scenarios, bound = (
            [simulate(each, notice, costs) for each in schedules for notice in (0.0, 30.0)]
            for costs in (measured, with_whole_commits(measured))
        )
        small = measure(
            bench, plan.small, interval=plan.short, rows=plan.small_rows, rounds=plan.rounds, turns=plan.small_turns
        )
        lives = scaled(exponential(1200, plan.lives, seed=3), mean=plan.mean, least=plan.mean / 2, most=2 * plan.mean)
        replayed = replay_really(bench, plan.small, lives, small, interval=plan.short, rows=plan.small_rows)
        same = same_bits(bench, replayed[BATON].arm)
        machine = f"{machine} {bench.load_words()}".strip()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = document(
        machine,
        scenarios,
        bound,
        Table(title=f"{plan.large.name}, {plan.rounds} rounds, arms in turn", measured=measured),
        RealReplay(
            title=plan.small.name, interval=plan.short, lives=lives, measured=small, replayed=replayed, same=same
        ),
    )
    (options.output / "PREEMPTIONS.md").write_text(text, encoding="utf-8")
    (options.output / "preemptions.svg").write_text(picture(scenarios), encoding="utf-8")
    sys.stdout.write(text)
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
