"""What `fit` would do anew in each epoch is read once: it is said by name and line, or refused."""

import re
from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.contracts.data_spec import DataSpec
from baton.tasks.foundation.errors import SourceError
from baton.tasks.foundation.telemetry.events import Note
from baton.tasks.prepare_data.sources.registry import open_source
from tests.prepare_data.conftest import Workshop

HEAD = """
import random
import keras
import numpy as np
import tensorflow as tf

x = np.arange(48, dtype="float32").reshape(16, 3)
y = np.arange(16)
MODULE = np.random.default_rng(5)
OF_PYTHON = random.Random(5)
flip = keras.layers.RandomFlip("horizontal")
of_tensorflow = tf.random.Generator.from_seed(3)
of_keras = keras.random.SeedGenerator(4)
ROW = tf.TensorSpec([3], tf.float32)

def slices():
    return tf.data.Dataset.from_tensor_slices((x, y))

def noisy(row):
    spread = 1.0
    return row + np.random.normal(0, spread, 3).astype("float32")  # drawn

@tf.function
def in_a_function(row):
    return row + tf.random.normal([3])

class Batches(keras.utils.PyDataset):
    epoch = 0

    def __init__(self):
        super().__init__()
        self.rows = np.arange(16)

    def __len__(self):
        return 4

    def __getitem__(self, n):
        rows = self.rows[4 * n : 4 * n + 4]
        return x[rows], y[rows]

class Shuffled(Batches):
    def on_epoch_end(self):
        np.random.shuffle(self.rows)
"""
# Each draws anew in each pass, at a line that ends with "drawn".
DRAWS = """
def operation():
    return slices().map(lambda a, b: (a + tf.random.normal([3]), b))  # drawn

def operation_in_a_condition():
    return slices().map(lambda a, b: (tf.image.random_flip_left_right(a[:, None, None]), b))  # drawn

def operation_in_a_function():
    return slices().map(lambda a, b: (in_a_function(a), b))  # drawn

def operation_of_an_inner_dataset():
    def inner(a, b):
        return tf.data.Dataset.from_tensors(a).map(lambda a: a + tf.random.normal([3]))  # drawn
    return slices().flat_map(inner)

def operation_before_a_batch():
    return slices().map(lambda a, b: (tf.random.shuffle(a), b)).batch(4).prefetch(1)  # drawn

def filtered():
    return slices().filter(lambda a, b: tf.random.uniform([]) < 0.9)  # drawn

def layer_of_keras():
    return slices().map(lambda a, b: (flip(a[None, :, None], training=True), b))  # drawn

def generator_of_tensorflow():
    return slices().map(lambda a, b: (a + of_tensorflow.normal([3]), b))  # drawn

def generator_of_keras():
    return slices().map(lambda a, b: (a + keras.random.normal([3], seed=of_keras), b))  # drawn

def counter():
    count = tf.Variable(0.0)
    return slices().map(lambda a, b: (a + count.assign_add(1.0), b))  # drawn

def of_numpy():
    for a, b in zip(x, y):
        yield noisy(a), b

def zip_of_a_generator():
    return zip((noisy(a) for a in x), y)

def of_python():
    for a, b in zip(x, y):
        yield a * random.random(), b  # drawn

def own_generator_of_python():
    for a, b in zip(x, y):
        c = OF_PYTHON.random()  # drawn
        yield a * c, b

def called_tensorflow():
    for a, b in zip(x, y):
        c = tf.random.uniform([])  # drawn
        yield a * c, b

def called_keras():
    for a, b in zip(x, y):
        c = keras.random.uniform([])  # drawn
        yield a * c, b

def called_layer():
    for a, b in zip(x, y):
        c = flip(a[None, :, None], training=True)  # drawn
        yield c, b

def generator_of_the_module():
    for a, b in zip(x, y):
        a = a + MODULE.normal()  # drawn
        yield a, b

def generator_without_a_seed():
    rng = np.random.default_rng()
    for a, b in zip(x, y):
        a = a + rng.normal()  # drawn
        yield a, b

def python_code_of_a_dataset():
    def rows():
        for a in x:
            yield noisy(a)
    return tf.data.Dataset.from_generator(rows, output_signature=ROW)

def function_of_python_in_a_dataset():
    def augment(a, b):
        return tf.ensure_shape(tf.numpy_function(noisy, [a], tf.float32), [3]), b
    return slices().map(augment)

def functions_of_python_side_by_side():
    def augment(a, b):
        return tf.ensure_shape(tf.py_function(func=lambda a: noisy(a.numpy()), inp=[a], Tout=tf.float32), [3]), b
    return slices().map(augment, num_parallel_calls=4)

def now_and_then():
    for n, (a, b) in enumerate(zip(x, y)):
        c = random.random() if n % 4 else 1.0  # drawn
        yield a * c, b

def py_dataset():
    class Noisy(Batches):
        def __getitem__(self, n):
            a, b = super().__getitem__(n)
            return np.stack([noisy(row) for row in a]), b
    return Noisy()

def py_dataset_that_shuffles_too():
    class Noisy(Shuffled):
        def __getitem__(self, n):
            a, b = super().__getitem__(n)
            return np.stack([noisy(row) for row in a]), b
    return Noisy()

def py_dataset_with_a_generator():
    class Noisy(Batches):
        rng = None
        def __getitem__(self, n):
            self.rng = self.rng or np.random.default_rng(0)
            a, b = super().__getitem__(n)
            a = a + self.rng.normal()  # drawn
            return a, b
    return Noisy()
"""
# The same examples in each pass, or in another order, which Baton makes itself.
SAME = """
def arrays():
    return np.random.normal(size=(16, 3)), y

def dataset():
    return slices().map(lambda a, b: (a * 2, b)).batch(4)

def shuffled_dataset():
    return slices().shuffle(16).batch(4)

def part_of_a_dataset_that_is_shuffled_once():
    return slices().shuffle(16, reshuffle_each_iteration=False).take(8)

def draws_that_are_kept():
    return slices().map(lambda a, b: (a + tf.random.normal([3]), b)).cache().batch(4)

def draw_from_a_seed():
    return slices().map(lambda a, b: (a + tf.random.stateless_normal([3], (1, b)), b))

def order_of_examples():
    order = np.random.permutation(16)
    for n in order:
        yield x[n], y[n]

def generator_with_a_seed():
    rng = np.random.default_rng(0)
    for a, b in zip(x, y):
        yield a + rng.normal(), b

def list_of_examples():
    return [(noisy(a), b) for a, b in zip(x, y)]

def python_code_without_draws():
    def rows():
        yield from x
    return tf.data.Dataset.from_generator(rows, output_signature=ROW)

def py_batches():
    return Batches()

def py_shuffled():
    return Shuffled()

def py_that_begins_epochs():
    class Begun(Batches):
        def on_epoch_begin(self):
            self.begun = True
        def __getitem__(self, n):
            assert self.begun
            return super().__getitem__(n)
    return Begun()

def py_of_lists():
    class Lists(Batches):
        num_batches = 2
        def __getitem__(self, n):
            return list(super().__getitem__(n))
    return Lists()
"""
CHANGES = """
def other_examples():
    class Changing(Batches):
        def __getitem__(self, n):
            return np.full((4, 1), self.epoch), y[:4]
        def on_epoch_end(self):
            self.epoch += 1
    return Changing()

def later_batch():
    class Changing(Batches):
        def __getitem__(self, n):
            return np.full((4, 1), self.epoch if n == 3 else 0), y[:4]
        def on_epoch_begin(self):
            self.epoch += 1
    return Changing()

def fewer_batches():
    class Changing(Batches):
        def __len__(self):
            return max(1, 4 - self.epoch)
        def on_epoch_end(self):
            self.epoch += 1
    return Changing()
"""
REFUSED = {
    "other_examples": [
        "batch 0 of its second epoch has examples that the first has not",
        "on_epoch_end (data.py, line",
    ],
    "later_batch": ["batch 3 of its second epoch has examples", "on_epoch_begin (data.py, line"],
    "fewer_batches": ["its first epoch has 4 batches, the second 3"],
}
CODE = HEAD + DRAWS + SAME + CHANGES


