"""Make a home of each kind, as this version writes them: `python -m tests.homes.make FOLDER`.

Each stopped at step 20 or 25 of 40. `1.0/` has those that 1.0 made, without their run files and code, which stand here
and never change: a home is continued only with the code that it began with. Later versions read and continue the homes
(`test_homes.py`).
"""

import subprocess
import sys
from pathlib import Path

from tests.support.fake_run import flip_a_byte
from tests.support.homes import entries_of
from tests.support.shipped_runs import DRIVER

MODEL = '''"""A small model with everything that a train state has: slots, moving statistics, random streams."""

import keras


def build_model():
    inputs = keras.Input((4,))
    x = keras.layers.Dense(8, activation="relu")(inputs)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Dropout(0.2)(x)
    outputs = keras.layers.Dense(3, activation="softmax")(x)
    model = keras.Model(inputs, outputs)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model
'''
DATA = '''"""Points around three centers; one of them may lie so far away that its loss is infinite."""

import numpy as np


def load(seed=0, count=60, far=None):
    generator = np.random.default_rng(seed)
    labels = (np.arange(count) % 3).astype("int32")
    points = (generator.normal(size=(count, 4)) + labels[:, None]).astype("float32")
    if far is not None:
        points[far] = 3e38
    return points, labels
'''
RUN = """\
run: small
storage: ./storage
data: {{source: data.py:load, classes: 3, shard_examples: 16, options: {options}{data}}}
model: model.py:build_model
train: {{steps: 40, segment_steps: 5, global_batch_size: 8, log_every_steps: 5{train}}}
checkpoint: {{keep_last: 2, keep_best: {{metric: accuracy, mode: max}}{checkpoint}}}
evaluate: {{every_steps: 10}}
accelerator: {{kind: cpu, intra_op_threads: 1, inter_op_threads: 1}}
"""
SPLIT = ", validation_fraction: 0.2"
OWN_SETS = (
    ", validation: {source: data.py:load, options: {seed: 1, count: 12}}"
    ", test: {source: data.py:load, options: {seed: 2, count: 12}}"
)
KINDS = ("straight", "cut_and_rewound", "kept_for_good", "forked", "quarantined", "own_sets")


def home_of(folder: Path) -> Path:
    """The home in a folder of one kind."""
    return folder / "storage" / ("branch" if folder.name == "forked" else "small")


def train(folder: Path, *words: str) -> None:
    """Run the run file of a folder."""
    name = ["--set", "run=branch"] if folder.name == "forked" else []
    done = subprocess.run([sys.executable, str(DRIVER), "run.yaml", *name, *words], cwd=folder, check=False)
    assert done.returncode in {0, 3}, done.returncode  # 3: work is left


def write_run(folder: Path) -> None:
    """Write the run file and the code of the kind that the folder's name says."""
    kind = folder.name
    texts = {
        "options": "{count: 200, far: 7}" if kind == "cut_and_rewound" else "{}",
        "data": OWN_SETS if kind == "own_sets" else SPLIT,
        "train": ", on_blowup: rewind, rewind_skip_batches: 2" if kind == "cut_and_rewound" else "",
        "checkpoint": ", keep_every_steps: 5" if kind == "kept_for_good" else "",
    }
    (folder / "run.yaml").write_text(RUN.format(**texts), encoding="utf-8")
    (folder / "model.py").write_text(MODEL, encoding="utf-8")
    (folder / "data.py").write_text(DATA, encoding="utf-8")


def make(folder: Path) -> None:
    """Make the home of the kind that the folder's name says."""
    kind = folder.name
    folder.mkdir(parents=True)
    write_run(folder)
    if kind == "cut_and_rewound":
        for _ in range(3):
            train(folder, "--until-step", "20", "--max-segments", "1")
    if kind == "forked":
        subprocess.run([sys.executable, str(DRIVER), "run.yaml", "--until-step", "10"], cwd=folder, check=True)
        words = ["-m", "baton.flows.commands.main", "fork", "storage/small", "--as", "branch"]
        subprocess.run([sys.executable, *words], cwd=folder, check=True)
    train(folder, "--until-step", "20")
    if kind == "quarantined":
        tip = entries_of(home_of(folder))[-1].head.tip
        assert tip is not None
        flip_a_byte(home_of(folder) / tip.path / "ckpt.index")
        train(folder, "--until-step", "25")


if __name__ == "__main__":
    for name in KINDS:
        make(Path(sys.argv[1]) / name)
