"""Steps a second without commits (part b): Baton over `fit`, Orbit and a loop by hand; and what each promise costs."""

from collections.abc import Callable

from tests.benchmarks.bench import Bench
from tests.benchmarks.figures.others import measured
from tests.benchmarks.process import Arm
from tests.benchmarks.turns import ratios
from tests.benchmarks.workloads import Workload, write_run_file

_OURS = "Baton without Prefect"  # what Prefect costs is in part a
_PEERS = ("plain loop", "fit", "Orbit")
_MANY = "fit, steps_per_execution"
# See `measured/promises.py`.
_PROMISES = {
    "deterministic kernels": "kernels",
    "a fixed order of sums": "sums",
    "a look at each loss": "loss",
    "the wait for batches": "waiting",
    "all four": "none",
}
_SMALL = 0.02  # seconds; steps_per_execution matters below


def speed(bench: Bench, workload: Workload, *, turns: int, rounds: int) -> None:
    """Measure one workload, with all arms in turn."""
    training, step = bench.endless(workload), bench.step_seconds(workload)
    bench.say(f"steps a second: {workload.name}, rows of {training.rows} steps")
    arms: dict[str, Callable[[], Arm]] = {}
    for baton in bench.batons:
        arms[baton.name(_OURS)] = lambda baton=baton: bench.baton(
            baton, workload, training, prefect=False, checkpoint={"every_seconds": None}
        )
    peers = list(_PEERS if bench.peers else _PEERS[:1])
    for name in peers:
        arms[name] = lambda name=name: bench.peer(name, workload, training)
    if step < _SMALL and bench.peers:
        peers.append(_MANY)
        words = ("--steps-per-execution", str(training.rows))
        arms[_MANY] = lambda: bench.peer("fit", workload, training, *words)
    found = bench.by_turns(arms, turns=turns, rounds=rounds)
    group = f"Steps a second: {workload.name}, {1000 * step:.1f} ms a step"
    for baton in bench.batons:
        ours, goal = baton.name(_OURS), 1.0 if baton is bench.batons[0] else None
        for peer in peers:
            bench.add(group, f"{ours} over {peer}", ratios(found, peer, ours), goal=goal, at_least=True)


def promises(bench: Bench, workload: Workload, *, turns: int, rounds: int) -> None:
    """Measure the steps of one workload without each promise, with all arms in turn."""
    training, baton = bench.endless(workload), bench.batons[0]
    bench.say(f"what promises cost: {workload.name}")

    def arm(promise: str) -> Arm:
        folder = bench.fresh()
        train = {"train": {"deterministic": False}} if promise in {"kernels", "none"} else {}
        keys = {"checkpoint": {"every_seconds": None}, **train}
        write_run_file(workload, training, folder, bench.examples(workload), **keys)
        return measured(bench, baton, "promises", promise, str(folder / "run.yaml"), folder=folder)

    arms = {promise: lambda promise=promise: arm(promise) for promise in ("all", *_PROMISES.values())}
    found = bench.by_turns(arms, turns=turns, rounds=rounds)
    for words, promise in _PROMISES.items():
        group = f"What promises cost: {workload.name}"
        bench.add(group, f"a step, over one without {words}", ratios(found, "all", promise))
