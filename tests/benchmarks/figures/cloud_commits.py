"""Requests and seconds of a commit on gs://, on a fake server that delays each request (part f)."""

import itertools

from tests.benchmarks.bench import Bench
from tests.benchmarks.environments import Baton, peer_command
from tests.benchmarks.process import Arm, Trace, Until
from tests.benchmarks.workloads import Training, Workload
from tests.fakes.gcs.server import FaultPlan, RemoteFakeGcs, fake_gcs_process

_FILES = 8
_SECONDS_OVER_TRANSFER = 1.5
_INTERVAL = 6.0  # seconds between commits
_COMMITS = 3


def cloud_commits(bench: Bench, workload: Workload, *, milliseconds: int, rounds: int) -> None:
    """Measure commits when every request takes `milliseconds` more.

    A commit begins when the row of its step is there, and ends when its log entry is.
    """
    bench.say(f"commits on gs://: {workload.name}, {milliseconds} ms a request")
    training = bench.training(workload, seconds=_COMMITS * _INTERVAL, commit_seconds=_INTERVAL)
    group = f"A commit on gs://, {milliseconds} ms a request: {workload.name}"
    transfers: list[float] = []
    within: dict[str, list[float]] = {}
    last: dict[str, list[float]] = {}
    requests: dict[str, list[float]] = {}
    for _ in range(rounds):
        for baton in bench.batons:
            with fake_gcs_process(("bucket",)) as server:
                _delay(server, milliseconds)
                counts: dict[int, int] = {}
                files: dict[int, int] = {}
                until = _until(training, server, counts, files)
                trace = bench.run(_arm(bench, baton, workload, training, server), until)
                if trace is None:
                    continue
                seconds = [trace.commits[step] - trace.rows[step] for step in training.commits]
                within.setdefault(baton.label, []).extend(seconds[:-1])
                last.setdefault(baton.label, []).append(seconds[-1])
                steps = training.commits
                between = [counts[after] - counts[before] - files[after] for before, after in itertools.pairwise(steps)]
                requests.setdefault(baton.label, []).extend(map(float, between))
        with fake_gcs_process(("bucket",)) as server:
            _delay(server, milliseconds)
            trace = bench.run(_transfer(bench, workload, server))
            if trace is not None:
                transfers.append(trace.values["seconds"][-1])
    bench.add(group, f"the transfer itself, transfer_manager, {_FILES} files", transfers, unit="s")
    for baton in bench.batons:
        first = baton is bench.batons[0]
        goal = min(transfers) + _SECONDS_OVER_TRANSFER if first and transfers and milliseconds == 200 else None
        name = baton.name("until its entry is there")
        bench.add(group, f"{name}, while training goes on", within.get(baton.label, []), unit="s")
        bench.add(group, f"{name}, after the last step", last.get(baton.label, []), unit="s", goal=goal)
        # With those for curves and the record of the attempt. Those of the commit alone are counted by a test.
        name = baton.name("all requests from one entry to the next, besides the files")
        bench.add(group, name, requests.get(baton.label, []), unit="")


def _delay(server: RemoteFakeGcs, milliseconds: int) -> None:
    if milliseconds:
        server.set_faults(FaultPlan.on("", "slow", times=None, delay_seconds=milliseconds / 1000))


def _arm(bench: Bench, baton: Baton, workload: Workload, training: Training, server: RemoteFakeGcs) -> Arm:
    arm = bench.baton(baton, workload, training, prefect=False, storage="gs://bucket/bench")
    environment = {**arm.environment, "STORAGE_EMULATOR_HOST": server.url, "NO_GCE_CHECK": "true"}
    return Arm(name=f"{arm.name} on gs://", command=arm.command, folder=arm.folder, environment=environment)


def _until(training: Training, server: RemoteFakeGcs, counts: dict[int, int], files: dict[int, int]) -> Until:
    """Take the number of requests at each commit, and of its files in TensorFlow's format; stop at the last one."""

    def until(trace: Trace) -> bool:
        for step in trace.commits.keys() - counts.keys():
            state = server.state()
            counts[step] = sum(state["counts"].values())
            files[step] = sum(
                f"/checkpoints/{step:08}-" in name and "/ckpt." in name for name in state["objects"]["bucket"]
            )
        return training.steps in trace.commits

    return until


def _transfer(bench: Bench, workload: Workload, server: RemoteFakeGcs) -> Arm:
    command = peer_command(bench.peer_python, "upload", server.url, str(workload.bytes), str(_FILES))
    return Arm(name="the transfer itself", command=command, folder=bench.fresh())