def names(code: str) -> list[str]:
    return re.findall(r"^def (\w+)", code, re.MULTILINE)


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the code of all sources, which is imported once."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "data.py").write_text(CODE, encoding="utf-8")
    return folder


def said(code: Path, name: str, *, accepted: bool = False, **data: Any) -> tuple[list[str], int]:
    """Read a source whole; returns the warnings, and how many examples it has."""
    notes: list[Note] = []
    spec = DataSpec(source=f"data.py:{name}", **data)
    examples = open_source(spec, code, note=notes.append, accepted=accepted).read()
    count = sum(1 for _ in examples)
    return [note.text for note in notes if note.warning], count


@pytest.mark.parametrize("name", names(DRAWS))
def test_draws_of_each_pass_are_said_with_the_line(name: str, code: Path) -> None:
    (warning,), _ = said(code, name)
    assert warning.startswith(f"data.py:{name}: ")
    assert warning.endswith("data.transform: augment(example, *, seed)")
    lines = CODE.splitlines()
    first = lines.index(f"def {name}():")
    found = re.search(r"data\.py, line (\d+): (.*# drawn)", warning)
    assert found is not None, warning
    number, text = int(found[1]), found[2]
    assert lines[number - 1].strip() == text
    of_function = first < number - 1 < lines.index("", first)
    assert of_function or "return row + np.random.normal" in text


