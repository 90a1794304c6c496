"""Measures what the simulation needs, and replays a short schedule with real processes and SIGKILL."""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tests.benchmarks.bench import FAR_STEPS, Bench
from tests.benchmarks.preemptions.simulation import Costs, goodput, replay
from tests.benchmarks.process import Arm, Trace, until_step
from tests.benchmarks.turns import ratios
from tests.benchmarks.workloads import Training, Workload

BATON = "Baton"
# Name in the table -> name of the arm.
PEERS = {"Keras BackupAndRestore": "fit, an epoch a commit", "Orbit + CheckpointManager": "Orbit"}
_COMMITS = 4
# Turns of five seconds: Baton's have Prefect, which is stopped with it.
# Equal programs differ by 3 % from process to process: many processes, each for few turns.
_SPEED_ROUNDS, _ROWS = 5, 2
# Seconds of a step, a start, a commit, and until a commit is durable.
_Round = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The costs of one arm, and their spread over the rounds.

    Attributes:
        costs: medians.
        step_seconds: seconds of a step that no commit slows down.
        starts, commits: of each round, in seconds.
        speeds: of each round, over the arm whose steps are fastest, from processes that train by turns.
    """

    costs: Costs
    step_seconds: float
    starts: tuple[float, ...]
    commits: tuple[float, ...]
    speeds: tuple[float, ...]


def arm_of(bench: Bench, name: str, workload: Workload, training: Training) -> Arm:
    """The arm of a name in the table, in a folder of its own where it goes on when it is run again."""
    if name == BATON:
        return bench.baton(bench.batons[0], workload, training, prefect=True, checkpoint={"every_seconds": None})
    return bench.peer(PEERS[name], workload, training)


def training_of(workload_seconds: float, *, step_seconds: float, rows: int) -> Training:
    """A training without end that commits after about `workload_seconds` of steps, and at most every second row."""
    commit_rows = max(2, round(workload_seconds / step_seconds / rows))
    commit_steps = commit_rows * rows
    return Training(steps=FAR_STEPS // commit_steps * commit_steps, rows=rows, commit_steps=commit_steps)


def measure(
    bench: Bench, workload: Workload, *, interval: float, rows: int, rounds: int, turns: int
) -> dict[str, Measured]:
    """Measure every arm: the speed of its steps, a commit, and a start from a checkpoint.

    Args:
        bench: the settings.
        workload: what is trained.
        interval: seconds between commits.
        rows: steps between rows of metrics.
        rounds: how often.
        turns: of each arm, for its speed, in a round.
    """
    names = [BATON, *(PEERS if bench.peers else ())]
    found: dict[str, list[_Round]] = {name: [] for name in names}
    plain = bench.step_seconds(workload)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found[name].append(_one_round(bench, name, workload, interval=interval, rows=rows, step_seconds=plain))
            step, start, commit, durable = found[name][-1]
            bench.say(
                f"{workload.name}, {name}: step {step:.3f}, start {start:.1f}, commit {commit:.2f}, {durable:.2f} s"
            )
    endless = bench.endless(workload)
    arms = {name: lambda name=name: arm_of(bench, name, workload, endless) for name in names}
    by_turns = bench.by_turns(arms, turns=turns, rows=_ROWS, rounds=_SPEED_ROUNDS)
    fastest = min(names, key=lambda name: statistics.median(each for one in by_turns for each in one[name]))
    return {name: _medians(found[name], speeds=ratios(by_turns, fastest, name), name=name) for name in names}


def _medians(rounds: Sequence[_Round], *, speeds: Sequence[float], name: str) -> Measured:
    step, start, commit, durable = (statistics.median(column) for column in zip(*rounds, strict=True))
    commit = max(commit, 0.0)
    costs = Costs(
        start=start,
        commit=commit,
        durable=max(durable, commit),
        speed=min(statistics.median(speeds), 1.0),
        saves_on_notice=name == BATON,
    )
    return Measured(
        costs=costs,
        step_seconds=step,
        starts=tuple(each[1] for each in rounds),
        commits=tuple(each[2] for each in rounds),
        speeds=tuple(speeds),
    )


def with_whole_commits(measured: Mapping[str, Measured]) -> dict[str, Measured]:
    """The same costs, but a commit takes from Baton's training all the time until it is durable."""
    ours = measured[BATON]
    return {**measured, BATON: replace(ours, costs=replace(ours.costs, commit=ours.costs.durable))}


