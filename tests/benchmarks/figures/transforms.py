"""Part l: examples a second with a transform, beside the same `map` in plain tf.data, and a seek."""

import shutil
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks.bench import Bench
from tests.benchmarks.environments import Baton
from tests.benchmarks.figures.others import bench_workload, measured
from tests.benchmarks.process import Arm, Until
from tests.benchmarks.workloads import Training, write_many_examples, write_run_file

_AUGMENT = Path(__file__).resolve().parents[1] / "workload" / "augment.py"
_SHARDS = 40
_PEERS = {"in memory": "plain tf.data in memory", "records": "interleave + shuffle(16000)"}
_SEEK_GOAL = 1.5


def transforms(bench: Bench, *, examples: int, seconds: float, rounds: int) -> None:
    """Examples a second of augmented, shuffled batches. Other checkouts may know no transforms, and are left out."""
    bench.say(f"transforms: {examples:,} examples")
    file = write_many_examples(bench.folder, examples)
    folder = bench.fresh()
    data = {"shard_examples": max(1, examples // _SHARDS), "transform": "augment.py:augment"}
    run_file = write_run_file(bench_workload(), Training(steps=1, rows=1), folder, file, data=data)
    shutil.copy(_AUGMENT, folder / _AUGMENT.name)
    ours = bench.batons[0]
    bench.run(_arm(bench, ours, run_file, "prepare", seconds))

    def arm(mode: str) -> Callable[[], tuple[Arm, Until | None]]:
        return lambda: (_arm(bench, ours, run_file, mode, seconds), None)

    traces = bench.in_turn({mode: arm(mode) for mode in ("ours", *_PEERS, "seek")}, rounds=rounds)
    group = f"Transforms: crop, flip and brightness of {examples:,} images of 32 x 32"
    rates = [found["ours"].value("examples/s") for found in traces if "ours" in found]
    bench.add(group, "Baton, examples a second", rates, unit="/s")
    for peer, label in _PEERS.items():
        pairs = [
            found["ours"].value("examples/s") / found[peer].value("examples/s")
            for found in traces
            if {"ours", peer} <= found.keys()
        ]
        bench.add(group, f"Baton over {label}, with the same map", pairs, at_least=True)
    seeks = [value for found in traces if "seek" in found for value in found["seek"].values["seek"]]
    bench.add(group, "Baton: first batch at step 1,000,000 over step 0", seeks, goal=_SEEK_GOAL)


def _arm(bench: Bench, baton: Baton, run_file: Path, mode: str, seconds: float) -> Arm:
    return measured(bench, baton, "transforms", str(run_file), mode, str(seconds))
