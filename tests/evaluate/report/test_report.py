"""The report's page and charts, from real run logs."""

import html
import html.parser
import json
import math
import re
import webbrowser
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET
from xml.etree.ElementTree import Element

import pytest

from baton.flows.commands.main import main
from baton.tasks.evaluate.report.charts import curves_of, pictures_of
from baton.tasks.evaluate.report.page import write_report
from baton.tasks.foundation.checkpoint.fork import fork
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.home_files import ConfusionMatrix, confusion_path
from baton.tasks.foundation.contracts.log_entry import (
    Change,
    Commit,
    Environment,
    Evaluation,
    EvaluationOnTest,
    Lineage,
    MetricRow,
    Origin,
    Rewind,
)
from baton.tasks.foundation.contracts.run_spec import KeepBest
from baton.tasks.foundation.errors import NoSuchRun
from baton.tasks.foundation.log.appends import commit, quarantine
from baton.tasks.foundation.log.history import history_of
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.local import LocalStorage
from tests.support.clock import NOON
from tests.support.fake_run import FakeRun
from tests.support.ledger_records import record_of

ENVIRONMENT = Environment(
    accelerator="cpu", replicas=1, intra_op_threads=2, inter_op_threads=2, versions={"tensorflow": "2.19.1"}
)


class Run:
    """A run log with invented numbers."""

    def __init__(self, folder: Path) -> None:
        self.home = LocalStorage(folder)
        self.log = RunLog(self.home)
        origin = Origin(
            identity={"train.seed": 7, "train.ema": None, "model.config": {"layers": ["<b>"] * 200}},
            environment=ENVIRONMENT,
        )
        self.log.append(lambda _: origin, attempt="a" * 32)
        self.tip = self.commit(0, ())

    def commit(
        self,
        step: int,
        rows: Sequence[dict[str, float]],
        seconds: dict[str, float] | None = None,
        *,
        rates: Sequence[float | None] = (),
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
        history = tuple(
            MetricRow(step=start + every * (n + 1), metrics=row, learning_rate=rate)
            for n, (row, rate) in enumerate(zip(rows, rates or [None] * len(rows), strict=True))
        )
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

    def report(self, title: str = "a-run", *, places: bool = False) -> str:
        address = write_report(RunLog(self.home), title=title, now=NOON + timedelta(seconds=10), places=places)
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


def captions(page: str) -> list[str]:
    return [html.unescape(text) for text in re.findall(r"<figcaption>(.*?)(?: <span>.*?)?</figcaption>", page)]


def drawn(page: str) -> dict[str, Any]:
    """What the page's script draws from."""
    found: dict[str, Any] = json.loads(page.split('id="curves">')[1].split("</script>", maxsplit=1)[0])
    return found


def page_of(run: Run) -> str:
    """The page of a run of the same shape with harmless names."""
    other = Run(run.home.root.parent / "harmless")
    other.evaluate(other.commit(10, [{"loss": 1.0, "accuracy": 2.0}], {"train": 1.0}), {"loss": 1.0})
    return other.report()


def test_page_shows_the_run(run: Run) -> None:
    page = trained(run).report("my run")
    assert "<title>my run | Baton</title>" in page
    for words in ("0.8125", "segment end", "initialized", "tensorflow", "2.19.1", "train.seed", "1.2 MB", "180"):
        assert words in page, words
    assert re.search(r'<span class="mark tip">tip</span><span class="mark best">best</span>', page)
    assert captions(page) == ["loss", "accuracy", "throughput of each segment"]
    assert "<span>examples per second</span>" in page
    training, validation = (
        {"label": kind, "kind": kind, "color": kind, "run": 0} for kind in ("training", "validation")
    )
    assert drawn(page)["charts"][0]["curves"] == [
        training | {"steps": [50, 100, 200], "values": [2.0, 1.0, 0.5]},
        validation | {"steps": [200], "values": [0.6]},
    ]
    assert 'aria-label="loss. training: 2 at step 50, 0.5 at step 200; validation: 0.6 at step 200' in page
    assert list(run.home.files("report")) == ["report/index.html"]


def test_page_is_self_contained(run: Run) -> None:
    elements = Elements(trained(run).report())
    assert not elements.addresses
    assert not {"link", "iframe", "object", "img"} & set(elements.tags)
    assert elements.tags.count("script") == 2  # the data, and what draws it


def test_values_are_escaped_in_html(run: Run) -> None:
    name = '<script>alert("1")</script>'
    ref = run.commit(10, [{name: 1.0, "$\\frac{$": 2.0}], {name: 1.0})
    run.evaluate(ref, {name: 1.0})
    plain = Elements(page_of(run))
    page = run.report(title="<script>x</script>")
    assert Elements(page).tags.count("script") == 2
    assert Elements(page).attributes == plain.attributes
    assert "&lt;script&gt;alert(&#34;1&#34;)&lt;/script&gt;" in page
    assert drawn(page)["charts"][0]["caption"] == name
    assert "train.seed" in page
    assert "train.ema" not in page  # null: the key is not set
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
    page = tried(trained(run)).report(places=True)
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
    assert "<b>2 min 02 s</b><span>of all processes</span>" in page  # too short for goodput at the top
    assert "Goodput is 15.6% of 2 min 02 s: the share" in page
    assert "1 of the attempts were killed or crashed" in page
    assert "Between attempts no process was running for 2 h 59 min." in page
    assert Elements(page).tags.count("script") == 2
    assert {"kind": "kill", "step": 130, "text": "killed or crashed in compile"} in drawn(page)["events"]


def test_long_run_shows_its_goodput_at_the_top(run: Run) -> None:
    trained(run)
    run.attempt("a" * 32, ended="complete", seconds={"train": 5400.0, "compile": 600.0}, uncommitted_seconds=0.0)
    assert "<b>90.0%</b><span>goodput, of 1 h 40 min</span>" in run.report()


def test_events_stand_on_the_curves(run: Run) -> None:
    trained(run)
    head = run.log.head()
    assert head is not None
    assert head.tip is not None
    changed = Change(environment=ENVIRONMENT, identity={**head.identity, "train.seed": 8}, accepted=("train.seed",))
    run.log.append(lambda _: changed, attempt="a" * 32)
    rewound = Rewind(to=head.tip, blown_up_at=250, reason="<i>loss</i> is NaN", skip_batches=50)
    run.log.append(lambda _: rewound, attempt="a" * 32)
    page = run.report()
    assert drawn(page)["events"] == [
        {"kind": "change", "step": 200, "text": "accepted train.seed"},
        {"kind": "rewind", "step": 200, "text": "rewound from step 250: <i>loss</i> is NaN"},
    ]
    assert "<title>rewound from step 250: &lt;i&gt;loss&lt;/i&gt; is NaN</title>" in page
    assert '<span class="key event rewind"></span>rewind</span>' in page


def test_accepted_changes_are_listed_whole(run: Run) -> None:
    head = trained(run).log.require_head()
    options = {f"model.options.key{number}": number for number in range(8)}
    changed = Change(environment=ENVIRONMENT, identity={**head.identity, "model.options": options}, accepted=("x",))
    run.log.append(lambda _: changed, attempt="a" * 32)
    page = run.report()
    assert all(f"model.options.key{number}: absent -&gt; {number}" in page for number in range(8))


def test_lineage_goes_back_to_the_first_run(tmp_path: Path) -> None:
    def parent(name: str, step: int, of: Lineage | None = None) -> Lineage:
        path = f"checkpoints/{step:012d}-000000-{'a' * 8}"
        return Lineage(home=f"runs/{name}", path=path, step=step, state_digest="d", entry=1, parent=of)

    log = RunLog(LocalStorage(tmp_path))
    forked = Origin(identity={}, environment=ENVIRONMENT, forked_from=parent("<b>", 2000, parent("first", 1000)))
    log.append(lambda _: forked, attempt="a" * 32)
    write_report(log, title="x")
    page = (tmp_path / "report" / "index.html").read_text()
    assert "<br>forked from step 2,000 of runs/&lt;b&gt; (" in page
    assert "<br>which was forked from step 1,000 of runs/first (" in page


def test_page_says_where_else_the_run_is_shown(run: Run) -> None:
    page = trained(run).report(places=True)
    assert f"tensorboard --logdir {run.home.uri}/tensorboard" in page
    assert "tensorboard --logdir HOME/tensorboard" in run.report()
    assert "the flow runs with the tag run:" in page


def test_page_names_neither_hosts_nor_folders_of_people_unless_asked(run: Run) -> None:
    """A page is sent to others; the home keeps the names."""
    trained(run)
    folder, host = run.home.uri, "trainer-7.example.org"
    storage = folder.rpartition("/")[0]
    messages = (f"{folder}/log is full", f"/home/ada/iris/model.py: no; {storage}/other", f"process 3 on {host}")
    for number, message in enumerate(messages):
        alive = (NOON + timedelta(seconds=number)).isoformat()  # the last is the cause, at the top
        run.attempt(f"{number}" * 32, ended="StorageError", message=message, host=host, alive=alive)
    page = run.report()
    assert page.index("StorageError: process 3 on host 1") < page.index("<h2>Curves")
    for name in (folder, storage, host, "/home/ada"):
        assert name not in page
    assert [row[1] for row in rows_below(page, "Attempts")] == ["host 1"] * 3
    assert [row[5] for row in rows_below(page, "Attempts")] == [
        "StorageError: HOME/log is full", "StorageError: ~/iris/model.py: no; STORAGE/other",
        "StorageError: process 3 on host 1",
    ]  # fmt: skip
    page = run.report(places=True)
    for name in (folder, host, "/home/ada/iris/model.py"):
        assert name in page


def test_steps_are_spread_over_the_time_of_their_segment(run: Run) -> None:
    segments = drawn(trained(run).report())["clocks"][0]["segments"]
    assert [each[:2] for each in segments] == [[0, 0], [0, 100], [100, 200]]
    assert [round(each[3] - each[2], 3) for each in segments] == [0.0, 4.0, 3.0]


@pytest.mark.parametrize(
    ("rates", "drawn_rates"), [((0.5, 0.25), [0.5, 0.25]), ((0.5, 0.5), None), ((None, None), None)]
)
def test_learning_rate_is_drawn_if_it_changes(run: Run, rates: Any, drawn_rates: Any) -> None:
    run.commit(10, [{"loss": 1.0}] * 2, rates=rates)
    charts = {chart["caption"]: chart for chart in drawn(run.report())["charts"]}
    assert (
        charts.get("learning rate of the next step", {"curves": [{"values": None}]})["curves"][0]["values"]
        == drawn_rates
    )


def test_proofs_and_audits_are_listed(run: Run) -> None:
    trained(run)
    run.home.write(
        "proofs/20260131T120000Z-a.json", b'{"verdict": "same", "steps": 31, "time": "2026-01-31T12:00:00+00:00"}'
    )
    run.home.write("audits/20260201T120000Z-b.json", b'{"verdict": "<b>", "stretches": [{"end": 3}]}')
    run.home.write("audits/20260202T120000Z-c.json", b"not JSON")
    rows = rows_below(run.report(), "Proofs and audits")
    assert rows[0] == ["2026-01-31 12:00:00", "baton prove", "same", "31", "proofs/20260131T120000Z-a.json"]
    assert [row[2] for row in rows[1:]] == ["cannot be read", "&lt;b&gt;"]


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


def test_run_before_its_first_segment_has_no_charts(run: Run) -> None:
    page = run.report()
    assert "No training has been committed yet." in page
    assert "initialized" in page
    assert captions(page) == []
    assert "script" not in Elements(page).tags


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
    assert "loss" in captions(page)
    assert page.count("<svg") == len(captions(page))
    assert drawn(page)
    assert not re.search(r'd="[^"]*(nan|inf)', page)
    assert ">nan<" in page


def test_partial_window_stands_on_the_curves(tmp_path: Path) -> None:
    run = FakeRun(tmp_path).train(50)
    run.commit(68, partial=MetricRow(step=68, metrics={"loss": 0.25, "f1": 0.5}))
    entries = tuple(run.log.entries(blocks="written"))
    charts = {chart.caption: chart.curves for chart in curves_of(history_of(entries), entries, None).charts}
    assert [(curve.kind, list(curve.points)) for curve in charts["loss"]] == [
        ("training", [(50, 2.0)]),
        ("partial", [(68, 0.25)]),
    ]
    assert [curve.kind for curve in charts["f1"]] == ["partial"]
    write_report(run.log, title="digits")
    assert "loss 0.25, f1 0.5 (partial)" in run.home.read("report/index.html").decode()


def pictures(run: Run) -> dict[str, Element]:
    """The pictures of a run by their captions, parsed as a browser parses an image: as XML."""
    entries = tuple(run.log.entries(blocks="written"))
    found = dict(pictures_of(curves_of(history_of(entries), entries, None)))
    return {caption: ET.fromstring(svg) for caption, svg in found.items()}  # noqa: S314 - the test made it


def words_in(picture: Element) -> list[str]:
    return [text for text in picture.itertext() if not text.startswith(":root")]


def test_pictures_stand_alone(run: Run) -> None:
    trained(run)
    tip = run.log.require_head().tip
    assert tip is not None
    rewound = Rewind(to=tip, blown_up_at=250, reason="password=hunter2", skip_batches=50)
    run.log.append(lambda _: rewound, attempt="a" * 32)
    found = pictures(run)
    assert list(found) == captions(run.report())
    loss = found["loss"]
    assert loss.tag == "{http://www.w3.org/2000/svg}svg"
    assert words_in(loss)[:4] == ["loss", "— training", "• validation", "┆ rewind"]
    assert "@media (prefers-color-scheme: dark)" in "".join(loss.itertext())
    assert len([each for each in loss.iter() if each.get("class") == "dots validation"]) == 1
    assert len([each for each in loss.iter() if each.get("class") == "joined validation"]) == 1
    assert not {name for each in loss.iter() for name in each.attrib} & {"href", "src"}
    assert "hunter2" not in "".join(loss.itertext())


def test_pictures_show_hostile_names_as_text(run: Run) -> None:
    name = '</text><script>alert("1")</script>]]>&'
    run.commit(10, [{name: 1.0}])
    found = pictures(run)
    assert words_in(found[name])[:2] == [name, "— training"]
    assert {each.tag.rpartition("}")[2] for each in found[name].iter()} == {
        *("svg", "style", "rect", "text", "tspan", "path")
    }


def test_picture_of_a_long_curve_is_small(run: Run) -> None:
    for step in range(20_000, 200_001, 20_000):
        run.commit(step, [{"loss": 1.0 / (step + row)} for row in range(1000)])
    loss = pictures(run)["loss"]
    assert len(ET.tostring(loss)) < 12_000
    assert "200,000" in words_in(loss)  # the axis ends where the curve ends


def test_charts_share_one_range_of_steps(run: Run) -> None:
    ref = run.commit(100, [{"loss": 1.0}], {"train": 1.0})
    run.commit(400, [{"loss": 0.5}], {"train": 1.0})
    run.evaluate(ref, {"accuracy": 0.5})  # whose chart has no later point
    found = pictures(run)
    axes = [[text for text in words_in(each) if text in {"0", "100", "200", "300", "400"}] for each in found.values()]
    assert all(axis[-5:] == ["0", "100", "200", "300", "400"] for axis in axes)
    assert len(axes) == 3


def test_confusion_matrix_names_its_classes(run: Run) -> None:
    ref = run.commit(100, [{"loss": 1.0}])
    run.evaluate(ref, {"accuracy": 0.75})
    matrix = ConfusionMatrix(checkpoint=ref.path, step=100, counts=((2, 1), (0, 1)), class_names=("<cat>", "dog"))
    run.home.write(confusion_path(ref.path), matrix.to_json())
    page = run.report()
    assert rows_below(page, "Confusion matrix") == [["&lt;cat&gt;", "2", "1"], ["dog", "·", "1"]]
    assert '<th class="number">&lt;cat&gt;</th><th class="number">dog</th>' in page


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


def test_command_opens_the_page_of_a_local_home(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) is None)
    assert main(["report", run.home.uri, "--open"]) == 0
    assert opened == [Path(capsys.readouterr().out.strip()).as_uri()]
    assert main(["report", "memory://bucket/run", "--open"]) == 2
    assert len(opened) == 1


