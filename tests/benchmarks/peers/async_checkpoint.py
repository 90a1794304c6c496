"""A hand-written loop with TensorFlow's asynchronous writing of a tree of variables."""

from collections.abc import Callable
from typing import Any

from common import fresh_folder, say_committed, settings, train_with, tree_of


def main() -> None:
    of = settings()
    saved: list[Any] = []

    def save(model: Any) -> Callable[[int], None]:
        import tensorflow as tf

        checkpoint = tf.train.Checkpoint(**tree_of(model))
        folder = fresh_folder(of)
        saved.append(checkpoint)

        def save_step(step: int) -> None:
            options = tf.train.CheckpointOptions(
                enable_async=True, experimental_write_callbacks=[lambda _: say_committed(step)]
            )
            checkpoint.write(str(folder / f"ckpt-{step}"), options)

        return save_step

    train_with(of, save)
    for checkpoint in saved:
        checkpoint.sync()


if __name__ == "__main__":
    main()
