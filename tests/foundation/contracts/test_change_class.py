"""Every key of the run file carries its change class, and deploy/runs/README.md lists them.

Run as a program, this file writes that page.
"""

import json

import pytest
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tasks.foundation.contracts.base import change_class_of, keys_of, operational
from tasks.foundation.contracts.identity import IDENTITY, accepted_keys
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.errors import RunFileError
from tests.support.checkout import CHECKOUT

ROOT = CHECKOUT
ORDER = ("data.shuffle", "data.window_shards")
TRANSFORMS = ("data.transform", "data.batch_transform", "data.validation_transform")
PAGE = ROOT / "deploy" / "runs" / "README.md"
REGENERATE = ".venv/bin/python tests/foundation/contracts/test_change_class.py"
FIELDS = dict(keys_of(RunSpec))
KEYS = {name: change_class_of(field) for name, field in FIELDS.items()}

HEAD = """# The run file

One YAML file, like [digits](digits/run.yaml), [text](text/run.yaml) or [images](images/run.yaml). Unknown keys are
refused. `--set KEY=VALUE` changes a key for one command.

The class of a key says what happens if you change it after the run has started:

- **identity**: another value would train another run. The change is refused, and the difference shown, unless
  `baton run FILE --accept KEYS` names it; then it is recorded in the log and applies from that step on.
  `baton fork HOME --at-step N --as NEW` makes a copy of the run to try it on.
- **operational**: you can change it freely.
- **environment**: the bits depend on it too. A change is reported and logged.

"""
MIDDLE = """
## The identity, as the log records it

A key of the run file decides one or more of these; those of the model are found by building it. `--accept` takes
their names, short names (`optimizer`, `loss`, `metrics`, `seed`), or `data`, `model` or `compile` for all of a kind,
separated by commas.

"""


def row(*cells: str) -> str:
    escaped = (cell.replace("<", "&lt;").replace("|", "&#124;") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def default_of(field: object) -> str:
    default = getattr(field, "default", None)
    if default is PydanticUndefined:
        factory = getattr(field, "default_factory", None)
        return "required" if factory is None else f"`{json.dumps(factory())}`"
    return "left out" if default is None else f"`{json.dumps(default)}`"


def page() -> str:
    """deploy/runs/README.md, a function of the contracts."""
    rows = [row("key", "class", "default", "what it is", "why"), row(*["---"] * 5)]
    for name, field in FIELDS.items():
        key = KEYS[name]
        decides = f" ({', '.join(key.decides)})" if key.decides else ""
        rows.append(row(f"`{name}`", key.kind, default_of(field), field.description or "", f"{key.why}{decides}"))
    recorded = [row("recorded key", "another one means", "accepted"), row(*["---"] * 3)]
    for name, each in IDENTITY.items():
        recorded.append(row(f"`{name}`", each.why, each.accepted))
    return f"{HEAD}{chr(10).join(rows)}\n{MIDDLE}{chr(10).join(recorded)}\n"


def test_every_key_of_the_run_file_carries_a_class() -> None:
    assert len(KEYS) > 50
    assert {"identity", "operational", "environment"} == {key.kind for key in KEYS.values()}


@pytest.mark.parametrize("markers", [(), (operational("a"), operational("b"))])
def test_a_field_needs_exactly_one_class(markers: tuple[object, ...]) -> None:
    field = FieldInfo(annotation=int)
    field.metadata = list(markers)
    with pytest.raises(ValueError, match=f"carries {len(markers)} change classes"):
        change_class_of(field)


def test_every_key_has_a_description_and_a_reason() -> None:
    assert [name for name, field in FIELDS.items() if not field.description] == []
    assert [name for name, key in KEYS.items() if not key.why] == []


def test_only_identity_keys_decide_recorded_keys() -> None:
    for name, key in KEYS.items():
        assert (key.kind == "identity") == bool(key.decides), name
        assert set(key.decides) <= IDENTITY.keys(), name


def test_every_recorded_key_is_decided_by_a_run_file_key() -> None:
    assert {decided for key in KEYS.values() for decided in key.decides} == IDENTITY.keys()


def test_a_key_recorded_under_its_own_name_decides_itself() -> None:
    assert [name for name in IDENTITY if name in KEYS and name not in KEYS[name].decides] == []


def test_the_page_lists_every_key() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), f"{PAGE} is out of date; write it with: {REGENERATE}"


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ("", ()),
        ("optimizer", ("compile.optimizer",)),
        ("compile.optimizer", ("compile.optimizer",)),
        ("loss, metrics", ("compile.loss", "compile.metrics")),
        ("seed,optimizer,train.seed", ("train.seed", "compile.optimizer")),
        ("global_batch_size", ("train.global_batch_size",)),
        ("data", ("data.content_digest", "data.sources", "data.validation", *ORDER, *TRANSFORMS, "data.contents")),
        ("validation", ("data.validation",)),
        ("model", ("model.config", "model.code", "model.signature", "model.options", "model.contents")),
        ("compile", ("compile.optimizer", "compile.loss", "compile.metrics", "compile.other")),
        ("model.options", ("model.options",)),
    ],
)
def test_accept_takes_names_and_short_names(words: str, keys: tuple[str, ...]) -> None:
    assert accepted_keys(words) == keys
    assert accepted_keys(",".join(keys)) == keys


@pytest.mark.parametrize("words", ["optimiser", "optimizer,", ",", "train.steps", "Optimizer", "all"])
def test_unknown_names_are_refused_with_the_known_ones(words: str) -> None:
    with pytest.raises(RunFileError, match=r"unknown key; use one or more of .*optimizer, loss, metrics") as refused:
        accepted_keys(words)
    assert refused.value.exit_code == 2


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
