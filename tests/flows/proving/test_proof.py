"""`baton prove` without processes and without TensorFlow: its course, what it finds, what it says and keeps."""

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from flows.commands import prove as verb
from flows.commands.main import main
from flows.proving import comparison
from flows.proving.comparison import compare, in_order
from flows.proving.proof import Workshop, prove
from flows.proving.receipt import Receipt
from flows.proving.trial import Trial, cut_length, log_every_steps, trial_of
from flows.proving.trial_processes import Ended, fault_of
from tasks.foundation.contracts.checkpoint import CheckpointRef, checkpoint_folder
from tasks.foundation.contracts.log_entry import Commit, Environment, Origin
from tasks.foundation.contracts.run_file import RunFile, load_run_file
from tasks.foundation.contracts.schedule import next_border
from tasks.foundation.contracts.segment import MetricRow
from tasks.foundation.errors import BatonError, InvalidInput, RunLogError, SourceError
from tasks.foundation.runlog.commits import commit
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage import temporary_files
from tasks.foundation.telemetry.events import Silent

ENVIRONMENT = Environment(accelerator="cpu", replicas=1, intra_op_threads=2, inter_op_threads=2, versions={})
WARNING = (
    "warning: model.py:build: while/noise/RandomStandardNormal draw from TensorFlow's own random state or run Python\n"
)
KEYS = ("model/dense/kernel", "model/dense/bias", "optimizer/0/iteration", "metrics/0/0/loss/total", "step")


def all_errors(base: type[BatonError]) -> list[type[BatonError]]:
    return [base, *(below for each in base.__subclasses__() for below in all_errors(each))]


@pytest.fixture
def run(tmp_path: Path) -> RunFile:
    values = {
        "run": "mine",
        "storage": "runs",
        "data": {"source": "digits"},
        "model": "model.py:build",
        "train": {"steps": 10, "segment_seconds": 5, "global_batch_size": 4},
        "checkpoint": {"keep_every_steps": 3},
        "evaluate": {"every_steps": 2},
    }
    (tmp_path / "model.py").write_text("def build():\n    pass\n")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    return load_run_file(tmp_path / "run.yaml")


