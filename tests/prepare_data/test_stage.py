"""The prepare-data stage: shards, split, order, the dataset's name, and preparing twice."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.tasks.foundation.contracts.data_spec import DataSpec
from baton.tasks.foundation.dataset.manifest import load_manifest, manifest_path
from baton.tasks.foundation.errors import DamagedDataset, SourceError, StorageError, StoreRefused
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.telemetry.events import Preparing
from baton.tasks.prepare_data import stage

COUNTING = """
import numpy as np

def load(n=100):
    for number in range(n):
        yield np.full(3, number, np.float32), number
"""


def test_shards_have_equal_counts_and_a_manifest(workshop: Any) -> None:
    workshop.write("data.py", COUNTING)
    ref = workshop.prepare("data.py:load", {"n": 100}, validation_fraction=0.2, shard_examples=7)
    manifest = load_manifest(workshop.storage, ref)
    assert ref.folder == f"datasets/{manifest.digest}"
    assert not ref.already_prepared
    assert ref.train_examples + ref.validation_examples == 100
    for part in (manifest.train, manifest.validation):
        assert [shard.examples for shard in part[:-1]] == [7] * (len(part) - 1)
    assert [shard.path for shard in manifest.train[:2]] == ["train-00000.tfrecord", "train-00001.tfrecord"]
    assert {(feature.name, feature.dtype, feature.shape) for feature in manifest.features} == {
        ("x", "float32", (3,)),
        ("y", "int64", ()),
    }
    examples = workshop.examples(ref) + workshop.examples(ref, "validation")
    assert sorted(example["y"] for example in examples) == list(range(100))
    assert all((example["x"] == example["y"]).all() for example in examples)
    assert workshop.events[-1] == Preparing(examples=100)


@pytest.mark.parametrize("source", ["function", "arrays", "npz"])
def test_order_of_the_source_is_kept_on_request(workshop: Any, source: str) -> None:
    """The last examples are held out, as by `fit(validation_split)`."""
    workshop.write("data.py", f"{COUNTING}\ndef arrays():\n    return np.zeros((100, 3)), np.arange(100)\n")
    workshop.write("data.npz", {"x": np.zeros((100, 3)), "y": np.arange(100)})
    named = {
        "function": ("data.py:load", {}),
        "arrays": ("data.py:arrays", {}),
        "npz": ("npz", {"path": "data.npz", "y": "y"}),
    }
    name, options = named[source]
    ref = workshop.prepare(name, options, shuffle=False, validation_fraction=0.2, shard_examples=7)
    parts = [[int(each["y"]) for each in workshop.examples(ref, part)] for part in ("train", "validation")]
    assert parts == [list(range(80)), list(range(80, 100))]
    assert workshop.prepare(name, options, validation_fraction=0.2, shard_examples=7).folder != ref.folder
    whole = workshop.prepare(name, options, shuffle=False, validation_fraction=0)
    assert [int(each["y"]) for each in workshop.examples(whole)] == list(range(100))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"split": "random"}, "split = random takes examples out of the order"),
        ({"split_by": "user"}, "split_by = user takes examples out of the order"),
        ({"source": "tfrecord"}, r"split = last \(shuffle = false\) needs records that Baton copies"),
    ],
)
def test_split_with_gaps_in_the_order_is_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DataSpec(**{"source": "data.py:load", "shuffle": False, **keys})


def test_shard_names_contain_the_total_if_known(workshop: Any) -> None:
    ref = workshop.prepare("digits", shard_examples=500)
    manifest = load_manifest(workshop.storage, ref)
    names = [f"train-{index:05d}-of-00004.tfrecord" for index in range(4)]
    assert [shard.path for shard in manifest.train] == names
    assert [shard.path for shard in manifest.validation] == ["validation-00000-of-00001.tfrecord"]


def test_preparing_twice_writes_nothing(workshop: Any) -> None:
    workshop.write("data.py", COUNTING)
    first = workshop.prepare("data.py:load")
    before = workshop.files()
    again = workshop.prepare("data.py:load")
    assert again == first.model_copy(update={"already_prepared": True})
    assert workshop.files() == before


def test_folder_of_datasets_is_tried_before_anything_is_read(workshop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    workshop.write("data.py", COUNTING)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refuse)
        with pytest.raises(StoreRefused, match="no permission to create files") as refused:
            workshop.prepare("data.py:load")
    assert refused.value.exit_code == 2
    assert workshop.files() == {}
    assert workshop.events == []
    workshop.prepare("data.py:load")
    monkeypatch.setattr(os, "link", refuse)
    assert workshop.prepare("data.py:load").already_prepared  # as on a shared disk that is read-only


def test_another_store_gets_the_same_bytes(workshop: Any, tmp_path: Path) -> None:
    workshop.write("data.py", COUNTING)
    first = workshop.prepare("data.py:load", shard_examples=9)
    elsewhere = type(workshop)(workshop.code, LocalStorage(tmp_path / "elsewhere"))
    assert elsewhere.prepare("data.py:load", shard_examples=9) == first
    assert load_manifest(elsewhere.storage, first) == load_manifest(workshop.storage, first)


@pytest.mark.parametrize(
    "change",
    [
        {"options": {"n": 99}},
        {"validation_fraction": 0.3},
        {"shard_examples": 10},
        {"version": 1},
        {"seed": 1},
    ],
)
def test_every_setting_that_changes_bytes_changes_the_name(workshop: Any, change: dict[str, Any]) -> None:
    workshop.write("data.py", COUNTING)
    first = workshop.prepare("data.py:load", {"n": 98})
    other = workshop.prepare("data.py:load", **{"options": {"n": 98}, **change})
    assert other.folder != first.folder
    assert not other.already_prepared


def test_stricter_checks_prepare_the_dataset_again(workshop: Any) -> None:
    workshop.write("table.csv", "a,y\nnan,1\n1,0\n")
    workshop.prepare("table", {"path": "table.csv", "x": "a", "y": "y"}, allow_nan=True)
    with pytest.raises(SourceError, match="x contains nan"):
        workshop.prepare("table", {"path": "table.csv", "x": "a", "y": "y"})
    workshop.write("data.py", COUNTING)
    unchecked = workshop.prepare("data.py:load")
    with pytest.raises(SourceError, match=r"outside of \[0, 50\)"):
        workshop.prepare("data.py:load", classes=50)
    for checks in ({"classes": 100}, {"allow_nan": True}):
        checked = workshop.prepare("data.py:load", **checks)
        assert checked.folder != unchecked.folder
        # The content digest depends on the bytes only.
        assert checked.content_digest == unchecked.content_digest


IMPORTS = {
    "beside it": ("from .consts import SCALE", "consts.py"),
    "a name from a module below": ("from .helpers.consts import SCALE", "helpers/consts.py"),
    "a module below": ("from .helpers import consts", "helpers/consts.py"),
    "a package": ("from . import helpers", "helpers/__init__.py"),
    "a package around it": ("from .helpers.consts import SCALE", "helpers/__init__.py"),
    "inside a function": ("def late():\n    from .helpers.deep import consts", "helpers/deep/consts.py"),
}


@pytest.mark.parametrize("case", IMPORTS)
def test_other_code_is_another_dataset(workshop: Any, case: str) -> None:
    statement, file = IMPORTS[case]
    for name in ("consts.py", "helpers/__init__.py", "helpers/consts.py", "helpers/deep/consts.py"):
        workshop.write(name, "SCALE = 1\n")
    workshop.write("data.py", f"{statement}\n{COUNTING}")
    first = workshop.prepare("data.py:load")
    workshop.write(file, "SCALE = 2\n")
    assert workshop.prepare("data.py:load").folder != first.folder


def test_imports_of_a_parent_module_change_the_name(workshop: Any) -> None:
    workshop.write("consts.py", "SCALE = 1\n")
    workshop.write("helpers/scaling.py", "from ..consts import SCALE\n")
    workshop.write("data.py", f"from .helpers.scaling import SCALE\n{COUNTING}")
    first = workshop.prepare("data.py:load")
    workshop.write("consts.py", "SCALE = 2\n")
    assert workshop.prepare("data.py:load").folder != first.folder


def test_comments_and_unused_code_do_not_change_the_name(workshop: Any) -> None:
    workshop.write("consts.py", "SCALE = 1\n")
    workshop.write("model.py", "RATE = 1\n")
    workshop.write("data.py", f"from .consts import SCALE\n{COUNTING}")
    first = workshop.prepare("data.py:load")
    workshop.write("model.py", "RATE = 2\n")
    workshop.write("consts.py", '"""Constants."""\nSCALE = 1  # as it was\n')
    assert workshop.prepare("data.py:load") == first.model_copy(update={"already_prepared": True})


def test_another_function_of_the_same_file_is_another_dataset(workshop: Any) -> None:
    workshop.write("data.py", f"{COUNTING}\ndef other(n=100):\n    yield from load(n)\n")
    assert workshop.prepare("data.py:load").folder != workshop.prepare("data.py:other").folder


def test_code_of_an_installed_package_changes_the_name(
    workshop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "counting_package"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "consts.py").write_text("SCALE = 1\n")
    (package / "unused.py").write_text("SCALE = 1\n")
    (package / "deep" / "data.py").write_text(f"from counting_package.consts import SCALE\n{COUNTING}")
    monkeypatch.syspath_prepend(str(package.parent))
    source = "counting_package.deep.data:load"
    first = workshop.prepare(source)
    (package / "unused.py").write_text("SCALE = 2\n")
    assert workshop.prepare(source).already_prepared
    for file in ("consts.py", "__init__.py"):
        (package / file).write_text("SCALE = 3\n")
        assert workshop.prepare(source).folder != first.folder
        (package / file).write_text("SCALE = 1\n" if file == "consts.py" else "")


def test_code_digest_needs_no_tensorflow() -> None:
    program = "import sys, baton.tasks.foundation.model.saved_code; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_sorted_source_is_shuffled(workshop: Any) -> None:
    workshop.write("data.py", COUNTING)
    labels = workshop.labels(workshop.prepare("data.py:load", {"n": 1000}, shard_examples=100, validation_fraction=0))
    assert sorted(labels) == list(range(1000))
    # Within a block of four shards, neighbors come from distant examples.
    steps = [abs(one - other) for one, other in pairwise(labels)]
    assert sum(steps) / len(steps) > 80
    assert set(labels[:100]) != set(range(100))


@pytest.mark.parametrize("shard_examples", [1, 3, 1000])
def test_split_does_not_depend_on_the_shards(workshop: Any, shard_examples: int) -> None:
    workshop.write("data.py", COUNTING)
    reference = workshop.prepare("data.py:load", validation_fraction=0.1, shard_examples=50)
    other = workshop.prepare("data.py:load", validation_fraction=0.1, shard_examples=shard_examples)
    assert sorted(workshop.labels(other, "validation")) == sorted(workshop.labels(reference, "validation"))


@pytest.mark.parametrize("fraction", [0.001, 0.5, 0.999])
@pytest.mark.parametrize("examples", [2, 3, 10])
def test_neither_part_is_empty(workshop: Any, fraction: float, examples: int) -> None:
    workshop.write("data.py", COUNTING)
    ref = workshop.prepare("data.py:load", {"n": examples}, validation_fraction=fraction)
    labels = workshop.labels(ref), workshop.labels(ref, "validation")
    assert all(labels)
    assert sorted(labels[0] + labels[1]) == list(range(examples))


def test_nothing_is_held_out_without_a_validation_fraction(workshop: Any) -> None:
    workshop.write("data.py", COUNTING)
    ref = workshop.prepare("data.py:load", {"n": 1}, validation_fraction=0)
    assert (ref.train_examples, ref.validation_examples) == (1, 0)


def test_later_process_reads_the_existing_manifest(workshop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    workshop.write("data.py", COUNTING)
    first = workshop.prepare("data.py:load")
    monkeypatch.setattr(stage, "_existing", lambda *_: None)  # both looked before either had written
    second = workshop.prepare("data.py:load")
    assert second == first
    load_manifest(workshop.storage, second)


def test_several_processes_prepare_at_once(workshop: Any) -> None:
    workshop.write("data.py", COUNTING)
    with ThreadPoolExecutor(4) as threads:
        refs = list(threads.map(lambda _: workshop.prepare("data.py:load", shard_examples=4), range(4)))
    assert {ref.content_digest for ref in refs} == {refs[0].content_digest}
    assert sorted(workshop.labels(refs[0]) + workshop.labels(refs[0], "validation")) == list(range(100))
    assert workshop.prepare("data.py:load", shard_examples=4).already_prepared


def test_source_with_changing_examples_is_refused(workshop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    workshop.write("data.py", "import os\ndef load():\n    for _ in range(9):\n        yield float(os.urandom(1)[0])\n")
    workshop.prepare("data.py:load")
    monkeypatch.setattr(stage, "_existing", lambda *_: None)
    with pytest.raises(SourceError, match="does not give the same examples each time") as refused:
        workshop.prepare("data.py:load")
    assert "delete the folder" in str(refused.value)


def test_shards_deleted_meanwhile_are_not_committed(workshop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    workshop.write("data.py", COUNTING)
    write = stage._write

    def then_cleared(*args: Any, storage: LocalStorage, **kwargs: Any) -> Any:
        manifest = write(*args, storage=storage, **kwargs)
        storage.delete(manifest.train[0].path)
        return manifest

    monkeypatch.setattr(stage, "_write", then_cleared)
    with pytest.raises(StorageError, match=r"train-00000\.tfrecord was deleted during preparation; run again"):
        workshop.prepare("data.py:load")
    assert not any(name.endswith("manifest.json") for name in workshop.files())


def test_lost_shard_is_written_again(workshop: Any) -> None:
    workshop.write("data.py", COUNTING)
    first = workshop.prepare("data.py:load", shard_examples=20)
    whole = workshop.examples(first)
    workshop.storage.delete(f"{first.folder}/train-00001.tfrecord")
    again = workshop.prepare("data.py:load", shard_examples=20)
    assert again == first
    assert str(workshop.examples(again)) == str(whole)


def test_failure_to_rewrite_a_shard_deletes_no_other(workshop: Any, tmp_path: Path) -> None:
    switch = tmp_path / "fail"
    workshop.write("data.py", f"import pathlib\n{COUNTING}    assert not pathlib.Path({str(switch)!r}).exists()\n")
    ref = workshop.prepare("data.py:load", shard_examples=20)
    workshop.storage.delete(f"{ref.folder}/train-00004.tfrecord")
    left = set(workshop.files())
    switch.touch()
    with pytest.raises(SourceError, match="AssertionError"):
        workshop.prepare("data.py:load", shard_examples=20)
    assert set(workshop.files()) >= left


def test_unreadable_manifest_is_reported(workshop: Any) -> None:
    workshop.write("data.py", COUNTING)
    ref = workshop.prepare("data.py:load")
    workshop.storage.write(manifest_path(ref.folder), b"{")
    with pytest.raises(DamagedDataset, match=r"manifest\.json"):
        workshop.prepare("data.py:load")


@pytest.mark.parametrize("after", [0, 30, 99])
def test_error_of_the_source_leaves_no_file(workshop: Any, after: int) -> None:
    workshop.write("data.py", COUNTING + f"        if number == {after}:\n            raise OSError\n")
    with pytest.raises(SourceError):
        workshop.prepare("data.py:load", shard_examples=5)
    assert workshop.files() == {}
