"""Every key of the run file carries its change class; deploy/runs/README.md lists all, identity.md what they decide.

Run as a program, this file writes the tables of both pages.
"""

import json
import re
from pathlib import Path

import pytest
import yaml
from pydantic_core import PydanticUndefined

from baton.tasks.foundation.contracts.base import ChangeClass, keys_of
from baton.tasks.foundation.contracts.identity import IDENTITY, accepted_keys, digest_of, identity_in_run_file
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import RunFileError
from tests.support.checkout import CHECKOUT

ROOT = CHECKOUT
ORDER = ("data.shuffle", "data.window_shards")
TRANSFORMS = ("data.transform", "data.batch_transform", "data.validation_transform")
PAGE = ROOT / "deploy" / "runs" / "README.md"
REGENERATE = ".venv/bin/python tests/foundation/contracts/test_change_class.py"
FIELDS = dict(keys_of(RunSpec))
CLASSES = {name: [each for each in field.metadata if isinstance(each, ChangeClass)] for name, field in FIELDS.items()}
KEYS = {name: found[0] for name, found in CLASSES.items() if found}
# What a key decides: itself, if it is recorded under its own name, and others.
DECIDES = {name: {*key.decides, *((name,) if key.accepted else ())} for name, key in KEYS.items()}

# A page, and the part of it that this file writes.
GENERATED = re.compile(r"(?<=^<!-- generated -->\n\n).*?(?=\n\n<!-- end of generated -->$)", re.MULTILINE | re.DOTALL)
EXAMPLE = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def row(*cells: str) -> str:
    escaped = (cell.replace("<", "&lt;").replace("|", "&#124;") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def default_of(field: object) -> str:
    default = getattr(field, "default", None)
    if default is PydanticUndefined:
        factory = getattr(field, "default_factory", None)
        return "required" if factory is None else f"`{json.dumps(factory())}`"
    return "left out" if default is None else f"`{json.dumps(default)}`"


def table_of_keys() -> str:
    """The table of deploy/runs/README.md, a function of the contracts."""
    rows = [row("key", "class", "default", "what it is"), row(*["---"] * 4)]
    for name, field in FIELDS.items():
        rows.append(row(f"`{name}`", KEYS[name].kind, default_of(field), field.description or ""))
    return "\n".join(rows)


def table_of_identity() -> str:
    """The table of deploy/runs/identity.md, a function of the contracts."""
    rows = [row("recorded key", "decided by", "another one means", "accepted"), row(*["---"] * 4)]
    for name, each in IDENTITY.items():
        by = (f"`{key}`" for key, decided in DECIDES.items() if name in decided)
        rows.append(row(f"`{name}`", ", ".join(by), each.why, each.accepted))
    return "\n".join(rows)


def page_of(file: Path, table: str) -> str:
    """A page with its table as it should be."""
    text, found = GENERATED.subn(lambda _: table, file.read_text(encoding="utf-8"))
    assert found == 1, f"{file} has no place for its table"
    return text


TABLES = {PAGE: table_of_keys, PAGE.with_name("identity.md"): table_of_identity}


def test_every_key_of_the_run_file_carries_a_class() -> None:
    assert len(FIELDS) > 50
    assert {name: len(found) for name, found in CLASSES.items()} == dict.fromkeys(FIELDS, 1)
    assert {"identity", "operational", "environment"} == {key.kind for key in KEYS.values()}


def test_every_key_has_a_description_and_a_reason() -> None:
    assert [name for name, field in FIELDS.items() if not field.description] == []
    assert [name for name, key in KEYS.items() if not key.why] == []


def test_only_identity_keys_decide_recorded_keys() -> None:
    for name, key in KEYS.items():
        assert (key.kind == "identity") == bool(DECIDES[name]), name
        assert DECIDES[name] <= IDENTITY.keys(), name


def test_every_recorded_key_is_decided_by_a_run_file_key() -> None:
    assert set().union(*DECIDES.values()) == IDENTITY.keys()


# sha256 of what the log records of a shipped run file alone. Another value would make each run of it another one.
IDENTITIES = {
    "digits": "9fc55033619ebab3b00ee5635449e54b",
    "text": "d6343b2b54898e684ae82c083cd9d23b",
    "classifier": "d3cde4b690191f02a94da2838415c53a",
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_what_is_recorded_of_the_shipped_runs_stays(name: str) -> None:
    spec = load_run_file(PAGE.with_name(name) / "run.yaml").spec
    assert digest_of(identity_in_run_file(spec)) == IDENTITIES[name]


@pytest.mark.parametrize("file", TABLES, ids=lambda file: file.name)
def test_the_page_has_the_table(file: Path) -> None:
    assert file.read_text(encoding="utf-8") == page_of(file, TABLES[file]()), f"out of date; write it: {REGENERATE}"


def examples() -> list[str]:
    return EXAMPLE.findall(PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("example", examples())
def test_examples_of_the_page_are_run_files(tmp_path: Path, example: str) -> None:
    """Each, added to the first one, is read without a complaint."""
    first, more = (yaml.safe_load(text) for text in (examples()[0], example))
    for key, value in more.items():
        first[key] = {**first[key], **value} if key in {"data", "train"} else value
    for one, other in (("sources", "source"), ("steps", "epochs")):
        for mapping in (first["data"], first["train"]):
            if one in mapping:
                mapping.pop(other, None)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(first))
    load_run_file(tmp_path / "run.yaml")


def test_every_key_stands_in_an_example() -> None:
    found = set()
    for example in examples():
        for key, value in yaml.safe_load(example).items():
            found |= {key, *(f"{key}.{name}" for name in (value if isinstance(value, dict) else ()))}
    named = {name: ".".join(name.split(".")[:2]) for name in FIELDS if name != "train.epoch_examples"}
    shown = {name for name, key in named.items() if key in found or (key == "model.build" and "model" in found)}
    assert named.keys() - shown == set(), f"add it to an example of {PAGE}"


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ("", ()),
        ("optimizer", ("compile.optimizer",)),
        ("compile.optimizer", ("compile.optimizer",)),
        ("loss, metrics", ("compile.loss", "compile.metrics")),
        ("seed,optimizer,train.seed", ("train.seed", "compile.optimizer")),
        ("global_batch_size", ("train.global_batch_size",)),
        ("data", ("data.sources", "data.validation", *TRANSFORMS, *ORDER, "data.content_digest", "data.contents")),
        ("validation", ("data.validation",)),
        ("model", ("model.options", "model.config", "model.code", "model.signature", "model.contents")),
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
    for file, table in TABLES.items():
        file.write_text(page_of(file, table()), encoding="utf-8")
