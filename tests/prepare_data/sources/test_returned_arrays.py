"""A `load` function that returns arrays instead of yielding examples."""

import uuid
from typing import Any

import numpy as np
import pytest

from baton.tasks.foundation.contracts.data_spec import DataSpec
from baton.tasks.foundation.contracts.log_entry import Environment, Origin
from baton.tasks.foundation.errors import SourceError
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.prepare_data.sources.registry import open_source
from tests.prepare_data.conftest import Workshop

LOAD = "data.py:load"
DATA = """
import numpy as np

a, b = np.zeros((40, 8), np.float32), np.arange(40)
c, d = np.zeros((10, 8), np.float32), np.arange(10)
named = {"left": a, "right": a[:, :2]}


def load():
    return RETURNED
"""

AMBIGUOUS = {
    "(a, b), (a, b)": ["(x float32[40, 8], y int64[40])", "2 sets of 40, 40 examples", "data.validation"],
    "(a, b), (c, d)": ["2 sets of 40, 10 examples", "of x float32[8] and y int64[]", "data.validation"],
    "[(a, b), (c, d), (c, d)]": ["3 sets of 40, 10, 10 examples", "test: data.py:load_test"],
    "[a, b]": ["one set of 40 examples of x float32[8] and y int64[]"],
    "[b, b]": ["one set of 40 examples of x int64[] and y int64[]"],
    "[a, b, b]": ["one set of 40 examples"],
    "a, b, c, d": ["2 sets of 40, 10 examples"],
    "(named, b), (named, b)": ["2 sets of 40, 40 examples of x/left float32[8], x/right float32[2] and y int64[]"],
    "[a.tolist(), b.tolist()]": ["one set of 40 examples of x float32[8] and y int64[]"],
}
EXAMPLES = ["zip(a, b)", "list(zip(a, b))", "[(a[0], 1), (a[1], 0)]", "((a[0], 1), (a[1], 0))", "a", "[a[0], a[1]][:1]"]


def first(workshop: Workshop, returned: str, **data: Any) -> object:
    workshop.write("data.py", DATA.replace("RETURNED", returned))
    spec = DataSpec(source=LOAD, **data)
    return next(open_source(spec, workshop.code).read())[1]


@pytest.mark.parametrize("returned", AMBIGUOUS)
def test_arrays_are_refused_with_both_readings(returned: str, workshop: Workshop) -> None:
    with pytest.raises(SourceError) as refused:
        first(workshop, returned)
    message = str(refused.value)
    assert [word for word in AMBIGUOUS[returned] if word not in message] == [], message
    assert "yield from zip(x, y)" in message
    # Two sets of different lengths are no examples of one form.
    assert ("data.batched: false" in message) == ("c" not in returned)


@pytest.mark.parametrize("returned", EXAMPLES)
def test_returned_examples_are_accepted(returned: str, workshop: Workshop) -> None:
    assert first(workshop, returned) is not None


def test_batched_false_accepts_single_examples(workshop: Workshop) -> None:
    x, y = first(workshop, "(a, b), (a, b)", batched=False)  # type: ignore[misc]
    assert (np.shape(x), np.shape(y)) == ((40, 8), (40,))


def test_refusal_writes_nothing_and_a_started_run_continues(workshop: Workshop) -> None:
    workshop.write("data.py", DATA.replace("RETURNED", "(a, b), (a, b)"))
    with pytest.raises(SourceError, match="2 sets"):
        workshop.prepare(LOAD)
    assert workshop.files() == {}
    environment = Environment(accelerator="cpu", replicas=1, intra_op_threads=1, inter_op_threads=1, versions={})
    log = RunLog(workshop.storage.at("test"))
    log.append(lambda _: Origin(identity={}, environment=environment), attempt=uuid.uuid4().hex)
    ref = workshop.prepare(LOAD, validation_fraction=0.5)
    assert ref.train_examples + ref.validation_examples == 2
