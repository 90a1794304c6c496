"""What the newest receipt of an audit says, in the home, in `baton status` and in the report."""

import json
from pathlib import Path

import pytest

from baton.flows.commands.main import main
from baton.tasks.foundation.contracts.home_files import AuditedStretch, AuditReceipt
from baton.tasks.foundation.log.receipts import last_audit, store_receipt
from tests.support.fake_run import FakeRun

SAME = AuditedStretch(start=100, end=200, verdict="same", commits=1, compared=1)
DIFFERENT = AuditedStretch(
    start=200, end=300, verdict="different", commits=2, compared=2, first_differing_step=250, second_agrees_with="first"
)


def receipt(time: str, *stretches: AuditedStretch) -> AuditReceipt:
    verdict = "same" if all(each.verdict == "same" for each in stretches) else "different"
    return AuditReceipt(
        time=time,
        verdict=verdict,
        run="digits",
        run_file="run.yaml",
        spec_digest="0" * 64,
        baton="0.1.0",
        seed=None,
        auditable=2,
        stretches=stretches,
    )


def test_status_and_report_show_the_last_audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = FakeRun(tmp_path).train(100, 200, 300)

    def status() -> object:
        assert main(["status", run.address, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["audit"]

    def shown() -> tuple[str, str]:
        assert main(["status", run.address]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("audited")]
        assert main(["report", run.address]) == 0
        capsys.readouterr()
        return line.removeprefix("audited").strip(), run.path("report/index.html").read_text()

    assert status() is None
    assert last_audit(run.home) is None
    # Written first, but newer: the time decides.
    newest = store_receipt(receipt("2026-02-01T12:00:00+00:00", SAME, DIFFERENT), run.home)
    store_receipt(receipt("2026-01-31T12:00:00+00:00", SAME), run.home)
    assert status() == {
        "receipt": newest.removeprefix(f"{run.home.uri}/"),
        "time": "2026-02-01T12:00:00+00:00",
        "verdict": "different",
        "steps": 200,
        "first_differing_step": 250,
    }
    words, page = shown()
    assert words == "2026-02-01 12:00:00 UTC, 200 steps executed again: NOT the same bits, first at step 250"
    assert f"last audit: {words}" in page

    store_receipt(receipt("2026-02-02T12:00:00+00:00", SAME), run.home)
    assert shown()[0] == "2026-02-02 12:00:00 UTC, 100 steps executed again: the same bits"
    run.home.create("audits/20260303T120000Z-00000000.json", b"{")
    assert shown()[0] == "audits/20260303T120000Z-00000000.json cannot be read"
    assert status() == {
        "receipt": "audits/20260303T120000Z-00000000.json",
        "time": None,
        "verdict": None,
        "steps": 0,
        "first_differing_step": None,
    }
