"""Random numbers of user modules depend on train.seed only, at import and in sources."""

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.random import seed_generator

from baton.tasks.foundation.contracts.data_spec import DataSpec
from baton.tasks.foundation.user_functions import USER_PACKAGE_PREFIX, load_function
from baton.tasks.init_or_restore.weights.loading import call_weights_function
from baton.tasks.prepare_data.sources.registry import open_source

MODULE = """
import random
import keras
import numpy as np
import tensorflow as tf

SEEDS = keras.random.SeedGenerator().state.numpy().tolist()
DRAWN = [random.random(), np.random.rand(), float(tf.random.uniform([])), SEEDS[0]]
LAYER = keras.layers.Dense(3)
LAYER.build((None, 2))
def drawn(): return [*DRAWN, *LAYER.kernel.numpy().ravel().tolist()]
"""
SOURCE = """
import random
import numpy as np
import tensorflow as tf
{0}

def load():
    for _ in range(3):
        yield np.float32([random.random(), np.random.rand(), tf.random.uniform([]).numpy()])
"""


@pytest.fixture(autouse=True)
def _forget_user_modules() -> Iterator[None]:
    forget()
    yield
    forget()


def forget() -> None:
    """Simulate another process: nothing is imported, and the generators have other states."""
    for name in [name for name in sys.modules if name.startswith(USER_PACKAGE_PREFIX)]:
        del sys.modules[name]
    random.seed()
    np.random.seed()  # noqa: NPY002
    tf.random.set_seed(int.from_bytes(random.randbytes(3), "big"))
    seed_generator.python_random = random


def drawn(folder: Path, seed: int) -> list[float]:
    forget()
    return list(load_function("model.py:drawn", folder, seed=seed)())


def test_import_time_values_are_equal_in_every_process(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODULE)
    first = drawn(tmp_path, 1)
    assert drawn(tmp_path, 1) == first
    assert not set(drawn(tmp_path, 2)) & set(first)


def test_modules_draw_different_numbers(tmp_path: Path) -> None:
    for name in ("model", "other"):
        (tmp_path / f"{name}.py").write_text(MODULE)
    first = drawn(tmp_path, 1)
    assert not set(load_function("other.py:drawn", tmp_path, seed=1)()) & set(first)


def test_module_can_set_the_seed(tmp_path: Path) -> None:
    own = MODULE.replace("\nSEEDS", "\nkeras.utils.set_random_seed(7)\nSEEDS", 1)
    (tmp_path / "model.py").write_text(own)
    assert drawn(tmp_path, 1) == drawn(tmp_path, 2)


def test_import_leaves_global_generators_unchanged(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODULE)
    keras.utils.set_random_seed(3)
    source = seed_generator.python_random
    preserved_global_state = [random.random(), float(np.random.rand()), float(tf.random.uniform([]))]  # noqa: NPY002
    forget()
    keras.utils.set_random_seed(3)
    load_function("model.py:drawn", tmp_path, seed=1)
    assert [random.random(), float(np.random.rand()), float(tf.random.uniform([]))] == preserved_global_state  # noqa: NPY002
    assert seed_generator.python_random is source


def examples(folder: Path, seed: int) -> list[Any]:
    """Read the examples as prepare-data does."""
    forget()
    return read(open_source(DataSpec(source="data.py:load"), folder, seed))


def read(source: Any) -> list[Any]:
    return [example.tolist() for _, example in source.read()]


def test_random_examples_are_reproducible(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(SOURCE.format(""))
    source = open_source(DataSpec(source="data.py:load"), tmp_path, 1)
    first = read(source)
    random.random()
    np.random.rand()  # noqa: NPY002
    assert read(source) == first
    assert examples(tmp_path, 1) == first
    assert examples(tmp_path, 2) != first


def test_examples_follow_the_modules_own_seed(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(SOURCE.format("random.seed(5)\nnp.random.seed(5)"))
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    theirs = [np.float32([random.random(), np.random.rand()]).tolist() for _ in range(3)]  # noqa: NPY002
    assert [example[:2] for example in examples(tmp_path, 1)] == theirs
    assert [example[:2] for example in examples(tmp_path, 2)] == theirs


def test_initial_weights_function_is_reproducible(tmp_path: Path) -> None:
    (tmp_path / "weights.py").write_text(
        "import numpy as np\nOFFSET = np.random.rand()\ndef load(): return {'bias': OFFSET + np.random.rand(3)}\n"
    )
    found = []
    for seed in (1, 1, 2):
        forget()
        before = random.getstate()
        contents = call_weights_function("weights.py:load", tmp_path, seed=seed)
        assert random.getstate() == before
        found.append(np.asarray(contents.variables[0].value).tolist())
    assert found[0] == found[1] != found[2]
