"""What the verbs look like on a terminal of any width, in a pipe, and as JSON."""

import io
import json
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from baton.flows.commands.main import main
from baton.flows.commands.output import Output, Painted, commands_to_paste, status
from baton.flows.evaluating import FreshEvaluation
from baton.flows.result import RelayResult
from baton.tasks.foundation.contracts.home_files import AuditReceipt, ProofReceipt
from baton.tasks.foundation.contracts.log_entry import MetricRow
from baton.tasks.foundation.errors import InvalidInput
from baton.tasks.foundation.log.appends import quarantine
from baton.tasks.foundation.text import command
from tests.support.checkout import CHECKOUT
from tests.support.fake_run import FakeRun, flip_a_byte
from tests.support.terminal import COLOR_VARIABLES, shown_by

WIDTHS = (40, 80, 120, 200)
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
CHECKPOINT = "checkpoints/00000300-00000005-0123456789abcdef"


@pytest.fixture(autouse=True)
def _usual_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in COLOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    """A run with a quarantined and a damaged checkpoint."""
    run = FakeRun(tmp_path).train(100, 200)
    run.evaluate(0.75)
    run.train(300)
    quarantine(run.log, run.tip, "flipped", attempt="q" * 32)
    flip_a_byte(run.path(run.tip.path) / "ckpt.index")
    return run


