"""A hand-written loop with `tf.train.CheckpointManager`, as TensorFlow's guide has it."""

from collections.abc import Callable
from typing import Any

from common import fresh_folder, say_committed, settings, train_with


def main() -> None:
    of = settings()

    def save(model: Any) -> Callable[[int], None]:
        import tensorflow as tf

        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        manager = tf.train.CheckpointManager(checkpoint, str(fresh_folder(of)), max_to_keep=3)

        def save_step(step: int) -> None:
            manager.save(checkpoint_number=step)
            say_committed(step)

        return save_step

    train_with(of, save)


if __name__ == "__main__":
    main()
