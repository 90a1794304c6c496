"""What every peer shares: its settings, the model, the batches, and the lines that it prints.

A peer prints what Baton's console prints, `step 10/400 …` when the metrics of a row have been read and
`step 100  committed` when a checkpoint is complete, so that one reader takes the time of all.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a peer trains.

    Attributes:
        model_file, build, options: the function that returns the compiled model.
        data: a .npz file with x and y.
        batch: examples a step.
        steps: number of steps.
        rows: a row of metrics is read at each multiple of this number of steps.
        commit_steps: a checkpoint is written at each multiple of this number of steps; 0: none.
        folder: where checkpoints are written.
        threads: of TensorFlow, within an operation and between operations.
        seed: of weights and of the order of the examples.
    """

    model_file: str
    build: str
    options: Mapping[str, Any]
    data: str
    batch: int
    steps: int
    rows: int
    commit_steps: int
    folder: str
    threads: int
    seed: int = 0


def settings() -> Settings:
    """The settings in the first argument, as JSON."""
    return Settings(**json.loads(sys.argv[1]))


def build(of: Settings) -> Any:
    """Build the compiled model with all variables of its optimizer."""
    import keras
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(of.threads)
    tf.config.threading.set_inter_op_parallelism_threads(of.threads)
    keras.utils.set_random_seed(of.seed)
    spec = importlib.util.spec_from_file_location("benchmark_model", of.model_file)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(of.model_file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = getattr(module, of.build)(**of.options)
    model.optimizer.build(model.trainable_variables)
    return model


def batches(of: Settings) -> Any:
    """Shuffled batches without end, as tf.data makes them from arrays."""
    import numpy as np
    import tensorflow as tf

    with np.load(of.data) as arrays:
        x, y = arrays["x"], arrays["y"]
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=of.seed).repeat()
    return dataset.batch(of.batch, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def multi_step(model: Any) -> Callable[[Any, Any], None]:
    """A hand-written loop: `loop(iterator, n)` trains n steps in one call of a `tf.function`."""
    import tensorflow as tf

    @tf.function
    def loop(iterator: Any, steps: Any) -> None:
        for _ in tf.range(steps):
            x, y = next(iterator)
            with tf.GradientTape() as tape:
                logits = model(x, training=True)
                loss = model.compute_loss(x, y, logits)
            variables = model.trainable_variables
            model.optimizer.apply(tape.gradient(loss, variables), variables)
            model.compute_metrics(x, y, logits)

    return loop


def read_row(model: Any) -> dict[str, float]:
    """Read the metrics and reset them."""
    row = {name: float(value) for name, value in model.get_metrics_result().items()}
    model.reset_metrics()
    return row


def tree_of(model: Any) -> dict[str, Any]:
    """Every variable of the model and its optimizer under a name, as Baton saves them."""
    variables = [*model.variables, *model.optimizer.variables]
    return {f"{number:05d}": variable.value for number, variable in enumerate(variables)}


def say_row(step: int, steps: int) -> None:
    """Say that the metrics of `step` have been read."""
    sys.stdout.write(f"step {step}/{steps}  read\n")
    sys.stdout.flush()


def say_committed(step: int) -> None:
    """Say that the checkpoint of `step` is complete."""
    sys.stdout.write(f"step {step}  committed\n")
    sys.stdout.flush()


def fresh_folder(of: Settings) -> Path:
    """The folder of checkpoints, made."""
    folder = Path(of.folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def train_with(of: Settings, save: Callable[[Any], Callable[[int], None]]) -> None:
    """Train with the hand-written loop, and save at each multiple of `commit_steps`.

    Args:
        of: the settings.
        save: gets the model, and returns what is called with the step of each checkpoint.
    """
    import tensorflow as tf

    model = build(of)
    loop, iterator, save_step = multi_step(model), iter(batches(of)), save(model)
    for step in range(of.rows, of.steps + 1, of.rows):
        loop(iterator, tf.constant(of.rows, tf.int64))
        read_row(model)
        say_row(step, of.steps)
        if of.commit_steps and step % of.commit_steps == 0:
            save_step(step)
