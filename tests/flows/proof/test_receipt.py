"""The order of the trainings of a proof, and its verdict, with fake processes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.flows.proof.execute import Laboratory
from baton.flows.proof.receipt import agreement, prove
from baton.flows.supervisor import Outcome
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.home_files import ProofReceipt
from baton.tasks.foundation.contracts.run_file import RunFile
from baton.tasks.foundation.contracts.stage_calls import ErrorReport
from baton.tasks.foundation.errors import BatonError, InvalidInput, SourceError
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.telemetry.events import Ended, Silent
from tests.support.fake_executions import FakeExecutions, small_run_file


@pytest.fixture
def run(tmp_path: Path) -> RunFile:
    return small_run_file(tmp_path)


def receipt_of(
    run: RunFile, fakes: FakeExecutions, tmp_path: Path, *, steps: int = 31, share_data: bool = False
) -> ProofReceipt:
    laboratory = Laboratory(folder=tmp_path / "scratch", processes=fakes, telemetry=Silent(), saved=fakes.saved)
    return prove(run, ("train.seed=4",), steps=steps, share_data=share_data, laboratory=laboratory)


def test_equal_trainings_give_the_verdict_same(run: RunFile, tmp_path: Path) -> None:
    fakes = FakeExecutions()
    receipt = receipt_of(run, fakes, tmp_path)
    assert (receipt.verdict, receipt.steps, receipt.cuts, receipt.killed_at_step) == ("same", 31, (7, 14, 21, 28), 14)
    assert (receipt.variables, receipt.differing, receipt.first_difference, receipt.causes) == (5, 0, None, ())
    assert (receipt.metric_rows, receipt.first_differing_step, receipt.repeatable) == (16, None, None)
    assert receipt.straight == receipt.cut
    assert [each.name for each in fakes.killed] == ["cut"]
    assert [each.name for each in fakes.ended] == ["cut", "straight"]
    assert "train.segment_steps=31" in fakes.ended[1].settings
    assert len({each.storage for each in fakes.ended}) == 2
    assert ProofReceipt.from_json(receipt.to_json(), where="", error=BatonError) == receipt


def test_shared_data_are_prepared_once(run: RunFile, tmp_path: Path) -> None:
    fakes = FakeExecutions()
    assert receipt_of(run, fakes, tmp_path, share_data=True).data_prepared == "once"
    assert len({each.storage for each in fakes.ended}) == 1
    assert len({each.home.uri for each in fakes.ended}) == 2


def test_difference_in_the_cut_training_is_located(run: RunFile, tmp_path: Path) -> None:
    fakes = FakeExecutions(result=lambda name: "other" if name == "cut" else "same")
    receipt = receipt_of(run, fakes, tmp_path)
    assert receipt.verdict == "different"
    assert receipt.repeatable is True
    assert (receipt.differing, receipt.first_differing_step) == (2, 16)
    found = receipt.first_difference
    assert found is not None
    assert (found.path, found.dtype, found.shape) == ("model/dense/bias", "float32", (2, 3))
    assert (found.values, found.bits, found.largest, found.only_in) == (2, 2, 2.0, "")
    assert [each.name for each in fakes.ended] == ["cut", "straight", "again"]
    assert len(receipt.causes) == 1
    assert "state is lost at the cut" in receipt.causes[0]


def test_stateful_operations_are_named_as_the_cause(run: RunFile, tmp_path: Path) -> None:
    fakes = FakeExecutions(
        result=lambda name: "other" if name == "cut" else "same",
        stateful_operations="model.py:build: while/noise/RandomStandardNormal",
    )
    causes = receipt_of(run, fakes, tmp_path).causes
    assert len(causes) == 1
    assert causes[0].startswith("model.py:build: while/noise/RandomStandardNormal draw from")
    assert "SeedGenerator" in causes[0]


def test_unrepeatable_model_is_named_as_the_cause(run: RunFile, tmp_path: Path) -> None:
    receipt = receipt_of(run, FakeExecutions(result=lambda name: "same" if name == "straight" else "other"), tmp_path)
    assert receipt.repeatable is False
    assert "not repeatable" in receipt.causes[0]
    assert "intra_op_threads" in receipt.causes[0]


def test_different_examples_are_the_cause_without_a_third_training(run: RunFile, tmp_path: Path) -> None:
    fakes = FakeExecutions(content=lambda name: name, result=lambda name: "other" if name == "cut" else "same")
    receipt = receipt_of(run, fakes, tmp_path)
    assert (receipt.verdict, receipt.repeatable) == ("different", None)
    assert (receipt.straight.content_digest, receipt.cut.content_digest) == ("straight", "cut")
    assert receipt.first_difference is not None
    assert receipt.causes[0].startswith("data.source digits gave other examples")
    assert [each.name for each in fakes.ended] == ["cut", "straight"]


@pytest.mark.parametrize("differs", ["digest", "content", "bytes"])
def test_one_kind_of_difference_is_enough(run: RunFile, tmp_path: Path, differs: str) -> None:
    fakes = FakeExecutions(
        result=lambda name: "other" if differs == "digest" and name == "cut" else "same",
        content=lambda name: name if differs == "content" else "c",
    )
    real_read = fakes.read

    def read(home: LocalStorage, ref: CheckpointRef) -> dict[str, Any]:
        values = real_read(home, ref.model_copy(update={"state_digest": "same"}))
        if differs == "bytes" and home.root.name == "cut":
            values["step"] = -values["step"]  # 0.0 equals -0.0, but its bits differ
        return values

    fakes.read = read  # type: ignore[method-assign]
    assert receipt_of(run, fakes, tmp_path).verdict == "different"


@pytest.mark.parametrize("too_quick", [1, 2, 4])
def test_training_that_ends_before_the_kill_gets_more_steps(run: RunFile, tmp_path: Path, too_quick: int) -> None:
    fakes = FakeExecutions(too_quick=too_quick)
    receipt = receipt_of(run, fakes, tmp_path)
    assert receipt.verdict == "same"
    assert receipt.steps == 31 * 2**too_quick
    assert [each.steps for each in fakes.killed] == [31 * 2**number for number in range(too_quick + 1)]
    assert len({each.storage for each in fakes.killed}) == too_quick + 1
    assert {each.steps for each in fakes.ended} == {receipt.steps}
    assert 0 < receipt.killed_at_step < receipt.steps


def test_proof_fails_if_every_training_finishes_before_the_kill(run: RunFile, tmp_path: Path) -> None:
    with pytest.raises(BatonError, match=r"nothing is proved: in 5 tries, .* use more steps: --steps 992"):
        receipt_of(run, FakeExecutions(too_quick=99), tmp_path)


def test_process_killed_from_outside_is_reported(run: RunFile, tmp_path: Path) -> None:
    fakes = FakeExecutions()
    fakes.kill_after = lambda *_: Outcome(returncode=-9)  # type: ignore[method-assign]
    with pytest.raises(BatonError, match="killed from outside"):
        receipt_of(run, fakes, tmp_path)


def test_process_that_refused_its_input_raises_its_error(run: RunFile, tmp_path: Path) -> None:
    fakes = FakeExecutions()
    ended = Ended(exit_code=2, error=ErrorReport.of(SourceError("data.py:load: no examples")))
    fakes.run_to_end = lambda _: Outcome(returncode=2, ended=ended)  # type: ignore[method-assign]
    with pytest.raises(SourceError, match=r"data\.py:load: no examples"):
        receipt_of(run, fakes, tmp_path)


def test_too_few_steps_are_refused(run: RunFile, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="--steps = 3"):
        receipt_of(run, FakeExecutions(), tmp_path, steps=3)


@pytest.mark.parametrize(
    ("second", "agrees_with"), [("ab", "log"), ("ax", "first"), ("ay", "neither"), ("xx", "neither")]
)
def test_second_execution_agrees_at_every_step(second: str, agrees_with: str) -> None:
    logged, first, again = (dict(zip((2, 4), digests, strict=True)) for digests in ("ab", "ax", second))
    executed: list[Any] = [SimpleNamespace(digests=digests) for digests in (first, again)]
    assert agreement([2, 4], logged, *executed) == agrees_with
