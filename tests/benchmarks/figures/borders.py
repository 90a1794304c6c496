"""What a border of a segment costs the training thread, with commits of every size (parts i and j)."""

import statistics
from collections.abc import Callable

from tests.benchmarks.bench import Bench
from tests.benchmarks.process import Arm, Trace, Until, until_step
from tests.benchmarks.workloads import Training, Workload

_KINDS = (("Baton without Prefect", False), ("baton run", True))
BORDER_GOAL_MS = 60.0
STALL_GOALS_MS = {250: 50.0, 1000: 200.0}


def borders(bench: Bench, workload: Workload, *, segment_seconds: float, segments: int, rounds: int) -> None:
    """Seconds of a border: the same steps in many segments and in one, over the number of borders."""
    training = bench.training(workload, seconds=segments * segment_seconds, commit_seconds=segment_seconds)
    single = Training(steps=training.steps, rows=training.rows)
    bench.say(f"borders: {workload.name}, {len(training.commits)} segments of {training.commit_steps} steps")
    last = until_step(training.steps)
    arms: dict[str, Callable[[], tuple[Arm, Until | None]]] = {}
    for baton in bench.batons:
        for kind, prefect in _KINDS:
            for words, cut in ((", cut", training), (", one segment", single)):
                arms[baton.name(kind) + words] = lambda baton=baton, prefect=prefect, cut=cut: (
                    bench.baton(baton, workload, cut, prefect=prefect),
                    last,
                )
    traces = bench.in_turn(arms, rounds=rounds)
    group = f"A border of a segment of {segment_seconds:g} s with nothing else due: {workload.name}"
    for baton in bench.batons:
        for kind, prefect in _KINDS:
            name = baton.name(kind)
            cut, one = f"{name}, cut", f"{name}, one segment"
            costs = [
                1000 * (found[cut].to_last_step - found[one].to_last_step) / (len(training.commits) - 1)
                for found in traces
                if {cut, one} <= found.keys()
            ]
            goal = BORDER_GOAL_MS if prefect and baton is bench.batons[0] else None
            bench.add(group, name, costs, unit="ms", goal=goal)


def stalls(bench: Bench, workload: Workload, *, interval: float, commits: int, rounds: int) -> None:
    """Stall of the training thread at a commit, from the time of each step.

    The stall is the first step after a commit, over the median step. What a commit takes from the training is the
    sum over all steps until the next one: it includes steps that are slower because the commit uses the processor.
    """
    step = bench.step_seconds(workload)
    commit_steps = max(3, round(interval / step))
    training = Training(steps=commit_steps * (commits + 1), rows=1, commit_steps=commit_steps)
    bench.say(f"stalls: {workload.name}, {commits} commits, one in {commit_steps} steps")
    last = until_step(training.steps)
    arms: dict[str, Callable[[], tuple[Arm, Until | None]]] = {}
    for baton in bench.batons:
        for kind, prefect in _KINDS:
            arms[baton.name(kind)] = lambda baton=baton, prefect=prefect: (
                bench.baton(baton, workload, training, prefect=prefect),
                last,
            )
    traces = bench.in_turn(arms, rounds=rounds)
    group = f"Stall of the training thread at a commit: {workload.name}"
    for baton in bench.batons:
        for kind, _ in _KINDS:
            name = baton.name(kind)
            found = [stalls_of(round_[name], training) for round_ in traces if name in round_]
            goal = next(goal for size, goal in STALL_GOALS_MS.items() if workload.bytes < size * 2e6)
            judged = goal if baton is bench.batons[0] else None
            bench.add(
                group, f"{name}: first step", [1000 * one for both in found for one in both[0]], unit="ms", goal=judged
            )
            bench.add(
                group, f"{name}: taken until the next", [1000 * one for both in found for one in both[1]], unit="ms"
            )


def stalls_of(trace: Trace, training: Training) -> tuple[list[float], list[float]]:
    """For each commit but the last: seconds of the first step after it, and of all until the next one, over the median.

    The median is taken over the second halves of the segments, where commits beside the training have landed.
    """
    gaps = {step: trace.rows[step] - trace.rows[step - 1] for step in range(2, training.steps + 1)}
    half = training.commit_steps // 2
    quiet = statistics.median(gap for step, gap in gaps.items() if (step - 1) % training.commit_steps >= half)
    first = [gaps[commit + 1] - quiet for commit in training.commits[:-1]]
    until_next = [
        sum(gaps[step] - quiet for step in range(commit + 1, commit + training.commit_steps + 1))
        for commit in training.commits[:-1]
    ]
    return first, until_next
