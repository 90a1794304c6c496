"""Each source from real files to a dataset."""

import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.tasks.foundation.dataset.manifest import load_manifest
from baton.tasks.foundation.errors import SourceError
from baton.tasks.foundation.telemetry.events import Note
from baton.tasks.prepare_data.sources.table import table
from tests.support.tars import tar


def features(workshop: Any, ref: Any) -> list[tuple[str, str, tuple[int, ...]]]:
    manifest = load_manifest(workshop.storage, ref)
    return [(feature.name, feature.dtype, feature.shape) for feature in manifest.features]


def test_digits_become_a_dataset(workshop: Any) -> None:
    ref = workshop.prepare("digits", classes=10)
    assert features(workshop, ref) == [("x", "float32", (8, 8, 1)), ("y", "int64", ())]
    assert ref.train_examples + ref.validation_examples == 1797
    assert ref.validation_examples == pytest.approx(180, abs=30)
    examples = workshop.examples(ref)
    assert {example["y"].item() for example in examples} == set(range(10))
    assert min(example["x"].min() for example in examples) == 0
    assert max(example["x"].max() for example in examples) == 1


def test_text_files_form_one_text_in_path_order(workshop: Any) -> None:
    workshop.write("corpus/b/one.py", "89abcdef")
    workshop.write("corpus/a.py", "01234567")
    workshop.write("corpus/notes.md", "never")
    workshop.write("corpus/site-packages/x.py", "never")
    ref = workshop.prepare("text", {"path": "corpus", "suffix": ".py", "length": 5}, validation_fraction=0)
    assert features(workshop, ref) == [("x", "int32", (5,)), ("y", "int32", (5,))]
    found = {bytes(example["x"].tolist()): bytes(example["y"].tolist()) for example in workshop.examples(ref)}
    assert found == {b"01234": b"12345", b"56789": b"6789a", b"abcde": b"bcdef"}
    assert set(load_manifest(workshop.storage, ref).origin) == {"a.py", "one.py"}


def test_max_bytes_limits_the_text(workshop: Any) -> None:
    workshop.write("a.txt", "0123456789")
    workshop.write("text/b.txt", "0123")
    options = {"path": "a.txt", "length": 2, "max_bytes": 7}
    assert workshop.prepare("text", options, validation_fraction=0).train_examples == 3
    assert workshop.prepare("text", {**options, "max_bytes": 6}, validation_fraction=0).train_examples == 2
    assert workshop.prepare("text", {**options, "max_bytes": 1000}, validation_fraction=0).train_examples == 4


def test_text_longer_than_a_block_is_cut_seamlessly(workshop: Any) -> None:
    text = np.random.default_rng(0).integers(0, 256, (1 << 20) * 2 + 12345, np.uint8).tobytes()
    workshop.write("corpus/a", text[: (1 << 20) + 77])
    workshop.write("corpus/b", text[(1 << 20) + 77 :])
    ref = workshop.prepare("text", {"path": "corpus", "length": 1000}, validation_fraction=0)
    found = {bytes(example["x"].tolist()) for example in workshop.examples(ref)}
    assert found == {text[begin : begin + 1000] for begin in range(0, len(text) - 1000, 1000)}


def test_standard_library_is_a_text_source(workshop: Any) -> None:
    ref = workshop.prepare("text", {"path": "{stdlib}/json", "suffix": ".py", "length": 100})
    total = sum(file.stat().st_size for file in Path(sysconfig.get_paths()["stdlib"], "json").rglob("*.py"))
    assert ref.train_examples + ref.validation_examples == (total - 1) // 100


def test_text_dataset_is_named_by_bytes_not_by_path(workshop: Any) -> None:
    workshop.write("one/a.txt", "0123456789")
    workshop.write("two/a.txt", "0123456789")
    first = workshop.prepare("text", {"path": "one", "length": 2})
    assert workshop.prepare("text", {"path": str(workshop.code / "two"), "length": 2}).folder == first.folder
    workshop.write("two/a.txt", "0123456780")
    assert workshop.prepare("text", {"path": "two", "length": 2}).folder != first.folder


def test_csv_rows_become_examples(workshop: Any) -> None:
    workshop.write("table.csv", "\ufeffa,kind,b\r\n1,0,2.5\r\n\r\n3,1,-4e2\r\n")
    ref = workshop.prepare("table", {"path": "table.csv", "y": "kind", "stack": True}, validation_fraction=0)
    assert features(workshop, ref) == [("x", "float32", (2,)), ("y", "int64", ())]
    rows = sorted((example["y"].item(), example["x"].tolist()) for example in workshop.examples(ref))
    assert rows == [(0, [1, 2.5]), (1, [3, -400])]


def test_csv_with_20_000_columns_is_read_at_once(tmp_path: Path) -> None:
    """Each name was looked for in the list of all names, three times."""
    names = [f"column{number}" for number in range(20_000)]
    (tmp_path / "wide.csv").write_text(f"{','.join(names)}\n{','.join(['1'] * 20_000)}\n")
    options = {"path": "wide.csv", "x": names[:-1], "y": names[-1], "stack": True}
    source = table(options, tmp_path, sequences=False)
    ((_, row),) = source.read()
    assert (row.arrays["x"].shape, row.arrays["y"]) == ((19_999,), 1)


