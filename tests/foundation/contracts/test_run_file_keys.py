"""Every key of the run file has its class, and deploy/runs/README.md shows them.

Run as a program, this file writes that page anew.
"""

import json

import pytest
from pydantic_core import PydanticUndefined

from tasks.foundation.contracts.identity import IDENTITY, accepted_keys
from tasks.foundation.contracts.run_file_keys import KEYS, leaves
from tasks.foundation.errors import RunFileError
from tests.support.checkout import CHECKOUT

ROOT = CHECKOUT
PAGE = ROOT / "deploy" / "runs" / "README.md"
REGENERATE = ".venv/bin/python tests/foundation/contracts/test_run_file_keys.py"

HEAD = """# The run file

One YAML file, like [this one](digits/run.yaml) or [this](text/run.yaml). Unknown keys are refused. `--set KEY=VALUE`
changes a key for one command.

What a change of a key means for a run that has begun is its class:

- **identity**: it would be another run. Refused, with the difference shown, until `baton run FILE --accept KEYS` names
  it; then it is an entry of the log and holds from that step on. `baton fork HOME --at-step N --as NEW` makes a copy to
  try it on.
- **operational**: may change freely.
- **environment**: what else the bits depend on. A change is said and logged.

"""
MIDDLE = """
## The identity, as the log records it

A key of the run file decides one or more of these; the model's are found by building it. `--accept` takes their names,
short ones (`optimizer`, `loss`, `metrics`, `seed`), or `data`, `model` or `compile` for all of a kind, with commas
between.

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
    rows = [row("key", "class", "default", "what it is", "why of that class"), row(*["---"] * 5)]
    for name, field in leaves():
        key = KEYS[name]
        decides = f" ({', '.join(key.decides)})" if key.decides else ""
        rows.append(row(f"`{name}`", key.kind, default_of(field), field.description or "", f"{key.why}{decides}"))
    recorded = [row("recorded key", "another one means", "accepted"), row(*["---"] * 3)]
    for name, each in IDENTITY.items():
        recorded.append(row(f"`{name}`", each.why, each.accepted or "never: the checkpoint could not be restored"))
    return f"{HEAD}{chr(10).join(rows)}\n{MIDDLE}{chr(10).join(recorded)}\n"


def test_every_key_has_one_class() -> None:
    assert [name for name, _ in leaves()] == list(KEYS)


def test_every_key_is_described() -> None:
    assert [name for name, field in leaves() if not field.description] == []
    assert [name for name, key in KEYS.items() if not key.why] == []


def test_identity_keys_decide_recorded_keys_and_others_none() -> None:
    for name, key in KEYS.items():
        assert (key.kind == "identity") == bool(key.decides), name
        assert set(key.decides) <= IDENTITY.keys(), name


def test_every_recorded_key_is_decided_by_the_run_file() -> None:
    assert {decided for key in KEYS.values() for decided in key.decides} == IDENTITY.keys()


def test_a_key_that_is_recorded_under_its_own_name_decides_that() -> None:
    assert [name for name in IDENTITY if name in KEYS and name not in KEYS[name].decides] == []


def test_the_page_shows_them() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), f"{PAGE} is not as the contracts are; write it: {REGENERATE}"


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ("", ()),
        ("optimizer", ("compile.optimizer",)),
        ("compile.optimizer", ("compile.optimizer",)),
        ("loss, metrics", ("compile.loss", "compile.metrics")),
        ("seed,optimizer,train.seed", ("train.seed", "compile.optimizer")),
        ("global_batch_size", ("train.global_batch_size",)),
        ("data", ("data.content_digest", "data.window_shards")),
        ("model", ("model.config", "model.code", "model.options")),
        ("compile", ("compile.optimizer", "compile.loss", "compile.metrics", "compile.other")),
        ("model.options", ("model.options",)),
    ],
)
def test_words_of_accept(words: str, keys: tuple[str, ...]) -> None:
    assert accepted_keys(words) == keys
    assert accepted_keys(",".join(keys)) == keys


def test_every_key_can_be_said_or_never_be_accepted() -> None:
    for name, recorded in IDENTITY.items():
        if recorded.accepted is not None:
            assert accepted_keys(name) == (name,)
            continue
        with pytest.raises(RunFileError, match=f"--accept {name}: with other variables the checkpoint cannot be"):
            accepted_keys(name)


@pytest.mark.parametrize("words", ["optimiser", "optimizer,", ",", "train.steps", "Optimizer", "all"])
def test_unknown_words_are_refused_with_those_that_can_be_said(words: str) -> None:
    with pytest.raises(RunFileError, match=r"names nothing; say one or more of .*optimizer, loss, metrics") as refused:
        accepted_keys(words)
    assert refused.value.exit_code == 2
    assert "model.signature" not in str(refused.value)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
