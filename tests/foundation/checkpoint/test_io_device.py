"""Behind gRPC, the training process itself writes and reads checkpoints."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from baton.tasks.foundation.checkpoint.restore import restore_checkpoint
from baton.tasks.foundation.checkpoint.write import stage_checkpoint
from baton.tasks.foundation.machine.tpu import IO_DEVICE
from baton.tasks.foundation.state.host_memory import HostValues
from tests.support.lab import Lab, built, spec_of


def test_values_come_from_and_go_to_servers_by_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab, spec = Lab(tmp_path), spec_of("functional")
    head = lab.begin(spec)
    state = built(lab, spec)
    environment = state.accelerator.environment.model_copy(update={"servers": 1})
    state.accelerator = dataclasses.replace(state.accelerator, environment=environment)
    state.host_values = HostValues(state.saved, IO_DEVICE)
    devices: list[Any] = []
    device = tf.device

    def recorded_device(name: str) -> Any:
        devices.append(name)
        return device(name)

    with monkeypatch.context() as patch:
        patch.setattr(tf, "device", recorded_device)
        staged = stage_checkpoint(state, lab.home(spec), base=head.base, attempt="a" * 32)
    assert devices == [IO_DEVICE] * len(state.saved)
    # TensorFlow's own restore would let the server read the file.
    monkeypatch.setattr(tf.train.Checkpoint, "read", None)
    restore_checkpoint(state, lab.home(spec), staged)
    assert state.digest().root == staged.state_digest
