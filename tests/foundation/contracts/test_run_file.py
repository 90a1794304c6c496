"""Run files: what is read, and what is refused with name, value and remedy before anything is written."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from baton.tasks.foundation.contracts import run_file
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import RunFileError

GOOD = """\
run: digits-cnn
storage: ./runs
data:
  source: digits
  validation_fraction: 0.1
model: model.py:build_model
train:
  steps: 3000
  segment_steps: 500
  global_batch_size: 128
accelerator: {kind: auto}
checkpoint: {keep_last: 3, keep_best: {metric: accuracy, mode: max}}
evaluate: {every_steps: 1000}
"""


def swap(old: str, new: str) -> str:
    assert GOOD.count(old) == 1, old
    return GOOD.replace(old, new)


def plus(text: str) -> str:
    return GOOD + text


class Bad(NamedTuple):
    id: str
    text: str
    says: tuple[str, ...]
    overrides: tuple[str, ...] = ()


LAUGHS = "\n".join(
    ["a0: &a0 [lol, lol, lol]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}, *a{n - 1}]" for n in range(1, 40)]
)

# One row per line: the run file and words of the message.
# ruff: noqa: E501
# fmt: off
SERVERS = swap("{kind: auto}", "{kind: tpu, tpu: 'grpc://a:8470,grpc://b:8470'}")

REFUSED = [
    # the file as YAML
    Bad("empty", "", ("is empty", "a line like  run: my-run")),
    Bad("only a comment", "# nothing\n", ("is empty", "a line like  run: my-run")),
    Bad("null document", "~\n", ("is empty", "a line like  run: my-run")),
    Bad("list at the top", "- run: a\n", ('[{"run": "a"}]', "not a mapping", "start it with")),
    Bad("text at the top", "hello\n", ('"hello"', "not a mapping", "start it with")),
    Bad("tab", swap("  steps: 3000", "\tsteps: 3000"), ("line 8, column 1", r"'\t'", "indent with spaces")),
    Bad("unclosed bracket", swap("{kind: auto}", "{kind: auto"), ("line 12", "not readable as YAML", "check the bra")),
    Bad("unclosed quote", swap("./runs", '"./runs'), ("line 14", "not readable as YAML", "quotes")),
    Bad("colon in a value", swap("./runs", "a: b: c"), ("line 2, column 11", "mapping values", "colons")),
    Bad("second document", plus("---\nrun: b\n"), ("line 14", "another document", "check the")),
    Bad("control character", swap("./runs", "a\x01"), ("#x0001", "not readable as YAML", "write it again")),
    Bad("unknown directive version", "%YAML 3.0\n---\n" + GOOD, ("line 1", "incompatible YAML", "check the")),
    Bad("duplicate key", plus("run: other\n"), ("line 14: run", '"digits-cnn"', "line 1", "keep one")),
    Bad("duplicate key below", swap("  steps: 3000", "  steps: 3000\n  steps: 4"), ("line 9: train.steps", "3000", "keep")),
    Bad("duplicate in brackets", swap("{kind: auto}", "{kind: auto, kind: cpu}"), ("accelerator.kind", "auto", "keep one")),
    Bad("number as a key", plus("7: a\n"), ("line 14: the key 7", "not text", "rename it")),
    Bad("yes as a key", plus("yes: a\n"), ("line 14: the key yes", "not text", "in quotes")),
    Bad("list as a key", plus("? [a]\n: b\n"), ("line 14: the key", "not text", "rename it")),
    Bad("number as a key in options", swap("digits\n", "digits\n  options: {3: a}\n"), ("the key 3", "data.options", "quotes")),
    Bad("alias", swap("./runs", "&a ./runs\nx: *a"), ("line 3", "alias *a", "write the value out")),
    Bad("billion laughs", LAUGHS, ("line 2", "alias *a0", "write the value out")),
    Bad("recursive alias", "run: &a [*a]\n", ("alias *a", "write the value out")),
    Bad("merge of an alias", swap("{kind: auto}", "{<<: *x}"), ("alias *x", "write the value out")),
    Bad("merge key", swap("{kind: auto}", "{<<: {kind: auto}}"), ("accelerator", "<<", "not a known key")),
    Bad("python object", swap("./runs", "!!python/object/apply:os.system [touch pwned]"), ("storage", "!!python/object", "write a plain")),
    Bad("python name", swap("./runs", "!!python/name:os.system"), ("storage", "!!python/name:os.system", "write a plain")),
    Bad("own tag", swap("./runs", "!env HOME"), ("storage", "!env", "write a plain")),
    Bad("binary tag", swap("./runs", "!!binary aGk="), ("storage", "!!binary", "write a plain")),
    Bad("set tag", swap("{kind: auto}", "!!set {kind}"), ("accelerator", "!!set", "write a plain")),
    Bad("false bool tag", swap("./runs", "!!bool maybe"), ("storage", '"maybe"', "write a plain")),
    Bad("false int tag", swap("3000", "!!int many"), ("train.steps", '"many"', "write a plain")),
    Bad("empty int tag", swap("3000", "!!int ''"), ("train.steps", '""', "write a plain")),
    Bad("lone surrogate", swap("./runs", r'"\ud800"'), ("storage", r"\ud800", "write a plain")),
    Bad("endless digits", swap("3000", "9" * 5000), ("train.steps", "9999", "write a plain")),
    Bad("nested too deeply", "run: " + "[" * 20_000, ("line 1, column 70", "nested more than 64 levels deep")),
    Bad("many anchors", GOOD + "".join(f"x{n}: &a{n} 1\n" for n in range(50_000)), ("more than 100 anchors", "remove")),
    Bad("long key", GOOD + "k" * 1000 + ": 1\n", ("k" * 59 + "… (here 1) is not a known key",)),
    # values
    Bad("steps: yes", swap("3000", "yes"), ("line 8: train.steps is yes", "not a whole number", "at least 1")),
    Bad("steps as text", swap("3000", '"3000"'), ('train.steps is "3000"', "not a whole number", "at least 1")),
    Bad("steps as a float", swap("3000", "1e3"), ("train.steps is 1e3", "write 1000", "at least 1")),
    Bad("steps as a fraction", swap("3000", "0.5"), ("train.steps is 0.5", "not a whole number", "at least 1")),
    Bad("steps octal", swap("3000", "0100"), ("train.steps is 0100", "not a whole number", "at least 1")),
    Bad("steps base 60", swap("3000", "50:00"), ("train.steps is 50:00", "not a whole number", "at least 1")),
    Bad("steps zero", swap("3000", "0"), ("train.steps is 0", "not at least 1", "the step to train to")),
    Bad("steps negative", swap("3000", "-5"), ("train.steps is -5", "not at least 1", "the step to train to")),
    Bad("steps null", swap("3000", "~"), ("train.steps is missing", "add train.epochs instead")),
    Bad("steps left empty", swap("3000", ""), ("train.steps is missing", "add train.epochs instead")),
    Bad("steps and epochs", GOOD, ("--set train.epochs=2", "steps and epochs exclude each other", "train.epochs=null"), ("train.epochs=2",)),
    Bad("two segment lengths", GOOD, ("segment_steps and segment_epochs exclude", "train.segment_epochs: 1"), ("train.segment_epochs=1",)),
    Bad("two cadences", GOOD, ("every and every_steps exclude each other",), ("evaluate.every=epoch",)),
    Bad("epochs zero", GOOD, ("train.epochs is 0", "not at least 1", "passes over the training examples"), ("train.epochs=0",)),
    Bad("examples of an epoch", GOOD, ("train.epoch_examples is not for run files",), ("train.epoch_examples=9",)),
    Bad("steps nan", swap("3000", ".nan"), ("train.steps is .nan", "not a whole number", "at least 1")),
    Bad("steps infinite", swap("3000", ".inf"), ("train.steps is .inf", "not a whole number", "at least 1")),
    Bad("steps list", swap("3000", "[1, 2]"), ("train.steps is [1, 2]", "not a whole number", "at least 1")),
    Bad("steps mapping", swap("3000", "{a: 1}"), ('train.steps is {"a": 1}', "not a whole number", "at least 1")),
    Bad("segment_steps zero", swap("500", "0"), ("train.segment_steps is 0", "not at least 1", "multiple of this number")),
    Bad("segment_seconds zero", swap("segment_steps: 500", "segment_seconds: 0"), ("segment_seconds is 0", "not above 0", "more than 0")),
    Bad("segment_seconds nan", swap("segment_steps: 500", "segment_seconds: .nan"), ("segment_seconds is .nan", "not", "more than 0")),
    Bad("batch zero", swap("128", "0"), ("train.global_batch_size is 0", "not at least 1", "examples in a step")),
    Bad("seed negative", swap("steps: 3000", "steps: 3\n  seed: -1"), ("train.seed is -1", "not at least 0", "0 to 2147483647")),
    Bad("seed too large", swap("steps: 3000", "steps: 3\n  seed: 2147483648"), ("train.seed is 2147483648", "not below", "0 to 2147483647")),
    Bad("log_every_steps zero", swap("steps: 3000", "steps: 3\n  log_every_steps: 0"), ("log_every_steps is 0", "not at least 1", "multiple of this number")),
    Bad("fraction of one", swap("0.1", "1.0"), ("data.validation_fraction is 1.0", "not below 1", "at least 0 and below 1")),
    Bad("fraction negative", swap("0.1", "-0.1"), ("data.validation_fraction is -0.1", "not at least 0", "below 1")),
    Bad("fraction nan", swap("0.1", ".nan"), ("data.validation_fraction is .nan", "not", "below 1")),
    Bad("fraction infinite", swap("0.1", "1e999"), ("data.validation_fraction is 1e999", "not below 1", "below 1")),
    Bad("fraction as text", swap("0.1", "a tenth"), ("validation_fraction is a tenth", "not a number", "at least 0")),
    Bad("fraction true", swap("0.1", "true"), ("validation_fraction is true", "not a number", "at least 0")),
    Bad("source number", swap("digits\n", "5\n"), ("data.source is 5", "not text, put it in quotes", "a built-in source")),
    Bad("source without a name", swap("source: digits", "source: 'data.py:'"), ("data.py:", "name a function as file.py:function")),
    Bad("options list", swap("digits\n", "digits\n  options: [a]\n"), ('data.options is ["a"]', "not a mapping", "settings of the source")),
    Bad("options null", swap("digits\n", "digits\n  options:\n"), ("data.options is empty", "not a mapping", "settings of the source")),
    Bad("version fraction", swap("digits\n", "digits\n  version: 1.5\n"), ("data.version is 1.5", "not text", "change it when")),
    Bad("classes zero", swap("digits\n", "digits\n  classes: 0\n"), ("data.classes is 0", "not at least 1", "number of classes")),
    Bad("allow_nan number", swap("digits\n", "digits\n  allow_nan: 1\n"), ("data.allow_nan is 1", "neither true nor false", "true lets")),
    Bad("window zero", swap("digits\n", "digits\n  window_shards: 0\n"), ("data.window_shards is 0", "not at least 1", "shards that are")),
    Bad("storage empty", swap("./runs", "''"), ('storage is ""', "too short", "a folder, relative to the run file")),
    Bad("storage number", swap("./runs", "8"), ("storage is 8", "in quotes", "a folder, relative to the run file")),
    Bad("storage false", swap("./runs", "no"), ("storage is no", "in quotes", "a folder, relative to the run file")),
    # names
    Bad("run reserved", swap("digits-cnn", "datasets"), ("run is datasets", "take another")),
    Bad("run above", swap("digits-cnn", "../x"), ("run is ../x", "use letters")),
    Bad("run dots", swap("digits-cnn", ".."), ("run is ..", "use letters")),
    Bad("run with a slash", swap("digits-cnn", "a/b"), ("run is a/b", "use letters")),
    Bad("run with a backslash", swap("digits-cnn", r"a\b"), (r"run is a\b", "use letters")),
    Bad("run with a space", swap("digits-cnn", "a b"), ("run is a b", "use letters")),
    Bad("run with a line break", swap("digits-cnn", r'"a\nb"'), (r'run is "a\nb"', "use letters")),
    Bad("run ending in a line break", swap("digits-cnn", r'"a\n"'), (r'run is "a\n"', "use letters")),
    Bad("run empty text", swap("digits-cnn", "''"), ('run is ""', "use letters")),
    Bad("run left empty", swap("digits-cnn", ""), ("run is empty", "not text", "the run's name")),
    Bad("run too long", swap("digits-cnn", "a" * 200), ("run is aaaa", "…", "use letters")),
    Bad("run hidden", swap("digits-cnn", ".hidden"), ("run is .hidden", "beginning with a letter or digit")),
    Bad("run number", swap("digits-cnn", "2024"), ("run is 2024", "put it in quotes", "the run's name")),
    Bad("run in other letters", swap("digits-cnn", "größe"), ("run is größe", "use letters")),
    # the model
    Bad("model without a function", swap("model.py:build_model", "model.py"), ("model is model.py", "name a function as")),
    Bad("model without a file", swap("model.py:build_model", "':build'"), ('model is ":build"', "name a function as")),
    Bad("model no identifier", swap("model.py:build_model", "model.py:1st"), ("model is model.py:1st", "name a function as")),
    Bad("model absolute", swap("model.py:build_model", "/m/model.py:build"), ("model is /m/model.py:build", "relative to the run file")),
    Bad("model number", swap("model.py:build_model", "5"), ("model is 5", "not a mapping", "as model.py:build_model")),
    Bad("model list", swap("model.py:build_model", "[a]"), ('model is ["a"]', "not a mapping", "as model.py:build_model")),
    Bad("model options text", swap("model.py:build_model", "{build: 'm.py:b', options: wide}"), ("model.options is wide", "not a mapping", "keyword arguments")),
    Bad("model build missing", swap("model.py:build_model", "{options: {}}"), ("model.build is missing", "add it", "as model.py:build_model")),
    # keys that belong together
    Bad("two ways to cut", swap("segment_steps: 500", "segment_steps: 500\n  segment_seconds: 30"), ("train.segment_steps: 500", "train.segment_seconds: 30", "keep one")),
    Bad("replicas on gpu", swap("{kind: auto}", "{kind: gpu, replicas: 2}"), ("accelerator.replicas: 2", '"gpu"', "needs kind: cpu")),
    Bad("port of a server", swap("{kind: auto}", "{kind: tpu, tpu: 'grpc://a:8470, grpc://b:x'}"), ("accelerator.tpu: ", "write grpc://HOST:PORT for each server")),
    Bad("replicas on whatever", swap("{kind: auto}", "{replicas: 2}"), ("line 11", "accelerator.replicas: 2", "needs kind: cpu")),
    Bad("best without validation", swap("0.1", "0"), ("checkpoint.keep_best", "data.validation_fraction: 0", "above 0 or drop it")),
    # validation and test sets
    Bad("two validation sets", swap("0.1", "0.1\n  validation: data.py:load"), ("data.validation: ", "data.validation_fraction: 0.1", "two validation sets; remove one")),
    Bad("two splits", swap("0.1", "0.1\n  split: last\n  split_by: user"), ("split = last and split_by = user", "two ways to split; remove one")),
    Bad("split of nothing", swap("  validation_fraction: 0.1", "  validation: digits\n  split: last"), ("split = last splits nothing", "validation is a set of its own")),
    Bad("split of no fraction", swap("checkpoint: {keep_last: 3, keep_best: {metric: accuracy, mode: max}}", "").replace("0.1", "0\n  split_by: user"), ("split_by = user splits nothing", "validation_fraction is 0")),
    Bad("split in place", swap("source: digits", "source: tfrecord\n  split: last"), ("those of source tfrecord stay in their files", "options.copy", "under validation")),
    Bad("unknown split", swap("0.1", "0.1\n  split: first"), ("data.split is first", "'random' or 'last'")),
    Bad("set without a source", swap("0.1", "0.1\n  test: {options: {a: 1}}"), ("data.test.source is missing", "add it")),
    Bad("set with a wrong key", swap("0.1", "0.1\n  test: {source: digits, classes: 3}"), ("data.test.classes", "not a known key")),
    Bad("set without a function", swap("0.1", "0.1\n  test: 'data.py:'"), ("data.test", "data.py:")),
    # remote stages
    Bad("stage unknown", plus("stages: {train_segmnt: train-segment/docker}\n"), ("line 14: stages.train_segmnt", "did you mean stages.train_segment?")),
    Bad("deployment without a flow", plus("stages: {train_segment: docker}\n"), ("docker", "FLOW/DEPLOYMENT, such as train-segment/docker")),
    Bad("deployment without a name", plus("stages: {evaluate: {deployment: evaluate/}}\n"), ("stages.evaluate.deployment is evaluate/", "FLOW/DEPLOYMENT")),
    Bad("code without a deployment", plus("stages: {evaluate: {code_folder: /code}}\n"), ("code_folder", "name the deployment too, or drop code_folder")),
    Bad("devices without a deployment", plus("stages: {evaluate: {accelerator: {kind: cpu}}}\n"), ("accelerator", "name a deployment for the stage")),
    Bad("one stage on several hosts", plus("stages: {evaluate: {deployment: evaluate/a, accelerator: {kind: multi_worker}}}\n"), ("a stage is one process",)),
    # the TensorFlow servers of a slice
    Bad("memory for servers", SERVERS.replace("0.1", "0.1\n  cache: memory"), ("data.cache: memory keeps the examples in this process", "drop it")),
    Bad("records in place for servers", SERVERS.replace("source: digits", "source: tfrecord"), ("the records of source tfrecord stay in their files", "options.copy")),
    Bad("no shared storage for servers", re.sub("storage: .*", "storage: memory://a", SERVERS), ("storage memory://a is in the memory of this process", "gs://")),
    Bad("two clients of servers", SERVERS + "stages: {evaluate: evaluate/a}\n", ("one process drives the TensorFlow servers", "drop stages.evaluate", "an accelerator of its own")),
    Bad("stages of several hosts", swap("{kind: auto}", "{kind: multi_worker}") + "stages: {evaluate: evaluate/a}\n", ("every host runs all stages", "drop stages.evaluate")),
    # choices
    Bad("unknown kind", swap("{kind: auto}", "{kind: quantum}"), ("accelerator.kind is quantum", "not 'auto', 'tpu'", "multi_worker")),
    Bad("kind in capitals", swap("{kind: auto}", "{kind: CPU}"), ("accelerator.kind is CPU", "not 'auto'", "cpu")),
    Bad("replicas too many", swap("{kind: auto}", "{kind: cpu, replicas: 65}"), ("accelerator.replicas is 65", "not at most 64", "1 to 64")),
    Bad("threads zero", swap("{kind: auto}", "{intra_op_threads: 0}"), ("accelerator.intra_op_threads is 0", "not at least 1", "left out")),
    Bad("wrong mode", swap("mode: max", "mode: biggest"), ("checkpoint.keep_best.mode is biggest", "not 'max' or 'min'")),
    Bad("metric empty", swap("metric: accuracy", "metric: ''"), ('checkpoint.keep_best.metric is ""', "too short", "such as accuracy")),
    Bad("mode missing", swap(", mode: max", ""), ("checkpoint.keep_best.mode is missing", "add it", "max or min")),
    Bad("keep_best text", swap("{metric: accuracy, mode: max}", "accuracy"), ("checkpoint.keep_best is accuracy", "not a mapping", "{metric: accuracy, mode: max}")),
    Bad("keep_last zero", swap("keep_last: 3", "keep_last: 0"), ("checkpoint.keep_last is 0", "not at least 1", "the newest checkpoints")),
    Bad("keep_every_steps zero", swap("keep_last: 3", "keep_every_steps: 0"), ("checkpoint.keep_every_steps is 0", "not at least 1", "are kept for good")),
    Bad("every_steps zero", swap("every_steps: 1000", "every_steps: 0"), ("evaluate.every_steps is 0", "not at least 1", "left out")),
    # sections
    Bad("data null", GOOD.replace("data:\n  source: digits\n  validation_fraction: 0.1\n", "data:\n"), ("data is empty", "not a mapping", "the examples: source")),
    Bad("data text", GOOD.replace("data:\n  source: digits\n  validation_fraction: 0.1\n", "data: digits\n"), ("data is digits", "not a mapping", "the examples: source")),
    Bad("train list", GOOD.replace("train:\n  steps: 3000\n", "train:\n  - steps: 3000\n").replace("  segment_steps: 500\n  global_batch_size: 128\n", ""), ("train is", "not a mapping", "segment_steps")),
    Bad("accelerator text", swap("{kind: auto}", "cpu"), ("accelerator is cpu", "not a mapping", "{kind: auto}")),
    # missing
    Bad("run missing", swap("run: digits-cnn\n", ""), ("run is missing", "add it", "the run's name")),
    Bad("storage missing", swap("storage: ./runs\n", ""), ("storage is missing", "add it", "gs://bucket/prefix")),
    Bad("source missing", swap("  source: digits\n", ""), ("data.source is missing", "add it", "a built-in source")),
    Bad("model missing", swap("model: model.py:build_model\n", ""), ("model is missing", "add it", "model.py:build_model")),
    Bad("steps missing", swap("  steps: 3000\n", ""), ("train.steps is missing", "add it", "the step to train to")),
    Bad("batch missing", swap("  global_batch_size: 128\n", ""), ("train.global_batch_size is missing", "add it", "examples in a step")),
    # unknown keys, at every level
    Bad("unknown at the top", plus("trian: {a: 1}\n"), ("line 14: trian", '{"a": 1}', "did you mean train?")),
    Bad("nothing like it", plus("zzz: 1\n"), ("line 14: zzz", "here 1", "the keys are run, storage, data")),
    Bad("unknown in data", swap("  source: digits", "  source: digits\n  sourcee: x"), ("data.sourcee", "here x", "did you mean data.source?")),
    Bad("unknown in model", swap("model.py:build_model", "{build: 'm.py:b', option: {}}"), ("model.option", "{}", "did you mean model.options?")),
    Bad("unknown in train", swap("  steps: 3000", "  steps: 3000\n  batch_size: 12"), ("train.batch_size", "here 12", "did you mean train.global_batch_size?")),
    Bad("unknown in accelerator", swap("{kind: auto}", "{kin: auto}"), ("accelerator.kin ", "here auto", "did you mean accelerator.kind?")),
    Bad("unknown in checkpoint", swap("keep_last", "keeplast"), ("checkpoint.keeplast", "here 3", "did you mean checkpoint.keep_last?")),
    Bad("unknown in keep_best", swap("mode: max", "mode: max, made: 1"), ("checkpoint.keep_best.made", "here 1", "did you mean checkpoint.keep_best.mode?")),
    Bad("unknown in evaluate", swap("every_steps: 1000", "every: 1000"), ("evaluate.every is 1000", "not 'epoch'", "for a number of steps use every_steps")),
    Bad("key of another section", plus("steps: 9\n"), ("line 14: steps", "here 9", "did you mean train.steps?")),
    Bad("key with a line break", plus('"a\\nb": 1\n'), (r'"a\nb"', "here 1", "the keys are")),
    # metadata
    Bad("list in metadata", plus("metadata: {team: vision, tags: [a]}\n"), ("line 14", "value of tags is not plain", "a number")),
    Bad("infinite metadata", plus("metadata: {a: .inf}\n"), ("value of a is not plain", "a number")),
    Bad("long metadata", plus(f"metadata: {{a: {'x' * 201}}}\n"), ("value of a is not plain", "at most 200")),
    Bad("much metadata", plus(f"metadata: {{{', '.join(f'k{n}: 1' for n in range(33))}}}\n"), ("33 keys", "at most 32")),
    Bad("metadata without a name", plus("metadata: {'': 1}\n"), ("'' is no name", "1 to 64 characters")),
    # overrides
    Bad("override without =", GOOD, ("--set train.steps", "write it as --set key=value"), ("train.steps",)),
    Bad("override empty", GOOD, ("--set", "write it as --set key=value"), ("",)),
    Bad("override empty key", GOOD, ("--set =3", "write it as --set key=value"), ("=3",)),
    Bad("override empty part", GOOD, ("--set train..steps=3", "write it as --set key=value"), ("train..steps=3",)),
    Bad("override leading dot", GOOD, ("--set .run=a", "write it as --set key=value"), (".run=a",)),
    Bad("override through a scalar", GOOD, ("--set train.steps.x=3", "train.steps is 3000", "set train.steps itself"), ("train.steps.x=3",)),
    Bad("override through a list", swap("digits\n", "digits\n  options: {a: [1]}\n"), ("data.options.a is [1]", "set data.options.a itself"), ("data.options.a.0=3",)),
    Bad("override no YAML", GOOD, ("--set run=[", "not readable as YAML", "check the"), ("run=[",)),
    Bad("override python tag", GOOD, ("--set storage=!!python/name:os.system", "write a plain"), ("storage=!!python/name:os.system",)),
    Bad("long override key", GOOD, ("k" * 59 + "… (here 1) is not a known key",), ("k" * 1000 + "=1",)),
    Bad("override alias", GOOD, ("--set storage=*a", "alias *a", "write the value out"), ("storage=*a",)),
    Bad("override duplicate keys", GOOD, ("--set accelerator={kind: cpu, kind: gpu}", "accelerator.kind", "keep one"), ("accelerator={kind: cpu, kind: gpu}",)),
    Bad("override unknown key", GOOD, ("--set train.stepz=3: train.stepz", "did you mean train.steps?"), ("train.stepz=3",)),
    Bad("override unknown section", GOOD, ("--set model.opts.w=3: model.opts", "did you mean model.options?"), ("model.opts.w=3",)),
    Bad("override bad value", GOOD, ("--set train.steps=soon: train.steps is soon", "not a whole number", "at least 1"), ("train.steps=soon",)),
    Bad("override left empty", GOOD, ("--set run=: run is empty", "not text", "the run's name"), ("run=",)),
    Bad("override whole section", GOOD, ("--set train=[1]: train is [1]", "not a mapping", "segment_steps"), ("train=[1]",)),
    Bad("override makes a conflict", GOOD, ("--set train.segment_seconds=3", "train.segment_steps: 500", "keep one"), ("train.segment_seconds=3",)),
    Bad("override bad source", GOOD, ("--set data.source=x.py:1", "x.py:1", "name a function as"), ("data.source=x.py:1",)),
    Bad("override below best", GOOD, ("--set checkpoint.keep_best.mode=up", "keep_best.mode is up", "max"), ("checkpoint.keep_best.mode=up",)),
]
# fmt: on


def contents(folder: Path) -> dict[str, bytes | None]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")
    }


def refusal(path: Path, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(RunFileError) as refused:
        load_run_file(path, overrides)
    assert refused.value.exit_code == 2
    return str(refused.value)


def test_the_table_of_bad_files_has_no_duplicates() -> None:
    assert len(REFUSED) >= 60
    assert len({bad.id for bad in REFUSED}) == len(REFUSED)


@pytest.mark.parametrize("bad", REFUSED, ids=lambda bad: bad.id)
def test_a_malformed_run_file_is_refused_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: Bad
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text(bad.text, encoding="utf-8")
    before = contents(tmp_path)

    message = refusal(path, bad.overrides)

    for part in bad.says:
        assert part in message
    assert "run.yaml" in message or "--set" in message
    assert "\n" not in message
    assert message.isprintable()
    assert message == message.strip()
    assert len(message) < 600
    for jargon in ("http", "pydantic", "Value error", "Input should", "type=", "RunSpec", "Traceback", "<unicode"):
        assert jargon not in message
    assert contents(tmp_path) == before


def test_a_missing_file_is_named_with_nearby_files(tmp_path: Path) -> None:
    (tmp_path / "runs.yaml").write_text(GOOD)
    message = refusal(tmp_path / "run.yaml")
    assert "run.yaml does not exist" in message
    assert "YAML files beside it: runs.yaml" in message
    assert "does not exist either" in refusal(tmp_path / "nowhere" / "run.yaml")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path)
    assert f"{tmp_path} is a folder" in message
    assert "name the run file in it" in message


def test_bytes_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"run: gr\xfc\xdfe\n")
    message = refusal(path)
    assert "not UTF-8 text (byte 7)" in message
    assert "save it as UTF-8" in message


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("#" * (1 << 20) + "\n")
    assert "1048577 bytes" in refusal(path)


def test_a_name_too_long_for_the_disk_is_refused(tmp_path: Path) -> None:
    assert "check its name" in refusal(tmp_path / ("a" * 300))


def test_several_errors_are_reported_together(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(GOOD.replace("3000", "0").replace("500", "0").replace("digits-cnn", "../x"))
    lines = refusal(path).splitlines()
    assert [line.split(": ")[1].split(" is ")[0] for line in lines] == ["run", "train.steps", "train.segment_steps"]


def test_only_the_first_few_errors_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(GOOD + "".join(f"unknown{number}: 1\n" for number in range(9)))
    lines = refusal(path).splitlines()
    assert len(lines) == 6
    assert lines[-1] == f"{path}: and 4 more"


def test_thousands_of_unknown_keys_cost_a_sentence_for_those_that_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """80,000 took two and a half minutes: each was compared with all known keys."""
    path = tmp_path / "run.yaml"
    path.write_text(GOOD + "".join(f"unknown{number}: 1\n" for number in range(2000)))
    known: list[object] = []
    monkeypatch.setattr(run_file, "get_close_matches", lambda *given, **_: known.append(given) or [])
    assert refusal(path).splitlines()[-1] == f"{path}: and 1995 more"
    assert len(known) < 1000


@pytest.mark.parametrize("levels", [65, 10_000])
def test_values_that_are_nested_too_deeply_are_refused(tmp_path: Path, levels: int) -> None:
    """What is read of a run file is written into JSON, which no reader reads at any depth."""
    path = tmp_path / "run.yaml"
    nested = "[" * levels + "]" * levels
    path.write_text(swap("model: model.py:build_model", f"model: {{build: m.py:f, options: {{a: {nested}}}}}"))
    assert "nested" in refusal(path)
    path.write_text(GOOD)
    assert "nested" in refusal(path, (f"model.options.a={nested}",))
    assert "model.options has values nested more than 64 levels deep" in refusal(
        path, ("model.options." + ".".join(["a"] * levels) + "=1",)
    )
    assert load_run_file(path, ("model.options.a=" + "[" * 61 + "]" * 61,)).spec.run == "digits-cnn"


def test_a_good_file_is_read_with_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.yaml").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    read = load_run_file(Path("run.yaml"))
    assert read.path == tmp_path / "run.yaml"
    assert read.folder == tmp_path
    assert read.spec.run == "digits-cnn"
    assert read.spec.model.build == "model.py:build_model"
    assert read.spec.model.options == {}
    assert read.spec.train.log_every_steps == 50
    assert read.spec.checkpoint.keep_best is not None
    assert read.spec.checkpoint.keep_best.mode == "max"


@pytest.mark.parametrize(
    ("data", "train", "evaluate", "every"),
    [
        ({"validation_fraction": 0.1}, {"epochs": 3}, None, "epoch"),
        ({"validation": {"source": "digits"}}, {"epochs": 3}, {}, "epoch"),
        ({"validation_fraction": 0}, {"epochs": 3}, None, None),
        ({"validation_fraction": 0.1}, {"epochs": 3}, {"every": None}, None),
        ({"validation_fraction": 0.1}, {"epochs": 3}, {"every_steps": None}, None),
        ({"validation_fraction": 0.1}, {"epochs": 3}, {"every_steps": 7}, None),
        ({"validation_fraction": 0.1}, {"steps": 3}, None, None),
    ],
)
def test_epochs_are_evaluated_unless_the_file_says_more(
    data: dict[str, Any], train: dict[str, Any], evaluate: dict[str, Any] | None, every: str | None
) -> None:
    values = {"run": "a", "storage": "b", "model": "m.py:f", "data": {"source": "digits", **data}}
    values |= {"train": {"global_batch_size": 8, **train}} | ({} if evaluate is None else {"evaluate": evaluate})
    spec = RunSpec.model_validate(values)
    assert spec.evaluate.every == every
    assert spec.train.log_every_steps == (50 if "steps" in train else None)
    assert RunSpec.model_validate_json(spec.to_json()) == spec, "JSON does not say what was left out"


def test_a_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load_run_file(tmp_path / "run.yaml").spec.run == "digits-cnn"


@pytest.mark.parametrize(
    ("spelling", "value"),
    [
        ("1e-3", 1e-3),
        ("1E+3", 1e3),
        ("-1e3", -1e3),
        (".5", 0.5),
        ("1.", 1.0),
        ("6.02e23", 6.02e23),
        ("1_000", 1000),
        ("0x1f", 31),
        ("+7", 7),
        ("-0", 0),
        ("017", "017"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("e3", "e3"),
        ("1e", "1e"),
        (".", "."),
        ("'1e-3'", "1e-3"),
        ("null", None),
        ("", None),
        ("true", True),
        ("off", False),
        ("<<", "<<"),
        ("=", "="),
        ("[1, [a, {b: 2.0}]]", [1, ["a", {"b": 2.0}]]),
    ],
)
def test_plain_values_are_read_as_written(tmp_path: Path, spelling: str, value: object) -> None:
    (tmp_path / "run.yaml").write_text(swap("digits\n", f"digits\n  options:\n    value: {spelling}\n"))
    read = load_run_file(tmp_path / "run.yaml").spec.data.options["value"]
    assert (type(read), read) == (type(value), value)
    given = load_run_file(tmp_path / "run.yaml", [f"data.options.value={spelling}"]).spec.data.options["value"]
    assert (type(given), given) == (type(value), value)


def test_overrides_apply_in_order_and_create_sections(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(GOOD)
    spec = load_run_file(
        path,
        [
            "train.steps=10",
            "train.steps=20",
            "model=other.py:build",
            "model.options.width=64",
            "model.options.block.depth=2",
            "data.options.path=a=b",
            "accelerator={kind: cpu, replicas: 4}",
            "checkpoint.keep_best=",
        ],
    ).spec
    assert spec.train.steps == 20
    assert spec.model.build == "other.py:build"
    assert spec.model.options == {"width": 64, "block": {"depth": 2}}
    assert spec.data.options == {"path": "a=b"}
    assert spec.accelerator.replicas == 4
    assert spec.checkpoint.keep_best is None
    assert path.read_text() == GOOD


def test_an_override_can_repair_a_bad_value(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(swap("3000", "0"))
    assert load_run_file(tmp_path / "run.yaml", ["train.steps=5"]).spec.train.steps == 5


def test_an_override_creates_a_missing_section(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(swap("evaluate: {every_steps: 1000}", "evaluate:"))
    assert load_run_file(tmp_path / "run.yaml", ["evaluate.every_steps=7"]).spec.evaluate.every_steps == 7


def test_whole_numbers_are_accepted_as_fractions(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(swap("segment_steps: 500", "segment_seconds: 30"))
    assert load_run_file(tmp_path / "run.yaml").spec.train.segment_seconds == 30.0


@pytest.mark.parametrize("text", ["{0: 1.0, 12: 5}", "{'0': 1.0, '12': 5.0}"])
def test_classes_are_whole_numbers(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(GOOD)
    spec = load_run_file(path, (f"train.class_weight={text}",)).spec
    assert spec.train.class_weight == {0: 1.0, 12: 5.0}
    assert RunSpec.model_validate_json(spec.to_json()) == spec
    assert load_run_file(path, ("train.class_weight.3=2.5",)).spec.train.class_weight == {3: 2.5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{a: 1.0}", "'a' is no class; name classes by whole numbers"),
        ("{0: -1}", "train.class_weight.0 is -1, which is not at least 0"),
        ("{0x1: 1.0}", "the key 0x1 in train.class_weight is not text"),
        ("[1]", "not a mapping of keys"),
    ],
)
def test_invalid_class_names_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(GOOD)
    with pytest.raises(RunFileError, match=re.escape(message)):
        load_run_file(path, (f"train.class_weight={text}",))


def test_own_sets_are_read_and_survive_json(tmp_path: Path) -> None:
    """A stage in another process gets the settings as JSON with every key."""
    file = tmp_path / "run.yaml"
    file.write_text(swap("  validation_fraction: 0.1", "  validation: data.py:held_out\n  test: {source: digits}"))
    data = load_run_file(file).spec.data
    assert (data.validation_fraction, data.has_validation, data.is_evaluated_on) == (0, True, ("validation", "test"))
    assert data.all_sources == ("digits", "data.py:held_out", "digits")
    assert type(data).model_validate_json(data.model_dump_json()) == data
    assert load_run_file(file, ["data.test=null", "data.validation.version=3"]).spec.data.test is None
