"""Every key of the run file, and what a change of it means for a run that has begun.

Identity keys decide what the log records of the run (identity.py): a change is refused, or accepted by name and logged.
Operational keys change freely. The environment is recorded too; a change of it is said and logged.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic.fields import FieldInfo

from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.run_spec import RunSpec


@dataclass(frozen=True, slots=True)
class Key:
    """What a change of one key of the run file means.

    Attributes:
        kind: its class.
        why: of that class, in a few words.
        decides: for an identity key, the recorded keys that it decides, alone or with others.
    """

    kind: Literal["identity", "operational", "environment"]
    why: str
    decides: tuple[str, ...] = ()


_EXAMPLES = ("data.content_digest",)
_COMPILED = ("compile.optimizer", "compile.loss", "compile.metrics", "compile.other")
_MODEL = ("model.config", "model.code", "model.signature", *_COMPILED)
_AIM = "says how far and in which pieces, not what is computed"
_RETENTION = "says what is kept, not what is computed"
_ANSWER = "says when work stops and is kept, not what is computed"
_REWIND = "a rewind is an entry of the log, and the run a function of that"
_ACT = "where there are train.callbacks, part of these: they act then"
_PLACE = "says where a stage runs, not what it does"
_THREADS = "other thread counts give other bits; left out, those that the run began with are set again anywhere"

KEYS: Mapping[str, Key] = {
    "run": Key("operational", "says where the run is; another name is another run"),
    "storage": Key("operational", "says where the run is; its folder may be moved"),
    "data.source": Key("identity", "other examples", _EXAMPLES),
    "data.options": Key("identity", "other examples, where the option changes them", _EXAMPLES),
    "data.version": Key("identity", "the source is read again, and may give other examples", _EXAMPLES),
    "data.validation_fraction": Key("identity", "other examples are held out", _EXAMPLES),
    "data.classes": Key("operational", "a check of the examples, which changes none"),
    "data.allow_nan": Key("operational", "a check of the examples, which changes none"),
    "data.batched": Key("operational", "says how the examples are meant, which changes none"),
    "data.shard_examples": Key("identity", "other shards, and so another order", _EXAMPLES),
    "data.window_shards": Key("identity", "another order", ("data.window_shards",)),
    "model.build": Key("identity", "another model; the name of the function may change", _MODEL),
    "model.options": Key("identity", "another model", ("model.options", *_MODEL)),
    "train.steps": Key("operational", _AIM),
    "train.segment_steps": Key("operational", _AIM),
    "train.segment_seconds": Key("operational", _AIM),
    "train.global_batch_size": Key("identity", "other batches", ("train.global_batch_size",)),
    "train.log_every_steps": Key("operational", f"says when metrics are read, not what is trained; {_ACT}"),
    "train.seed": Key(
        "identity", "other weights, split, order and dropout", ("train.seed", "data.content_digest")
    ),
    "train.deterministic": Key("environment", "operations that are not deterministic give other bits each time"),
    "train.stop_after_seconds": Key("operational", _ANSWER),
    "train.on_blowup": Key("operational", _REWIND),
    "train.blowup_factor": Key("operational", _REWIND),
    "train.rewind_skip_batches": Key("operational", _REWIND),
    "train.rewind_tries": Key("operational", _REWIND),
    "train.accumulate": Key("identity", "gradients are summed in another order", ("train.accumulate",)),
    "train.precision": Key("identity", "another arithmetic", ("train.precision", "model.config")),
    "train.class_weight": Key("identity", "another loss", ("train.class_weight",)),
    "train.callbacks": Key("identity", "other callbacks, which may change the learning rate", ("train.callbacks",)),
    "init.weights": Key("identity", "other initial weights", ("init.weights",)),
    "init.freeze": Key("identity", "other variables are trained", ("init.freeze", "model.config", "model.signature")),
    "accelerator.kind": Key("environment", "other devices may give other bits"),
    "accelerator.replicas": Key("environment", "the same global batches, cut otherwise: equal to float tolerance"),
    "accelerator.tpu": Key("environment", "other devices may give other bits"),
    "accelerator.zone": Key("environment", "says where the devices are"),
    "accelerator.project": Key("environment", "says where the devices are"),
    "accelerator.intra_op_threads": Key("environment", _THREADS),
    "accelerator.inter_op_threads": Key("environment", _THREADS),
    "checkpoint.keep_last": Key("operational", _RETENTION),
    "checkpoint.keep_every_steps": Key("operational", _RETENTION),
    "checkpoint.keep_best": Key("operational", _RETENTION),
    "checkpoint.every_seconds": Key("operational", _ANSWER),
    "evaluate.every_steps": Key("operational", f"says when validation is looked at, not what is trained; {_ACT}"),
    "stop.grace_seconds": Key("operational", _ANSWER),
    "stop.answer_seconds": Key("operational", _ANSWER),
    "stop.attempts_without_progress": Key("operational", _ANSWER),
    "stages.prepare_data.deployment": Key("operational", _PLACE),
    "stages.prepare_data.code_folder": Key("operational", _PLACE),
    "stages.init_or_restore.deployment": Key("operational", _PLACE),
    "stages.init_or_restore.code_folder": Key("operational", _PLACE),
    "stages.train_segment.deployment": Key("operational", _PLACE),
    "stages.train_segment.code_folder": Key("operational", _PLACE),
    "stages.checkpoint_to_gcs.deployment": Key("operational", _PLACE),
    "stages.checkpoint_to_gcs.code_folder": Key("operational", _PLACE),
    "stages.evaluate.deployment": Key("operational", _PLACE),
    "stages.evaluate.code_folder": Key("operational", _PLACE),
    "stages.evaluate.accelerator": Key("operational", "other devices may give other bits of metrics only"),
}  # fmt: skip


def leaves(contract: type[Contract] = RunSpec, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key of the run file that holds a value, in its order, with what pydantic knows of it."""
    for name, field in contract.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Contract):
            yield from leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field
