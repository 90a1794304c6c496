"""The report's page and pictures, from real run logs."""

import html.parser
import math
import re
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tasks.evaluate.report.report import write_report
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.log_entry import Commit, Environment, Evaluation, EvaluationOnTest, Origin
from tasks.foundation.contracts.run_spec import KeepBest
from tasks.foundation.contracts.segment import MetricRow
from tasks.foundation.errors import NoSuchRun
from tasks.foundation.runlog.commits import commit, quarantine
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.local import LocalStorage
from tests.support.clock import NOON
from tests.support.ledger_records import record_of

ENVIRONMENT = Environment(
    accelerator="cpu", replicas=1, intra_op_threads=2, inter_op_threads=2, versions={"tensorflow": "2.19.1"}
)


class Run:
    """A run log with invented numbers."""

    def __init__(self, folder: Path) -> None:
        self.home = LocalStorage(folder)
        self.log = RunLog(self.home)
        origin = Origin(identity={"train.seed": 7, "model.config": {"layers": ["<b>"] * 200}}, environment=ENVIRONMENT)
        self.log.append(lambda _: origin, attempt="a" * 32)
        self.tip = self.commit(0, ())

    def commit(
        self, step: int, rows: Sequence[dict[str, float]], seconds: dict[str, float] | None = None
    ) -> CheckpointRef:
        head = self.log.head()
        assert head is not None
        start = head.tip.step if head.tip else 0
        attempt = f"{head.number:032x}"
        ref = CheckpointRef(
            path=f"checkpoints/{step:08d}-{head.base:08d}-{attempt}", step=step, base=head.base, attempt=attempt,
            state_digest=f"{step:064x}", manifest_digest="0" * 64, size=1_200_000,
        )  # fmt: skip
        every = (step - start) // max(len(rows), 1)
        history = tuple(MetricRow(step=start + every * (n + 1), metrics=row) for n, row in enumerate(rows))
        body = Commit(
            checkpoint=ref, parent=head.tip.path if head.tip else None,
            exit_reason="segment_end" if step else "initialized", history=history, examples=(step - start) * 32,
            seconds=seconds or {},
        )  # fmt: skip
        commit(self.log, body)
        return ref

    def evaluate(self, ref: CheckpointRef, metrics: dict[str, float]) -> None:
        rule = KeepBest(metric="accuracy", mode="max")
        body = Evaluation(checkpoint=ref, metrics=metrics, examples=180, seconds=0.5, keep_best=rule)
        self.log.append(lambda _: body, attempt="e" * 32)

    def attempt(self, name: str, **changes: Any) -> None:
        record = record_of(name, **changes)
        self.home.write(f"attempts/{name}.json", record.to_json())

    def report(self, title: str = "a-run") -> str:
        address = write_report(RunLog(self.home), title=title, now=NOON + timedelta(seconds=10))
        assert address == f"{self.home.uri}/report/index.html"
        return Path(address).read_text(encoding="utf-8")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "a-run")


def trained(run: Run) -> Run:
    run.commit(100, [{"loss": 2.0, "accuracy": 0.3}, {"loss": 1.0, "accuracy": 0.6}], {"train": 3.0, "compile": 1.0})
    ref = run.commit(200, [{"loss": 0.5, "accuracy": 0.9}], {"train": 2.5, "stage": 0.5})
    run.evaluate(ref, {"loss": 0.6, "accuracy": 0.8125})
    return run


