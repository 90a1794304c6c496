"""`data.pack`: each token is in one row once, next to those of its sequence, and rows are filled."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.tasks.foundation.contracts.data_spec import PackSpec
from baton.tasks.foundation.dataset.features import Array
from baton.tasks.foundation.dataset.manifest import load_manifest
from baton.tasks.foundation.dataset.shards import encode
from baton.tasks.foundation.errors import SourceError
from baton.tasks.foundation.telemetry.events import Note
from baton.tasks.prepare_data.sequences import Packing
from tests.prepare_data.conftest import Workshop

SEQUENCES = """
import numpy as np

def load(bare=False):
    for number in range(40):
        tokens = np.arange(number % 7, dtype=np.int32) + 100 * (number + 1)
        yield tokens if bare else (tokens, tokens + 1)
"""


def segments_of(row: dict[str, Any], *names: str) -> Iterator[tuple[list[int], ...]]:
    """Yield the parts of a row's features that belong to one sequence."""
    for number in range(1, int(row["x/segment_ids"].max()) + 1):
        at = row["x/segment_ids"] == number
        assert row["x/positions"][at].tolist() == list(range(at.sum()))
        yield tuple(row[name][at].tolist() for name in names)


def decoded(packing: Packing, record: bytes) -> dict[str, Array]:
    from tensorflow.core.example.example_pb2 import Example

    found = Example.FromString(record).features.feature
    return {
        name: np.frombuffer(found[name].bytes_list.value[0], dtype).reshape(shape)
        for name, dtype, shape in packing.kinds
    }


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=200),
    length=st.integers(2, 16),
    held_out=st.integers(0, 3),
)
def test_each_token_is_packed_once_and_rows_are_filled(lengths: list[int], length: int, held_out: int) -> None:
    packing = Packing(PackSpec(length=length, longer="split"))
    sequences = [(number * 100 + np.arange(size)).astype(np.int64) for number, size in enumerate(lengths)]
    for tokens in sequences:
        packing.check("here", {"x": tokens, "y": -tokens})
    parts = [(bool(n % 4 < held_out), encode({"x": tokens, "y": -tokens})) for n, tokens in enumerate(sequences)]
    rows = [(part, decoded(packing, record)) for part, record in packing.pack(parts)]
    for part in (False, True):
        found = [
            tokens
            for of_part, row in rows
            if of_part == part
            for tokens, labels in segments_of(row, "x/tokens", "y")
            if [-token for token in tokens] == labels or pytest.fail(f"{tokens} has the labels {labels}")
        ]
        pieces = [
            tokens[begin : begin + length].tolist()
            for (of_part, _), tokens in zip(parts, sequences, strict=True)
            if of_part == part
            for begin in range(0, len(tokens), length)
        ]
        assert sorted(found) == sorted(pieces)
        of_part = [row for which, row in rows if which == part]
        # No two rows would fit into one, where all rows were open together.
        used = sorted(int((row["x/segment_ids"] > 0).sum()) for row in of_part)
        assert len(of_part) > 60 or len(used) < 2 or used[0] + used[1] > length
    for _, row in rows:
        filling = row["x/segment_ids"] == 0
        assert (row["sample_weight"] == np.where(filling, 0, 1)).all()
        assert not row["x/tokens"][filling].any()
        assert not row["y"][filling].any()


def test_prepared_rows_hold_whole_sequences(workshop: Workshop) -> None:
    workshop.write("data.py", SEQUENCES)
    ref = workshop.prepare("data.py:load", validation_fraction=0.25, pack=8)
    manifest = load_manifest(workshop.storage, ref)
    assert [(each.name, each.dtype, each.shape) for each in manifest.features] == [
        ("x/positions", "int32", (8,)),
        ("x/segment_ids", "int32", (8,)),
        ("x/tokens", "int32", (8,)),
        ("y", "int32", (8,)),
        ("sample_weight", "float32", (8,)),
    ]
    found = [
        [tokens for row in workshop.examples(ref, part) for (tokens,) in segments_of(row, "x/tokens")]
        for part in ("train", "validation")
    ]
    expected = [(np.arange(n % 7) + 100 * (n + 1)).tolist() for n in range(40) if n % 7]
    assert sorted([*found[0], *found[1]]) == expected
    assert all(found)
    tokens = sum(map(len, expected))
    rows = ref.train_examples + ref.validation_examples
    words = f"40 sequences of {tokens} tokens in {rows} rows of 8, {tokens / rows / 8:.1%} filled"
    assert manifest.origin["data.pack"] == words
    assert [event.text for event in workshop.events if isinstance(event, Note)].count(f"packed {words}") == 1


