"""`model.fit`, with `BackupAndRestore` where checkpoints are wanted. Keras decides about XLA (jit_compile="auto")."""

import argparse
from pathlib import Path
from typing import Any

from common import batches, build, fresh_folder, say_committed, say_row, settings


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("settings")
    parser.add_argument("--steps-per-execution", type=int, default=1)
    chosen = parser.parse_args()
    of = settings()
    import keras

    class Backup(keras.callbacks.BackupAndRestore):
        """Says when a backup is complete."""

        def _save_model(self, *positions: Any, **words: Any) -> None:
            super()._save_model(*positions, **words)
            say_committed(rows.step)

    class Rows(keras.callbacks.Callback):
        """Says when a row of metrics is there."""

        step = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
            self.step = batch + 1
            if self.step % of.rows == 0:
                say_row(self.step, of.steps)
                self.model.reset_metrics()

    model = build(of)
    if chosen.steps_per_execution > 1:
        model.steps_per_execution = chosen.steps_per_execution
    rows = Rows()
    callbacks: list[Any] = [rows]
    if of.commit_steps:
        folder = fresh_folder(of) / "backup"
        Path(folder).mkdir(exist_ok=True)
        callbacks.append(Backup(str(folder), save_freq=of.commit_steps))
    model.fit(batches(of), steps_per_epoch=of.steps, epochs=1, verbose=0, callbacks=callbacks)


if __name__ == "__main__":
    main()
