"""The evaluation of a checkpoint whose save is in flight: it waits for nothing, and is logged after the commit."""

from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.contracts.log_entry import Commit, Evaluation
from baton.tasks.foundation.errors import NonFinite
from tests.evaluate.test_warm_evaluation import MODEL
from tests.support.lab import Lab, lab_of, spec_of
from tests.support.watched_relay import HeldSave, InLine, command

pytestmark = pytest.mark.slow


def entries(lab: Lab, spec: Any) -> list[tuple[str, int]]:
    """Kind and step of each commit and evaluation; an evaluation names the committed checkpoint."""
    found, committed = [], {}
    for entry in lab.log(spec).entries():
        if isinstance(entry.body, Commit):
            committed[entry.body.checkpoint.path] = entry.body.checkpoint
        elif isinstance(entry.body, Evaluation):
            assert entry.body.checkpoint == committed[entry.body.checkpoint.path]
        else:
            continue
        found.append((entry.body.kind, entry.body.checkpoint.step))
    return found


def test_evaluation_does_not_wait_for_the_save(tmp_path: Path) -> None:
    lab, spec = Lab(tmp_path), spec_of("functional", evaluate__every_steps=4)
    held = HeldSave(4)
    command(lab, spec, held=held)
    assert held.acted
    assert held.trained_to > 4, "the training waited for the save, or the evaluation did"
    kinds = [("checkpoint", 4), ("evaluation", 4), ("checkpoint", 8), ("evaluation", 8), ("checkpoint", 11)]
    assert entries(lab, spec) == [("checkpoint", 0), *kinds, ("evaluation", 11)]
    in_line = spec.model_copy(update={"run": "in-line"})
    command(lab, in_line, runner=InLine())
    of_both = [
        [entry.body.metrics for entry in lab.log(each).entries() if isinstance(entry.body, Evaluation)]
        for each in (spec, in_line)
    ]
    assert of_both[0] == of_both[1]
    tips = [lab.log(each).require_head().tip for each in (spec, in_line)]
    assert tips[0] is not None
    assert tips[1] is not None
    assert tips[0].state_digest == tips[1].state_digest


def test_callbacks_wait_for_the_evaluation_in_flight(tmp_path: Path) -> None:
    # The callback changes what cannot be put back, so another model is evaluated, with what the store has.
    lab = lab_of(
        tmp_path, MODEL.replace("self.model.shift = 5.0", "self.model.shift, self.model._mark = 5.0, object()")
    )
    spec = spec_of("phased", train__callbacks="model.py:shifting", evaluate__every_steps=4)
    held = HeldSave(4)
    command(lab, spec, held=held)
    assert held.trained_to == 4, "the training went on without the metrics"
    assert [kind for kind in entries(lab, spec) if kind[0] == "evaluation"] == [
        ("evaluation", 4),
        ("evaluation", 8),
        ("evaluation", 11),
    ]


def test_save_that_fails_leaves_no_evaluation(tmp_path: Path) -> None:
    lab, spec = Lab(tmp_path), spec_of("plain", evaluate__every_steps=4)

    def fail() -> None:
        raise NonFinite("step 4: found while it was written", step=4)

    with pytest.raises(NonFinite):
        command(lab, spec, held=HeldSave(4, fail))
    assert entries(lab, spec) == [("checkpoint", 0)]
    command(lab, spec)
    assert [step for kind, step in entries(lab, spec) if kind == "evaluation"] == [4, 8, 11]
