"""A train state with every kind of leaf, built once for each module, and a home to stage it in."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.tasks.foundation.contracts.log_entry import Entry, Environment, Origin
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.log.files import encode
from baton.tasks.foundation.log.fold import fold
from baton.tasks.foundation.storage.local import LocalStorage
from tests.support.lab import Lab, built, lab_of, spec_of

SPEC = spec_of("build")
MODEL = """
def build():
    x = keras.Input((6,), name="in.put")
    y = layers.RawVariable()(x)
    y = layers.GeneratorNoise()(y)
    y = keras.layers.BatchNormalization(name="norm. 1")(y)
    y = keras.layers.Dropout(0.5)(keras.layers.Dense(4, name="hidden")(y))
    model = keras.Model(x, keras.layers.Dense(3, name="out.put")(y))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01, use_ema=True), loss, metrics=[layers.CountRight()])
    return model
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return lab_of(tmp_path_factory.mktemp("lab"), MODEL)


@pytest.fixture(scope="module")
def spec() -> RunSpec:
    return SPEC


@pytest.fixture(scope="module")
def state(lab: Lab) -> Any:
    return built(lab, SPEC)


@pytest.fixture
def staging_home(tmp_path: Path) -> LocalStorage:
    """A home whose log has only the entry that tests stage on top of."""
    return home_with_entry_7(tmp_path / "home")


def home_with_entry_7(folder: Path) -> LocalStorage:
    """The same, in a folder."""
    home = LocalStorage(folder)
    environment = Environment(accelerator="cpu", replicas=1, intra_op_threads=1, inter_op_threads=1, versions={})
    body = Origin(identity={}, environment=environment)
    head = fold(None, body)
    here = {name: getattr(head, name).model_copy(update={"entry": 7}) for name in ("identity_in", "environment_in")}
    head = head.model_copy(update={"number": 7, "base": 7, **here})
    entry = Entry(number=7, time="2026-11-20T12:00:00+00:00", attempt="0", body=body, head=head)
    home.create("log/00000007.json", encode(entry))
    return home


@contextmanager
def changed(variable: Any, value: Any) -> Iterator[None]:
    before = variable.numpy()
    variable.assign(value)
    try:
        yield
    finally:
        variable.assign(before)


def nearest_other(value: Any) -> Any:
    """The same values, except that one of them differs by the smallest amount."""
    flat = np.array(value).reshape(-1)
    flat[-1] = np.nextafter(flat[-1], np.float32(9)) if flat.dtype.kind == "f" else flat[-1] + 1
    return flat.reshape(np.shape(value))