class Elements(html.parser.HTMLParser):
    """Collects tags, attributes and addresses, as a browser sees them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.attributes: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        self.addresses += [value or "" for name, value in attrs if name in {"src", "href", "srcset", "data"}]


def pictures(run: Run) -> set[str]:
    return {Path(path).name for path in run.home.files("report") if path.endswith(".png")}


def test_page_shows_the_run(run: Run) -> None:
    page = trained(run).report("my run")
    assert "<title>my run | Baton</title>" in page
    for words in ("0.8125", "segment end", "initialized", "tensorflow", "2.19.1", "train.seed", "1.2 MB", "180"):
        assert words in page, words
    assert re.search(r'<span class="mark tip">tip</span><span class="mark best">best</span>', page)
    assert pictures(run) == {"loss.png", "accuracy.png", "speed.png", "seconds.png"}
    for name in pictures(run):
        assert run.home.read(f"report/{name}").startswith(b"\x89PNG\r\n")


def test_page_is_self_contained(run: Run) -> None:
    elements = Elements(trained(run).report())
    assert len(elements.addresses) == 4
    assert all(address.startswith("data:image/png;base64,") for address in elements.addresses)
    assert not {"script", "link", "iframe", "object"} & set(elements.tags)


def test_same_log_gives_the_same_page(run: Run) -> None:
    assert trained(run).report() == run.report()


def test_values_are_escaped_in_html(run: Run) -> None:
    name = '<script>alert("1")</script>'
    ref = run.commit(10, [{name: 1.0, "$\\frac{$": 2.0}], {name: 1.0})
    run.evaluate(ref, {name: 1.0})
    page = run.report(title="<script>x</script>")
    assert "script" not in Elements(page).tags
    assert Elements(page).attributes == {"lang", "charset", "name", "content", "class", "title", "alt", "src"}
    assert "&lt;script&gt;alert(&#34;1&#34;)&lt;/script&gt;" in page
    assert page.count("<b>") == page.count("</b>")  # "<b>" in the identity is text
    assert "&#34;&lt;b&gt;&#34;" in page


def tried(run: Run) -> Run:
    """Adds an attempt that was killed, one that an error ended, and one that is running."""
    began = (NOON - timedelta(hours=3)).isoformat()
    run.attempt("a" * 32, began=began, alive=began, doing="compile", uncommitted_seconds=12.0)
    run.attempt("b" * 32, ended="ValueError", message="<script>no\nway</script> " + "x" * 500, host="<i>h</i>")
    run.attempt("c" * 32, seconds={"train": 1.0, "unattributed": 0.5}, step=1234, uncommitted_seconds=1.0)
    return run


def rows_below(page: str, heading: str) -> list[list[str]]:
    """Cells of the table below a heading."""
    table = page.split(f"<h2>{heading}</h2>")[1].split("</table>", maxsplit=1)[0]
    return [
        [re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)]
        for row in table.split("<tr>")[2:]
    ]


def test_time_by_cause_and_attempts_are_shown(run: Run) -> None:
    page = tried(trained(run)).report()
    assert rows_below(page, "Where the time went") == [
        ["lost work", "42 s", "34.6%", "badput"],
        ["compile", "40 s", "32.9%", "badput"],
        ["start-up", "20 s", "16.5%", "badput"],
        ["train", "19 s", "15.6%", "goodput"],
        ["unattributed", "0.5 s", "0.4%", "badput"],
        ["all", "2 min 02 s", "100%", ""],
    ]
    attempts = rows_below(page, "Attempts")
    assert attempts[0] == [
        "2026-01-31 09:00:00", "host", "1 min 00 s", "100 → 130", "12 s", "killed or crashed in compile",
    ]  # fmt: skip
    assert attempts[1][1] == "&lt;i&gt;h&lt;/i&gt;"
    assert attempts[1][5].startswith("ValueError: &lt;script&gt;no way&lt;/script&gt; xxx")
    assert len(attempts[1][5]) < 250
    assert attempts[2][2:] == ["1.5 s", "100 → 1,234", "", "running: train"]
    assert "<b>15.6%</b><span>goodput, of 2 min 02 s</span>" in page
    assert "1 of the attempts were killed or crashed" in page
    assert "Between attempts no process was running for 2 h 59 min." in page
    assert "script" not in Elements(page).tags


def test_picture_of_seconds_shows_the_recorded_attempts(run: Run) -> None:
    trained(run).report()
    before = run.home.read("report/seconds.png")
    tried(run).report()
    assert run.home.read("report/seconds.png") != before


def test_same_log_and_attempts_give_the_same_page(run: Run) -> None:
    assert tried(trained(run)).report() == run.report()


def test_page_without_attempts_says_so(run: Run) -> None:
    page = trained(run).report()
    assert "Attempts are not recorded for this run" in page
    assert "in committed segments" in page
    assert "<h2>Attempts</h2>" not in page


def test_unreadable_and_many_attempts_are_counted(run: Run) -> None:
    run.attempt("d" * 32, seconds={})
    run.home.write("attempts/note.txt", b"hello")
    page = run.report()
    assert "Unreadable attempt records, not included: 1." in page
    assert rows_below(page, "Where the time went")[-1] == ["all", "0.0 s", "", ""]
    for number in range(250):
        run.attempt(f"{number:032x}")
    page = run.report()
    assert len(rows_below(page, "Attempts")) == 200
    assert "51 earlier attempts are not shown." in page


def test_run_before_its_first_segment_has_no_pictures(run: Run) -> None:
    page = run.report()
    assert "No training has been committed yet." in page
    assert "initialized" in page
    assert pictures(run) == set()


def test_run_without_checkpoints_has_a_page(tmp_path: Path) -> None:
    home = LocalStorage(tmp_path)
    origin = Origin(identity={}, environment=ENVIRONMENT)
    RunLog(home).append(lambda _: origin, attempt="a" * 32)
    write_report(RunLog(home), title="x")
    assert "No checkpoint is committed yet." in home.read("report/index.html").decode()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "rows",
    [
        [{"loss": math.nan}],
        [{"loss": math.nan}, {"loss": 1.0}, {"loss": math.inf}],
        [{"loss": 1e-30}, {"loss": 1e30}],
        [{"loss": -1.0}, {"loss": 0.0}],
        [{"损失": 1.0}, {"損失": 2.0}],
        [{}],
    ],
)
def test_unusual_metric_values_are_drawn(run: Run, rows: list[dict[str, float]]) -> None:
    ref = run.commit(100, rows)
    run.evaluate(ref, {"loss": math.nan})
    page = run.report()
    assert f"{len(pictures(run))}" == str(page.count("<figure>"))
    assert "loss.png" in pictures(run)
    assert ">nan<" in page


def test_metric_names_become_distinct_file_names(run: Run) -> None:
    run.commit(10, [{"a/b": 1.0, "a b": 2.0, "speed": 3.0, "../../x": 4.0}], {"train": 1.0})
    page = run.report()
    assert pictures(run) == {"a-b.png", "a-b-2.png", "metric-speed.png", "x.png", "speed.png", "seconds.png"}
    assert page.count("<figure>") == 6


def test_quarantined_checkpoint_shows_the_reason(run: Run) -> None:
    trained(run)
    head = run.log.head()
    assert head is not None
    assert head.tip is not None
    quarantine(run.log, head.tip, 'crc32c of "x" differs', attempt="q" * 32)
    page = run.report()
    assert 'class="mark quarantined" title="crc32c of &#34;x&#34; differs"' in page
    # An abandoned checkpoint's metrics and evaluations are not shown.
    assert "Evaluations" not in page


def test_each_metric_names_its_set(run: Run) -> None:
    trained(run)
    head = run.log.head()
    assert head is not None
    assert head.tip is not None
    body = EvaluationOnTest(
        checkpoint=head.tip, metrics={"accuracy": 0.7654}, examples=77, seconds=0.5, content_digest="t"
    )
    run.log.append(lambda _: body, attempt="e" * 32)
    page = run.report()
    for words in ("Evaluations on the validation set", "Evaluations on the test set", "test accuracy", "0.7654"):
        assert words in page, words
    assert "validation accuracy" in page
    assert page.index("0.8125") < page.index("Evaluations on the test set")


def test_home_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoSuchRun, match="no run is at"):
        write_report(RunLog(LocalStorage(tmp_path / "none")), title="none")
    assert not (tmp_path / "none").exists()
