"""Behind gRPC, the training process itself writes and reads checkpoints."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tasks.foundation.accelerator.tpu import IO_DEVICE
from tasks.foundation.checkpoint.restore import restore_checkpoint
from tasks.foundation.checkpoint.save import stage_checkpoint
from tests.support.lab import Lab, built, spec_of


def test_files_are_written_and_read_on_the_io_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab, spec = Lab(tmp_path), spec_of("functional")
    head = lab.begin(spec)
    state = built(lab, spec)
    state.accelerator = dataclasses.replace(state.accelerator, io_device=IO_DEVICE)
    devices: list[Any] = []
    options = tf.train.CheckpointOptions

    def recorded(**settings: Any) -> Any:
        devices.append(settings.get("experimental_io_device"))
        return options(**settings)

    monkeypatch.setattr(tf.train, "CheckpointOptions", recorded)
    staged = stage_checkpoint(state, lab.home(spec), base=head.base, attempt="a" * 32)
    restore_checkpoint(state, lab.home(spec), staged)
    assert devices == [IO_DEVICE, IO_DEVICE]
    assert state.digest() == staged.state_digest
