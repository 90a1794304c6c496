"""Figures of the commands that one types many times a day (part m): seconds, and beside what they import at least."""

from collections.abc import Callable

from tests.benchmarks.bench import Bench
from tests.benchmarks.environments import Baton
from tests.benchmarks.process import Arm, Until
from tests.benchmarks.workloads import Training, Workload

_HELP_SECONDS = 0.4
_RUN_SECONDS = 0.8
_IMPORTS = "python -c 'import typer, rich, pydantic'"
_GROUP = "Commands: from the start of the process to its end"
_VERBS = ("status", "list", "log")


def commands(bench: Bench, workload: Workload, *, rounds: int) -> None:
    """`baton --help`, and `status`, `list` and `log` of a run, in turn with an interpreter that imports three packages.

    Args:
        bench: the measurement.
        workload: of the run.
        rounds: how often each command runs.
    """
    bench.say("commands")
    homes = {}
    for baton in bench.batons:
        run = bench.baton(baton, workload, Training(steps=8, rows=1, commit_steps=2), prefect=False)
        if bench.run(run, keep=True) is None:
            return
        homes[baton.label] = str(run.folder / "run.yaml")

    def command(baton: Baton, name: str, *words: str) -> Callable[[], tuple[Arm, Until | None]]:
        return lambda: (
            Arm(name=name, command=(baton.python, *words), folder=bench.fresh(), environment=baton.environment()),
            None,
        )

    arms = {_IMPORTS: command(bench.batons[0], _IMPORTS, "-c", "import typer, rich, pydantic")}
    goals: dict[str, float] = {}
    for baton in bench.batons:
        typed = {"--help": ("--help",), **{verb: (verb, homes[baton.label]) for verb in _VERBS}}
        for verb, words in typed.items():
            name = baton.name(f"baton {verb}")
            arms[name] = command(baton, name, "-m", "baton.flows.commands.main", *words)
            goals[name] = _HELP_SECONDS if verb == "--help" else _RUN_SECONDS
    traces = bench.in_turn(arms, rounds=rounds)
    seconds = {name: [found[name].ended for found in traces if name in found] for name in arms}
    bench.add(_GROUP, _IMPORTS, seconds[_IMPORTS], unit="s")
    for name, goal in goals.items():
        bench.add(_GROUP, name, seconds[name], unit="s", goal=goal)
        pairs = [found[name].ended / found[_IMPORTS].ended for found in traces if {name, _IMPORTS} <= found.keys()]
        bench.add(_GROUP, f"{name} over the imports", pairs)
