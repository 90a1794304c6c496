"""A run file's secrets are in no file of a home, in nothing that a command prints, and in no call of a stage."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.flows import train as trainer
from baton.flows.commands.main import main
from baton.flows.opened_run import saved_run
from baton.tasks.foundation.contracts.home_files import SavedCode
from baton.tasks.foundation.contracts.identity import differences, identity_in_run_file
from baton.tasks.foundation.contracts.log_entry import Change
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.contracts.stage_calls import PrepareDataCall, RemoteContext, pack, unpack
from baton.tasks.foundation.errors import InvalidInput, SourceError
from baton.tasks.foundation.model.saved_code import save_code
from baton.tasks.foundation.telemetry.ledger import Ledger
from tests.support.fake_run import FakeRun
from tests.support.lab import lab_of, spec_of

PASSWORD = "hunter2/with blank"  # noqa: S105 - the one that must not appear
TRACKER = {"mlflow": {"uri": f"https://me:{PASSWORD}@tracker.example.org:5000"}}
WEIGHTS = {"weights": ["gs://bucket/w?sig=hunter2"]}
CODE = "def build(): ...\n"


def assert_no_secret(text: str | bytes, where: str) -> None:
    found = text if isinstance(text, str) else text.decode(errors="replace")
    assert "hunter2" not in found, f"{where}: {found[max(0, found.index('hunter2') - 200) :][:300]}"


def with_secrets(**changes: Any) -> RunSpec:
    options = {"form": "plain", "url": f"https://me:{PASSWORD}@data.example.org", "api_key": "hunter2"}
    return spec_of("build", run="digits", tracking=TRACKER, init=WEIGHTS, data__options=options, **changes)


def test_no_file_and_no_output_has_a_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec, code = with_secrets(), lab_of(tmp_path, CODE).code
    run = FakeRun(tmp_path, identity=identity_in_run_file(spec))
    changed = {**run.head.identity, **save_code(run.home, spec, code)}
    change = Change(environment=run.head.environment, identity=changed, accepted=("data",))
    run.log.append(lambda _: change, attempt="c")
    run.train(100, 200)
    with pytest.raises(SourceError):
        fail(run)
    assert main(["fork", run.address, "--as", "forked"]) == 0
    assert main(["report", run.address, "--places"]) == 0
    for verb in ("status", "log", "verify", "report"):
        assert main([verb, run.address]) == 0
        assert main([verb, run.address, "--json"]) == 0
    assert main(["list", run.root.uri]) == 0
    assert main(["compare", run.address, f"{run.root.uri}/forked", "--html", str(tmp_path / "compared.html")]) == 0
    printed = capsys.readouterr()
    assert_no_secret(printed.out + printed.err, "printed")
    for file in tmp_path.rglob("*"):
        if file.is_file():
            assert_no_secret(file.read_bytes(), str(file))
    assert "https://***@tracker.example.org:5000" in run.path("report/index.html").read_text()


def fail(run: FakeRun) -> None:
    """An attempt that ends with an error which has the secret, and is caused by a library's error that has it."""
    with Ledger(whole_process=False) as ledger:
        ledger.open(run.home, run.head)
        try:
            raise OSError(f"https://me:{PASSWORD}@data.example.org did not answer")  # noqa: TRY301 - a library does
        except OSError as fault:
            raise SourceError(f"{fault}, sent Authorization: Bearer hunter2hunter2") from fault


def test_changed_secrets_change_no_identity() -> None:
    spec = with_secrets()
    other = RunSpec.model_validate_json(spec.model_dump_json().replace("hunter2", "other"))
    assert differences(identity_in_run_file(spec), identity_in_run_file(other)) == ()


def test_model_is_not_built_without_its_secret(tmp_path: Path) -> None:
    spec, code = with_secrets(model__options={"password": "hunter2"}), lab_of(tmp_path, CODE).code
    run = FakeRun(tmp_path)
    identity = {**run.head.identity, **save_code(run.home, spec, code)}
    change = Change(environment=run.head.environment, identity=identity, accepted=("data",))
    run.log.append(lambda _: change, attempt="c")
    with pytest.raises(InvalidInput, match=r"has no secrets, and model.options had one(.|\n)*hint: name the run file"):
        saved_run(run, run.head)  # type: ignore[arg-type] - it has what a home has


def test_code_without_secrets_is_saved_as_before() -> None:
    spec = spec_of("build", model__options={"rate": 1e-05, "name": "on"})
    assert SavedCode.of(spec, {}).run_file == spec


def test_calls_of_stages_have_no_trackers(tmp_path: Path) -> None:
    """Prefect stores the parameters of a flow run."""
    call = PrepareDataCall(spec=with_secrets().model_copy(update={"init": spec_of("build").init}))
    text = pack(call, RemoteContext(code_folder=str(tmp_path)))
    assert "tracker.example.org" not in text
    again, _ = unpack(PrepareDataCall, text)
    assert again.spec.data == call.spec.data
    assert again.spec.tracking.mlflow is None


def test_bare_process_masks_and_escapes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"run": "digits", "storage": "runs", "model": "model.py:build"}
    values |= {
        "data": {"source": "\x1b]0;owned\x07\x1b[31m", "options": {"password": "hunter2", "api_key": ["hunter2"]}}
    }
    values |= {"train": {"steps": 1, "global_batch_size": 8}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    (tmp_path / "model.py").write_text(CODE)
    assert trainer.main([str(tmp_path / "run.yaml")]) == 2
    override = f"data.source=https://me:{PASSWORD}@host/x"
    assert trainer.main([str(tmp_path / "run.yaml"), "--set", override]) == 2
    printed = capsys.readouterr().err
    assert_no_secret(printed, "printed")
    assert all(line.isprintable() for line in printed.splitlines())
    assert "\\x1b]0;owned" in printed