def test_packing_twice_gives_the_same_rows(workshop: Workshop) -> None:
    workshop.write("data.py", SEQUENCES)
    first = workshop.prepare("data.py:load", pack=8)
    again = Workshop(workshop.code, workshop.storage.at("again"))  # type: ignore[arg-type]
    assert again.prepare("data.py:load", pack=8).content_digest == first.content_digest
    assert workshop.prepare("data.py:load", pack=9).content_digest != first.content_digest


@pytest.mark.parametrize(
    ("yielded", "names"),
    [
        ("tokens", ["x/positions", "x/segment_ids", "x/tokens"]),
        ("{'ids': tokens}", ["x/ids", "x/positions", "x/segment_ids"]),
        ("({'ids': tokens}, {'a': tokens, 'b': tokens})", [
            "x/ids", "x/positions", "x/segment_ids", "y/a", "y/b", "sample_weight/a", "sample_weight/b",
        ]),
        ("(tokens, tokens, np.ones(3))", ["x/positions", "x/segment_ids", "x/tokens", "y", "sample_weight"]),
        ("{'ids': tokens, 'user': 7 + n % 2}", ["x/ids", "x/positions", "x/segment_ids"]),
    ],
)  # fmt: skip
def test_rows_have_the_structure_of_the_examples(yielded: str, names: list[str], workshop: Workshop) -> None:
    code = f"import numpy as np\ntokens = np.arange(3)\ndef load():\n    for n in range(8):\n        yield {yielded}\n"
    workshop.write("data.py", code)
    keys = {"split_by": "user", "validation_fraction": 0.5} if "user" in yielded else {"validation_fraction": 0.0}
    ref = workshop.prepare("data.py:load", pack=8, **keys)
    assert [feature.name for feature in load_manifest(workshop.storage, ref).features] == names


@pytest.mark.parametrize(
    ("yielded", "words"),
    [
        ("(np.arange(3), 1)", ["x [3], y []", "a label for each token"]),
        ("(np.arange(3), np.arange(2))", ["x [3], y [2]"]),
        ("np.arange(9)", ["it has 9 tokens, but data.pack.length is 8", "longer: split"]),
        ("['a', 'b']", ["packs numbers, but x is text"]),
        ("{'positions': np.arange(3)}", ["adds the input positions", "rename it"]),
        ("((np.arange(3), np.arange(3)), np.arange(3))", ["x is a list of 2 arrays", "yield a dict"]),
    ],
)
def test_examples_that_cannot_be_packed_are_refused(yielded: str, words: list[str], workshop: Workshop) -> None:
    workshop.write("data.py", f"import numpy as np\ndef load():\n    for _ in range(8):\n        yield {yielded}\n")
    with pytest.raises(SourceError) as refused:
        workshop.prepare("data.py:load", validation_fraction=0, pack=8)
    assert all(word in str(refused.value) for word in ["data.pack", *words]), refused.value
    assert workshop.files() == {}


def test_sources_of_a_mixture_are_packed_apart(workshop: Workshop) -> None:
    code = (
        "import numpy as np\ndef load(begin=0):\n    for n in range(20):\n        yield np.arange(begin, begin + 3)\n"
    )
    workshop.write("data.py", code)
    sources = [{"source": "data.py:load", "options": {"begin": begin}, "weight": 1} for begin in (0, 1000)]
    ref = workshop.prepare("", validation_fraction=0, pack=9, sources=sources)
    assert ref.train_examples == 2 * 7
