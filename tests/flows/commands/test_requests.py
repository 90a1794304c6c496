"""On Cloud Storage, `baton status` and a `baton run` with nothing to do take few requests, however long the log is."""

import json

import pytest

from baton.flows.commands.main import main
from baton.tasks.foundation.contracts.identity import identity_in_run_file
from baton.tasks.foundation.contracts.log_entry import Change
from baton.tasks.foundation.contracts.run_file import load_run_file
from tests.fakes.gcs.server import FakeGcs
from tests.support.fake_run import FakeRun
from tests.support.sent_requests import Requests, requests_of

STORAGE = "gs://bucket/team"


@pytest.fixture(scope="module", params=[10, 300])
def written(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> FakeRun:
    """A complete run whose log has at least this number of entries."""
    folder = tmp_path_factory.mktemp("written")
    run = FakeRun(folder)
    (folder / "model.py").write_text("def build_model(): ...\n")
    head, spec = run.head, load_run_file(run.run_file()).spec
    identity = {**head.identity, **identity_in_run_file(spec)}
    run.log.append(lambda _: Change(environment=head.environment, identity=identity), attempt="a")
    step = 0
    while run.head.number < request.param:
        step += 1
        run.train(step).retire(keep_last=2)
    run.train(400).evaluate(0.9)
    run.retire(keep_last=2)
    run.attempt("a" * 32, ended="complete", uncommitted_seconds=0.0)
    return run


@pytest.fixture
def run(written: FakeRun, cloud: FakeGcs) -> FakeRun:
    """The run, at gs://bucket/team."""
    for path in written.root.files(""):
        cloud.store.put("bucket", f"team/{path}", written.root.read(path))
    return written


def sent_by(cloud: FakeGcs, *words: str) -> Requests:
    with requests_of(cloud) as requests:
        assert main(list(words)) == 0
    return requests


def test_status_takes_seven_requests(run: FakeRun, cloud: FakeGcs, capsys: pytest.CaptureFixture[str]) -> None:
    requests = sent_by(cloud, "status", f"{STORAGE}/{run.name}", "--json")
    facts = json.loads(capsys.readouterr().out)
    assert (facts["step"], facts["metrics"]) == (400, {"loss": 0.25, "accuracy": 0.5})
    assert facts["evaluation"]["metrics"] == {"accuracy": 0.9}
    assert facts["environment"]["versions"] == {"tensorflow": "2.19.1"}
    assert len(facts["account"]["attempts"]) == 1
    assert len(requests.sent) <= 7, requests.words()  # one is for the entry that has the environment


def test_nothing_to_do_takes_few_requests(run: FakeRun, cloud: FakeGcs, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", str(run.run_file()), "--set", f"storage={STORAGE}", "--json"]
    sent_by(cloud, *words)  # it writes the report, which is missing
    before = cloud.store.names("bucket")
    capsys.readouterr()
    requests = sent_by(cloud, *words)
    result = json.loads(capsys.readouterr().out)
    assert (result["exit_reason"], result["step"]) == ("nothing_to_do", 400)
    assert result["metrics"] == {"loss": 0.25, "accuracy": 0.5, "validation_accuracy": 0.9}
    assert len(requests.sent) <= 5, requests.words()  # a sixth reads saved code, which this home has not
    assert cloud.store.names("bucket") == before


def test_outdated_report_is_written_again(run: FakeRun, cloud: FakeGcs) -> None:
    words = ["run", str(run.run_file()), "--set", f"storage={STORAGE}", "--json"]
    sent_by(cloud, *words)
    page = f"team/{run.name}/report/index.html"
    cloud.store.put("bucket", page, b"<!-- log entry 3 -->\n")
    sent_by(cloud, *words)
    assert cloud.store.bytes("bucket", page).startswith(f"<!-- log entry {run.head.number} -->".encode())
