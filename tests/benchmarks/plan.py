"""How long everything is measured: the whole table, the short one, and one that only shows that the code works."""

from dataclasses import dataclass, replace

from tests.benchmarks.workloads import (
    DIGITS,
    MEDIUM,
    PERCEPTRON,
    TINY,
    TRANSFORMER_1GB,
    TRANSFORMER_64MB,
    TRANSFORMER_250MB,
    Workload,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WallClock:
    """One measurement of part a: a commit every `interval` seconds, for `seconds` of the plain loop.

    The peers run in the first `peer_rounds` rounds.
    """

    workload: Workload
    interval: float
    seconds: float
    rounds: int
    peer_rounds: int
    derive: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The lengths of all figures.

    Attributes:
        rounds: how often every arm runs.
        walls: of part a.
        large, medium, small, digits: the workloads.
        stalls: workloads of part i, each with the seconds between commits.
        stall_commits: how many commits.
        turns: of each arm of part b, in a round.
        start_rounds: of part d.
        border_seconds, borders: length and number of the segments of part j.
        latencies: milliseconds a request, of part f.
        transfer_megabytes, transfer_files: of part e.
        input_examples, input_seconds: of parts c, l and o.
        log_entries: of part g.
        command_rounds: of part m.
        shared, hosts, megabytes_per_second, share_rounds: of part n.
    """

    rounds: int
    walls: tuple[WallClock, ...]
    large: Workload = TRANSFORMER_250MB
    medium: Workload = MEDIUM
    small: Workload = PERCEPTRON
    digits: Workload = DIGITS
    stalls: tuple[tuple[Workload, float], ...] = ((TRANSFORMER_250MB, 4.0), (TRANSFORMER_1GB, 10.0))
    stall_commits: int = 3
    turns: int = 15
    start_rounds: int = 3
    border_seconds: float = 0.5
    borders: int = 30
    latencies: tuple[int, ...] = (0, 50, 200)
    transfer_megabytes: int = 64
    transfer_files: int = 8
    input_examples: int = 100_000
    input_seconds: float = 5.0
    log_entries: int = 10_000
    command_rounds: int = 10
    shared: Workload = TRANSFORMER_64MB
    hosts: tuple[int, ...] = (2, 4, 8)
    megabytes_per_second: float = 8.0
    share_rounds: int = 1


WHOLE = Plan(
    rounds=3,
    walls=(
        WallClock(workload=TRANSFORMER_250MB, interval=7, seconds=42, rounds=3, peer_rounds=3, derive=(30, 60)),
        WallClock(workload=TRANSFORMER_1GB, interval=20, seconds=40, rounds=1, peer_rounds=1),
    ),
)
QUICK = Plan(
    rounds=1,
    walls=(WallClock(workload=TRANSFORMER_250MB, interval=7, seconds=21, rounds=3, peer_rounds=2, derive=(30, 60)),),
    stalls=((TRANSFORMER_250MB, 3.0), (TRANSFORMER_1GB, 6.0)),
    stall_commits=2,
    turns=10,
    start_rounds=2,
    borders=16,
    transfer_megabytes=32,
    input_examples=30_000,
    input_seconds=3.0,
)
TRIAL = Plan(
    rounds=1,
    walls=(WallClock(workload=TINY, interval=0.2, seconds=0.6, rounds=1, peer_rounds=1, derive=(30,)),),
    large=TINY,
    medium=TINY,
    small=TINY,
    digits=TINY,
    stalls=((TINY, 0.1),),
    turns=2,
    start_rounds=1,
    border_seconds=0.1,
    borders=3,
    latencies=(0,),
    transfer_megabytes=1,
    transfer_files=2,
    input_examples=2_000,
    input_seconds=0.2,
    log_entries=20,
    command_rounds=1,
    shared=TINY,
    hosts=(2,),
    megabytes_per_second=1.0,
)


def with_rounds(plan: Plan, rounds: int) -> Plan:
    """The same with another number of rounds everywhere."""
    walls = tuple(replace(wall, rounds=rounds, peer_rounds=rounds) for wall in plan.walls)
    return replace(plan, rounds=rounds, start_rounds=rounds, share_rounds=rounds, walls=walls)
