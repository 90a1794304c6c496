"""Common mistakes in user code: the command's error begins with the user's own line, and the record has the rest."""

import html
import json
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

from baton.flows.facts import RunStatus
from baton.flows.opened_run import OpenedRun, RunHome
from baton.flows.result import Goal
from baton.flows.train import train
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.errors import BatonError
from baton.tasks.foundation.state.warm_state import PROCESS_STATE
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.text import shown_lines
from tests.support import forked
from tests.support.event_recorder import EventRecorder

DATA = """
import numpy as np


def load():
    draw = np.random.default_rng(0)
    for number in range(32):
        yield draw.normal(size=6).astype("float32"), np.int64(number % 3)
"""
HEAD = "import keras\nimport tensorflow as tf\nfrom keras import layers, ops\n"
SEQUENTIAL = """
def build_model():
    model = keras.Sequential([keras.Input((6,)), MIDDLE layers.Dense(3, activation="softmax")])
    model.compile("sgd", LOSS)
    return model
"""
BLOCK = """
class Block(layers.Layer):
    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(4)

    def call(self, x):
        BODY
"""
OWN = """
class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(3)

    def call(self, x):
        return CALL

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = LOSS
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables))
        return LOGS


def build_model():
    model = Own()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
"""
CALLBACK = """
import keras


class Printing(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            print(logs["accuracy"])


def make():
    return [Printing()]
"""


def sequential(middle: str = "", loss: str = '"sparse_categorical_crossentropy"', before: str = "") -> str:
    return HEAD + before + SEQUENTIAL.replace("MIDDLE", middle).replace("LOSS", loss)


def with_block(body: str) -> str:
    return sequential("Block(),", before=BLOCK.replace("BODY", textwrap.indent(body, " " * 8).lstrip()))


def own(loss: str, logs: str = '{"loss": loss}', call: str = "self.inner(x)") -> str:
    return HEAD + OWN.replace("LOSS", loss).replace("LOGS", logs).replace("CALL", call)


class Mistake(NamedTuple):
    """Files of user code, and what the error must say. `at` is the text of the user's line; None: no line is known."""

    files: dict[str, str]
    exit_code: int
    file: str
    at: str | None
    says: str
    callbacks: str | None = None


MISTAKES = {
    "typo": Mistake({"model.py": sequential("layers.Dens(4),")}, 2, "model.py", "layers.Dens(4)", "attribute 'Dens'"),
    "wrong shape": Mistake(
        {"model.py": with_block("return ops.matmul(x, ops.ones((5, 4)))")}, 2, "model.py", "ops.matmul", "[?,6], [5,4]"
    ),
    "wrong shape in a model built lazily": Mistake(
        {"model.py": own("self.compute_loss(x, y, self(x))", call="ops.matmul(x, ops.ones((5, 3)))")},
        2,
        "model.py",
        "ops.matmul",
        "[5,3]",
    ),
    "unknown loss": Mistake(
        {"model.py": sequential(loss='"crossentropi"')}, 2, "", None, "interpret loss identifier: crossentropi"
    ),
    "own loss": Mistake(
        {"model.py": sequential(loss="mine", before="\ndef mine(y, p):\n    return ops.mean(y - p[:, :2], axis=-1)\n")},
        2,
        "model.py",
        "return ops.mean(y - p",
        "[8] vs. [8,2]",
    ),
    "step returns None": Mistake(
        {"model.py": own("self.compute_loss(x, y, self(x))", "None")},
        2,
        "model.py",
        "def train_step(self, data)",
        "train_step returned None; return a dict",
    ),
    "name in train_step": Mistake(
        {"model.py": own("self.compute_los(x, y, self(x))")},
        2,
        "model.py",
        "self.compute_los(",
        "AttributeError: 'Own' object has no attribute 'compute_los'",
    ),
    "late example": Mistake(
        {"data.py": DATA.replace("        yield", "        1 / (20 - number)\n        yield")},
        2,
        "data.py",
        "1 / (20 - number)",
        "ZeroDivisionError: division by zero (example 20)",
    ),
    "sibling": Mistake(
        {
            "model.py": f"from .blocks import block\n{sequential('block(),')}",
            "blocks.py": "from keras import layers\n\n\ndef block():\n    return layers.Dense({}['width'])\n",
        },
        2,
        "blocks.py",
        "layers.Dense({}['width'])",
        "called from model.py, line",
    ),
    "syntax": Mistake(
        {"model.py": f"{HEAD}def build_model(:\n    pass\n"}, 2, "model.py", "build_model(:", "SyntaxError"
    ),
    "import": Mistake(
        {"model.py": f"from keras.layers import Dens\n{sequential()}"},
        2,
        "model.py",
        "import Dens",
        "cannot import name 'Dens'",
    ),
    "missing sibling": Mistake(
        {"model.py": f"from .blocs import block\n{sequential()}"},
        2,
        "model.py",
        "from .blocs",
        "No module named '.blocs'",
    ),
    "py_function": Mistake(
        {
            "model.py": with_block(
                "y = tf.py_function(lambda v: v / {}['scale'], [x], tf.float32)\ny.set_shape(x.shape)\nreturn y"
            )
        },
        2,
        "model.py",
        "tf.py_function(lambda v: v / {}['scale']",
        ": KeyError: 'scale'",
    ),
    "operation at run time": Mistake(
        {"model.py": with_block("tf.debugging.assert_less(x, 0.5, message='too large')\nreturn self.inner(x)")},
        1,
        "model.py",
        "tf.debugging.assert_less(x, 0.5",
        "InvalidArgumentError: assertion failed: [too large]",
    ),
    "callback": Mistake(
        {"callbacks.py": CALLBACK},
        1,
        "callbacks.py",
        'print(logs["accuracy"])',
        "on_epoch_end of Printing raised KeyError: 'accuracy'",
        "callbacks.py:make",
    ),
    "infinite loss": Mistake(
        {"model.py": with_block("return self.inner(tf.math.log(x))")}, 1, "", None, "the loss is not finite at step 1"
    ),
}


