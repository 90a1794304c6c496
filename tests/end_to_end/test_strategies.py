"""What each distribution strategy promises, for each kind of model, fresh or warm started, straight or cut."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.contracts.stage_calls import CheckpointToGcsCall
from tests.support.lab import ZOO, Lab, differing, in_fresh_process, keep_trainer, rows_of, spec_of
from tests.support.shipped_runs import run_file
from tests.support.worker_processes import free_addresses

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

BEGINNINGS = ("fresh", "warm")
CUT, STEPS = 2, 4
# For weights and losses over these few steps.
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
    """A row of the table.

    For every model: the same initial state on all strategies, and the same bytes straight and cut.
    """

    settings: tuple[str, ...] = ()
    zoo: str | None = None
    init: dict[str, Any] = field(default_factory=dict)
    # Parts that depend on which examples share a replica. None: equal on all strategies, to TOLERANCE.
    depends_on: tuple[str, ...] = ()
    # Parts that a run reports although they do not depend on this.
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
# The accelerator section of the run file. `multi_worker` is two processes with one replica each.
STRATEGIES: dict[str, dict[str, Any]] = {
    "default": {"kind": "cpu"},
    "mirrored-2": {"kind": "cpu", "replicas": 2},
    "mirrored-4": {"kind": "cpu", "replicas": 4},
    "mirrored-8": {"kind": "cpu", "replicas": 8},
    "multi-worker-2": {"kind": "multi_worker"},
}


# Only `make chaos` tries these. Tracing a transformer for eight replicas takes half a minute, three times.
LONG = {
    *(("text", strategy) for strategy in ("mirrored-4", "multi-worker-2")),
    ("digits", "mirrored-4"),
    *((model, "mirrored-8") for model in MODELS),
}
CELLS = [
    (model, strategy)
    for strategy in STRATEGIES
    for model in MODELS
    if "BATON_TEST_WHOLE_TABLE" in os.environ or (model, strategy) not in LONG
]


def spec_for(folder: Path, model: str, beginning: str, strategy: str) -> RunSpec:
    """The run file of a cell; `warm` starts from the end of `fresh` on the same strategy."""
    init: dict[str, Any] = {}
    if beginning == "warm":
        init = {"weights": {"source": str(folder / "storage" / f"{model}-fresh-{strategy}"), "step": STEPS}}
    return MODELS[model].spec(model, f"{model}-{beginning}-{strategy}", STRATEGIES[strategy], init)


def lab_for(folder: Path, model: str) -> Lab:
    return Lab(folder, MODELS[model].code(model))


class Hosts:
    """Passes the chief's staged checkpoint to the other hosts, through a file instead of the log."""

    def __init__(self, folder: Path, spec: RunSpec) -> None:
        from baton.tasks.foundation.machine.devices import acquire

        self.accelerator = acquire(spec.accelerator, None)
        self._file = folder / f"{spec.run}.json"

    def agreed(self, staged: CheckpointRef | None) -> CheckpointRef:
        if staged is not None:
            self._file.write_bytes(staged.to_json())
        self.accelerator.broadcast_from_chief(0)  # the chief has written it
        found = CheckpointRef.model_validate_json(self._file.read_bytes())
        self.accelerator.all_agree(True)  # all hosts have read it
        return found


def cell(folder: Path, model: str, beginning: str, strategy: str) -> dict[str, Any]:
    """Train straight, then cut in two without a warm trainer; commit the first."""
    from baton.tasks.checkpoint_to_gcs.stage import checkpoint_to_gcs
    from baton.tasks.foundation.state.warm_state import PROCESS_STATE
    from baton.tasks.init_or_restore.model_requirements import batch_dependent_parts

    lab, spec = lab_for(folder, model), spec_for(folder, model, beginning, strategy)
    start = lab.begin(spec).tip
    assert start is not None
    hosts = Hosts(folder, spec)
    PROCESS_STATE.forget()
    straight = lab.train(spec, start, STEPS)
    keep_trainer()
    trainings = [[straight]]
    # A warm start is cut on one strategy: the cut itself does not depend on where the weights come from.
    if beginning == "fresh" or strategy == "mirrored-2":
        first = lab.train(spec, start, CUT)
        at = hosts.agreed(first.staged)
        keep_trainer()
        PROCESS_STATE.forget()
        trainings.append([first, lab.train(spec, at, STEPS)])
        keep_trainer()
    warm = PROCESS_STATE.kept
    assert warm is not None
    results: dict[str, Any] = {"depends_on": [each.part for each in batch_dependent_parts(warm.state.model)]}
    if straight.staged is not None:  # on the chief
        ends = [segments[-1].staged for segments in trainings]
        results |= {
            "differing": [differing(lab.tensors(spec, straight.staged), lab.tensors(spec, end)) for end in ends if end],
            "digests": [end.state_digest for end in ends if end],
            "rows": [[row.model_dump() for row in rows_of(segments)] for segments in trainings],
        }
        checkpoint_to_gcs(CheckpointToGcsCall.of(lab.request(spec, start, STEPS), straight), lab.place(spec))
    hosts.accelerator.broadcast_from_chief(0)  # the chief has committed it
    return results


