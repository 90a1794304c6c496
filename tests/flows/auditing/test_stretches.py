"""What of a run can be executed again, and which part of it is chosen."""

import uuid
from pathlib import Path

import pytest

from flows.auditing.audit import environment_differences
from flows.auditing.stretches import Stretches, choose, stretches_of
from flows.commands.main import main
from tasks.foundation.contracts.log_entry import Change
from tasks.foundation.errors import InvalidInput
from tests.support.fake_run import FakeRun
from tests.support.fake_trials import ENVIRONMENT, small_run_file


def test_too_few_retained_checkpoints_are_refused() -> None:
    with pytest.raises(InvalidInput, match="keep_every_steps") as refused:
        choose(Stretches(auditable=(), left_out=("steps 2 to 4: why",)), "all", count=1, seed=0, home="home")
    assert "steps 2 to 4: why" in str(refused.value)
    assert refused.value.exit_code == 2


def test_steps_from_before_an_accepted_change_are_left_out(tmp_path: Path) -> None:
    run = FakeRun(tmp_path).train(10, 20)
    change = Change(environment=run.head.environment, identity={**run.head.identity, "train.seed": 1}, accepted=())
    run.log.append(lambda _: change, attempt=uuid.uuid4().hex)
    found = stretches_of(run.train(30, 40).log.entries())
    assert [each.start.step for each in found.auditable] == [20, 30]
    assert found.left_out == (
        "steps 0 to 10: a change of the identity was accepted later",
        "steps 10 to 20: a change of the identity was accepted later",
    )


def test_another_environment_is_named_by_key() -> None:
    now = ENVIRONMENT.model_copy(update={"replicas": 2, "versions": {"keras": "3"}})
    assert environment_differences(ENVIRONMENT, now) == (
        "replicas: the log has 1, the audit ran with 2",
        "version of keras: the log has none, the audit ran with 3",
    )
    assert environment_differences(now, now) == ()


def test_run_without_a_log_is_not_audited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = small_run_file(tmp_path)
    assert main(["audit", str(run.path)]) == 2
    assert "has not been run yet" in capsys.readouterr().err
    assert main(["audit", str(run.path), "--last", "--all"]) == 2
    assert not (tmp_path / "runs").exists()
