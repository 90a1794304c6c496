"""Orbit: its controller, a `StandardTrainer`, and a `CheckpointManager` at an interval of steps."""

import contextlib
import sys
from pathlib import Path
from typing import Any

from common import batches, build, fresh_folder, read_row, say_committed, say_row, settings


def main() -> None:
    of = settings()
    import orbit
    import tensorflow as tf

    model = build(of)
    global_step = orbit.utils.create_global_step()

    class Trainer(orbit.StandardTrainer):
        """The loop of a `StandardTrainer`: `rows` steps in one call of a `tf.function`."""

        def __init__(self) -> None:
            super().__init__(train_dataset=batches(of))

        def train_step(self, iterator: Any) -> None:
            x, y = next(iterator)
            with tf.GradientTape() as tape:
                logits = model(x, training=True)
                loss = model.compute_loss(x, y, logits)
            variables = model.trainable_variables
            model.optimizer.apply(tape.gradient(loss, variables), variables)
            model.compute_metrics(x, y, logits)
            global_step.assign_add(1)

        def train_loop_end(self) -> dict[str, float]:
            row = read_row(model)
            say_row(int(global_step.numpy()), of.steps)
            return row

    class Manager(tf.train.CheckpointManager):
        """Says when a checkpoint is complete."""

        def save(self, *positions: Any, **words: Any) -> Any:
            path = super().save(*positions, **words)
            if path is not None and global_step.numpy() > 0:
                say_committed(int(global_step.numpy()))
            return path

    manager = None
    if of.commit_steps:
        manager = Manager(
            tf.train.Checkpoint(model=model, optimizer=model.optimizer, step=global_step),
            str(fresh_folder(of)),
            max_to_keep=3,
            step_counter=global_step,
            checkpoint_interval=of.commit_steps,
        )
        if manager.latest_checkpoint is None:  # else the controller restores it
            manager.save(checkpoint_number=0)  # otherwise the first one comes after the first loop
    # Orbit prints its own lines to standard output.
    with contextlib.redirect_stdout(_OnlyOurs(sys.stdout)):
        controller = orbit.Controller(
            global_step=global_step,
            trainer=Trainer(),
            steps_per_loop=of.rows,
            checkpoint_manager=manager,
            summary_dir=None if manager is None else str(Path(of.folder) / "summaries"),
            summary_interval=None if manager is None else of.rows,
        )
        controller.train(of.steps, checkpoint_at_completion=False)


class _OnlyOurs:
    """Lets through the lines that `say_row` and `say_committed` write."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        ours = text.startswith("step ") and text.endswith(("read\n", "committed\n"))
        return self._stream.write(text) if ours else len(text)

    def flush(self) -> None:
        self._stream.flush()


if __name__ == "__main__":
    main()
