"""From the command to the first step: after a kill, and cold; against a bare script (part d)."""

import shutil
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks.bench import Bench
from tests.benchmarks.environments import Baton, peer_command
from tests.benchmarks.process import Arm, Trace, Until
from tests.benchmarks.workloads import Training, Workload, peer_settings

_BARE, _BARE_PREFECT = "bare script", "importing TensorFlow, then an empty Prefect flow"
_WITHOUT, _RUNNING, _EMBEDDED = "Baton without Prefect", "baton run, running server", "baton run, embedded server"
GOALS = {_WITHOUT: 1.05, _RUNNING: 1.15, _EMBEDDED: 1.3}
COLD_GOAL = 1.0
_STEPS = 1_000_000


def starts_after_kill(bench: Bench, workload: Workload, *, rounds: int, apis: dict[str, str]) -> None:
    """From the command to the first new step of a run that was killed.

    Args:
        bench: the measurement.
        workload: what is trained.
        rounds: how often every arm runs.
        apis: for each checkout's label, the address of a running Prefect server.
    """
    bench.say(f"kill → first new step: {workload.name}")
    training = Training(steps=_STEPS, rows=1, commit_steps=10)
    bare = _saved_by_bare(bench, workload)
    homes = {baton.label: _killed(bench, baton, workload, training) for baton in bench.batons}
    arms: dict[str, Callable[[], tuple[Arm, Until | None]]] = {_BARE: lambda: (_bare(bench, workload, bare), _any_row)}
    for baton in bench.batons:
        for name, prefect, running in ((_WITHOUT, False, False), (_RUNNING, True, True), (_EMBEDDED, True, False)):
            api = apis.get(baton.label, "") if running else ""
            if running and not api:
                continue
            arms[baton.name(name)] = lambda baton=baton, prefect=prefect, api=api: (
                bench.baton_in(baton, _copy(bench, homes[baton.label]), prefect=prefect, api=api),
                _any_row,
            )
    traces = bench.in_turn(arms, rounds=rounds)
    group = f"Kill → first new step over a bare script's start: {workload.name}"
    _figures(bench, group, traces, goals=GOALS)
    for home in homes.values():
        shutil.rmtree(home, ignore_errors=True)


def cold_starts(bench: Bench, workload: Workload, *, rounds: int) -> None:
    """From the command to the first step of a new run."""
    bench.say(f"cold start: {workload.name}")
    training = Training(steps=_STEPS, rows=1)
    arms: dict[str, Callable[[], tuple[Arm, Until | None]]] = {
        _BARE: lambda: (_bare(bench, workload, None), _any_row),
        _BARE_PREFECT: lambda: (_bare(bench, workload, None, "--prefect"), _any_row),
    }
    for baton in bench.batons:
        for name, prefect in ((_WITHOUT, False), (_EMBEDDED, True)):
            arms[baton.name(name)] = lambda baton=baton, prefect=prefect: (
                bench.baton(baton, workload, training, prefect=prefect),
                _any_row,
            )
    traces = bench.in_turn(arms, rounds=rounds)
    group = f"Cold start → first step: {workload.name}"
    _figures(bench, f"{group}, over a bare script's", traces, goals={})
    for baton in bench.batons:
        name = baton.name(_EMBEDDED)
        pairs = [found[name].first_row / found[_BARE_PREFECT].first_row for found in traces if _both(found, name)]
        goal = COLD_GOAL if baton is bench.batons[0] else None
        bench.add(f"{group}, over TensorFlow's import and an empty Prefect flow in series", name, pairs, goal=goal)


def _both(found: dict[str, Trace], name: str) -> bool:
    return {name, _BARE_PREFECT} <= found.keys()


def _any_row(trace: Trace) -> bool:
    return bool(trace.rows)


def _figures(bench: Bench, group: str, traces: list[dict[str, Trace]], *, goals: dict[str, float]) -> None:
    seconds = [found[_BARE].first_row for found in traces if _BARE in found]
    bench.add(group, f"{_BARE}, seconds", seconds, unit="s")
    names = [_BARE_PREFECT]
    names += [baton.name(name) for baton in bench.batons for name in (_WITHOUT, _RUNNING, _EMBEDDED)]
    for name in names:
        ratios = [found[name].first_row / found[_BARE].first_row for found in traces if {name, _BARE} <= found.keys()]
        bench.add(group, name, ratios, goal=goals.get(name))


def _bare(bench: Bench, workload: Workload, checkpoints: Path | None, *words: str) -> Arm:
    folder = bench.fresh()
    training = Training(steps=_STEPS, rows=1)
    settings = peer_settings(
        workload, training, checkpoints or folder / "none", bench.examples(workload), threads=bench.threads
    )
    name = _BARE_PREFECT if words else _BARE
    command = peer_command(bench.peer_python, "bare_start", settings, *words)
    return Arm(name=name, command=command, folder=folder, environment=bench.batons[0].environment())


def _saved_by_bare(bench: Bench, workload: Workload) -> Path:
    """A folder with a checkpoint of the bare script."""
    folder = bench.fresh()
    training = Training(steps=1, rows=1, commit_steps=1)
    settings = peer_settings(workload, training, folder, bench.examples(workload), threads=bench.threads)
    Arm(name=_BARE, command=peer_command(bench.peer_python, "bare_start", settings), folder=folder).run()
    return folder


def _killed(bench: Bench, baton: Baton, workload: Workload, training: Training) -> Path:
    """A folder with a run that was killed two steps after its first commit."""
    arm = bench.baton(baton, workload, training, prefect=False)
    commit = training.commit_steps
    arm.run(lambda trace: commit in trace.commits and max(trace.rows, default=0) >= commit + 2)
    return arm.folder


def _copy(bench: Bench, home: Path) -> Path:
    folder = bench.fresh()
    shutil.copytree(home, folder, dirs_exist_ok=True)
    return folder