def output(stream: io.StringIO, columns: int | None = None, *, colors: bool = False, whole: bool = False) -> Output:
    return Output(stream=stream, columns=columns, colors=colors, whole=whole, now=NOW)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["log", "HOME", "--verbose"], 0),
        (["status", "HOME", "--verbose"], 0),
        (["list", "HOME/..", "--verbose"], 0),
        (["verify", "HOME"], 4),
        (["fork", "HOME", "--as", "other", "--at-step", "100"], 0),
        (["log", "HOME/nowhere"], 2),
    ],
)
def test_no_verb_breaks_a_word_at_any_width(
    words: list[str], code: int, run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With whole times, which do not pass meanwhile."""
    words = [word.replace("HOME", run.address) for word in words]
    if words[0] == "fork":
        assert main(words) == code  # the second time, it is already there
    wide = shown_by(monkeypatch, 1000, *words, code=code).plain.split()
    assert wide
    for columns in WIDTHS:
        screen = shown_by(monkeypatch, columns, *words, code=code).plain
        assert screen.split() == wide
        too_long = [line for line in screen.splitlines() if len(line) > columns]
        assert [line for line in too_long if max(map(len, line.split())) < columns - 16] == []


def test_a_terminal_shows_colors_short_ids_and_ages(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = shown_by(monkeypatch, 120, "log", run.address)
    assert "\x1b[32mcheckpoint\x1b[0m" in screen.text
    assert "\x1b[1;31mquarantine\x1b[0m" in screen.text
    assert re.search(r"^3  \d+ (s|min) ago +checkpoint +200 +00000200-\d{8}-\w{8}  2.4 kB", screen.plain, re.MULTILINE)
    whole = shown_by(monkeypatch, 200, "log", run.address, "--verbose").plain
    assert f"checkpoints/{run.tip.path.rpartition('/')[2]} " in whole
    assert " ago" not in whole
    refused = shown_by(monkeypatch, 80, "log", f"{run.address}/nowhere", code=2).text
    assert refused.startswith("\x1b[1;31merror:\x1b[0m no run is at")
    damaged = shown_by(monkeypatch, 80, "verify", run.address, code=4).text
    assert "\n\x1b[1;31mdamaged:\x1b[0m " in damaged
    assert "\n\x1b[36mhint:\x1b[0m `baton run`" in damaged


def test_status_and_list_are_short_on_a_terminal(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run.path("../broken/log").mkdir(parents=True)
    run.path("../broken/log/00000000.json").write_text("{")
    listed = shown_by(monkeypatch, 80, "list", str(run.root.root), code=4)
    assert re.search(r"^digits +200 +\d+ (s|min) ago +accuracy 0.75$", listed.plain, re.MULTILINE)
    assert re.search(r"^broken  damaged\n    \S+/broken/log/00000000.json", listed.plain, re.MULTILINE)
    assert "\x1b[1;31mdamaged\x1b[0m" in listed.text
    status_lines = shown_by(monkeypatch, 80, "status", str(run.run_file(steps=400)))
    assert re.search(
        r"^tip +00000200-\d{8}-\w{8}\ncommitted +\d+ (s|min) ago\ndigest +0{12}$", status_lines.plain, re.MULTILINE
    )
    assert "\x1b[33mincomplete\x1b[0m" in status_lines.text
    assert status_lines.plain.count("retained") == 1
    assert re.search(
        r"^retained +00000000-\S+  2.0 kB\n +00000100-\S+  2.2 kB\n +00000200-", status_lines.plain, re.MULTILINE
    )


def test_no_color_and_force_color(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    colored = shown_by(monkeypatch, 120, "verify", run.address, code=4)
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown_by(monkeypatch, 120, "verify", run.address, code=4).text == colored.plain
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream := io.StringIO())
        assert main(["verify", run.address]) == 4
    assert "\x1b[1;31mdamaged:\x1b[0m " in stream.getvalue()


def test_a_pipe_gets_plain_whole_lines(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["log", run.address]) == 0
    piped = capsys.readouterr().out
    assert "\x1b" not in piped
    assert len(piped.splitlines()) == 7
    assert run.tip.path in piped
    assert main(["log", run.address, "--verbose"]) == 0
    assert capsys.readouterr().out == piped


def test_head_of_a_pipe_ends_quietly(run: FakeRun) -> None:
    # More than a pipe of 64 kB holds and head reads at once.
    metrics = {f"metric_number_{number}": 0.5 for number in range(50)}
    for step in range(400, 12000, 100):
        run.commit(step, [MetricRow(step=step, metrics=metrics)])
    log = [sys.executable, "-m", "baton.flows.commands.main", "log", run.address]
    with subprocess.Popen(log, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        head = subprocess.run(
            [shutil.which("head") or "head", "-1"], stdin=process.stdout, capture_output=True, check=True
        )
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
    assert b" origin " in head.stdout


def documented(verb: str) -> set[str]:
    """The keys at the top of a verb's object, as flows/homes.md says: those before the first semicolon of its row."""
    page = (CHECKOUT / "flows" / "homes.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| {verb} \| (.*) \|$", page, re.MULTILINE)
    parts = row.replace("; and ", ", ").partition(";")[0]
    return {"schema_version", *re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", parts))}


def test_every_json_is_one_object_as_documented(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    for words, code in (
        (["status", run.address], 0),
        (["list", str(run.root.root)], 0),
        (["log", run.address], 0),
        (["verify", run.address], 4),
        (["fork", run.address, "--as", "other", "--at-step", "100"], 0),
        (["init", str(run.folder / "new")], 0),
        (["report", run.address], 0),
        (["status", "nowhere"], 2),
        (["doctor", str(run.folder / "nowhere.yaml")], 2),
    ):
        assert main([*words, "--json"]) == code
        (line,) = capsys.readouterr().out.splitlines()
        facts = json.loads(line)
        assert facts["schema_version"] == 1
        verb = "any, if it fails" if "error" in facts else words[0]
        assert documented(verb) - facts.keys() == set(), words
    for verb, contract in (("run", RelayResult), ("evaluate", FreshEvaluation)):
        assert documented(verb) - contract.model_fields.keys() == set()
    assert documented("prove") - ProofReceipt.model_fields.keys() == {"schema_version", "receipt", "kept"}
    assert documented("audit") - AuditReceipt.model_fields.keys() == {"schema_version", "receipt"}


def test_columns_align_and_the_last_one_hangs() -> None:
    rows = [("1", status("pass"), "all is well with it"), ("10", "origin", "one  two three"), ("", "", "hint: more")]
    out = output(stream := io.StringIO(), 40)
    out.table(rows, right=(0,))
    assert stream.getvalue() == " 1  pass    all is well with it\n10  origin  one  two three\n            hint: more\n"
    out = output(stream := io.StringIO(), 40, colors=True)
    out.facts([("label", "word " * 12 + "end"), ("left out", ""), ("", Painted("gone", "bold red"))])
    indent = " " * 7
    assert stream.getvalue() == (
        "\x1b[2mlabel\x1b[0m  word word word word word word\n"
        f"{indent}word word word word word word end\n{indent}\x1b[1;31mgone\x1b[0m\n"
    )


def test_a_table_too_wide_for_the_terminal_is_stacked() -> None:
    rows = [("1", "a" * 18, status("hung"), "word " * 10), ("", "", "", "more")]
    output(stream := io.StringIO(), 40).table(rows)
    assert stream.getvalue().splitlines() == [
        f"1  {'a' * 18}  hung",
        "    word word word word word word word",
        "    word word word",
        "    more",
    ]


def test_ids_and_times_are_short_unless_asked_for() -> None:
    ago = (NOW - timedelta(minutes=3)).isoformat()
    short, whole = output(io.StringIO(), 80), output(io.StringIO(), 80, whole=True)
    assert (short.time(ago), whole.time(ago), short.time("nonsense")) == ("3 min ago", ago, "nonsense")
    assert short.path(f"/runs/x/{CHECKPOINT}") == short.path(CHECKPOINT) == "00000300-00000005-01234567"
    assert whole.path(f"/runs/x/{CHECKPOINT}") == f"/runs/x/{CHECKPOINT}"
    assert (short.id("f" * 64), whole.id("f" * 64)) == ("f" * 12, "f" * 64)


@given(
    some.lists(some.tuples(some.text(max_size=20), some.text(alphabet="ab \x1b\n\0", max_size=200)), max_size=4),
    some.none() | some.integers(1, 200),
)
def test_any_text_keeps_its_words(rows: list[tuple[str, str]], columns: int | None) -> None:
    """Control characters are escaped on the way, so the words are those of an output that wraps nothing."""
    wide, narrow = io.StringIO(), io.StringIO()
    output(wide).table(rows)
    output(narrow, columns).table(rows)
    assert "\x1b" not in narrow.getvalue()
    assert narrow.getvalue().split() == wide.getvalue().split()


@pytest.mark.parametrize("after", ["", "; with the weights", ", or another"])
def test_commands_of_a_message_can_be_pasted(monkeypatch: pytest.MonkeyPatch, after: str) -> None:
    monkeypatch.setattr(sys, "argv", ["baton"])
    with pytest.raises(InvalidInput) as refused, commands_to_paste("my run.yaml", ["train.seed=1"]):
        raise InvalidInput("or: " + command("run", ("set", "run=NEW"), ("accept", "data")) + after)
    pasted = "baton run 'my run.yaml' --set train.seed=1 --set run=NEW --accept data"
    assert str(refused.value) == f"or: {pasted}{after}"