def _one_round(
    bench: Bench, name: str, workload: Workload, *, interval: float, rows: int, step_seconds: float
) -> _Round:
    """Seconds of a step, a start, a commit, and until a commit is durable.

    All but the start are from one process.
    """
    training = training_of(interval, step_seconds=step_seconds, rows=rows)
    arm = arm_of(bench, name, workload, training)
    # The row after the last commit ends what that commit costs.
    bench.wait_until_quiet()
    done = arm.run(until_step(_COMMITS * training.commit_steps + rows))
    bench.wait_until_quiet()
    again = arm.run(lambda trace: bool(trace.rows))
    plain, commit = row_and_commit(done.rows, training.commit_steps)
    step = plain / rows
    lags = [at - done.rows[of] for of, at in done.commits.items() if of in done.rows]
    return step, again.first_row - rows * step, commit, statistics.median(lags)


def row_and_commit(rows: Mapping[int, float], commit_steps: int) -> tuple[float, float]:
    """Seconds from a row to the next, and what a commit costs.

    A row is the median of those that do not follow a commit. What a commit costs is the time that the rows from it to
    the next commit took longer: the median of all commits, so that one at which the machine halts does not decide.

    Args:
        rows: step of each row -> when it was written, in seconds.
        commit_steps: steps between commits, each at a row. The last commit has at least one row after it.
    """
    gaps = {first: rows[second] - rows[first] for first, second in itertools.pairwise(sorted(rows))}
    plain = statistics.median(gap for first, gap in gaps.items() if first % commit_steps)
    longer: dict[int, float] = {}
    for first, gap in gaps.items():
        if first >= commit_steps:
            longer[first // commit_steps] = longer.get(first // commit_steps, 0.0) + gap - plain
    return plain, statistics.median(longer.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A schedule with real processes, and what the simulation says of the same one.

    Attributes:
        real, simulated: goodput.
        steps: committed at the end.
        digest: of Baton's newest checkpoint, "" for peers.
    """

    real: float
    simulated: float
    steps: int
    arm: Arm

    @property
    def difference(self) -> float:
        """Of the simulation from the real replay, as a share of it."""
        return self.simulated / self.real - 1 if self.real else math.inf


def replay_really(
    bench: Bench,
    workload: Workload,
    up_times: Sequence[float],
    measured: Mapping[str, Measured],
    *,
    interval: float,
    rows: int,
) -> dict[str, Replayed]:
    """Let each arm, in turn, train on machines that live for `up_times` seconds and are then killed with SIGKILL."""
    fastest = min(each.step_seconds for each in measured.values())
    training = training_of(interval, step_seconds=fastest, rows=rows)
    arms = {name: arm_of(bench, name, workload, training) for name in measured}
    traces: dict[str, list[Trace]] = {name: [] for name in arms}
    # The first start of all prepares the data, and has nothing to restore.
    begun = {name: max(arm.run(lambda trace: any(trace.commits)).commits) for name, arm in arms.items()}
    for number, up_time in enumerate(up_times, start=1):
        for name, arm in arms.items():
            traces[name].append(arm.run(seconds=up_time, machine=True))
        bench.say(f"machine {number} of {len(up_times)} lived {up_time:.0f} s")
    found = {}
    for name, lives in traces.items():
        lived = [trace.ended for trace in lives]
        steps = max((step for trace in lives for step in trace.commits), default=begun[name]) - begun[name]
        own = training.commit_steps * measured[name].step_seconds
        between: Callable[[int, float], float] = lambda *_, own=own: own  # noqa: E731 - of this arm
        simulated = replay(lived, measured[name].costs, between)
        found[name] = Replayed(
            real=steps * fastest / sum(lived),
            simulated=goodput(simulated, measured[name].costs),
            steps=steps,
            arm=arms[name],
        )
        bench.say(f"{name}: real {found[name].real:.3f}, simulated {found[name].simulated:.3f}")
    return found