@pytest.mark.parametrize("name", names(SAME))
def test_nothing_is_said_of_the_same_examples(name: str, code: Path) -> None:
    warnings, count = said(code, name)
    assert warnings == []
    assert count in {8, 16}


@pytest.mark.parametrize("name", names(CHANGES))
def test_dataset_that_changes_between_epochs_is_refused(name: str, code: Path) -> None:
    with pytest.raises(SourceError) as refused:
        said(code, name)
    words = [*REFUSED[name], "changes between epochs", "data.transform", "data.batched: true"]
    assert [word for word in words if word not in str(refused.value)] == [], refused.value
    for changed in ({"accepted": True}, {"examples": 7}):
        (warning,), _ = said(code, name, **changed)
        assert "is without effect" in warning


def test_part_of_a_dataset_that_is_shuffled_anew_is_said(workshop: Workshop) -> None:
    workshop.write("data.py", f"{HEAD}def load():\n    return slices().shuffle(16).take(8)\n")
    notes: list[Note] = []
    assert len(list(open_source(DataSpec(source="data.py:load"), workshop.code, note=notes.append).read())) == 8
    assert any("shuffles anew in each pass" in note.text for note in notes if note.warning)


def test_order_of_a_pass_counts_where_it_is_kept(code: Path) -> None:
    (warning,), _ = said(code, "shuffled_dataset", shuffle=False)
    assert "shuffles anew in each pass" in warning
    with pytest.raises(SourceError, match="its second epoch has another order"):
        said(code, "py_shuffled", shuffle=False)


def test_list_of_a_py_dataset_is_x_and_y(workshop: Workshop) -> None:
    """As in Keras, where a tuple of two is (x, y) too."""
    workshop.write("data.py", CODE)
    ref = workshop.prepare("data.py:py_of_lists", validation_fraction=0)
    assert sorted(int(each["y"]) for each in workshop.examples(ref)) == list(range(8))


def test_warning_is_said_to_every_new_run(workshop: Workshop) -> None:
    workshop.write("data.py", CODE)
    for _ in range(2):
        workshop.events.clear()
        workshop.prepare("data.py:operation")
        (warning,) = [event.text for event in workshop.events if isinstance(event, Note) and event.warning]
        assert "draws random numbers (data.py, line" in warning