def test_csv_files_with_chosen_columns_and_float_label(workshop: Any) -> None:
    workshop.write("parts/1.csv", "a;b;price\n1;2;0.5\n")
    workshop.write("parts/2.csv", "price;b;a\n7;5;4\n")
    workshop.write("parts/readme.txt", "no table")
    options = {"x": ["b", "a"], "y": "price", "stack": True, "delimiter": ";", "types": {"a": "float64"}}
    for path in ("parts", "parts/*.csv"):
        ref = workshop.prepare("table", {"path": path, **options}, validation_fraction=0)
        assert features(workshop, ref) == [("x", "float32", (2,)), ("y", "float32", ())]
        rows = sorted((example["y"].item(), example["x"].tolist()) for example in workshop.examples(ref))
        assert rows == [(0.5, [2, 1]), (7, [5, 4])]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_arrays_become_examples(workshop: Any, save: Any) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "images": rng.normal(size=(3000, 40, 3)).astype(np.float32),
        "labels": np.arange(3000, dtype=np.uint16),
        "weights": np.arange(3000) / 7,
        "other": np.zeros(2),
    }
    save(workshop.code / "data.npz", **arrays)
    options = {"path": "data.npz", "x": "images", "y": "labels", "sample_weight": "weights"}
    ref = workshop.prepare("npz", options, shard_examples=1000)
    assert features(workshop, ref) == [
        ("x", "float32", (40, 3)),
        ("y", "uint16", ()),
        ("sample_weight", "float32", ()),
    ]
    examples = workshop.examples(ref) + workshop.examples(ref, "validation")
    assert sorted(example["y"].item() for example in examples) == list(range(3000))
    for example in examples:
        np.testing.assert_array_equal(example["x"], arrays["images"][example["y"]])
        assert example["sample_weight"] == np.float32(arrays["weights"][example["y"]])


def test_npz_in_fortran_and_big_endian_order(workshop: Any) -> None:
    x = np.arange(12, dtype=">f4").reshape(4, 3)
    workshop.write("data.npz", {"x": np.asfortranarray(x), "y": np.arange(4, dtype=">i8")})
    ref = workshop.prepare("npz", {"path": "data.npz", "y": "y"}, validation_fraction=0)
    assert features(workshop, ref) == [("x", "float32", (3,)), ("y", "int64", ())]
    for example in workshop.examples(ref):
        np.testing.assert_array_equal(example["x"], x[example["y"]])


def test_user_function_yields_dicts_and_weights(workshop: Any) -> None:
    workshop.write("numbers_.py", "START = 5\n")
    workshop.write(
        "data.py",
        "from .numbers_ import START\n"
        "def load(n):\n"
        "    for i in range(START, START + n):\n"
        "        yield {'b': [i, i], 'a': True}, {'out': i}, 0.5\n",
    )
    ref = workshop.prepare("data.py:load", {"n": 4}, validation_fraction=0)
    assert features(workshop, ref) == [
        ("x/b", "int64", (2,)),
        ("x/a", "bool", ()),
        ("y/out", "int64", ()),
        ("sample_weight", "float32", ()),
    ]
    assert sorted(example["y/out"].item() for example in workshop.examples(ref)) == [5, 6, 7, 8]


def test_user_function_may_return_a_list(workshop: Any) -> None:
    workshop.write("data.py", "def load():\n    return [(1.0, 2), (3.0, 4)]\n")
    assert sorted(workshop.labels(workshop.prepare("data.py:load", validation_fraction=0))) == [2, 4]


def test_allow_nan_accepts_nan(workshop: Any) -> None:
    workshop.write("table.csv", "a,y\nnan,1\ninf,0\n")
    ref = workshop.prepare("table", {"path": "table.csv", "y": "y"}, allow_nan=True)
    assert ref.train_examples + ref.validation_examples == 2


@pytest.mark.parametrize(
    ("source", "options", "suffix", "made"),
    [
        ("table", {"y": "y"}, "csv", lambda number: f"x,y\n{number},0\n{number + 1},1\n".encode()),
        ("tar", {"x": "npy", "y": "cls"}, "tar", lambda number: tar(number, number + 1)),
    ],
)
def test_files_of_a_folder_are_read_or_named(
    workshop: Any,
    monkeypatch: pytest.MonkeyPatch,
    *,
    source: str,
    options: dict[str, Any],
    suffix: str,
    made: Callable[[int], bytes],
) -> None:
    listed: list[Path] = []
    list_folder = Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda folder, mark: listed.append(folder) or list_folder(folder, mark))
    workshop.write(f"f/0.{suffix}", made(0))
    workshop.write(f"f/below/1.{suffix.upper()}", made(2))
    workshop.write(f"f/2.{suffix}.old", made(4))
    workshop.write("f/.3", b"hidden")
    ref = workshop.prepare(source, {"path": "f", **options}, validation_fraction=0)
    assert ref.train_examples == 4
    notes = [event.text for event in workshop.events if isinstance(event, Note)]
    assert notes == [f"data.options.path: f: 1 file not read: 2.{suffix}.old"]
    assert listed.count(workshop.code / "f") == 1


def test_folder_that_is_a_link_is_refused(workshop: Any) -> None:
    workshop.write("f/0.csv", "x,y\n1,0\n")
    workshop.write("elsewhere/1.csv", "x,y\n1,0\n")
    (workshop.code / "f/more").symlink_to(workshop.code / "elsewhere")
    with pytest.raises(SourceError, match="f/more is a link to a folder, whose files would be left out; put"):
        workshop.prepare("table", {"path": "f", "y": "y"})
