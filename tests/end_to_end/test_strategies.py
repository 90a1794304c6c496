"""The table: what is promised of each strategy, for each kind of model, however it begins and is cut."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.run_file import load_run_file
from tasks.foundation.contracts.run_spec import RunSpec
from tests.support.lab import ZOO, Lab, differing, in_fresh_process, keep_trainer, rows_of, spec_of
from tests.support.shipped_runs import run_file
from tests.support.worker_processes import free_addresses

pytestmark = pytest.mark.slow

BEGINNINGS = ("fresh", "warm")
CUT, STEPS = 2, 4
# Of weights and losses, over so few steps.
TOLERANCE = 1e-6
SHORT = [
    "data.validation_fraction=0",
    "checkpoint.keep_best=null",
    f"train.steps={STEPS}",
    "train.segment_steps=1000",
    "train.global_batch_size=16",
    "train.log_every_steps=3",  # a row across the cut
]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A line of the table.

    Always: the same initial state on every strategy; begun from nothing and from weights, cut and not, the same bytes.
    """

    settings: tuple[str, ...] = ()
    zoo: str | None = None
    init: dict[str, Any] = field(default_factory=dict)
    # What is known to depend on which examples share a replica; nothing: the same on all strategies, to TOLERANCE.
    depends_on: tuple[str, ...] = ()
    # What a run names as such, since it cannot see that this one divides by the replicas' number.
    named: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()

    def spec(self, name: str, run: str, accelerator: dict[str, Any], init: dict[str, Any]) -> RunSpec:
        if self.zoo is None:
            shipped = load_run_file(run_file(name), [*SHORT, *self.settings]).spec.model_dump()
            return RunSpec.model_validate({**shipped, "run": run, "accelerator": accelerator, "init": init})
        train = {"steps": STEPS, "global_batch_size": 16, "log_every_steps": 3}
        changes = {"model": self.zoo, "train": train, "accelerator": accelerator, "init": {**self.init, **init}}
        return spec_of("", run=run, data__validation_fraction=0, **changes)

    def code(self, name: str) -> Path:
        return run_file(name).parent if self.zoo is None else ZOO


MODELS = {
    "digits": Model(settings=("model.options.width=2",), depends_on=("batch_normalization", "dropout")),
    "text": Model(
        settings=(
            "data.options.path=.",  # its own code: short, and quickly found
            "data.options.length=8",
            "model.options.length=8",
            "model.options.width=8",
            "model.options.heads=2",
            "model.options.blocks=1",
        ),
        depends_on=("dropout", "clipnorm = 1.0 of optimizer"),
    ),
    "own_step": Model(zoo="shared_out.py:own_step", named=("train_step of OwnStep",)),
    "pretrained": Model(
        zoo="shared_out.py:pretrained",
        init={"weights": {"source": "pretraining.py:load", "exclude": "head"}, "freeze": ["first", "norm"]},
        frozen=("first/", "norm/"),
    ),
}
# Name to what the run file says. `multi_worker` is two processes, each with one replica.
STRATEGIES: dict[str, dict[str, Any]] = {
    "default": {"kind": "cpu"},
    "mirrored-2": {"kind": "cpu", "replicas": 2},
    "mirrored-4": {"kind": "cpu", "replicas": 4},
    "mirrored-8": {"kind": "cpu", "replicas": 8},
    "multi-worker-2": {"kind": "multi_worker"},
}


# Tracing a transformer for eight replicas takes half a minute, and three times: these are tried by `make chaos`.
LONG = {
    *(("text", strategy) for strategy in ("mirrored-4", "mirrored-8", "multi-worker-2")),
    *(("digits", strategy) for strategy in ("mirrored-4", "mirrored-8")),
}
CELLS = [
    (model, strategy)
    for strategy in STRATEGIES
    for model in MODELS
    if "BATON_TEST_WHOLE_TABLE" in os.environ or (model, strategy) not in LONG
]