def in_a_process(file: Path) -> tuple[int, str]:
    """The exit code and the error of the command."""
    command = [sys.executable, "-m", "baton.flows.train", file.name]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = forked.run(command, cwd=file.parent, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr[done.stderr.index("error: ") :]


def here(file: Path) -> tuple[int, str]:
    """The same of the function that the command calls, as the command prints it."""
    run = OpenedRun.open(load_run_file(file))
    PROCESS_STATE.forget()
    with pytest.raises(BatonError) as raised:
        train(run, Goal.of(run.spec), telemetry=EventRecorder())
    return raised.value.exit_code, shown_lines(f"error: {type(raised.value).__name__}: {raised.value}")


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_error_begins_with_the_users_line(tmp_path: Path, mistake: Mistake) -> None:
    files = {"data.py": DATA, "model.py": sequential(), **mistake.files}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    train = {"steps": 20, "segment_steps": 10, "global_batch_size": 8, "log_every_steps": 4}
    data = {"source": "data.py:load", "validation_fraction": 0}
    run = {
        "run": "r",
        "storage": "./runs",
        "data": data,
        "model": "model.py:build_model",
        "train": {**train, "callbacks": mistake.callbacks},
    }
    (tmp_path / "run.yaml").write_text(json.dumps({**run, "accelerator": {"kind": "cpu"}}))
    exit_code, error = (in_a_process if mistake.callbacks else here)(tmp_path / "run.yaml")
    assert exit_code == mistake.exit_code, error
    assert mistake.says in error
    for hidden in ("__autograph_generated_file", "site-packages/tensorflow", "tasks/", "Traceback", "in user code"):
        assert hidden not in error
    if mistake.at is not None:
        found = re.match(r"error: \w+: ([\w.]+), line (\d+)(, in \S+)?:\n    (.+)\n", error)
        assert found is not None, error
        assert found[1] == mistake.file
        assert mistake.at in found[4]
        assert files[mistake.file].splitlines()[int(found[2]) - 1].strip() == found[4]
    records = [json.loads(each.read_text()) for each in (tmp_path / "runs" / "r" / "attempts").glob("*.json")]
    assert len(records) == (mistake.exit_code == 1)  # refused input leaves nothing
    for record in records:
        assert f"{record['ended']}: {record['message']}" == error.removeprefix("error: ").strip()
        assert record["traceback"].startswith("Traceback (most recent call last):")
        assert "tasks/train_segment/" in record["traceback"]
        # The first that a person sees, wherever they look.
        home = RunHome.at(LocalStorage(tmp_path / "runs"), "r")
        shown = RunStatus.read(home)
        assert (shown.state, shown.cause.partition(": ")[0]) == ("failed", record["ended"])
        assert mistake.says in shown.cause
        page = html.unescape((tmp_path / "runs" / "r" / "report" / "index.html").read_text())
        assert page.index(shown.cause) < page.index("<b>failed</b>") < page.index("<h2>Curves")
