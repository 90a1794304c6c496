"""Figures of one process each: input (part c), transfers (e), the head of a log (g), train states in memory (k)."""

import json
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks.bench import Bench
from tests.benchmarks.environments import Baton
from tests.benchmarks.process import Arm, Trace, Until
from tests.benchmarks.workloads import Training, Workload, write_many_examples, write_run_file

_MEASURED = Path(__file__).resolve().parents[1] / "measured"
_SHARDS = 40
_BATCH = 128


def measured(bench: Bench, baton: Baton, script: str, *words: str, folder: Path | None = None) -> Arm:
    """The arm of a script in `measured/`, with the packages of a checkout of Baton."""
    command = baton.script(_MEASURED / f"{script}.py", *words)
    return Arm(
        name=baton.name(script), command=command, folder=folder or bench.fresh(), environment=baton.environment()
    )


def input_pipeline(bench: Bench, *, examples: int, seconds: float, rounds: int) -> None:
    """Examples a second of shuffled batches, and a seek."""
    bench.say(f"input: {examples:,} examples")
    file = write_many_examples(bench.folder, examples)
    prepared = bench.fresh()
    training = Training(steps=1, rows=1)
    data = {"shard_examples": max(1, examples // _SHARDS)}
    run_file = write_run_file(bench_workload(), training, prepared, file, data=data)
    words = json.dumps(str(run_file)).strip('"'), str(seconds)
    bench.run(measured(bench, bench.batons[0], "input", words[0], "prepare", words[1]))
    modes = ("ours", "interleave", "raw", "seek")

    def arm(baton: Baton, mode: str) -> Callable[[], tuple[Arm, Until | None]]:
        return lambda: (measured(bench, baton, "input", words[0], mode, words[1]), None)

    arms = {
        baton.name(mode): arm(baton, mode)
        for baton in bench.batons
        for mode in modes
        if baton is bench.batons[0] or mode in {"ours", "seek"}
    }
    traces = bench.in_turn(arms, rounds=rounds)
    group = f"Input: shuffled batches of {_BATCH} from {examples:,} examples of 1 kB in {_SHARDS} shards"
    for baton in bench.batons:
        ours = baton.name("ours")
        bench.add(group, f"{baton.name('Baton')}, examples a second", _values(traces, ours, "examples/s"), unit="/s")
        for peer, label in (("interleave", "interleave + shuffle(16000)"), ("raw", "reading the raw records")):
            pairs = [
                found[ours].value("examples/s") / found[peer].value("examples/s")
                for found in traces
                if {ours, peer} <= found.keys()
            ]
            bench.add(group, f"{baton.name('Baton')} over {label}", pairs, at_least=True)
        seek = baton.name("seek")
        bench.add(
            group, f"{baton.name('Baton')}: first batch at step 1,000,000 over step 0", _values(traces, seek, "seek")
        )


def bench_workload() -> Workload:
    """Batches of the input benchmark; the model is never built."""
    return Workload(name="examples", build="perceptron", batch=_BATCH, bytes=0)


def transfers(bench: Bench, *, files: int, megabytes: int, rounds: int) -> None:
    """Uploads and downloads side by side against transfer_manager."""
    bench.say("transfers on gs://")
    words = ("--rounds", str(rounds), "--files", str(files), "--megabytes", str(megabytes))
    for baton in bench.batons:
        trace = bench.run(measured(bench, baton, "transfers", *words))
        group = (
            f"Transfers of {files} files of {megabytes} MB on a fake gs://: seconds of transfer_manager over Baton's"
        )
        for direction in ("upload", "download") if trace is not None else ():
            bench.add(group, baton.name(direction), trace.values[direction], goal=1.0, at_least=True)


def head(bench: Bench, *, entries: int, rounds: int) -> None:
    """Finding the head of a short and a long log."""
    bench.say("the head of a log on gs://")
    for baton in bench.batons:
        trace = bench.run(measured(bench, baton, "head", "--rounds", str(10 * rounds), "--entries", str(entries)))
        for name, values in trace.values.items() if trace is not None else ():
            requests = "requests" in name
            goal = None if requests else 1.2
            bench.add(
                f"Head of a log of {entries:,} entries on gs://",
                baton.name(name),
                values,
                unit="" if requests else "x",
                goal=goal,
            )


def train_states(bench: Bench, workload: Workload) -> None:
    """Copies of the train state in a process that trains and evaluates."""
    bench.say("train states in memory")
    for baton in bench.batons:
        arm = bench.baton(
            baton,
            workload,
            Training(steps=6, rows=1, commit_steps=2),
            prefect=False,
            data={"validation_fraction": 0.1},
            evaluate={"every_steps": 2},
        )
        words = str(arm.folder / "run.yaml")
        trace = bench.run(measured(bench, baton, "train_states", words, folder=arm.folder))
        for name, values in trace.values.items() if trace is not None else ():
            goal = 1.05 if baton is bench.batons[0] else None
            bench.add(f"Train states in memory, as variables: {workload.name}", baton.name(name), values, goal=goal)


def _values(traces: list[dict[str, Trace]], arm: str, name: str) -> list[float]:
    return [found[arm].value(name) for found in traces if arm in found]
