"""The shortest way to a first step: import, build, restore with TensorFlow's own checkpoint if there is one, one step.

With `--prefect`, instead: import TensorFlow and Keras, import Prefect, start its API, run an empty flow, in series.
"""

import sys

from common import batches, build, multi_step, read_row, say_committed, say_row, settings


def main() -> None:
    of = settings()
    import tensorflow as tf

    if "--prefect" in sys.argv:
        import keras  # noqa: F401 - its time is what counts

        _empty_flow()
        say_row(1, of.steps)
        return
    model = build(of)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    newest = tf.train.latest_checkpoint(of.folder)
    start = 0
    if newest is not None:
        checkpoint.restore(newest).assert_existing_objects_matched()
        start = int(newest.rsplit("-", 1)[1])
    loop, iterator = multi_step(model), iter(batches(of))
    loop(iterator, tf.constant(1, tf.int64))
    read_row(model)
    say_row(start + 1, of.steps)
    if of.commit_steps:
        checkpoint.save(f"{of.folder}/ckpt")
        say_committed(start + 1)


def _empty_flow() -> None:
    from prefect import flow

    @flow
    def nothing() -> None:
        pass

    nothing()


if __name__ == "__main__":
    main()
