"""Which devices a command's own process needs."""

from pathlib import Path

import pytest

from baton.flows.runner import acquired_devices, stages_on_devices
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.machine.collectives import OneHost
from tests.support.event_recorder import EventRecorder
from tests.support.fake_run import FakeRun

ON_DEVICES = frozenset({"init_or_restore", "train_segment", "evaluate"})


def spec_of(folder: Path, *overrides: str) -> RunSpec:
    return load_run_file(FakeRun(folder).run_file(), overrides).spec


@pytest.mark.parametrize(("fraction", "names"), [(0.1, ON_DEVICES), (0, ON_DEVICES - {"evaluate"})])
def test_stages_on_devices_follow_the_run_file(tmp_path: Path, fraction: float, names: frozenset[str]) -> None:
    assert stages_on_devices(spec_of(tmp_path, f"data.validation_fraction={fraction}")) == names


def test_no_accelerator_is_acquired_if_all_stages_are_remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def acquire(*_: object, **__: object) -> None:
        raise AssertionError("an accelerator was acquired")

    monkeypatch.setattr("baton.tasks.foundation.machine.devices.acquire", acquire)
    spec = spec_of(tmp_path)
    with acquired_devices(spec, None, remote=ON_DEVICES, telemetry=EventRecorder()) as devices:
        assert isinstance(devices, OneHost)
    with (
        pytest.raises(AssertionError, match="was acquired"),
        acquired_devices(spec, None, remote=frozenset(), telemetry=EventRecorder()),
    ):
        pass
