"""What Prefect calls flow runs; where the run file is refused, naming one must not be what fails."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect import Flow

from flows import train_run as module
from flows.evaluate_best import evaluate_best
from flows.train_run import train_run
from tasks.foundation.errors import RunFileError
from tests.support.fake_run import FakeRun


@pytest.mark.parametrize("flow", [train_run, evaluate_best])
@pytest.mark.parametrize(
    ("file", "overrides", "name"),
    [
        ("run.yaml", None, "digits"),
        ("run.yaml", ["run=other"], "other"),
        ("run.yaml", ["train.stepz=3"], "run.yaml"),
        ("not-there.yaml", [], "not-there.yaml"),
        ("", [], "."),
    ],
)
def test_a_flow_run_is_named_after_its_run_or_if_that_is_refused_after_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flow: Flow[..., Any], *, file: str, overrides: Any, name: str
) -> None:
    FakeRun(tmp_path).run_file()
    given = {"run_file": str(tmp_path / file) if file else "", "overrides": overrides}
    monkeypatch.setattr(module, "flow_run", SimpleNamespace(parameters=given))
    assert callable(flow.flow_run_name)
    assert flow.flow_run_name() == name
    if name.endswith((".yaml", ".")):
        with pytest.raises(RunFileError):
            flow.fn(**given)
