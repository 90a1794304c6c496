"""The shipped run files, shortened for tests, and the digits run slowed down."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.checkout import CHECKOUT

DRIVER = Path(__file__).with_name("run_without_prefect.py")

# Short, with evaluations and log rows that no segment border falls on.
SHORT: dict[str, list[str]] = {
    "digits": ["train.steps=60", "train.log_every_steps=7", "evaluate.every_steps=25", "model.options.width=4"],
    "text": [
        "train.steps=40",
        "train.log_every_steps=7",
        "evaluate.every_steps=25",
        "data.options.max_bytes=60000",
        "data.options.length=16",
        "model.options.length=16",
        "model.options.width=16",
        "model.options.heads=2",
        "model.options.blocks=1",  # a block takes seconds of tracing in each process
        "train.global_batch_size=16",
    ],
}


# For runs that are interrupted: seconds to act in, at little processor time. See `slow_digits`.
SLOW = [
    *SHORT["digits"], "evaluate.every_steps=null", "train.log_every_steps=40", "train.callbacks=model.py:pauses",
]  # fmt: skip
NO_PAUSES = {"BATON_TEST_PAUSE_SECONDS": "0"}
_PAUSES = """

class Pause(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        time.sleep(float(os.environ.get("BATON_TEST_PAUSE_SECONDS", "0.3")))


def pauses():
    return [Pause()]
"""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The outcome of a process."""

    code: int
    result: dict[str, Any]
    stdout: str
    stderr: str


def run_file(name: str) -> Path:
    return CHECKOUT / "deploy" / "runs" / name / "run.yaml"


def slow_digits(folder: Path) -> Path:
    """A run file of the digits whose training pauses at each logged row, with the settings `SLOW`.

    Args:
        folder: is made, for the run file and its code.
    """
    shutil.copytree(run_file("digits").parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    model = folder / "model.py"
    text = model.read_text(encoding="utf-8").replace("import keras\n", "import os\nimport time\n\nimport keras\n", 1)
    model.write_text(text + _PAUSES, encoding="utf-8")
    return folder / "run.yaml"


def settings(name: str, storage: Path, *, replicas: int = 1, extra: Sequence[str] = ()) -> list[str]:
    chosen = [f"storage={storage}", "accelerator.kind=cpu", f"accelerator.replicas={replicas}", *SHORT[name], *extra]
    return [word for setting in chosen for word in ("--set", setting)]
