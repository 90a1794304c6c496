"""Values of an identity that no version of Baton writes: every verb ends with exit code 4 and the name of the entry."""

from pathlib import Path
from typing import Any

import pytest

from baton.flows.commands.main import main
from baton.tasks.foundation.contracts.identity import CALLBACK_RECORD, digest_of, require_types
from baton.tasks.foundation.log.files import entry_path
from tests.support.fake_run import FakeRun
from tests.support.small_logs import edit_entry

SOUND = {
    "data.train_examples": 1000,
    "train.global_batch_size": 32,
    "train.drop_remainder": False,
    CALLBACK_RECORD: {"csv_files": [{"name": "log.csv"}], "of_a_later_version": 1},
}
WRONG: dict[str, list[Any]] = {
    "data.train_examples": [-1, 0, 1.5, "x", True, 10**30, [], None],
    "train.global_batch_size": [0, -32, "32", 1e300, False],
    "train.drop_remainder": ["x", 1, None, {}],
    "data.folder": ["datasets/../x", "/etc", 5, None],
    "data.validation_folder": ["../x"],
    "data.content_digest": [None, 7],
    "train.class_weight": [{"0": "x"}, [1.0]],
    "init.freeze": ["layer", [1]],
    "model.contents": [[], "x"],
    CALLBACK_RECORD: [[], None, {"keep_best": 1}, {"csv_files": [{"name": "../x"}]}],
}
CASES = [(key, value) for key, values in WRONG.items() for value in values]


def set_identity(run: FakeRun, changes: dict[str, Any]) -> None:
    """Write the identity anew into the entry that sets it, with all digests as a version of Baton would write them."""
    identity = {**run.head.identity, **changes}
    digests = {"digest": digest_of(identity)}
    for number in range(run.head.number + 1):
        edit_entry(run.home, number, lambda entry: entry["head"]["identity"].update(digests))
    edit_entry(run.home, 0, lambda entry: entry["body"]["identity"].update(changes))


@pytest.mark.parametrize(("key", "value"), CASES, ids=[f"{key}={value!r}" for key, value in CASES])
def test_each_verb_that_looks_at_it_names_the_entry(
    key: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text("def build_model(): ...\n")
    run = FakeRun(tmp_path, target=100, identity=SOUND).train(100)
    set_identity(run, {key: value})
    before = run.files()
    for words in (
        ["verify", run.address],
        ["log", run.address],
        ["report", run.address],
        ["fork", run.address, "--as", "new"],
        ["run", str(run.run_file(steps=300))],
    ):
        code = main(words)
        out, err = capsys.readouterr()
        printed = "".join((out + err).split())
        assert code == 4, f"{words[0]}: {out}{err}"
        assert entry_path(0) in printed
        assert key in printed
        assert run.files() == before, words[0]


def test_a_dropped_remainder_that_leaves_no_batch_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = FakeRun(tmp_path, identity=SOUND).train(100)
    set_identity(run, {"train.drop_remainder": True, "data.train_examples": 31})
    assert main(["report", run.address]) == 4
    assert "leaves no batch of train.global_batch_size = 32" in " ".join(capsys.readouterr().err.split())


def test_values_that_versions_of_baton_write_are_accepted() -> None:
    require_types(SOUND)
    require_types({})
    require_types({"of_a_later_version": object(), "model.config": [None], "compile.loss": 5})
    require_types({"train.precision": None, "data.validation": None, "train.callbacks": None, "data.sources": None})
