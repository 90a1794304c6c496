"""Hosts that differ in settings, data, code, model or storage, or of which one refuses, all end alike; none trains."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkout import CHECKOUT
from tests.support.homes import entries_of
from tests.support.shipped_runs import SHORT, run_file
from tests.support.training_child import Child
from tests.support.worker_processes import THREADS, Workers, free_addresses, place

pytestmark = pytest.mark.slow

DATA = """
import os

import numpy as np

try:
    from installed_elsewhere import scaled
except ImportError:
    from tensorflow import identity as scaled


def load():
    x = np.random.default_rng(1).normal(size=(300, 8, 8, 1)).astype("float32")
    return x, (x.sum((1, 2, 3)) > 0).astype("int64")


def of_example(example):
    return example[0] * float(os.environ.get("BATON_TEST_EXAMPLE", "1")), example[1]


def of_batch(batch):
    return batch[0], scaled(batch[1])


def of_validation(example):
    return example[0] * float(os.environ.get("BATON_TEST_VALIDATION", "1")), example[1]
"""
EXTRA = [
    "data.source=data.py:load", "train.global_batch_size=48", "data.transform=data.py:of_example",
    "data.batch_transform=data.py:of_batch", "data.validation_transform=data.py:of_validation",
]  # fmt: skip
OWN_STEP = """

class OwnStep(keras.Model):
    def train_step(self, data):
        logs = super().train_step(data)
        return {name: value * float(os.environ.get("BATON_TEST_FACTOR", "1")) for name, value in logs.items()}
"""
# What is different on the last host before TensorFlow is imported: lines of files, and settings.
EDITS = [("model.py", "Dropout(dropout", "Dropout(0.5"), ("sizes.py", "0", "1"), ("data.py", "rng(1)", "rng(2)")]
SETTINGS = [
    "train.global_batch_size=96", "train.log_every_steps=5", "train.seed=3", "accelerator.intra_op_threads=2",
]  # fmt: skip
NAMED = [
    "code of model.py: ", "code of sizes.py: ", "code of data.py: ", "code of Baton: ",
    "train.global_batch_size: 48 on host 0; 96 on host 1", "train.log_every_steps: 7 on host 0; 5 on host 1",
    "train.seed: 0 on host 0; 3 on host 1", "accelerator.intra_op_threads: 1 on host 0; 2 on host 1",
]  # fmt: skip
# Environment variables that the code of the last host reads, and the line that names what they change.
OF_ENVIRONMENT = {
    "BATON_TEST_FACTOR": "  train step as traced: ",
    "BATON_TEST_EXAMPLE": "  first examples as the model gets them.training.x: ",
    "PYTHONPATH": "  first examples as the model gets them.training.y: ",
    "BATON_TEST_VALIDATION": "  first examples as the model gets them.validation.x: ",
}
DIFFER = "InvalidInput: the hosts of this run differ in settings, data or code\n"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A run file with code of its own, some of which reads the environment."""
    folder = tmp_path / "own"
    shutil.copytree(run_file("digits").parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "data.py").write_text(DATA)
    (folder / "sizes.py").write_text("MORE = 0\n")
    model = (folder / "model.py").read_text()
    model = model.replace("import keras\n", "import os\n\nimport keras\n\nfrom .sizes import MORE\n" + OWN_STEP, 1)
    model = model.replace("keras.Model(images", "OwnStep(images").replace("Dense(10", "Dense(10 + MORE")
    model = model.replace("Dropout(dropout", 'Dropout(dropout if "BATON_TEST_RATE" not in os.environ else 0.5')
    (folder / "model.py").write_text(model)
    return folder / "run.yaml"


def edited(file: Path, *edits: tuple[str, str, str]) -> Path:
    """A copy of the run file's folder; an edit is (name, old text, new text)."""
    folder = file.parent.with_name("edited")
    shutil.copytree(file.parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, old, new in edits:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))
    return folder / "run.yaml"


def refused(workers: Workers) -> str:
    """The message with which all hosts have ended, without having waited for a time-out."""
    (words,) = {done.stderr.partition("error: ")[2] for done in workers.finish(2)}
    return words


def another_checkout(folder: Path) -> Path:
    """A checkout of Baton with the same version, and with one line more in one of its files."""
    for package, source in (("", "flows/package"), ("flows", "flows"), ("tasks", "tasks")):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(CHECKOUT / source, folder / "baton" / package, ignore=ignored, dirs_exist_ok=True)
    with (folder / "baton" / "tasks" / "foundation" / "dataset" / "order.py").open("a") as file:
        file.write("# changed\n")
    return folder


