"""`baton compare`: settings, metrics and curves of several runs beside each other."""

import json
import math
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.flows.commands.compare import sparkline
from baton.flows.commands.main import main
from baton.tasks.foundation.contracts.dataset import OpenedFile
from baton.tasks.foundation.contracts.home_files import ModelSummary
from baton.tasks.foundation.contracts.log_entry import Change
from baton.tasks.foundation.dataset.manifest import manifest_path
from baton.tasks.foundation.model.saved_code import save_code
from baton.tasks.foundation.storage.local import LocalStorage
from tests.evaluate.report.test_saved_code_sections import spec_of_model
from tests.support.fake_run import FakeRun

HOSTILE = "<script>x</script>"


@pytest.fixture
def runs(tmp_path: Path) -> list[FakeRun]:
    """Two runs: the second has another seed and another accelerator, and went further."""
    first, second = FakeRun(tmp_path / "a", "one"), FakeRun(tmp_path / "b", "two")
    first.metadata, second.metadata = {"team": "vision", "lr_note": 0.1}, {"team": "vision"}
    first.train(100).evaluate(0.5)
    second.train(100).train(250).evaluate(0.75)
    environment = second.head.environment.model_copy(update={"replicas": 4})
    changed = Change(
        environment=environment, identity={**second.head.identity, "train.seed": 7}, accepted=("train.seed",)
    )
    second.log.append(lambda _: changed, attempt=uuid.uuid4().hex)
    return [first, second]


