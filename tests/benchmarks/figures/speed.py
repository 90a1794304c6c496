"""Steps a second without commits (part b): Baton over `fit`, Orbit and a loop by hand; and what each promise costs."""

from collections.abc import Callable

from tests.benchmarks.bench import Bench
from tests.benchmarks.figures.others import measured
from tests.benchmarks.process import Arm, Trace, Until, until_step
from tests.benchmarks.workloads import Workload, write_run_file

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


def speed(bench: Bench, workload: Workload, *, seconds: float, rounds: int) -> None:
    """Measure one workload for `seconds` an arm."""
    training = bench.training(workload, seconds=seconds)
    step = bench.step_seconds(workload)
    bench.say(f"steps a second: {workload.name}, {training.steps} steps")
    last = until_step(training.steps)
    arms: dict[str, Callable[[], tuple[Arm, Until | None]]] = {}
    for baton in bench.batons:
        for kind, prefect in (("Baton without Prefect", False), ("baton run", True)):
            arms[baton.name(kind)] = lambda baton=baton, prefect=prefect: (
                bench.baton(baton, workload, training, prefect=prefect),
                last,
            )
    peers = list(_PEERS if bench.peers else _PEERS[:1])
    for name in peers:
        arms[name] = lambda name=name: (bench.peer(name, workload, training), last)
    if step < _SMALL and bench.peers:
        peers.append(_MANY)
        words = ("--steps-per-execution", str(training.rows))
        arms[_MANY] = lambda: (bench.peer("fit", workload, training, *words), last)
    traces = bench.in_turn(arms, rounds=rounds)
    group = f"Steps a second: {workload.name}, {1000 * step:.1f} ms a step"
    for baton in bench.batons:
        for kind in ("Baton without Prefect", "baton run"):
            ours = baton.name(kind)
            for peer in peers:
                ratios = [
                    _steady(found[peer]) / _steady(found[ours]) for found in traces if {peer, ours} <= found.keys()
                ]
                goal = 1.0 if baton is bench.batons[0] and kind == "Baton without Prefect" else None
                bench.add(group, f"{ours} over {peer}", ratios, goal=goal, at_least=True)


def promises(bench: Bench, workload: Workload, *, seconds: float, rounds: int) -> None:
    """Measure the steps of one workload without each promise in turn, for `seconds` an arm."""
    training, baton = bench.training(workload, seconds=seconds), bench.batons[0]
    bench.say(f"what promises cost: {workload.name}")

    def arm(promise: str) -> Arm:
        folder = bench.fresh()
        train = {"train": {"deterministic": False}} if promise in {"kernels", "none"} else {}
        write_run_file(workload, training, folder, bench.examples(workload), **train)
        return measured(bench, baton, "promises", promise, str(folder / "run.yaml"), folder=folder)

    last = until_step(training.steps)
    arms: dict[str, Callable[[], tuple[Arm, Until | None]]] = {
        promise: lambda promise=promise: (arm(promise), last) for promise in ("all", *_PROMISES.values())
    }
    traces = bench.in_turn(arms, rounds=rounds)
    for words, promise in _PROMISES.items():
        ratios = [
            _steady(found["all"]) / _steady(found[promise]) for found in traces if {"all", promise} <= found.keys()
        ]
        bench.add(f"What promises cost: {workload.name}", f"a step, over one without {words}", ratios)


def _steady(trace: Trace) -> float:
    """Seconds from the first row to the last one; the first row has the tracing behind it."""
    return trace.to_last_step
