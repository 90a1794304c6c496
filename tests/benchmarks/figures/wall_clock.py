"""Wall clock with commits, over the plain loop's without: Baton and its peers (part a), and peak memory (part h)."""

from collections.abc import Callable, Sequence

from tests.benchmarks.bench import Bench
from tests.benchmarks.plan import WallClock
from tests.benchmarks.process import Arm, Trace, Until, until_step
from tests.benchmarks.workloads import Training, Workload

PLAIN = "plain loop"
PEERS = ("CheckpointManager", "fit + BackupAndRestore", "Orbit", "TensorFlow async")
GOALS = {7.0: 1.05, 30.0: 1.015, 60.0: 1.01}
WITHOUT_PREFECT_GOAL = 1.02
MEMORY_OVER_STATE = 300e6


def wall_clock(bench: Bench, wall: WallClock) -> None:
    """Measure one size of state and one interval.

    Intervals in `wall.derive` are longer; their ratios are derived from the cost of a commit, for want of time.
    """
    workload, interval = wall.workload, wall.interval
    training = bench.training(workload, seconds=wall.seconds, commit_seconds=interval)
    commits = len(training.commits)
    bench.say(f"wall clock: {workload.name}, {training.steps} steps, {commits} commits, one in {interval:g} s")
    ours_only = {name: arm for name, arm in _arms(bench, workload, training).items() if name not in PEERS}
    traces = bench.in_turn(_arms(bench, workload, training), rounds=wall.peer_rounds)
    traces += bench.in_turn(ours_only, rounds=wall.rounds - wall.peer_rounds)
    group = f"Wall clock over the plain loop's: {workload.name}, a commit every {interval:g} s, {commits} commits"
    names = _names(bench)
    ours = bench.batons[0].name("baton run")
    goal = GOALS.get(interval)
    for name in names:
        ratios = _ratios(traces, name, lambda trace: trace.to_last_commit)
        bench.add(group, f"{name}, first step → last commit", ratios, goal=goal if name == ours else None)
    for name in names:
        bench.add(group, f"{name}, first → last step", _ratios(traces, name, lambda trace: trace.to_last_step))
    best = [
        found[ours].to_last_commit / min(found[name].to_last_commit for name in PEERS if name in found)
        for found in traces
        if ours in found and any(name in found for name in PEERS)
    ]
    bench.add(group, f"{ours} over the best peer of the round, first step → last commit", best, goal=1.0)
    for baton in bench.batons:
        run, bare = baton.name("baton run"), baton.name("Baton without Prefect")
        pairs = [found[run].to_last_step / found[bare].to_last_step for found in traces if {run, bare} <= found.keys()]
        bench.add(group, f"{run} over {bare}, first → last step", pairs, goal=WITHOUT_PREFECT_GOAL)
    for longer in wall.derive:
        group = f"Wall clock over the plain loop's: {workload.name}, a commit every {longer:g} s, derived"
        for name in names:
            shares = [
                1 + (found[name].to_last_commit - found[PLAIN].to_last_step) / commits / longer
                for found in traces
                if {name, PLAIN} <= found.keys()
            ]
            bench.add(group, name, shares, goal=GOALS.get(longer) if name == ours else None)
    _memory(bench, workload, traces)


def _names(bench: Bench) -> list[str]:
    ours = [baton.name(kind) for baton in bench.batons for kind in ("baton run", "Baton without Prefect")]
    return [*ours, *PEERS]


def _arms(bench: Bench, workload: Workload, training: Training) -> dict[str, Callable[[], tuple[Arm, Until | None]]]:
    last, done = until_step(training.steps), until_step(training.steps, commit=True)
    arms: dict[str, Callable[[], tuple[Arm, Until | None]]] = {
        PLAIN: lambda: (bench.peer(PLAIN, workload, training), last)
    }
    for baton in bench.batons:
        for kind, prefect in (("Baton without Prefect", False), ("baton run", True)):
            arms[baton.name(kind)] = lambda baton=baton, prefect=prefect: (
                bench.baton(baton, workload, training, prefect=prefect),
                done,
            )
    for name in PEERS if bench.peers else ():
        arms[name] = lambda name=name: (bench.peer(name, workload, training), done)
    return arms


def _ratios(traces: Sequence[dict[str, Trace]], name: str, seconds: Callable[[Trace], float]) -> list[float]:
    return [seconds(found[name]) / found[PLAIN].to_last_step for found in traces if {name, PLAIN} <= found.keys()]


def _memory(bench: Bench, workload: Workload, traces: Sequence[dict[str, Trace]]) -> None:
    group = f"Peak memory over the plain loop's: {workload.name}, state of {workload.bytes / 1e6:.0f} MB"
    goal = (workload.bytes + MEMORY_OVER_STATE) / 1e6
    ours = {baton.name(kind) for baton in bench.batons[:1] for kind in ("baton run", "Baton without Prefect")}
    for name in _names(bench):
        pairs = [(found[name], found[PLAIN]) for found in traces if {name, PLAIN} <= found.keys()]
        rise = [(trace.peak_bytes - plain.peak_bytes) / 1e6 for trace, plain in pairs]
        bench.add(group, name, rise, unit="MB", goal=goal if name in ours else None)
        if any(trace.peak_of_children for trace, _ in pairs):
            children = [trace.peak_of_children / 1e6 for trace, _ in pairs]
            bench.add(group, f"{name}: its child processes", children, unit="MB")