@pytest.fixture
def compared(runs: list[FakeRun], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def compare(*words: str) -> str:
        assert main(["compare", *(run.address for run in runs), *words]) == 0
        return capsys.readouterr().out

    return compare


def test_runs_stand_beside_each_other(compared: Callable[..., str]) -> None:
    text = compared()
    assert re.search(r"^ +one +two$", text, re.MULTILINE)
    assert re.search(r"^step +100 +250$", text, re.MULTILINE)
    assert re.search(r"^validation accuracy +0.5 +0.75$", text, re.MULTILINE)
    assert len({len(line) for line in text.split("\n\n")[0].splitlines()}) == 1  # all values are aligned on the right
    assert re.search(r"^train.seed +0 +7$", text, re.MULTILINE)
    assert re.search(r"^metadata.lr_note +0.1 +absent$", text, re.MULTILINE)
    assert "metadata.team" not in text
    assert re.search(r"^environment.replicas +2 +4$", text, re.MULTILINE)
    assert re.search(r"^\d+ equal values: --verbose prints them$", text, re.MULTILINE)
    assert re.search(r"^training loss, steps 0 to 250\none +[▁-█]+", text, re.MULTILINE)


def test_json_has_the_same_facts(compared: Callable[..., str], runs: list[FakeRun]) -> None:
    facts: dict[str, Any] = json.loads(compared("--json"))
    assert [(run["run"], run["home"], run["step"]) for run in facts["runs"]] == [
        ("one", runs[0].address, 100), ("two", runs[1].address, 250),
    ]  # fmt: skip
    assert facts["settings"] == {
        "metadata.lr_note": [0.1, "absent"],
        "train.seed": [0, 7],
        "environment.replicas": [2, 4],
    }
    assert list(facts["changed"].values()) == [["0.1", "absent"], ["0", "7"], ["2", "4"]]
    assert facts["equal"]["environment.inter_op_threads"] == 1
    assert facts["equal"]["metadata.team"] == "vision"
    assert facts["code"] == []
    assert facts["page"] is None


CODE = "def build_model():\n    return compiled({rate}, units=8)\n"


def edited(folder: Path, name: str, *, rate: float = 0.003, units: int = 8, code: str = CODE) -> FakeRun:
    """A run whose home has its code, with all that Baton records of an optimizer and an architecture."""
    source, home = folder / f"code-{name}", LocalStorage(folder / "runs" / name)
    source.mkdir()
    (source / "model.py").write_text(code.format(rate=rate))
    model = ModelSummary(layers=(), trainable=10 * units, frozen=0, optimizer=0)
    layer = {"class_name": "Dense", "config": {"name": "wide", "units": units, "activation": "relu"}}
    identity = {
        **save_code(home, spec_of_model(), source, model),
        "compile.optimizer": {
            "class_name": "Adam",
            "config": {
                "name": "adam",
                "learning_rate": rate,
                "clipnorm": None,
            },
        },
        "compile.loss": "mse",
        "model.config": {"class_name": "Sequential", "config": {"layers": [layer]}},
        "model.code": {"model.py:build_model": f"{units:032x}{rate}"},
    }
    return FakeRun(folder, name, identity=identity)


def compare_edited(capsys: pytest.CaptureFixture[str], *runs: FakeRun, words: tuple[str, ...] = ()) -> str:
    assert main(["compare", *(run.address for run in runs), *words]) == 0
    return capsys.readouterr().out


def test_edited_learning_rate_is_one_row_and_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = edited(tmp_path, "one"), edited(tmp_path, "two", rate=0.001)
    text = compare_edited(capsys, *runs)
    rows = text.split("what differs")[1].split("\n\n")[0].splitlines()[1:]
    assert [row.split() for row in rows] == [["learning", "rate", "0.003", "0.001"], ["code", "model.py", "+1", "-1"]]
    assert "  -    return compiled(0.003, units=8)\n  +    return compiled(0.001, units=8)\n" in text
    verbose = compare_edited(capsys, *runs, words=("--verbose",))
    assert re.search(r"^compile.optimizer.config.learning_rate +0.003 +0.001$", verbose, re.MULTILINE)
    assert re.search(r"^compile.loss +mse$", verbose, re.MULTILINE)
    assert "clipnorm" not in verbose
    page = tmp_path / "page.html"
    compare_edited(capsys, *runs, words=("--html", str(page)))
    html = page.read_text(encoding="utf-8")
    assert "<summary>model.py of two, compared with one</summary><pre>--- one\n+++ two\n" in html
    assert re.search(r"<summary>\d+ equal values</summary><pre>[^<]*compile.loss: mse\n", html)


def test_code_that_homes_do_not_have_differs_all_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        FakeRun(tmp_path, name, identity={"model.code": {"a": name}, "model.signature": name})
        for name in ("one", "two")
    ]
    assert re.search(r"^code +differs$", compare_edited(capsys, *runs), re.MULTILINE)
    runs = [FakeRun(tmp_path, name, identity={"model.signature": name}) for name in ("three", "four")]
    assert re.search(r"^model.signature +three +four$", compare_edited(capsys, *runs), re.MULTILINE)


def test_other_architecture_is_named_by_layer_and_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = compare_edited(capsys, edited(tmp_path, "one"), edited(tmp_path, "two", units=16))
    assert re.search(r"^parameters +80 +160$", text, re.MULTILINE)
    assert re.search(r"^layer wide: units +8 +16$", text, re.MULTILINE)
    assert "model.config" not in text


def test_same_run_twice_differs_in_nothing(runs: list[FakeRun], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", runs[0].address, runs[0].address]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^ +one +one \(2\)$", text, re.MULTILINE)
    assert "settings, data, code and environment are the same" in text


def test_one_metric_is_chosen(compared: Callable[..., str]) -> None:
    assert re.findall(r"^training (.*), steps", compared("--metric", "accuracy"), re.MULTILINE) == ["accuracy"]


def test_page_draws_the_curves_over_each_other(compared: Callable[..., str], tmp_path: Path) -> None:
    page = tmp_path / "compared.html"
    assert f"page: {page}" in compared("--html", str(page))
    text = page.read_text(encoding="utf-8")
    assert "<title>one / two | Baton</title>" in text
    data = json.loads(text.split('id="curves">')[1].split("</script>", maxsplit=1)[0])
    training = [curve for curve in data["charts"][0]["curves"] if curve["kind"] == "training"]
    assert [(curve["label"], curve["color"], curve["steps"]) for curve in training] == [
        ("one", "run0", [100]), ("two", "run1", [100, 250]),
    ]  # fmt: skip
    assert '<span class="key run1"></span>two' in text
    # Each run has its own epochs and its own time.
    assert [curve["run"] for curve in training] == [0, 1]
    assert [[each[1] for each in clock["segments"]] for clock in data["clocks"]] == [[0, 100], [0, 100, 250]]


