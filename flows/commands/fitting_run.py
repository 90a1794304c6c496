"""Writes the run file for the data that `baton init --data` found, beside a model from the templates in new_run/.

The run file has the keys of `data`, and in `model.options` what was seen of inputs and labels; the model builds itself
from that, so both are beginnings to change.
"""

import math
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Final

import yaml

from baton.tasks.foundation.dataset.features import STRING
from baton.tasks.foundation.errors import InvalidInput
from baton.tasks.prepare_data.look import Found

_COLUMNS = 100
_COMMENT_AT = 32
# Most examples -> passes, and examples in a step.
_LENGTHS: Final = ((5_000, 20, 32), (50_000, 10, 64), (math.inf, 3, 128))
_NAME_CHARACTERS = 50
_UNSCALED = 10  # labels that lie within this of 0 are learned as they are
WORDS: Final = "model.py:word_ids"
# What the template of this function makes of a text.
_WORD_IDS: Final = {"shape": [100], "codes": 10_000}


def takes_texts(found: Found) -> bool:
    """Whether an input is text, which a model takes as ids of words."""
    return any(each.dtype == STRING for each in found.inputs)


def data_keys(found: Found, paths: Mapping[str, str]) -> dict[str, Any]:
    """Return `data` of the run file.

    Args:
        paths: path -> how the run file names it.
    """
    plan = found.plan

    def options_of(options: Mapping[str, Any]) -> dict[str, Any]:
        return {**options, "path": paths.get(options["path"], options["path"])}

    keys: dict[str, Any] = {"source": plan.source, "options": options_of(plan.options)}
    for name, options in plan.sets.items():
        keys[name] = {"source": plan.source, "options": options_of(options)}
    if "validation" not in plan.sets:
        keys["validation_fraction"] = 0.1
    if takes_texts(found):
        keys |= {"transform": WORDS, "validation_transform": WORDS}
    return keys


def model_options(found: Found) -> dict[str, Any]:
    """Return `model.options`: what the template of the model builds itself from.

    Raises:
        InvalidInput: the labels are texts, which no loss compares.
    """
    label, classes = found.label, found.classes
    if label.dtype == STRING:
        raise InvalidInput("--data: the labels are texts; name a column of numbers or of categories: --label NAME")
    inputs: dict[str, dict[str, Any]] = {}
    for each in found.inputs:
        codes = {"codes": len(each.vocabulary)} if each.vocabulary else {}
        inputs[each.name.partition("/")[2] or each.name] = (
            _WORD_IDS if each.dtype == STRING else {"shape": list(each.shape), **codes}
        )
    x = found.inputs[0]
    if len(inputs) == 1 and len(x.shape) == 1 and x.shape == label.shape and "int" in x.dtype and "int" in label.dtype:
        classes = 1 + max([255, *(int(each.value) for each in found.extremes)])  # at least the values of a byte
        return {"inputs": {"x": {"shape": list(x.shape), "codes": classes}}, "classes": classes, "each_step": True}
    if label.dtype == "bool" and not label.shape:
        classes = 2
    if classes is not None:
        return {"inputs": inputs, "classes": classes}
    span = found.label_range or (0.0, 0.0)
    far = {"span": list(span)} if max(map(abs, span)) > _UNSCALED else {}
    return {"inputs": inputs, "outputs": list(label.shape or (1,)), **far}


def run_text(found: Found, data: Mapping[str, Any], name: str) -> str:
    """Return the run file.

    Args:
        data: see `data_keys`.
        name: a file or a folder, which the run is named after.

    Raises:
        InvalidInput: see `model_options`.
    """
    epochs, batch = next((epochs, batch) for most, epochs, batch in _LENGTHS if found.examples <= most)
    of_data = _yaml({"data": dict(data)})
    fraction = "  validation_fraction: 0.1"
    of_data = of_data.replace(fraction, _with_comment(fraction, "held out, and evaluated at the end of each epoch"))
    return "\n".join(
        [
            "# What is trained, for how long, and where it goes. Paths start at this file's folder.",
            "# Every other key has a default: deploy/runs/README.md in Baton's repository.",
            _with_comment(f"run: {_run_name(name)}", "the run's name; its home is <storage>/<run>"),
            _with_comment("storage: ./runs", "or gs://bucket/prefix"),
            of_data,
            _yaml({"model": {"build": "model.py:build_model", "options": model_options(found)}}),
            "train:",
            _with_comment(f"  epochs: {epochs}", "passes over the training examples, as in fit; or steps: N batches"),
            _with_comment(f"  global_batch_size: {batch}", "examples in a step, over all replicas"),
            "",
        ]
    )


class _Dumper(yaml.SafeDumper):
    """Writes equal values again, and not as anchors."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - as PyYAML calls it
        return True


def _yaml(keys: Mapping[str, Any]) -> str:
    text: str = yaml.dump(
        keys, Dumper=_Dumper, default_flow_style=None, sort_keys=False, width=_COLUMNS, allow_unicode=True
    )
    return text.rstrip()


def _with_comment(line: str, comment: str) -> str:
    return f"{line:{_COMMENT_AT}}  # {comment}"


def _run_name(path: str) -> str:
    """Return a name for the run: the last part of the path that begins with a letter, as mnist of mnist/3.0.1."""
    for part in reversed(PurePosixPath(path).parts):
        last = re.split(r"[*?\[]", part)[0].split(".")[0]
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-._")[:_NAME_CHARACTERS]
        if name[:1].isalpha() and name != "datasets" and yaml.safe_load(name) == name:
            return name
    return "first-run"
