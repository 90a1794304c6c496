"""`model.fit` with `BackupAndRestore` at the end of each epoch, which is as long as the interval between two commits.

It goes on where a process was killed: at the begin of the epoch, because that is what the callback restores.
"""

from typing import Any

from common import batches, build, fresh_folder, say_committed, say_row, settings


def main() -> None:
    of = settings()
    import keras

    epoch_steps = of.commit_steps or of.steps

    class Backup(keras.callbacks.BackupAndRestore):
        """Says when a backup is complete."""

        def _save_model(self, *positions: Any, **words: Any) -> None:
            super()._save_model(*positions, **words)
            say_committed(self._current_epoch * epoch_steps)

    class Rows(keras.callbacks.Callback):
        """Says when a row of metrics is there."""

        done = 0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
            self.done = epoch * epoch_steps

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
            if (batch + 1) % of.rows == 0:
                say_row(self.done + batch + 1, of.steps)

    model = build(of)
    callbacks: list[Any] = [Rows()]
    if of.commit_steps:
        # Without the second copy, a kill within a save leaves none.
        callbacks.append(Backup(str(fresh_folder(of) / "backup"), double_checkpoint=True))
    model.fit(batches(of), steps_per_epoch=epoch_steps, epochs=of.steps // epoch_steps, verbose=0, callbacks=callbacks)


if __name__ == "__main__":
    main()