def test_hostile_settings_are_text_on_the_page(tmp_path: Path) -> None:
    runs = [FakeRun(tmp_path / str(number), f"r{number}") for number in range(2)]
    changed = Change(environment=runs[1].head.environment.model_copy(update={"versions": {HOSTILE: HOSTILE}}))
    runs[1].log.append(lambda _: changed, attempt=uuid.uuid4().hex)
    page = tmp_path / "page.html"
    assert main(["compare", *(run.address for run in runs), "--html", str(page)]) == 0
    assert HOSTILE not in page.read_text(encoding="utf-8")
    assert "&lt;script&gt;x&lt;/script&gt;" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{one}"], "1 run given; name 2 to 8 of them"),
        (["{one}"] * 9, "9 runs given"),
        (["{one}", "{one}", "--metric", "f1"], "--metric f1 is in none of the runs; they have: loss, accuracy"),
        (["{one}", "nowhere"], "no run is at"),
        (["{one}", "{one}", "--html", "nowhere/page.html"], "cannot be written"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    words: list[str], message: str, runs: list[FakeRun], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *(word.format(one=runs[0].address) for word in words)]) == 2
    assert message in capsys.readouterr().err


CURVES = st.lists(st.tuples(st.integers(0, 1000), st.floats(width=32)), max_size=50)


@given(CURVES, st.integers(1, 80))
def test_any_curve_fits(curve: list[tuple[int, float]], columns: int) -> None:
    drawn = sparkline(curve, columns=columns, last=1000, values=[value for _, value in curve])
    assert len(drawn) <= columns
    assert set(drawn) <= set(" ▁▂▃▄▅▆▇█")


def test_heights_follow_the_values() -> None:
    curve = [(step, float(step)) for step in range(8)]
    assert sparkline(curve, columns=8, last=8, values=[value for _, value in curve]) == "▁▂▃▄▅▆▇█"


def test_curves_are_drawn_against_each_other() -> None:
    values = [0.0, 8.0]
    assert sparkline([(1, 0.0), (5, 8.0)], columns=2, last=8, values=values) == "▁█"
    assert sparkline([(5, 4.5)], columns=2, last=8, values=values) == " ▅"


def test_values_far_apart_are_logarithmic() -> None:
    curve = [(0, 1e-4), (1, 1e-2), (2, 1.0)]
    assert sparkline(curve, columns=3, last=3, values=[value for _, value in curve]) == "▁▅█"


def test_curve_without_finite_values_is_empty() -> None:
    assert sparkline([(1, math.nan), (2, math.inf)], columns=4, last=4, values=[math.nan, math.inf]) == ""


def test_changed_files_of_the_data_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [FakeRun(tmp_path / name, name) for name in ("one", "two")]
    for number, run in enumerate(runs):
        folder = str(run.head.identity["data.folder"])
        names = {"same.csv": "0", "train.csv": str(number)}
        opened = [OpenedFile(path=path, size=1, sha256=digest).model_dump() for path, digest in names.items()]
        manifest = json.loads(run.root.read(manifest_path(folder))) | {"opened": opened}
        run.root.write(manifest_path(folder), json.dumps(manifest).encode())
    other = {**runs[1].head.identity, "data.content_digest": "another"}
    changed = Change(environment=runs[1].head.environment, identity=other, accepted=("data.content_digest",))
    runs[1].log.append(lambda _: changed, attempt=uuid.uuid4().hex)
    assert re.search(r"^files of the data +train\.csv$", compare_edited(capsys, *runs), re.MULTILINE)
