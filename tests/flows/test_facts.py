"""The state and the speed of a run; a folder's runs come in pages, and each costs few requests."""

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from baton.flows.commands.main import main
from baton.flows.facts import list_page, pace_of
from baton.tasks.foundation.contracts.log_entry import Evaluation
from baton.tasks.foundation.log.appends import finish
from baton.tasks.foundation.log.attempts import cause_of, last_attempt, state_of
from baton.tasks.foundation.storage.opening import open_storage
from tests.fakes.gcs.server import FakeGcs
from tests.support.counting_storage import Counting
from tests.support.fake_run import FakeRun
from tests.support.ledger_records import record_of
from tests.support.sent_requests import Requests, requests_of, responding_together

FAILED = {"ended": "NonFinite", "message": "the loss is not finite at step 2\nhint: lower it"}


@pytest.mark.parametrize(
    ("now", "step", "target", "ended", "state"),
    [
        ("at work", 100, 100, "NonFinite", "at work"),
        ("ended early", 50, 100, None, "ended early"),
        ("", 100, 100, "NonFinite", "complete"),
        ("", 99, 100, None, "incomplete"),
        ("", 99, 100, "KeyboardInterrupt", "incomplete"),
        ("", 99, 100, "StoreUnreachable", "incomplete"),
        ("", 99, 100, "IdentityChanged", "incomplete"),
        ("", 99, 100, "NonFinite", "failed"),
        ("", 99, 100, "hung", "failed"),
        ("", 99, None, "MemoryError", "failed"),
        ("", 99, None, None, "unknown"),
    ],
)
def test_state_of_a_run(now: str, step: int, target: int | None, ended: str | None, state: str) -> None:
    flags = {"at_work": now == "at work", "ended_early": now == "ended early"}
    assert state_of(**flags, step=step, target=target, last=record_of("a", ended=ended)) == state


USER_ERROR = "a.py, line 7, in f:\n    raise X\n  callbacks.py:make: f of Own raised X: text\nhint: correct it"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "killed or crashed in train"),
        ({"ended": "sigint"}, "stopped by Ctrl-C (SIGINT)"),
        ({"ended": "Terminated"}, "stopped by SIGTERM"),
        ({"ended": "preempted"}, "preempted"),
        (FAILED, "NonFinite: the loss is not finite at step 2"),
        (
            {"ended": "StepFailed", "message": USER_ERROR},
            "StepFailed: callbacks.py:make: f of Own raised X: text (a.py, line 7, in f)",
        ),
    ],
)
def test_cause_is_one_line(changes: dict[str, object], words: str) -> None:
    assert cause_of("incomplete", record_of("a", **changes)) == words
    assert cause_of("complete", record_of("a", **changes)) == ""


def test_last_attempt_is_no_stage_and_no_loser_of_a_race() -> None:
    """A loser says nothing about the run, which another process goes on with."""
    later = {"alive": "2030-01-01T00:00:00+00:00"}
    records = [
        record_of("a", **FAILED),
        record_of("b", within="a", **later),
        record_of("c", ended="StaleWriter", **later),
    ]
    last = last_attempt(records)
    assert last is not None
    assert last.attempt == "a"
    assert last_attempt([]) is None


def test_status_list_and_log_show_first_why_a_run_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = FakeRun(tmp_path, "a", target=400).train(100)
    run.attempt("b", **FAILED)
    cause = "NonFinite: the loss is not finite at step 2"
    for words in (["status", run.address], ["list", run.root.uri], ["log", run.address]):
        assert main([*words, "--json"]) == 0
        facts: dict[str, Any] = json.loads(capsys.readouterr().out)
        if words[0] == "log":
            assert [(each["ended"], each["message"]) for each in facts["failed"]] == [(*FAILED.values(),)]
            assert facts["hung"] == []
        else:
            [facts] = facts.get("runs", [facts])
            assert (facts["state"], facts["cause"]) == ("failed", cause)
        assert main(words) == 0
        lines = capsys.readouterr().out.splitlines()
        shown = [" ".join(lines[1:3])] if words[0] == "status" else lines
        assert any(re.search(rf"failed +.*{cause}$", line) for line in shown)


def test_pace_is_that_of_this_process() -> None:
    record = record_of("a" * 32, from_step=100, step=300, seconds={"train": 50.0, "compile": 20.0})
    assert pace_of(record, 1000) == (4.0, 175.0)
    assert pace_of(record, 200) == (4.0, 0.0)
    assert pace_of(record, None) == (4.0, None)