def spec_for(folder: Path, model: str, beginning: str, strategy: str) -> RunSpec:
    """Of a cell's run; `warm` begins from the end of `fresh` on the same strategy."""
    init: dict[str, Any] = {}
    if beginning == "warm":
        init = {"weights": {"source": str(folder / "storage" / f"{model}-fresh-{strategy}"), "step": STEPS}}
    return MODELS[model].spec(model, f"{model}-{beginning}-{strategy}", STRATEGIES[strategy], init)


def lab_for(folder: Path, model: str) -> Lab:
    return Lab(folder, MODELS[model].code(model))


class Hosts:
    """What the chief has staged is known to the others through a file, as it otherwise is through the log."""

    def __init__(self, folder: Path, spec: RunSpec) -> None:
        from tasks.foundation.accelerator.strategy import acquire

        self.accelerator = acquire(spec.accelerator, None)
        self._file = folder / f"{spec.run}.json"

    def agreed(self, staged: CheckpointRef | None) -> CheckpointRef:
        if staged is not None:
            self._file.write_bytes(staged.to_json())
        self.accelerator.of_chief(0)  # has written it
        found = CheckpointRef.model_validate_json(self._file.read_bytes())
        self.accelerator.all_agree(True)  # all have read it
        return found


def cell(folder: Path, model: str, beginning: str, strategy: str) -> dict[str, Any]:
    """A run straight to the end, and its second half once more with nothing kept in memory; the first is committed."""
    from tasks.checkpoint_to_gcs.stage import checkpoint_to_gcs
    from tasks.foundation.model.batch_dependence import batch_dependent_parts
    from tasks.train_segment import stage
    from tasks.train_segment.stage import forget_trainer

    lab, spec = lab_for(folder, model), spec_for(folder, model, beginning, strategy)
    start = lab.begin(spec).tip
    assert start is not None
    hosts = Hosts(folder, spec)
    forget_trainer()
    straight = lab.train(spec, start, STEPS)
    keep_trainer()
    ways = [[straight]]
    if beginning == "fresh" or (model, strategy) not in LONG:
        first = lab.train(spec, start, CUT)
        at = hosts.agreed(first.staged)
        keep_trainer()
        forget_trainer()
        ways.append([first, lab.train(spec, at, STEPS)])
        keep_trainer()
    (trainer,) = stage._warm
    told: dict[str, Any] = {"depends_on": [each.part for each in batch_dependent_parts(trainer.state.model)]}
    if straight.staged is not None:  # by the chief
        ends = [way[-1].staged for way in ways]
        told |= {
            "differing": [differing(lab.tensors(spec, straight.staged), lab.tensors(spec, end)) for end in ends if end],
            "digests": [end.state_digest for end in ends if end],
            "rows": [[row.model_dump() for row in rows_of(way)] for way in ways],
        }
        checkpoint_to_gcs(lab.request(spec, start, STEPS), straight, storage=lab.storage, telemetry=lab.heard)
    hosts.accelerator.of_chief(0)  # has committed it
    return told


def on_strategy(folder: str, strategy: str, tf_config: str = "") -> dict[str, Any]:
    """A strategy's column, in one process of each host."""
    from tasks.init_or_restore import stage

    if tf_config:
        os.environ["TF_CONFIG"] = tf_config
    # Traces the step for a message that these models do not need: a third of the time.
    stage.require_train_step = lambda *_model, **_settings: None
    return {
        model: {beginning: cell(Path(folder), model, beginning, strategy) for beginning in BEGINNINGS}
        for model, on in CELLS
        if on == strategy
    }


def on_two_hosts(folder: str, strategy: str) -> dict[str, Any]:
    """As the chief tells it."""
    cluster = {"worker": free_addresses(2)}
    places = [json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}}) for index in range(2)]
    with ThreadPoolExecutor(2) as threads:
        hosts = [
            threads.submit(in_fresh_process, on_strategy, folder=folder, strategy=strategy, tf_config=place)
            for place in places
        ]
        chief, _other = [host.result() for host in hosts]
        return dict(chief)