def test_a_fork_shows_the_curve_that_it_came_from(tmp_path: Path) -> None:
    """Also that of the run before, and the learning rate that was accepted; nothing of a run that is gone."""
    first = FakeRun(tmp_path, "first")
    for step in (100, 200):
        first.commit(step, [MetricRow(step=step, metrics={"loss": 100 / step}, learning_rate=0.1)])
    fork(first.root, "first", "second", at_step=100, attempt="f" * 32)
    second = RunLog(first.root.at("second"))
    ref = second.require_head().tip
    assert ref is not None
    row = MetricRow(step=150, metrics={"loss": 0.5}, learning_rate=0.01)
    body = Commit(
        checkpoint=ref.model_copy(update={"step": 150, "path": f"{ref.path}x", "base": second.require_head().base}),
        parent=ref.path, history=(row,), exit_reason="segment_end", seconds={"train": 1.0},
    )  # fmt: skip
    second.append(lambda _: body, attempt=ref.attempt)

    def drawn() -> dict[str, list[tuple[str, list[int]]]]:
        page = Path(write_report(second, title="second")).read_text(encoding="utf-8")
        data = json.loads(page.split('id="curves">')[1].split("</script>", maxsplit=1)[0])
        return {
            chart["caption"]: [(curve["kind"], curve["steps"]) for curve in chart["curves"]] for chart in data["charts"]
        }

    assert drawn()["loss"] == [("before", [100]), ("training", [150])]
    assert drawn()["learning rate of the next step"] == [("before", [100]), ("training", [150])]
    first.root.delete("first")
    assert drawn()["loss"] == [("training", [150])]
    assert "learning rate of the next step" not in drawn()
