"""Two hosts save one run together; one host alone goes on from it, and a host that computes wrongly is found."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.homes import head_of
from tests.support.shipped_runs import run_file
from tests.support.worker_processes import THREADS, Workers

pytestmark = pytest.mark.slow

# One host notes which files it writes, and later holds another bit in one weight.
CODE = """
if "BATON_TEST_WRITTEN" in os.environ:
    from baton.tasks.foundation.storage.local import LocalStorage

    write = LocalStorage.write_buffers

    def note(self, path, buffers):
        with open(os.environ["BATON_TEST_WRITTEN"], "a") as file:
            file.write(path + "\\n")
        return write(self, path, buffers)

    LocalStorage.write_buffers = note


class FlipBit(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if os.environ.pop("BATON_TEST_FLIP", ""):
            kernel = self.model.layers[-1].kernel
            value = kernel.numpy()
            value.view("uint32")[3, 5] ^= 1
            kernel.assign(value)


def callbacks():
    return [FlipBit()]
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    folder = tmp_path / "own"
    shutil.copytree(run_file("digits").parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    text = (folder / "model.py").read_text()
    (folder / "model.py").write_text(text.replace("import keras\n", "import os\n\nimport keras\n", 1) + CODE)
    return folder / "run.yaml"


def test_hosts_save_their_shares_and_find_the_one_that_errs(
    own: Path, train_without_prefect: Callable[..., Any], tmp_path: Path
) -> None:
    storage = tmp_path / "runs"
    extra = ["train.callbacks=model.py:callbacks", "train.global_batch_size=48", "train.steps=45"]
    extra += ["train.segment_steps=5", "train.log_every_steps=5"]
    written = tmp_path / "written.txt"
    noting = {"env": {"BATON_TEST_WRITTEN": str(written)}}
    begun = Workers(2, storage, "--until-step", "20", extra=extra, notes=tmp_path, file=own, last=noting)
    chief, other = begun.finish()
    assert chief.result["state_digest"] == other.result["state_digest"]
    folder = Path(chief.result["checkpoint"])
    data = {path.name: path.stat().st_size for path in folder.glob("ckpt.data-*")}
    of_other = {Path(path).name for path in written.read_text().split() if Path(path).parent.name == folder.name}
    assert of_other
    assert of_other < data.keys()
    # The third file holds TensorFlow's graph and the memory of callbacks; the variables are divided evenly.
    shares = sorted([sum(data[name] for name in of_other), data["ckpt.data-00000-of-00003"]])
    assert shares[1] < 1.1 * shares[0]

    # From the next evaluation on, host 1 holds another bit in one weight.
    wrong = Workers(2, storage, extra=extra, notes=tmp_path, file=own, last={"env": {"BATON_TEST_FLIP": "1"}})
    messages = {done.stderr.partition("error: ")[2] for done in wrong.finish(4)}
    (message,) = messages
    assert re.match(
        r"HostsDiffer: step (30|35), in segment \d: hosts 0 \(.+\) and 1 \(.+\) hold different values of", message
    )
    assert " model/logits/kernel, which must be the same on all of them; this state is not committed" in message
    head = head_of(begun.home)
    assert head is not None
    assert head.tip is not None
    assert head.tip.step in {25, 30}
    assert re.search(r"the whole state was the same up to step (20|25);", message)

    alone = train_without_prefect("digits", storage, extra=[*extra, *THREADS], file=own)
    assert alone.result["step"] == 45
    assert "replicas: 2 -> 1" in alone.stderr
