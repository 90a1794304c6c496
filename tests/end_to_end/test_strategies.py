"""The table: what is promised of each strategy, for each kind of model, however it begins and is cut."""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lab import ZOO, Heard, Lab, built, differing, in_fresh_process, rows_of, spec_of
from processes import run_file
from workers import free_addresses

from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.dataset import DatasetRef
from tasks.foundation.contracts.run_file import load_run_file
from tasks.foundation.contracts.run_spec import RunSpec

pytestmark = pytest.mark.slow

CUT, STEPS = 2, 4
TOLERANCE = 1e-5
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
            "data.options.max_bytes=8000",
            "data.options.length=8",
            "model.options.length=8",
            "model.options.width=8",
            "model.options.heads=2",
            "model.options.blocks=1",
        ),
        depends_on=("dropout", "multi_head_attention", "clipnorm = 1.0 of optimizer"),
    ),
    "own_step": Model(zoo="shared_out.py:own_step"),
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
    """A run straight to the end, and once more in two, with nothing kept in memory; the straight one is committed."""
    from tasks.checkpoint_to_gcs.stage import checkpoint_to_gcs
    from tasks.train_segment.stage import forget_trainer

    lab, spec = lab_for(folder, model), spec_for(folder, model, beginning, strategy)
    start = lab.begin(spec).tip
    assert start is not None
    hosts = Hosts(folder, spec)
    forget_trainer()
    straight = lab.train(spec, start, STEPS)
    first = lab.train(spec, start, CUT)
    at = hosts.agreed(first.staged)
    forget_trainer()
    second = lab.train(spec, at, STEPS)
    told: dict[str, Any] = {"warnings": lab.heard.warnings}
    if hosts.accelerator.is_chief:
        ends = [lab.tensors(spec, result.staged) for result in (straight, second) if result.staged is not None]
        told |= {
            "differing": differing(*ends),
            "digests": [result.staged.state_digest for result in (straight, second) if result.staged is not None],
            "rows": [[row.model_dump() for row in rows_of(each)] for each in ([straight], [first, second])],
        }
        checkpoint_to_gcs(lab.request(spec, start, STEPS), straight, storage=lab.storage, telemetry=lab.heard)
    hosts.accelerator.of_chief(0)  # has committed it
    return told


def on_strategy(folder: str, strategy: str, tf_config: str = "") -> dict[str, Any]:
    """A strategy's column, in one process of each host."""
    if tf_config:
        os.environ["TF_CONFIG"] = tf_config
    return {
        model: {beginning: cell(Path(folder), model, beginning, strategy) for beginning in ("fresh", "warm")}
        for model in MODELS
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
        return dict([host.result() for host in hosts][0])


def stored(folder: Path, model: str, beginning: str, strategy: str, step: int) -> dict[str, Any]:
    """A committed checkpoint's variables by name, of those that each replica has for itself all, as [replicas, ...]."""
    import tensorflow as tf

    lab, spec = lab_for(folder, model), spec_for(folder, model, beginning, strategy)
    (ref,) = [ref for ref in lab.log(spec).require_head().retained if ref.step == step]
    reader = tf.train.load_checkpoint(str(lab.folder(spec, ref) / "ckpt"))
    parts: dict[str, list[Any]] = {}
    for key in sorted(reader.get_variable_to_shape_map()):
        name, _, replica = key.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE").partition("/replica_")
        if name.startswith(("model/", "optimizer/", "metrics/")):
            parts.setdefault(name, []).append(reader.get_tensor(key))
            assert not replica or len(parts[name]) <= 8
    return parts


def trained(parts: dict[str, Any]) -> dict[str, Any]:
    """Weights, as one array each."""
    return {name: values[0] for name, values in parts.items() if name.startswith("model/") and "seed" not in name}


def one_value(parts: dict[str, Any], name: str) -> bytes:
    """Of all replicas, which have the same one."""
    (value,) = {np.asarray(part).tobytes() for part in parts[name]}
    return value


def furthest(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(float(np.max(np.abs(one[name] - other[name]))) for name in one)


def test_every_strategy_keeps_what_is_promised_of_it(tmp_path: Path) -> None:
    folder = str(tmp_path)
    told = {"default": on_strategy(folder, "default")}
    for strategy in STRATEGIES:
        if strategy.startswith("mirrored"):
            told[strategy] = in_fresh_process(on_strategy, folder=folder, strategy=strategy)
    told["multi-worker-2"] = on_two_hosts(folder, "multi-worker-2")

    for model in MODELS:
        for strategy in STRATEGIES:
            for beginning in ("fresh", "warm"):
                where = f"{model}, {beginning}, {strategy}"
                assert_resumes_exactly(told[strategy][model][beginning], where)
            assert_begins_alike(tmp_path, model, strategy)
            assert_begins_from_weights(tmp_path, model, strategy)
