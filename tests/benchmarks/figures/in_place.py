"""Part o: Parquet files that stay in place, over pyarrow alone and over Hugging Face's datasets; seeks and memory."""

from tests.benchmarks.bench import Bench
from tests.benchmarks.figures.others import bench_workload, measured
from tests.benchmarks.process import Arm
from tests.benchmarks.workloads import Training, write_run_file

_GROUPS = 20
# Smaller batches measure how fast TensorFlow hands batches over, which is 40 microseconds for constants.
_TABLE_BATCH = 1_024
_IMAGES = 50  # as many numbers as one image
_CASES = {
    "100 columns of float32": {"x": [f"c{number:02}" for number in range(100)], "stack": True},
    "JPEG files of 224 x 224": {"x": "image", "size": [224, 224]},
}


def in_place(bench: Bench, *, examples: int, seconds: float, rounds: int) -> None:
    """Examples a second of shuffled batches, and a seek."""
    ours = bench.batons[0]
    for case, options in _CASES.items():
        count = max(2 * _GROUPS, examples // (_IMAGES if "size" in options else 1))
        bench.say(f"in place: {count:,} rows, {case}")
        folder = bench.fresh()
        data = {
            "source": "table",
            "options": {"path": str(folder / "rows.parquet"), "y": "label", **options},
            "shard_examples": max(1, count // _GROUPS),
        }
        of_tables = {} if "size" in options else {"train": {"global_batch_size": min(_TABLE_BATCH, count // 2)}}
        run_file = write_run_file(bench_workload(), Training(steps=1, rows=1), folder, folder, data=data, **of_tables)

        def arm(mode: str, *words: str, run_file: str = str(run_file)) -> Arm:
            return measured(bench, ours, "in_place", run_file, mode, str(seconds), *words)

        bench.run(arm("write", str(count), str(_GROUPS)))
        bench.run(arm("prepare"))
        modes = ("ours", "raw", "seek", "memory", *(("hf",) if bench.peers and "stack" in options else ()))
        traces = bench.in_turn({mode: lambda mode=mode: (arm(mode), None) for mode in modes}, rounds=rounds)
        group = f"Parquet in place: {count:,} rows in {_GROUPS} row groups, {case}"
        values = {
            (mode, name): [value for found in traces if mode in found for value in found[mode].values[name]]
            for mode, name in (("ours", "examples/s"), ("raw", "over raw"), ("seek", "seek"), ("memory", "memory"))
        }
        decoding = ", both with decoding" if "size" in options else ""
        bench.add(group, "Baton, examples a second", values["ours", "examples/s"], unit="/s")
        bench.add(
            group,
            f"Baton over pyarrow reading the same row groups{decoding}",
            values["raw", "over raw"],
            goal=0.9,
            at_least=True,
        )
        pairs = [
            found["ours"].value("examples/s") / found["hf"].value("examples/s")
            for found in traces
            if {"ours", "hf"} <= found.keys()
        ]
        bench.add(group, "Baton over to_tf_dataset + shuffle(16000)", pairs, goal=1.0, at_least=True)
        bench.add(group, "Baton: first batch at step 1,000,000 over step 0", values["seek", "seek"], goal=1.5)
        bench.add(group, "Baton: memory for reading over two windows", values["memory", "memory"])
