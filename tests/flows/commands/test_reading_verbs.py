"""`baton status`, `list`, `log` and `report` on a home that the real log wrote."""

import json
import os
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from baton.flows.commands.main import main
from baton.tasks.foundation.contracts.log_entry import MetricRow
from baton.tasks.foundation.log.appends import quarantine
from tests.support.fake_run import FakeRun
from tests.support.host_intervals import stats_of


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    run = FakeRun(tmp_path).train(100, 200)
    run.evaluate(0.75)
    return run.train(300)


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    value: dict[str, Any] = json.loads(lines[0])
    return value


def test_status_json(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    facts = as_json(capsys, "status", run.address)
    assert facts["run"] == "digits"
    assert facts["home"] == run.address
    assert (facts["step"], facts["target"], facts["segments"]) == (300, None, 3)
    assert (facts["entry"], facts["base"]) == (5, 5)
    assert facts["checkpoint"] == f"{run.address}/{run.tip.path}"
    assert facts["state_digest"] == run.tip.state_digest
    assert [kept["step"] for kept in facts["retained"]] == [0, 100, 200, 300]
    assert facts["best"]["step"] == 200
    assert facts["evaluation"]["metrics"] == {"accuracy": 0.75}
    assert facts["seconds"] == {"train": 6.0, "stage": 1.5, "evaluate": 0.5}
    assert facts["account"] is None


def test_status_text(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    quarantine(run.log, run.tip, "flipped", attempt="q" * 32)
    assert main(["status", str(run.run_file(steps=400))]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^step +200 of 400$", out, re.MULTILINE)
    assert re.search(r"^log +entry 6, base 6$", out, re.MULTILINE)
    assert re.search(r"^quarantined +checkpoints/00000300-", out, re.MULTILINE)
    assert re.search(r"^validation +accuracy 0.75  \(180 examples, step 200\)$", out, re.MULTILINE)
    assert re.search(r"^time +train 4.0 s, stage 1.0 s, evaluate 0.5 s$", out, re.MULTILINE)
    assert re.search(r"^attempts +not recorded: the time is that of committed segments alone$", out, re.MULTILINE)


def test_metadata_stands_where_it_changed_and_is_shown(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.metadata = {"team": "vision & co", "ticket": 42, "baseline": False}
    run.train(400, 500)
    assert [entry["metadata"] for entry in as_json(capsys, "log", run.address)["entries"][-2:]] == [run.metadata, None]
    assert as_json(capsys, "status", run.address)["metadata"] == run.metadata
    assert main(["status", run.address]) == 0
    assert re.search(
        r"^metadata +team: vision & co\nmetadata +ticket: 42\nmetadata +baseline: false$",
        capsys.readouterr().out,
        re.MULTILINE,
    )
    assert main(["report", run.address]) == 0
    page = run.home.read("report/index.html").decode()
    assert '<td>team</td><td class="wrap code">vision &amp; co</td>' in page
    run.metadata = {}
    run.train(600)
    capsys.readouterr()
    assert as_json(capsys, "status", run.address)["metadata"] == {}


def with_attempts(run: FakeRun) -> FakeRun:
    """Add two past attempts, one of them killed, and one that is at work now."""
    now = datetime.now(UTC).isoformat()
    run.attempt("a" * 32)
    run.attempt("b" * 32, ended="complete", uncommitted_seconds=0.0, host="[bold]h[/bold]")
    run.attempt("c" * 32, began=now, alive=now, seconds={"train": 10.0, "unattributed": 0.2}, uncommitted_seconds=9.0)
    run.home.write("attempts/note.txt", b"hello")
    return run


def test_status_json_has_the_time_by_cause(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    facts = as_json(capsys, "status", with_attempts(run).address)
    seconds = {
        "compile": 40.0, "train": 40.0, "lost work": 30.0, "start-up": 20.0, "unattributed": 0.2,
    }  # fmt: skip
    assert facts["seconds"] == seconds
    account = facts["account"]
    assert account["total_seconds"] == pytest.approx(130.2)
    assert account["goodput_seconds"] == 40.0
    assert account["goodput_share"] == pytest.approx(40 / 130.2)
    assert account["unattributed_share"] == pytest.approx(0.2 / 130.2)
    assert account["badput_seconds"] == {cause: amount for cause, amount in seconds.items() if cause != "train"}
    assert sum(account["badput_seconds"].values()) + 40.0 == pytest.approx(account["total_seconds"])
    assert (account["alive"], account["died_without_a_word"], account["unreadable"]) == (1, 1, 1)
    assert [each["lost_seconds"] for each in account["attempts"]] == [30.0, 0.0, 0.0]
    assert [each["is_alive"] for each in account["attempts"]] == [False, False, True]
    assert all("last_lines" not in each for each in account["attempts"])
    assert [(each["attempt"], each["step"], each["committed_step"]) for each in facts["at_work"]] == [
        ("c" * 32, 130, 100)
    ]
    assert (facts["step"], facts["at_work"][0]["doing"]) == (300, "train")


def test_status_text_has_the_time_by_cause(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", with_attempts(run).address]) == 0
    out = capsys.readouterr().out
    for line in (
        r"time +2 min 10 s in 3 attempts \(1 at work, 1 killed or crashed\)",
        r"goodput +30\.7%  40 s of training that counts",
        r"badput +compile 40 s \(30\.7%\)  lost work 30 s \(23\.0%\)  start-up 20 s .*  unattributed 0\.2 s \(0\.2%\)",
        r"away +\d+ h \d\d min between attempts, no process at work",
        r"left out +1 file below attempts/ is no attempt's record",
    ):
        assert re.search(f"^{line}$", out, re.MULTILINE), line
    assert "not recorded" not in out


def test_hung_attempt_is_told_from_a_dead_one(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    before = run.log.entry(2).time
    run.attempt("a" * 32)
    hung = {"ended": "hung", "message": "no inner loop has ended for 605 s after step 130 (limit 600 s)"}
    run.attempt("b" * 32, alive=before, pid=77, traceback="Thread 1 baton-work", **hung)
    account = as_json(capsys, "status", run.address)["account"]
    assert (account["hung"], account["died_without_a_word"]) == (1, 1)
    assert [each["traceback"] for each in account["attempts"] if each["ended"] == "hung"] == ["Thread 1 baton-work"]
    (listed,) = as_json(capsys, "log", run.address)["hung"]
    assert (listed["attempt"], listed["time"], listed["message"]) == ("b" * 32, before, hung["message"])
    assert main(["status", run.address]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^time +\d.* in 2 attempts \(1 killed or crashed, 1 hung\)$", out, re.MULTILINE)
    words = r"no inner loop has ended for 605 s after step 130 \(limit 600 s\)  \(process 77 on \S+, attempt bbbbbbbb; "
    assert re.search(rf"^hung +\S+ \S+  {words}", out, re.MULTILINE)
    assert main(["log", run.address]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "hung" not in line] == [str(number) for number in range(6)]
    place = next(place for place, line in enumerate(lines) if " hung " in line)
    assert re.search(rf"^ +{re.escape(before)}  hung +130  {words}", lines[place])
    assert place >= 3


def test_status_of_a_run_at_work_shows_its_current_step(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    """It is shown beside the committed step, because a segment may last for hours."""
    now = datetime.now(UTC).isoformat()
    run.attempt("a" * 32, began=now, alive=now, step=340, pid=77, host="tpu-vm")
    run.attempt("b" * 32, began=now, alive=now, step=300, doing="launch", seconds={"launch": 5.0})
    assert main(["status", str(run.run_file())]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^step +300 of 400$", out, re.MULTILINE)
    assert re.search(r"^state +at work$", out, re.MULTILINE)
    pace = r"[\d.]+ steps/s, at least \S+ s left"  # it has not evaluated yet
    process = r"\(process 77 on tpu-vm, as of \d+\.\d s ago\)"
    assert re.search(rf"^at work +step 340  train  {pace}  {process}$", out, re.MULTILINE)
    assert re.search(r"^at work +step 300  waits for a remote stage  \(", out, re.MULTILINE)
    facts = as_json(capsys, "status", str(run.run_file()))
    assert facts["state"] == "at work"
    assert facts["at_work"][0]["seconds_left"] == pytest.approx(60 / facts["at_work"][0]["steps_per_second"])
    run.attempt("c" * 32, began=now, alive=now, step=340, seconds={"train": 5.0, "evaluate": 5.0})
    assert main(["status", str(run.run_file())]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^at work +step 340  train  [\d.]+ steps/s, about \S+ s left", out, re.MULTILINE)
    for attempt in ("a", "b", "c"):
        run.attempt(attempt * 32, ended="complete")
    assert main(["status", run.address]) == 0
    assert "at work" not in capsys.readouterr().out
    assert as_json(capsys, "status", run.address)["state"] == "unknown"
    assert as_json(capsys, "status", str(run.run_file()))["state"] == "incomplete"
    assert as_json(capsys, "status", str(run.run_file()), "--set", "train.steps=300")["state"] == "complete"


def test_status_says_epochs_and_counts_one_of_a_thing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = {"data.train_examples": 1600, "train.global_batch_size": 32}  # 50 steps an epoch
    run = FakeRun(tmp_path, identity=recorded).train(100)
    run.evaluate(0.5, examples=1)
    now = datetime.now(UTC).isoformat()
    run.attempt("a" * 32, began=now, alive=now, step=340)
    assert as_json(capsys, "status", run.address)["at_work"][0]["epoch"] == 6.8
    assert main(["status", run.address]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^step +100, epoch 2.0$", out, re.MULTILINE)
    assert re.search(r"^at work +step 340, epoch 6.8  train  ", out, re.MULTILINE)
    assert re.search(r"^validation +accuracy 0.5  \(1 example, step 100\)$", out, re.MULTILINE)
    assert main(["log", run.address]) == 0
    assert "(1 validation example)" in capsys.readouterr().out


def test_metrics_after_the_newest_row_are_partial(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.commit(318, partial=MetricRow(step=318, metrics={"loss": 0.25}))
    assert main(["status", run.address]) == 0
    assert re.search(r"^partial +loss 0.25  \(step 318, since step 300\)$", capsys.readouterr().out, re.MULTILINE)
    assert as_json(capsys, "status", run.address)["partial"]["metrics"] == {"loss": 0.25}
    assert main(["log", run.address]) == 0
    assert "loss 0.25 (partial)" in capsys.readouterr().out
    run.train(400)
    assert as_json(capsys, "status", run.address)["partial"] is None


def test_watched_status_is_shown_until_it_is_interrupted(
    run: FakeRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = iter([None, None, KeyboardInterrupt()])

    def wait(_: float) -> None:
        if (fault := next(waits)) is not None:
            raise fault

    monkeypatch.setattr(time, "sleep", wait)
    assert main(["status", run.address, "--watch"]) == 0
    assert len(re.findall(r"^step +300", capsys.readouterr().out, re.MULTILINE)) == 3
    assert main(["status", run.address, "--watch", "--json"]) == 2


def test_verbs_accept_a_run_file_with_overrides(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    facts = as_json(capsys, "status", str(run.run_file()), "--set", "train.steps=900", "--set", "data.source=text")
    assert (facts["step"], facts["target"]) == (300, 900)
    assert main(["status", str(run.run_file()), "--set", "run=another"]) == 2
    assert "runs/another" in capsys.readouterr().err


def test_overrides_need_a_run_file(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("status", "log", "verify", "report", "list"):
        assert main([verb, run.address, "--set", "train.steps=1"]) == 2
        assert "--set train.steps=1" in capsys.readouterr().err


def test_verbs_accept_relative_folders_and_file_uris(
    run: FakeRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.folder)
    for address in ("runs/digits", "./runs/digits/", f"file://{run.address}"):
        assert as_json(capsys, "status", address)["home"] == run.address


def test_log_text(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.retire(keep_last=2)
    quarantine(run.log, run.tip, "ckpt.index is missing", attempt="q" * 32)
    assert main(["log", run.address]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [str(number) for number in range(8)]
    kinds = ["origin", "checkpoint", "checkpoint", "checkpoint", "evaluation", "checkpoint", "retire", "quarantine"]
    assert [line.split()[2] for line in lines] == kinds
    assert re.search(r"  300  checkpoints/00000300-\S+  2.6 kB  segment_end  loss 0.3333  accuracy 0.5$", lines[5])
    assert lines[7].endswith("ckpt.index is missing")


def test_log_json(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    entries = as_json(capsys, "log", run.address)["entries"]
    assert [entry["number"] for entry in entries] == list(range(6))
    assert entries[-1]["checkpoint"]["path"] == run.tip.path
    row = {"step": 300, "metrics": {"loss": 100 / 300, "accuracy": 0.5}, "learning_rate": None}
    assert entries[-1]["history"] == [row]


def test_log_shows_what_was_read_whole(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    read = run.tip
    run.log.note_read(read.path)
    run.train(400)
    assert as_json(capsys, "log", run.address)["entries"][-1]["read"] == [read.path]
    assert main(["log", run.address]) == 0
    assert f"read whole: {read.path}" in " ".join(capsys.readouterr().out.split())


def test_list_shows_every_run(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    FakeRun(run.folder, "another")
    runs = as_json(capsys, "list", str(run.root.uri))["runs"]
    assert [each["run"] for each in runs] == ["another", "digits"]
    assert (runs[0]["step"], runs[0]["validation"], runs[0]["best"], runs[0]["entries"]) == (0, {}, None, 2)
    assert (runs[1]["step"], runs[1]["validation"], runs[1]["entries"]) == (300, {"accuracy": 0.75}, 6)
    assert runs[1]["best"] == {"metric": "accuracy", "value": 0.75, "step": 200}
    assert runs[1]["last_commit"] == run.log.entry(5).time
    assert as_json(capsys, "list", str(run.run_file()))["runs"] == runs
    assert main(["list", run.root.uri]) == 0
    line = r"^digits +300 +accuracy 0.75 +accuracy 0.75 at step 200 +6 "
    assert re.search(line, capsys.readouterr().out, re.MULTILINE)


def test_list_of_an_empty_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no runs below {tmp_path}\n"


def test_a_missing_folder_is_refused(run: FakeRun, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for address in ("nowhere", str(tmp_path / "nowhere"), f"file://{tmp_path}/nowhere"):
        assert main(["list", address]) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ")
        assert "nowhere does not exist; name a folder that holds runs" in err
    # A run file's storage folder is created by the first run.
    assert main(["list", str(run.run_file()), "--set", "storage=later"]) == 0
    assert capsys.readouterr().out.startswith("no runs below ")
    assert not (tmp_path / "later").exists()


def test_list_continues_past_a_damaged_run(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    other = FakeRun(run.folder, "another")
    other.path("log/00000001.json").write_text("{")
    runs = as_json(capsys, "list", run.root.uri, code=4)["runs"]
    assert "log/00000001.json" in runs[0]["error"]
    assert runs[1]["step"] == 300
    other.path("log/00000000.json").unlink()
    other.path("log/HINT").unlink()
    runs = as_json(capsys, "list", run.root.uri, code=4)["runs"]
    assert "log/00000000.json" in runs[0]["error"]


def test_report_writes_the_page(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", run.address]) == 0
    page = Path(capsys.readouterr().out.strip())
    assert page == run.path("report/index.html")
    assert "<title>digits | Baton</title>" in page.read_text()
    assert as_json(capsys, "report", run.address)["report"] == str(page)


def test_a_slow_host_is_shown_since_it_is_slow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = FakeRun(tmp_path)
    usual, slow = (0.0, 10.0), (0.0, 19.0)
    run.commit(1000, workers=stats_of([[usual] * 10, [usual] * 3 + [slow] * 7]))
    run.commit(2000, workers=stats_of([[usual] * 10, [slow] * 10], after_step=1000))
    assert main(["status", run.address, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["slow_hosts"] == [{"host": 1, "factor": 1.9, "cause": "processor time", "since_step": 300}]
    assert len(shown["workers"]) == 2
    assert main(["status", run.address]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("slow")]
    assert "host 1 needs 1.9 times the median of the others (processor time), since step 300" in line
    assert main(["report", run.address]) == 0
    assert "own time of a step" in run.path("report/index.html").read_text()

    run.commit(3000, workers=stats_of([[usual] * 10, [usual] * 10], after_step=2000))
    run.commit(4000, workers=stats_of([[usual] * 10]))  # of one host
    assert main(["status", run.address]) == 0
    assert not [line for line in capsys.readouterr().out.splitlines() if line.startswith("slow")]
    assert main(["report", run.address]) == 0
    assert "own time of a step" not in run.path("report/index.html").read_text()


@pytest.mark.parametrize("verb", ["status", "log", "verify", "report"])
def test_an_address_without_a_run_is_refused(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, str(tmp_path / "nowhere")]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: no run is at {tmp_path / 'nowhere'}")
    assert "baton list" in err
    assert os.listdir(tmp_path) == []  # noqa: PTH208


@pytest.mark.parametrize(
    ("verb", "number"), [("status", 5), *((verb, number) for verb in ("log", "report") for number in (0, 3, 5))]
)
def test_a_damaged_log_is_named(verb: str, number: int, run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    """Status reads the newest entry alone."""
    run.path(f"log/{number:08d}.json").write_text("{")
    assert main([verb, run.address]) == 4
    assert f"log/{number:08d}.json" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["status", "log", "report"])
def test_a_lost_first_entry_is_damage(verb: str, run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.path("log/00000000.json").unlink()
    run.path("log/HINT").unlink()
    assert main([verb, run.address]) == 4
    assert "log/00000000.json" in capsys.readouterr().err