def on_strategy(folder: str, strategy: str, tf_config: str = "") -> dict[str, Any]:
    """Run all cells of a strategy, in one process for each host."""
    from baton.tasks.init_or_restore import model_requirements

    if tf_config:
        os.environ["TF_CONFIG"] = tf_config
    # This check takes a third of the time, and these models never fail it.
    model_requirements.require_train_step = lambda *_model, **_settings: None
    return {
        model: {beginning: cell(Path(folder), model, beginning, strategy) for beginning in BEGINNINGS}
        for model, on in CELLS
        if on == strategy
    }


def on_two_hosts(folder: str, strategy: str) -> dict[str, Any]:
    """Run all cells on two hosts; returns the chief's result."""
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
    """The variables of a committed checkpoint by path, with one value for each replica that has its own."""
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
    """The weights of replica 0."""
    return {path: each[0] for path, each in parts.items() if path.startswith("model/") and "seed" not in path}


def the_same(one: dict[str, Any], other: dict[str, Any], beginning: str = "") -> bool:
    """Whether all variables whose paths start with `beginning` are bit-equal."""
    paths = {path for path in one.keys() | other.keys() if path.startswith(beginning)}
    return bool(paths) and all(np.array_equal(one[path], other[path]) for path in paths)


def of_any_replica(parts: dict[str, list[Any]]) -> dict[str, Any]:
    """The variables, which must be equal on all replicas."""
    for path, each in parts.items():
        assert all(np.array_equal(each[0], part) for part in each), path
    return {path: each[0] for path, each in parts.items()}


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(float(np.max(np.abs(one[path] - other[path]))) for path in one)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("table")


def test_every_model_on_every_strategy(folder: Path) -> None:
    results = {"default": in_fresh_process(on_strategy, folder=str(folder), strategy="default")}
    for strategy in dict.fromkeys(strategy for _, strategy in CELLS if strategy.startswith("mirrored")):
        results[strategy] = in_fresh_process(on_strategy, folder=str(folder), strategy=strategy)
    results["multi-worker-2"] = on_two_hosts(str(folder), "multi-worker-2")

    apart: dict[str, float] = {}
    for model, strategy in CELLS:
        for beginning in BEGINNINGS:
            assert_exact(results[strategy][model][beginning], f"{model}, {beginning}, {strategy}")
            expected = MODELS[model].depends_on + MODELS[model].named
            assert_depends(results[strategy][model][beginning]["depends_on"], expected)
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
                losses = [
                    results[on][model][beginning]["rows"][0][0]["metrics"]["loss"] for on in (strategy, "default")
                ]
                far = max(largest_difference(weights(ends), weights(there)), abs(losses[0] - losses[1]))
                apart[", ".join(where)] = far
    assert max(apart.values()) < TOLERANCE, apart


def only(parts: dict[str, list[Any]], beginning: str) -> dict[str, list[Any]]:
    return {path: each for path, each in parts.items() if path.startswith(beginning)}


def assert_exact(results: dict[str, Any], where: str) -> None:
    assert not any(results["differing"]), where
    assert len(set(results["digests"])) == 1, where
    assert all(rows == results["rows"][0] for rows in results["rows"]), where
    assert [row["step"] for row in results["rows"][0]] == [3], where


def assert_depends(parts: list[str], expected: tuple[str, ...]) -> None:
    """Assert that the reported parts are those of the table."""
    assert bool(parts) == bool(expected)
    for name in expected:
        assert any(name in part for part in parts), parts
