"""Saves of several hosts on a bucket that caps the bytes a second of each of them (part n).

Once with real processes that train, from the snapshot to the log entry, and once the save alone: many processes on few
cores take longer to agree than to save.
"""

import statistics

from tests.benchmarks.bench import Bench
from tests.benchmarks.environments import Baton
from tests.benchmarks.figures.others import measured
from tests.benchmarks.process import Trace
from tests.benchmarks.workloads import Training, Workload, write_run_file
from tests.fakes.capped_ports import capped_ports
from tests.fakes.gcs.server import fake_gcs_process

# What Orbax publishes for saves that its hosts share, over those of one.
_GOALS = {2: 1.67, 4: 1.98, 8: 2.35}
_SPARE_MB = 64
_TRAINING = Training(steps=2, rows=1, commit_steps=1)


def shares(
    bench: Bench, workload: Workload, *, hosts: tuple[int, ...], megabytes_per_second: float, rounds: int
) -> None:
    """Measure the saves of 1 and more hosts, each with a bandwidth of its own.

    Args:
        bench: the measurement.
        workload: what is trained; its batch is divisible by every number of hosts.
        hosts: numbers of hosts, besides one.
        megabytes_per_second: of each host, to the bucket and back. So little that neither processor nor disk matters.
        rounds: how often.
    """
    group = f"Saves of hosts with {megabytes_per_second:g} MB/s each: {workload.name}, from the snapshot to the entry"
    bench.say(group)
    state = workload.bytes / 1e6

    def arm(baton: Baton, number: int) -> Trace | None:
        with (
            fake_gcs_process(("bucket",)) as server,
            capped_ports(server.url, number, bytes_per_second=megabytes_per_second * 1e6) as buckets,
        ):
            folder = bench.fresh()
            file = write_run_file(
                workload,
                _TRAINING,
                folder,
                bench.examples(workload),
                storage="gs://bucket/bench",
                accelerator={"kind": "multi_worker", "intra_op_threads": 1, "inter_op_threads": 1},
            )
            return bench.run(measured(bench, baton, "shares", str(file), *buckets, folder=folder))

    _saves_alone(bench, hosts=(1, *hosts), megabytes_per_second=megabytes_per_second, megabytes=state, rounds=rounds)
    for baton in bench.batons:
        found: dict[int, list[Trace]] = {}
        ratios: dict[int, list[float]] = {}
        for _ in range(rounds):
            traces = {number: trace for number in (1, *hosts) if (trace := arm(baton, number)) is not None}
            seconds = {number: statistics.median(trace.values["seconds"]) for number, trace in traces.items()}
            for number, trace in traces.items():
                found.setdefault(number, []).append(trace)
                if 1 in seconds and number > 1:
                    ratios.setdefault(number, []).append(seconds[1] / seconds[number])
        judged = baton is bench.batons[0]
        for number, those in found.items():
            name = baton.name("1 host" if number == 1 else f"{number} hosts")
            took = [each for trace in those for each in trace.values["seconds"]]
            bench.add(group, f"{name}, seconds", took, unit="s")
            goal = _GOALS.get(number) if judged else None
            bench.add(group, f"{name}: those of one over theirs", ratios.get(number, []), goal=goal, at_least=True)
            most = [max(trace.values["memory"]) for trace in those]
            goal = state / number + _SPARE_MB if judged else None
            bench.add(group, f"{name}, memory of the host that takes most", most, unit="MB", goal=goal)


def _saves_alone(
    bench: Bench, *, hosts: tuple[int, ...], megabytes_per_second: float, megabytes: float, rounds: int
) -> None:
    group = f"The save alone of hosts with {megabytes_per_second:g} MB/s each: {megabytes:.0f} MB, hosts as threads"
    words = (str(megabytes_per_second), str(megabytes))
    found: dict[int, list[Trace]] = {}
    for _ in range(rounds):
        for number in hosts:
            trace = bench.run(measured(bench, bench.batons[0], "linked_saves", str(number), *words))
            if trace is not None:
                found.setdefault(number, []).append(trace)
    alone = [statistics.median(trace.values["seconds"]) for trace in found.get(1, [])]
    for number, traces in found.items():
        name = "1 host" if number == 1 else f"{number} hosts"
        took = [statistics.median(trace.values["seconds"]) for trace in traces]
        bench.add(group, f"{name}, seconds", took, unit="s")
        if number > 1 and len(alone) == len(took):
            ratios = [one / theirs for one, theirs in zip(alone, took, strict=True)]
            bench.add(group, f"{name}: those of one over theirs", ratios, goal=_GOALS.get(number), at_least=True)
        goal = megabytes / number + _SPARE_MB
        bench.add(
            group, f"{name}, largest snapshot", [trace.value("snapshot") for trace in traces], unit="MB", goal=goal
        )