def test_every_difference_is_named_on_all_hosts(own: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    common = ["accelerator.kind=multi_worker", f"storage={runs}", *SHORT["digits"], *THREADS, *EXTRA]
    addresses, hosts = free_addresses(2), []
    for host, (checkout, file, extra) in enumerate(
        [
            (CHECKOUT, own, common),
            (another_checkout(tmp_path / "checkout"), edited(own, *EDITS), [*common, *SETTINGS]),
        ]
    ):
        words = [word for setting in extra for word in ("--set", setting)]
        hosts.append(
            subprocess.Popen(
                [sys.executable, "-m", "baton.flows.train", str(file), *words],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(checkout), **place(addresses, host)},
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    (message,) = {host.communicate(timeout=300)[1].partition("error: ")[2] for host in hosts}
    assert [host.returncode for host in hosts] == [2, 2]
    assert message.startswith(DIFFER)
    assert [line for line in NAMED if f"  {line}" not in message] == []
    assert not list(runs.glob("*/log/*"))


def test_model_step_and_examples_are_compared_before_training(own: Path, tmp_path: Path) -> None:
    """Their code is the same, and reads the environment or another package."""
    (tmp_path / "installed_elsewhere.py").write_text("def scaled(x):\n    return 1 - x\n")

    def message(**env: str) -> str:
        return refused(Workers(2, tmp_path / "runs", extra=EXTRA, notes=tmp_path, file=own, last={"env": env}))

    of_model = message(BATON_TEST_RATE="0.5")
    assert of_model.startswith(DIFFER)
    assert ".config.rate: 0.3 on host 0; 0.5 on host 1" in of_model
    home = tmp_path / "runs" / "digits-cnn"
    assert not list(home.glob("log/*"))

    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    of_environment = message(**dict.fromkeys(OF_ENVIRONMENT, "2") | {"PYTHONPATH": path})
    assert of_environment.startswith(DIFFER)
    assert [line for line in OF_ENVIRONMENT.values() if line not in of_environment] == []
    assert [entry.body.kind for entry in entries_of(home)] == ["origin", "checkpoint"], "nothing is trained"


# What only the last host refuses, and the class and words with which all end.
REFUSALS: dict[str, tuple[dict[str, Any], str, str]] = {
    "run file": ({"extra": ["train.batch=7"]}, "RunFileError", "train.batch"),
    "package": ({"edit": ("sizes.py", "MORE", "import not_there\nMORE")}, "ModelError", "not_there"),
    "batch": ({"extra": ["train.global_batch_size=47"]}, "AcceleratorError", "47 is not divisible by 2 replicas"),
}


@pytest.mark.parametrize("case", ["run file", "package", pytest.param("batch", marks=pytest.mark.nightly)])
def test_all_end_with_what_one_refuses(own: Path, tmp_path: Path, case: str) -> None:
    different, kind, words = REFUSALS[case]
    last = dict(different)
    if "edit" in last:
        last["file"] = edited(own, last.pop("edit"))
    message = refused(Workers(2, tmp_path / "runs", notes=tmp_path, file=own, last=last))
    assert message.startswith(f"{kind}: host 1 refused: ")
    assert words in message


def test_a_host_with_another_storage_is_told_so(own: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    last = {"extra": [f"storage={other}"]}
    message = refused(Workers(2, tmp_path / "runs", notes=tmp_path, file=own, last=last))
    assert message.startswith("InvalidInput: host 1 sees another storage: ")
    assert "other on host 1" in message


def waiting(tmp_path: Path, addresses: list[str], *indices: int, extra: list[str]) -> list[Child]:
    settings = ["accelerator.kind=multi_worker", *extra]
    return [
        Child("digits", tmp_path / "runs", extra=settings, notes=tmp_path, env=place(addresses, index))
        for index in indices
    ]


def test_hosts_that_are_missing_or_there_twice_are_named_and_a_signal_ends_the_wait(tmp_path: Path) -> None:
    addresses = free_addresses(2)
    (alone,) = waiting(tmp_path, addresses, 1, extra=["accelerator.connect_seconds=0.5"])
    assert f"error: AcceleratorLost: host 0 ({addresses[0]}: " in alone.finish(3).stderr
    (alone,) = waiting(tmp_path, addresses, 0, extra=[])
    assert alone.until_printed("waiting for all hosts: ")
    alone.process.send_signal(signal.SIGTERM)
    assert "stopped: sigterm" in alone.finish(3).stderr
    # The other host comes last: with one chief it would go on, however late the second one starts.
    children = waiting(tmp_path, addresses, 0, 0, extra=[])
    assert all(child.until_printed("waiting for all hosts: ") for child in children)
    children += waiting(tmp_path, addresses, 1, extra=[])
    (message,) = {child.finish(2).stderr.partition("error: ")[2] for child in children}
    assert message.startswith("AcceleratorError: two processes are host 0 (process ")


@pytest.mark.nightly
def test_three_hosts_name_the_one_that_differs_and_go_on_alike(tmp_path: Path) -> None:
    extra, storage = ["train.global_batch_size=48", "train.steps=20", "train.segment_steps=10"], tmp_path / "runs"
    last = {"extra": ["train.segment_steps=20", "stop.grace_seconds=7"]}
    message = refused(Workers(3, storage, extra=extra, notes=tmp_path, last=last))
    assert "  train.segment_steps: 10 on host 0, 1; 20 on host 2\n" in message
    assert "  stop.grace_seconds: 25.0 on host 0, 1; 7.0 on host 2\n" in message
    begun = Workers(3, storage, "--until-step", "10", extra=extra, notes=tmp_path).finish()
    assert [done.result["step"] for done in begun] == [10] * 3
    # One host has another seed than the run: the others would wait for it, if it refused on its own.
    message = refused(Workers(3, storage, extra=extra, notes=tmp_path, last={"extra": ["train.seed=1"]}))
    assert "train.seed: 0 on host 0, 1; 1 on host 2" in message
    # All hosts have another seed than the run.
    message = refused(Workers(3, storage, extra=[*extra, "train.seed=1"], notes=tmp_path))
    assert message.startswith("IdentityChanged: ")
    assert "train.seed: 0 -> 1" in message
    ended = Workers(3, storage, extra=extra, notes=tmp_path).finish()
    assert len({done.result["state_digest"] for done in ended}) == 1
