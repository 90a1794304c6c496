"""The report in a browser: its script draws and sorts, and no text from the run is executed."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from baton.flows.commands.main import main
from baton.tasks.evaluate.report.page import write_report
from baton.tasks.foundation.contracts.log_entry import MetricRow
from baton.tasks.foundation.log.appends import commit
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.local import LocalStorage
from tests.support.fake_run import FakeRun
from tests.support.ledger_records import record_of
from tests.support.small_logs import begin, committing, evaluation, head_of, stage

pytestmark = pytest.mark.slow

SCRIPT = "document.title='executed'"
HOSTILE = [f"</script><script>{SCRIPT}</script>", f'"><img src=x onerror="{SCRIPT}">', f"'-{SCRIPT}-'", "<!--", "]]>"]


def page_with(home: LocalStorage, names: list[str]) -> Path:
    log = begin(home)
    head = head_of(log)
    assert head.tip is not None
    rows = tuple(MetricRow(step=step, metrics=dict.fromkeys(names, 1.0 / step)) for step in (5, 10))
    commit(log, committing(stage(home, 10, head.base, "a"), parent=head.tip.path, history=rows))
    tip = head_of(log).tip
    assert tip is not None
    log.append(lambda _: evaluation(tip, keep_best=None, loss=0.5), attempt="e")
    name = "b" * 32
    home.write(f"attempts/{name}.json", record_of(name, host=names[0], doing=names[0], message=names[0]).to_json())
    return Path(write_report(RunLog(home), title=names[0]))


def shown(page: Path, folder: Path) -> str:
    """The page after its script has run."""
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("chromium is not installed; .ci/engine installs it")
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", f"--user-data-dir={folder}"]
    done = subprocess.run(
        [browser, *words, "--dump-dom", page.as_uri()], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout


def test_script_draws_charts_and_makes_tables_sortable(tmp_path: Path) -> None:
    dom = shown(page_with(LocalStorage(tmp_path / "home"), ["loss", "accuracy"]), tmp_path / "profile")
    assert '<fieldset id="controls">' in dom  # no longer hidden
    assert dom.count('tabindex="0" aria-label="loss. training: 0.2 at step 5') == 1
    assert re.search(r'<path class="line training" d="M[\d.]+ [\d.]+L', dom)
    assert '<th class="number"><button type="button">step</button></th>' in dom


def ends_of_lines(dom: str) -> list[float]:
    """Where the lines of two runs end, on the x axis."""
    paths = [re.search(rf'<path class="line {run}" d="([^"]*)"', dom) for run in ("run0", "run1")]
    return [float(path[1].rpartition("L")[2].split()[0]) for path in paths if path is not None]


def test_runs_are_compared_by_their_own_epochs(tmp_path: Path) -> None:
    epoch = {"data.train_examples": 320, "train.drop_remainder": False}
    runs = [FakeRun(tmp_path, f"r{batch}", identity={**epoch, "train.global_batch_size": batch}) for batch in (32, 64)]
    for run in runs:
        run.train(50, 100).commit(120, partial=MetricRow(step=120, metrics={"loss": 0.5}))
    page = tmp_path / "page.html"
    assert main(["compare", *(run.address for run in runs), "--html", str(page)]) == 0
    by_step = ends_of_lines(shown(page, tmp_path / "profile"))
    text = page.read_text(encoding="utf-8").replace('value="step" checked', 'value="step"')
    page.write_text(text.replace('value="epoch"', 'value="epoch" checked'), encoding="utf-8")
    dom = shown(page, tmp_path / "profile")
    by_epoch = ends_of_lines(dom)
    assert by_step[0] == by_step[1] == by_epoch[1]
    assert by_epoch[0] - 58 == pytest.approx((by_epoch[1] - 58) / 2, abs=0.1)  # 58: where the axis begins
    assert ">epoch</text>" in dom
    # A window that is not complete is a hollow point, of the first chart alone.
    assert [dom.count(f'<path class="{form} run0"') for form in ("hollow", "dots")] == [1, 2]


def test_hostile_names_are_not_executed(tmp_path: Path) -> None:
    names = ["".join(HOSTILE), *HOSTILE, "loss"]  # the first is the title, too
    dom = shown(page_with(LocalStorage(tmp_path / "home"), names), tmp_path / "profile")
    title = re.search(r"<title>(.*?)</title>", dom)
    assert title is not None
    assert title[1].endswith(" | Baton")
    assert '<fieldset id="controls">' in dom  # the page's own script has run
    assert "<img" not in dom