def stored(folder: Path, model: str, beginning: str, strategy: str, step: int) -> dict[str, list[Any]]:
    """A committed checkpoint's variables by path; of those that each replica has for itself, all."""
    import tensorflow as tf

    lab, spec = lab_for(folder, model), spec_for(folder, model, beginning, strategy)
    (ref,) = [ref for ref in lab.log(spec).require_head().retained if ref.step == step]
    reader = tf.train.load_checkpoint(str(lab.folder(spec, ref) / "ckpt"))
    parts: dict[str, list[Any]] = {}
    for key in sorted(reader.get_variable_to_shape_map()):
        path = key.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE").partition("/replica_")[0]
        if path.startswith(("model/", "optimizer/", "metrics/")):
            parts.setdefault(path, []).append(reader.get_tensor(key))
    return parts


def weights(parts: dict[str, list[Any]]) -> dict[str, Any]:
    """Replica 0's."""
    return {path: each[0] for path, each in parts.items() if path.startswith("model/") and "seed" not in path}


def the_same(one: dict[str, Any], other: dict[str, Any], beginning: str = "") -> bool:
    """Bit-equal, as far as paths begin so."""
    paths = {path for path in one.keys() | other.keys() if path.startswith(beginning)}
    return bool(paths) and all(np.array_equal(one[path], other[path]) for path in paths)


def of_any_replica(parts: dict[str, list[Any]]) -> dict[str, Any]:
    """What is the same on all replicas, and has to be."""
    for path, each in parts.items():
        assert all(np.array_equal(each[0], part) for part in each), path
    return {path: each[0] for path, each in parts.items()}


def furthest(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(float(np.max(np.abs(one[path] - other[path]))) for path in one)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("table")


def test_every_cell_keeps_what_is_promised(folder: Path) -> None:
    told = {"default": in_fresh_process(on_strategy, folder=str(folder), strategy="default")}
    for strategy in ("mirrored-2", "mirrored-4", "mirrored-8"):
        told[strategy] = in_fresh_process(on_strategy, folder=str(folder), strategy=strategy)
    told["multi-worker-2"] = on_two_hosts(str(folder), "multi-worker-2")

    apart: dict[str, float] = {}
    for model, strategy in CELLS:
        for beginning in BEGINNINGS:
            assert_exact(told[strategy][model][beginning], f"{model}, {beginning}, {strategy}")
            says = MODELS[model].depends_on + MODELS[model].named
            assert_depends(told[strategy][model][beginning]["depends_on"], says)
            where = model, beginning, strategy
            starts = of_any_replica(stored(folder, *where, step=0))
            ends = stored(folder, *where, step=STEPS)
            assert not the_same(starts, {path: each[0] for path, each in ends.items()}, "model/")
            for frozen in MODELS[model].frozen:
                assert the_same(starts, of_any_replica(only(ends, f"model/{frozen}")), f"model/{frozen}"), where
            if beginning == "fresh":
                assert the_same(starts, of_any_replica(stored(folder, model, "fresh", "default", 0))), where
            else:
                before = stored(folder, model, "fresh", strategy, STEPS)
                assert the_same(weights({path: [each] for path, each in starts.items()}), weights(before)), where
                assert the_same(starts, of_any_replica(stored(folder, model, "fresh", strategy, 0)), "optimizer/")
            if not MODELS[model].depends_on:
                there = stored(folder, model, beginning, "default", STEPS)
                losses = [told[on][model][beginning]["rows"][0][0]["metrics"]["loss"] for on in (strategy, "default")]
                far = max(furthest(weights(ends), weights(there)), abs(losses[0] - losses[1]))
                apart[", ".join(where)] = far
    assert max(apart.values()) < TOLERANCE, apart


def only(parts: dict[str, list[Any]], beginning: str) -> dict[str, list[Any]]:
    return {path: each for path, each in parts.items() if path.startswith(beginning)}


def assert_exact(told: dict[str, Any], where: str) -> None:
    assert not any(told["differing"]), where
    assert len(set(told["digests"])) == 1, where
    assert all(rows == told["rows"][0] for rows in told["rows"]), where
    assert [row["step"] for row in told["rows"][0]] == [3], where


def assert_depends(parts: list[str], expected: tuple[str, ...]) -> None:
    """What the run would say aloud is what the table has."""
    assert bool(parts) == bool(expected)
    for name in expected:
        assert any(name in part for part in parts), parts