@dataclass
class Fakes:
    """Processes that write their logs at once; `result` says which trials come out as others."""

    too_quick: int = 0
    result: Callable[[str], str] = lambda _: "same"
    content: Callable[[str], str] = lambda _: "c"
    stderr: str = ""
    ended: list[Trial] = field(default_factory=list)
    killed: list[Trial] = field(default_factory=list)

    def to_its_end(self, trial: Trial) -> Ended:
        self.ended.append(trial)
        self._train(trial, trial.steps)
        return Ended(returncode=0, stderr=self.stderr)

    def killed_after(self, trial: Trial, step: int) -> Ended:
        self.killed.append(trial)
        if len(self.killed) <= self.too_quick:
            self._train(trial, trial.steps)
            # By turns: it had left before the kill; it was killed with all its work done.
            return Ended(returncode=-9 * (len(self.killed) % 2), stderr="", killed=True)
        self._train(trial, step)
        return Ended(returncode=-9, stderr="", killed=True)

    def read(self, _trial: Trial, ref: CheckpointRef) -> dict[str, Any]:
        values = {key: np.arange(6, dtype="float32").reshape(2, 3) for key in KEYS}
        if ref.state_digest != "same":
            values["model/dense/bias"] = values["model/dense/bias"] + np.float32([[0, 0, 0.5], [0, 0, 2]])
            values["optimizer/0/iteration"] = np.zeros((2, 3), "float32")
        return values

    def _train(self, trial: Trial, until: int) -> None:
        log = RunLog(trial.home)
        result, content = self.result(trial.name), self.content(trial.name)
        if log.head() is None:
            origin = Origin(identity={"data.content_digest": content}, environment=ENVIRONMENT)
            log.append(lambda _: origin, attempt=uuid.uuid4().hex)
            self._commit(log, 0, result)
        while (head := log.head()) and head.tip and head.tip.step < until:
            step = min(trial.steps, (head.tip.step // trial.segment_steps + 1) * trial.segment_steps)
            self._commit(log, step, result, parent=head.tip)

    def _commit(self, log: RunLog, step: int, result: str, parent: CheckpointRef | None = None) -> None:
        head, attempt = log.head(), uuid.uuid4().hex
        assert head is not None
        path = checkpoint_folder(step=step, base=head.base, attempt=attempt)
        ref = CheckpointRef(
            path=path, step=step, base=head.base, attempt=attempt, state_digest=result, manifest_digest="", size=1
        )
        rows = range(parent.step + 1, step + 1) if parent else ()
        loss = {False: 0.5, True: float("nan")}  # NaN is the same as itself
        history = tuple(
            MetricRow(step=row, metrics={"loss": 0.7 if result != "same" and row > 15 else loss[row == 3]})
            for row in rows
            if row % 2 == 0 or row == 3
        )
        body = Commit(
            checkpoint=ref, parent=parent.path if parent else None, exit_reason="segment_end", history=history
        )
        commit(log, body)


def proved(run: RunFile, fakes: Fakes, tmp_path: Path, *, steps: int = 31, share_data: bool = False) -> Receipt:
    workshop = Workshop(
        folder=tmp_path / "scratch", processes=fakes, share_data=share_data, telemetry=Silent(), read=fakes.read
    )
    return prove(run, ("train.seed=4",), steps=steps, workshop=workshop)


def test_the_same(run: RunFile, tmp_path: Path) -> None:
    fakes = Fakes()
    receipt = proved(run, fakes, tmp_path)
    assert (receipt.verdict, receipt.steps, receipt.cuts, receipt.killed_at_step) == ("same", 31, (7, 14, 21, 28), 14)
    assert (receipt.variables, receipt.differing, receipt.first_difference, receipt.causes) == (5, 0, None, ())
    assert (receipt.metric_rows, receipt.first_differing_step, receipt.repeatable) == (16, None, None)
    assert receipt.straight == receipt.cut
    assert [trial.name for trial in fakes.killed] == ["cut"]
    assert [trial.name for trial in fakes.ended] == ["cut", "straight"]
    assert fakes.ended[1].segment_steps == 31
    assert len({trial.storage for trial in fakes.ended}) == 2
    assert Receipt.from_json(receipt.to_json(), where="", error=BatonError) == receipt


def test_data_may_be_prepared_once(run: RunFile, tmp_path: Path) -> None:
    fakes = Fakes()
    assert proved(run, fakes, tmp_path, share_data=True).data_prepared == "once"
    assert len({trial.storage for trial in fakes.ended}) == 1
    assert len({trial.home.uri for trial in fakes.ended}) == 2


def test_a_state_that_no_checkpoint_holds(run: RunFile, tmp_path: Path) -> None:
    fakes = Fakes(result=lambda name: "other" if name == "cut" else "same")
    receipt = proved(run, fakes, tmp_path)
    assert receipt.verdict == "different"
    assert receipt.repeatable is True
    assert (receipt.differing, receipt.first_differing_step) == (2, 16)
    found = receipt.first_difference
    assert found is not None
    assert (found.path, found.dtype, found.shape) == ("model/dense/bias", "float32", (2, 3))
    assert (found.values, found.largest, found.only_in) == (2, 2.0, "")
    assert [trial.name for trial in fakes.ended] == ["cut", "straight", "again"]
    assert len(receipt.causes) == 1
    assert "state that no checkpoint holds" in receipt.causes[0]


def test_a_warning_of_the_trainer_names_the_cause(run: RunFile, tmp_path: Path) -> None:
    fakes = Fakes(result=lambda name: "other" if name == "cut" else "same", stderr=f"step 1\n{WARNING}step 2\n")
    causes = proved(run, fakes, tmp_path).causes
    assert len(causes) == 1
    assert causes[0].startswith("model.py:build: while/noise/RandomStandardNormal draw from")
    assert "SeedGenerator" in causes[0]


def test_what_cannot_be_repeated_at_all(run: RunFile, tmp_path: Path) -> None:
    receipt = proved(run, Fakes(result=lambda name: "same" if name == "straight" else "other"), tmp_path)
    assert receipt.repeatable is False
    assert "not repeatable" in receipt.causes[0]
    assert "intra_op_threads" in receipt.causes[0]


def test_other_examples_need_no_repetition(run: RunFile, tmp_path: Path) -> None:
    fakes = Fakes(content=lambda name: name, result=lambda name: "other" if name == "cut" else "same")
    receipt = proved(run, fakes, tmp_path)
    assert (receipt.verdict, receipt.repeatable) == ("different", None)
    assert (receipt.straight.content_digest, receipt.cut.content_digest) == ("straight", "cut")
    assert receipt.first_difference is not None
    assert receipt.causes[0].startswith("data.source digits gave other examples")
    assert [trial.name for trial in fakes.ended] == ["cut", "straight"]


@pytest.mark.parametrize("differs", ["digest", "content", "bytes"])
def test_each_difference_alone_is_one(run: RunFile, tmp_path: Path, differs: str) -> None:
    fakes = Fakes(
        result=lambda name: "other" if differs == "digest" and name == "cut" else "same",
        content=lambda name: name if differs == "content" else "c",
    )
    reading = fakes.read

    def read(trial: Trial, ref: CheckpointRef) -> dict[str, Any]:
        values = reading(trial, ref.model_copy(update={"state_digest": "same"}))
        if differs == "bytes" and trial.name == "cut":
            values["step"] = -values["step"]  # 0.0 and -0.0 are equal, and not the same
        return values

    fakes.read = read  # type: ignore[method-assign]
    assert proved(run, fakes, tmp_path).verdict == "different"


@pytest.mark.parametrize("too_quick", [1, 2, 4])
def test_a_process_that_was_too_quick_is_tried_again_with_more_steps(
    run: RunFile, tmp_path: Path, too_quick: int
) -> None:
    fakes = Fakes(too_quick=too_quick)
    receipt = proved(run, fakes, tmp_path)
    assert receipt.verdict == "same"
    assert receipt.steps == 31 * 2**too_quick
    assert [trial.steps for trial in fakes.killed] == [31 * 2**number for number in range(too_quick + 1)]
    assert len({trial.storage for trial in fakes.killed}) == too_quick + 1
    assert {trial.steps for trial in fakes.ended} == {receipt.steps}
    assert 0 < receipt.killed_at_step < receipt.steps


def test_a_kill_that_never_hits_proves_nothing(run: RunFile, tmp_path: Path) -> None:
    with pytest.raises(BatonError, match="nothing is proved; give it more with --steps 992"):
        proved(run, Fakes(too_quick=99), tmp_path)


def test_a_process_that_something_else_killed(run: RunFile, tmp_path: Path) -> None:
    fakes = Fakes()
    fakes.killed_after = lambda *_: Ended(returncode=-9, stderr="")  # type: ignore[method-assign]
    with pytest.raises(BatonError, match="killed from outside"):
        proved(run, fakes, tmp_path)


def test_a_process_that_was_refused_says_so_itself(run: RunFile, tmp_path: Path) -> None:
    trial = trial_of(run, (), name="cut", storage=tmp_path, steps=31, segment_steps=7)
    fault = fault_of(
        trial, Ended(returncode=2, stderr="error: bad: x\nerror: SourceError: data.py:load: raised\nKey\n")
    )
    assert isinstance(fault, SourceError)
    assert str(fault) == "data.py:load: raised\nKey"
    crash = fault_of(trial, Ended(returncode=1, stderr="Traceback\nZeroDivisionError: 1\n"))
    assert type(crash) is BatonError
    assert "ended with code 1" in str(crash)
    assert "ZeroDivisionError" in str(crash)
    fakes = Fakes()
    fakes.to_its_end = lambda _: Ended(returncode=2, stderr="error: SourceError: no\n")  # type: ignore[method-assign]
    with pytest.raises(SourceError, match="no"):
        proved(run, fakes, tmp_path)


@pytest.mark.parametrize("kind", all_errors(BatonError), ids=lambda kind: kind.__name__)
def test_every_error_of_a_process_stays_what_it_was(kind: type[BatonError], run: RunFile, tmp_path: Path) -> None:
    trial = trial_of(run, (), name="cut", storage=tmp_path, steps=31, segment_steps=7)
    fault = fault_of(trial, Ended(returncode=kind.exit_code, stderr=f"error: {kind.__name__}: no\n"))
    assert (type(fault), str(fault), fault.exit_code) == (kind, "no", kind.exit_code)


def test_too_few_steps(run: RunFile, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="--steps = 3"):
        proved(run, Fakes(), tmp_path, steps=3)


@pytest.mark.parametrize("steps", [*range(4, 70), 1000])
def test_cuts_and_rows(steps: int) -> None:
    length, every = cut_length(steps), log_every_steps(steps, cut_length(steps))
    assert length % 2 == 1
    # The kill falls on the second border, and something must be left after it.
    assert 2 * length < steps
    assert steps % every != 0
    assert length % every != 0


def test_a_trial_runs_straight_to_its_end(run: RunFile, tmp_path: Path) -> None:
    storage = tmp_path / "a: b #c"
    trial = trial_of(run, ("train.seed=4", "run=other"), name="straight", storage=storage, steps=31, segment_steps=31)
    file, *words, until, steps = trial.words()
    assert (until, steps) == ("--until-step", "31")
    spec = load_run_file(Path(file), [word for word in words if word != "--set"]).spec
    assert (spec.run, spec.storage, spec.train.seed) == ("straight", str(storage), 4)
    assert spec.train.steps > 31  # no evaluation falls due at the end
    assert next_border(spec, 0, 31) == 31
    assert (spec.evaluate.every_steps, spec.train.segment_seconds) == (None, None)


@pytest.mark.parametrize(("every", "wanted"), [(100, 15), (None, None)])
def test_callbacks_that_act_at_evaluations_act_in_a_trial(
    run: RunFile, tmp_path: Path, every: int | None, wanted: int | None
) -> None:
    callbacks = run.spec.train.model_copy(update={"callbacks": "callbacks.py:make"})
    evaluate = run.spec.evaluate.model_copy(update={"every_steps": every})
    acting = replace(run, spec=run.spec.model_copy(update={"train": callbacks, "evaluate": evaluate}))
    for of, steps in ((acting, wanted), (run, None)):
        trial = trial_of(of, (), name="cut", storage=tmp_path, steps=31, segment_steps=7)
        file, *words, _, _ = trial.words()
        spec = load_run_file(Path(file), [word for word in words if word != "--set"]).spec
        assert spec.evaluate.every_steps == steps


def test_the_order_of_the_tree() -> None:
    keys = ["step", "metrics/0/0/a", "optimizer/10/x", "optimizer/2/x", "host/a", "seeds/s", "model/b_10", "model/b_2"]
    assert in_order(keys) == [
        "model/b_2", "model/b_10", "seeds/s", "optimizer/2/x", "optimizer/10/x", "metrics/0/0/a", "host/a", "step"
    ]  # fmt: skip


def test_a_variable_that_only_one_has(run: RunFile, tmp_path: Path) -> None:
    fakes = Fakes()
    one, other = (
        trial_of(run, (), name=name, storage=tmp_path, steps=4, segment_steps=4) for name in ("straight", "cut")
    )
    fakes.to_its_end(one)
    fakes.to_its_end(other)

    def read(trial: Trial, ref: CheckpointRef) -> dict[str, Any]:
        values = fakes.read(trial, ref)
        return values if trial is one else {key: value for key, value in values.items() if key != "step"}

    comparison, *_ = compare(one, other, read=read)
    assert comparison.first is not None
    assert (comparison.first.path, comparison.first.only_in) == ("step", "straight")
    with pytest.raises(RunLogError, match="was to be trained to step 9 and ended at step 4"):
        compare(one, replace(other, steps=9), read=read)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fakes:
    fakes = Fakes()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(verb.tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(verb, "FreshProcesses", lambda _folder, **_settings: fakes)
    monkeypatch.setattr(comparison, "read_arrays", fakes.read)
    return fakes


def test_the_command_keeps_a_receipt(run: RunFile, fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", str(run.path)]) == 0
    out = capsys.readouterr().out
    assert "proved: mine: 31 steps straight, and again cut at 7, 14, 21, 28 with a SIGKILL at 14: the same bits" in out
    proofs = list((run.folder / "runs" / "mine" / "proofs").iterdir())
    assert len(proofs) == 1
    assert str(proofs[0]) in out
    kept = Receipt.from_json(proofs[0].read_bytes(), where="", error=BatonError)
    assert (kept.verdict, kept.run, kept.run_file, kept.environment) == ("same", "mine", "run.yaml", ENVIRONMENT)
    assert kept.identity == {"data.content_digest": "c"}
    assert not fakes.ended[0].storage.exists()


def test_the_command_says_where_they_differ(run: RunFile, fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    fakes.result = lambda name: "other" if name == "cut" else "same"
    assert main(["prove", str(run.path), "--json", "--keep"]) == 1
    captured = capsys.readouterr()
    facts = json.loads(captured.out)
    assert facts["verdict"] == "different"
    assert facts["first_difference"]["path"] == "model/dense/bias"
    assert Path(facts["receipt"]).is_file()
    assert fakes.ended[0].storage.is_dir()
    assert facts["kept"] == str(fakes.ended[0].storage.parent)
    assert main(["prove", str(run.path)]) == 1
    out = capsys.readouterr().out
    assert out.count("model/dense/bias  float32[2, 3]: 2 of its values differ, by up to 2") == 1
    assert "first differ at step 16" in out
    assert len(list((run.folder / "runs" / "mine" / "proofs").iterdir())) == 2


def test_the_scratch_folder_goes_whatever_happens(run: RunFile, fakes: Fakes, tmp_path: Path) -> None:
    def interrupted(_: Trial) -> Ended:
        raise KeyboardInterrupt

    fakes.to_its_end = interrupted  # type: ignore[method-assign]
    assert main(["prove", str(run.path)]) == 130
    assert fakes.killed
    assert list((tmp_path / "temporary").iterdir()) == []
    assert not (run.folder / "runs").exists()


def test_what_a_killed_proof_left_goes_with_the_next_and_what_was_kept_stays(
    run: RunFile, fakes: Fakes, tmp_path: Path
) -> None:
    for left in ("baton-proving-killed", "baton-doctor-killed"):
        (tmp_path / "temporary" / left / "shared").mkdir(parents=True)
    assert main(["prove", str(run.path), "--keep"]) == 0
    temporary_files._LOOKED_AT.clear()  # the next command is another process
    assert main(["prove", str(run.path)]) == 0
    assert [path.name for path in (tmp_path / "temporary").iterdir()] == [fakes.ended[0].storage.parent.name]


def test_a_home_that_holds_only_proofs_is_no_run(
    run: RunFile, fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prove", str(run.path), "--set", "data.source=text"]) == 0
    assert fakes.ended[0].overrides == ("data.source=text",)
    for word in ("status", "log", "verify", "report"):
        assert main([word, str(run.path)]) == 2
        assert "has not been run yet" in capsys.readouterr().err
    assert main(["list", str(run.path)]) == 0
    assert capsys.readouterr().out.startswith("no runs below")


def test_what_is_refused_is_refused_before_anything_starts(
    run: RunFile, fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    for setting, words in (
        ("storage=memory://x", "ends with this process"),
        ("model.build=model.py:none", "none"),
        ("train.steps=0", "train.steps"),
    ):
        assert main(["prove", str(run.path), "--set", setting]) == 2
        assert words in capsys.readouterr().err
    assert not fakes.killed