def test_time_left_has_what_recurs_beside_the_steps() -> None:
    """Evaluations, waits and commits come again; the start does not."""
    seconds = {"train": 50.0, "evaluate": 140.0, "input wait": 6.0, "commit": 4.0, "compile": 20.0, "start-up": 9.0}
    assert pace_of(record_of("a" * 32, from_step=100, step=300, seconds=seconds), 1000) == (4.0, 700.0)


@pytest.mark.parametrize("changes", [{"step": 100}, {"seconds": {"compile": 20.0}}])
def test_pace_is_unknown_before_the_first_steps(changes: dict[str, object]) -> None:
    record = record_of("a" * 32, **{"from_step": 100, "step": 300, "seconds": {"train": 50.0}, **changes})
    assert pace_of(record, 1000) == (None, None)


NAMES = ["a", "b", "c", "e", "f"]


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    """A folder with the runs a, b, c, e and f, a folder d without a log, and a dataset."""
    run = FakeRun(tmp_path, "a", target=100).train(100)
    run.retire(keep_last=2)
    for name in NAMES[1:]:
        for path in run.home.files("log"):
            run.root.write(f"{name}/{path}", run.home.read(path))
    run.root.write("d/log/note.txt", b"not a run")
    return run


def listed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[list[str], str | None]:
    assert main(["list", *words, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return [each["run"] for each in found["runs"]], found["next"]


@pytest.mark.parametrize("limit", range(1, 7))
def test_pages_have_each_run_once(run: FakeRun, limit: int, capsys: pytest.CaptureFixture[str]) -> None:
    page, after = listed(capsys, run.root.uri, "--limit", str(limit))
    found = [page]
    while after is not None:
        page, after = listed(capsys, run.root.uri, "--limit", str(limit), "--after", after)
        found.append(page)
    assert [name for page in found for name in page] == NAMES
    assert [len(page) for page in found[:-1]] == [limit] * (len(found) - 1)
    assert found[-1], "an empty page"


def test_page_may_begin_after_a_name_that_is_gone(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(capsys, run.root.uri, "--after", "bb") == (["c", "e", "f"], None)
    assert listed(capsys, run.root.uri, "--after", "f") == ([], None)
    assert main(["list", run.root.uri, "--after", "f"]) == 0
    assert capsys.readouterr().out == f"no runs below {run.root.uri} after f\n"


def test_a_cut_list_says_so_beside_the_table(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", run.root.uri, "--limit", "2"]) == 0
    printed = capsys.readouterr()
    assert [line.split()[0] for line in printed.out.splitlines()] == ["run", "a", "b"]
    assert printed.err == "there are more runs; list them with --after b\n"
    assert main(["list", run.root.uri, "--limit", "0"]) == 2
    assert "--limit" in capsys.readouterr().err


def test_only_damage_on_the_page_is_reported(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.root.write("c/log/00000002.json", b"{")
    assert listed(capsys, run.root.uri, "--limit", "2") == (["a", "b"], "b")
    assert listed(capsys, run.root.uri, "--limit", "1", "--after", "b", code=4) == (["c"], "c")


def test_run_without_hint_is_listed(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "bc":
        run.root.delete(f"{name}/log/HINT")
    run.root.write("e/log/HINT", b"900")
    assert main(["list", run.root.uri, "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [{**each, "run": "", "home": ""} for each in runs] == [{**runs[0], "run": "", "home": ""}] * 5


def listed_runs(capsys: pytest.CaptureFixture[str], root: str) -> dict[str, dict[str, Any]]:
    assert main(["list", root, "--json"]) == 0
    return {each["run"]: each for each in json.loads(capsys.readouterr().out)["runs"]}


def test_list_says_state_target_and_who_is_at_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alive = {"alive": datetime.now(UTC).isoformat(), "host": "tpu-vm-3", "pid": 4711}
    over = FakeRun(tmp_path, "over", target=100).train(100)
    over.attempt("lingers", **alive)
    early = FakeRun(tmp_path, "early", target=400).train(100)
    finish(early.log, early.tip, base=early.head.base, reason="EarlyStopping", attempt="0" * 32)
    FakeRun(tmp_path, "old").train(100)  # its log does not say the target
    stopped = FakeRun(tmp_path, "stopped", target=400).train(100)
    stopped.attempt("killed")
    stopped.attempt("ended", **alive, ended="sigterm")
    trains = FakeRun(tmp_path, "trains", target=2000).train(100, 1500)
    trains.attempt("b", **alive)
    runs = listed_runs(capsys, over.root.uri)
    assert {name: (each["state"], each["step"], each["target"]) for name, each in runs.items()} == {
        "early": ("ended early", 100, 400),
        "old": ("unknown", 100, None),
        "over": ("complete", 100, 100),
        "stopped": ("incomplete", 100, 400),
        "trains": ("at work", 1500, 2000),
    }
    at_work = {name: each["at_work"] for name, each in runs.items() if each["at_work"]}
    assert at_work == {"trains": [{"attempt": "b", "host": "tpu-vm-3", "pid": 4711}]}
    assert main(["list", over.root.uri]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[-1] == "at work / cause"
    assert re.fullmatch(r"stopped +incomplete +100/400 .* stopped by SIGTERM", lines[-2])
    assert re.fullmatch(r"old +100 +3 +\S+", lines[2])
    assert re.fullmatch(r"trains +at work +1500/2000 .* 4711 on tpu-vm-3", lines[-1])


def test_one_run_makes_no_line_of_a_piped_list_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = FakeRun(tmp_path, "plain", target=100).train(100)
    many = FakeRun(tmp_path, "many", target=100).train(100)
    metrics = {f"metric_{number}": float(number) for number in range(25)}
    body = Evaluation(checkpoint=many.tip, metrics=metrics, examples=1, seconds=0.5, keep_best=None)
    many.log.append(lambda _: body, attempt="e" * 32)
    plain.root.write("broken/log/00000000.json", b"{" * 900)
    assert main(["list", plain.root.uri]) == 4
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "metric_0 0  metric_1 1  metric_2 2  and 22 more" in lines["many"]
    assert len(lines["plain"]) < 200
    assert "/broken/log/00000000.json" in lines["broken"]


def test_target_is_as_of_the_newest_commit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = FakeRun(tmp_path, "a", target=100).train(100)
    run.evaluate(0.5)
    assert listed_runs(capsys, run.root.uri)["a"]["state"] == "complete"
    run.target = 400
    run.train(200)
    run.evaluate(0.5)
    assert listed_runs(capsys, run.root.uri)["a"]["target"] == 400
    run.target = None  # a commit that does not say it
    run.train(300)
    assert listed_runs(capsys, run.root.uri)["a"]["target"] == 400


def test_only_runs_that_are_not_over_cost_a_listing_more(tmp_path: Path) -> None:
    over = FakeRun(tmp_path, "over", target=100).train(100)
    for each in (over, FakeRun(tmp_path, "trains", target=400).train(100)):
        each.retire(keep_last=2)  # writes HINT
    calls = {}
    for name in ("over", "trains"):
        counted = Counting(over.root.at(name))
        [run] = list_page(counted).runs
        assert run.name == name
        calls[name] = counted.calls
    assert calls["over"] == {"read": 2, "exists": 1, "folders": 1}  # HINT and the newest entry
    assert calls["trains"] - calls["over"] == {"files": 1}


def test_a_run_on_cloud_storage_costs_three_requests(run: FakeRun, cloud: FakeGcs, tmp_path: Path) -> None:
    root = open_storage("gs://bucket/team", relative_to=tmp_path)
    for number in range(40):
        for path in run.home.files("log"):
            cloud.store.put("bucket", f"team/run-{number:02}/{path}", run.home.read(path))
    asked, hints = 21, ("object.media", r"run-\d\d/log/HINT")  # one more than the page shows
    with responding_together(cloud, [hints] * asked), requests_of(cloud) as requests:
        assert main(["list", root.uri, "--limit", "20"]) == 0
    assert len(requests.sent) <= 3 * asked + 4, requests.words()  # the root itself, and the folders
    assert Requests(requests.of(*hints)).in_series() == 1, "runs wait for each other"


def test_attempts_of_runs_on_cloud_storage_are_read_side_by_side(cloud: FakeGcs, tmp_path: Path) -> None:
    run = FakeRun(tmp_path, "a", target=400).train(100)
    run.retire(keep_last=2)  # writes HINT
    run.attempt("b", alive=datetime.now(UTC).isoformat())
    root = open_storage("gs://bucket/team", relative_to=tmp_path)
    for number in range(20):
        for path in (*run.home.files("log"), *run.home.files("attempts")):
            cloud.store.put("bucket", f"team/run-{number:02}/{path}", run.home.read(path))
    records = ("object.media", r"run-\d\d/attempts/b.json")
    with responding_together(cloud, [records] * 20), requests_of(cloud) as requests:
        page = list_page(root)
    assert [len(each.at_work) for each in page.runs] == [1] * 20
    assert len(requests.sent) <= 5 * 20 + 4, requests.words()
    assert Requests(requests.of(*records)).in_series() == 1, "runs wait for each other"
