"""Errors as JSON for another process, perhaps of another version."""

import inspect
import json

import pytest

from baton.tasks.foundation import errors
from baton.tasks.foundation.contracts.stage_calls import ErrorReport
from baton.tasks.foundation.errors import BatonError, BlowUp, InvalidInput, NonFinite, RunLogError
from baton.tasks.foundation.text import command, message, option, with_place, worded

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, BatonError)]


def sent(report: ErrorReport) -> ErrorReport:
    return ErrorReport.from_json(report.to_json(), where="report", error=RunLogError)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_arrives_as_its_own_class(kind: type[BatonError]) -> None:
    fault = kind("a\nhint: b", **dict.fromkeys(kind.field_names, 12))
    arrived = sent(ErrorReport.of(fault)).to_error()
    assert type(arrived) is kind
    assert (str(arrived), arrived.fields) == ("a\nhint: b", fault.fields)


OPTIONS = message(
    "a" + option("to", "b") + " c", hints=[command("run", ("set", "d=e f"), ("try-again", True), after="g"), "h"]
)


def test_options_of_a_message_arrive_as_values() -> None:
    arrived = sent(ErrorReport.of(InvalidInput(OPTIONS)).model_copy(update={"traceback": None})).to_error()
    assert str(arrived) == OPTIONS
    assert worded(str(arrived), repr) == worded(OPTIONS, repr)
    assert "Usage(verb='run', options=(('set', 'd=e f'), ('try-again', True)), after='g')" in worded(OPTIONS, repr)


@pytest.mark.parametrize(
    "parts", [None, 3, "a", [4], [{"verb": "run"}], ["a", {"verb": "run", "options": [], "place": "before"}]]
)
def test_options_that_are_not_known_are_text(parts: object) -> None:
    values = json.loads(ErrorReport.of(InvalidInput(OPTIONS)).to_json())
    data = json.dumps({**values, "parts": parts} if parts else {key: values[key] for key in values if key != "parts"})
    arrived = ErrorReport.from_json(data.encode(), where="report", error=RunLogError).to_error()
    assert worded(str(arrived), repr) == OPTIONS


def test_place_in_a_headline_keeps_the_options_of_hints() -> None:
    placed = with_place(OPTIONS, "in a stage")
    assert placed.splitlines()[0] == "a--to b c (in a stage)"
    assert worded(placed, repr).splitlines()[1:] == worded(OPTIONS, repr).splitlines()[1:]


def test_unknown_class_becomes_its_nearest_known_base() -> None:
    report = ErrorReport(
        error="LossSpike", bases=("NonFinite", "BlowUp", "BatonError"), message="up", fields={"step": 3}
    )
    arrived = sent(report).to_error()
    assert type(arrived) is NonFinite
    assert (str(arrived), arrived.step) == ("up", 3)


def test_class_whose_fields_are_missing_becomes_its_base() -> None:
    report = ErrorReport.of(NonFinite("NaN", step=3)).model_copy(update={"fields": {}})
    arrived = sent(report).to_error()
    assert type(arrived) is BatonError
    assert str(arrived) == "NaN"


def test_unknown_fields_are_ignored() -> None:
    report = ErrorReport.of(BlowUp("up", step=3)).model_copy(update={"fields": {"step": 3, "window": 100}})
    assert sent(report).to_error().fields == {"step": 3}


@pytest.mark.parametrize("name", ["Mapping", "ClassVar", "__doc__", "ValueError", "no class"])
def test_name_that_is_no_baton_error_becomes_the_base(name: str) -> None:
    assert type(sent(ErrorReport(error=name, message="m")).to_error()) is BatonError


def test_report_holds_the_bases_nearest_first() -> None:
    assert ErrorReport.of(errors.RunFileError("x")).bases == (InvalidInput.__name__, BatonError.__name__)


def test_traceback_of_the_other_process_is_a_note() -> None:
    with pytest.raises(BlowUp) as caught:
        raise BlowUp("up", step=3) from ValueError("the cause")
    report = sent(ErrorReport.of(caught.value))
    assert report.traceback is not None
    assert "ValueError: the cause" in report.traceback
    arrived = report.to_error()
    assert str(arrived) == "up"
    assert arrived.__notes__ == [f"In the other process:\n{report.traceback}"]
    assert ErrorReport.of(BlowUp("up", step=3)).traceback is None


def test_long_traceback_loses_its_middle() -> None:
    with pytest.raises(BlowUp) as caught:
        raise BlowUp("begin" + "x" * 100_000 + "end", step=3)
    text = errors.whole_traceback(caught.value)
    assert text is not None
    assert len(text) < 50_000
    assert text.startswith("Traceback")
    assert text.rstrip().endswith("end")
