"""Behind gRPC, the training process itself writes and reads checkpoints."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tasks.foundation.checkpoint.restore import restore_checkpoint
from tasks.foundation.checkpoint.write import stage_checkpoint
from tasks.foundation.machine.tpu import IO_DEVICE
from tasks.foundation.state.host_state import HostValues
from tests.support.lab import Lab, built, spec_of


def test_files_are_written_and_read_on_the_io_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab, spec = Lab(tmp_path), spec_of("functional")
    head = lab.begin(spec)
    state = built(lab, spec)
    state.accelerator = dataclasses.replace(state.accelerator, io_device=IO_DEVICE)
    state.host_values = HostValues(state.saved, IO_DEVICE)
    devices: list[Any] = []
    options, device = tf.train.CheckpointOptions, tf.device

    def recorded(**settings: Any) -> Any:
        devices.append(settings.get("experimental_io_device"))
        return options(**settings)

    def recorded_device(name: str) -> Any:
        devices.append(name)
        return device(name)

    monkeypatch.setattr(tf.train, "CheckpointOptions", recorded)
    with monkeypatch.context() as patch:
        patch.setattr(tf, "device", recorded_device)
        staged = stage_checkpoint(state, lab.home(spec), base=head.base, attempt="a" * 32)
    assert devices == [IO_DEVICE] * len(state.saved)
    restore_checkpoint(state, lab.home(spec), staged)
    assert devices[len(state.saved) :] == [IO_DEVICE]
    assert state.digest().root == staged.state_digest
