"""Part l: examples a second with a transform, beside the same `map` in plain tf.data, a mixture, and seeks."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.benchmarks.bench import Bench
from tests.benchmarks.environments import Baton
from tests.benchmarks.figures.others import bench_workload, measured
from tests.benchmarks.process import Arm, Until
from tests.benchmarks.workloads import Training, write_many_examples, write_run_file

_AUGMENT = Path(__file__).resolve().parents[1] / "workload" / "augment.py"
_SHARDS = 40
_PEERS = {"in memory": "plain tf.data in memory", "records": "interleave + shuffle(16000)"}
_MIXTURE, _MIXTURE_SEEK = "mixture", "mixture seek"
_SEEK_GOAL = 1.5


def transforms(bench: Bench, *, examples: int, seconds: float, rounds: int) -> None:
    """Examples a second of augmented, shuffled batches. Other checkouts may know no transforms, and are left out."""
    bench.say(f"transforms: {examples:,} examples")
    file = write_many_examples(bench.folder, examples)
    folder = bench.fresh()
    data = {"shard_examples": max(1, examples // _SHARDS), "transform": "augment.py:augment"}
    run_file = write_run_file(bench_workload(), Training(steps=1, rows=1), folder, file, data=data)
    shutil.copy(_AUGMENT, folder / _AUGMENT.name)
    mixed_file = _write_mixture(
        bench, file, write_many_examples(bench.folder, examples // 4, name="more", seed=1), data
    )
    ours = bench.batons[0]
    for each in (run_file, mixed_file):
        bench.run(_arm(bench, ours, each, "prepare", seconds))

    def arm(mode: str, of: Path = run_file) -> Callable[[], tuple[Arm, Until | None]]:
        return lambda: (_arm(bench, ours, of, mode, seconds), None)

    arms = {mode: arm(mode) for mode in ("ours", *_PEERS, "seek")}
    mixed = {_MIXTURE: arm("ours", mixed_file), _MIXTURE_SEEK: arm("seek", mixed_file)}
    traces = bench.in_turn(arms | mixed, rounds=rounds)
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
    pairs = [
        found[_MIXTURE].value("examples/s") / found["ours"].value("examples/s")
        for found in traces
        if {"ours", _MIXTURE} <= found.keys()
    ]
    bench.add(group, "Baton: a mixture of two sources over one source", pairs, at_least=True)
    for seek, label in (("seek", "first batch"), (_MIXTURE_SEEK, "first batch of a mixture")):
        seeks = [value for found in traces if seek in found for value in found[seek].values["seek"]]
        bench.add(group, f"Baton: {label} at step 1,000,000 over step 0", seeks, goal=_SEEK_GOAL)


def _write_mixture(bench: Bench, file: Path, more: Path, data: Mapping[str, Any]) -> Path:
    """Write a run file that mixes two sources, three to one, with the same transform."""
    folder = bench.fresh()
    sources = [
        {"source": "npz", "options": {"path": str(path), "x": "x", "y": "y"}, "weight": weight}
        for path, weight in ((file, 3), (more, 1))
    ]
    mixture = {**data, "source": "", "options": {}, "sources": sources}
    run_file = write_run_file(bench_workload(), Training(steps=1, rows=1), folder, file, data=mixture)
    shutil.copy(_AUGMENT, folder / _AUGMENT.name)
    return run_file


def _arm(bench: Bench, baton: Baton, run_file: Path, mode: str, seconds: float) -> Arm:
    return measured(bench, baton, "transforms", str(run_file), mode, str(seconds))
