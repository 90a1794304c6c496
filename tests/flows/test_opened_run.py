"""A home has its run file and code, so that what is asked of it needs its address only."""

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from baton.flows import train as trainer
from baton.flows.commands.main import main
from baton.flows.opened_run import RunHome, open_run, run_of_deployment, saved_run, write_run_file
from baton.tasks.foundation.contracts import home_files
from baton.tasks.foundation.contracts.home_files import SAVED_CODE, SavedFile
from baton.tasks.foundation.contracts.log_entry import Change, Head, Origin
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.contracts.stage_calls import InitOrRestoreCall
from baton.tasks.foundation.errors import InvalidInput, RunLogError
from baton.tasks.foundation.model.code_changes import read_saved_code
from baton.tasks.foundation.model.saved_code import MOST_BYTES, save_code
from baton.tasks.foundation.storage.local import LocalStorage
from tests.fakes.gcs.server import FakeGcs
from tests.support.fake_run import FakeRun
from tests.support.lab import Lab, lab_of, spec_of
from tests.support.small_logs import ENVIRONMENT

MODEL = """
def build(rate=0.1):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(rate), loss, metrics=["accuracy"])
    return model
"""
ACCEPTED = ("model.options", "compile.optimizer")
# How a home on a local disk can be somebody else's, and what the refusal says of it.
FOREIGN: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "home of another user": (lambda home, _: give_away(home), r"/build belongs to user \d+"),
    "code folder of another user": (lambda _, code: give_away(code.parent), r"/code belongs to user \d+"),
    "code of another user": (lambda _, code: give_away(code), r"\.json belongs to user \d+"),
    "home that everybody may write to": (lambda home, _: home.chmod(0o777), r"may write to .*/build \(mode 777\)"),
    "a sticky one too": (lambda home, _: home.chmod(0o1777), r"may write to .*/build \(mode 1777\)"),
    "code folder that everybody may write to": (lambda _, code: code.parent.chmod(0o777), r"may write to .*/code "),
    "code that its group may write to": (lambda _, code: code.chmod(0o664), r"may write to .*\.json \(mode 664\)"),
    "code behind a link": (lambda _, code: linked(code), r"\.json is neither a file nor a folder, but a link"),
    "code folder behind a link": (lambda _, code: linked(code.parent), r"/code is neither a file nor a folder"),
}


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return lab_of(tmp_path, MODEL)


def begun(folder: Path, storage: Path, **changes: Any) -> tuple[RunHome, Head, RunSpec]:
    """A home with an origin entry, and the code of `folder`, as a start leaves it, without training anything."""
    spec = spec_of("build", **changes)
    home = RunHome.at(LocalStorage(storage), spec.run)
    identity = {"data.source": "x", **save_code(home.home, spec, folder)}
    home.log.append(
        lambda head: Origin(identity=identity, environment=ENVIRONMENT) if head is None else None, attempt="a"
    )
    return home, home.require_head(), spec


def give_away(place: Path) -> None:
    os.chown(place, 4711, 4711)


def linked(place: Path) -> None:
    """Put a link within the home into the place of a file or folder."""
    real = place.with_name(f"real-{place.name}")
    place.rename(real)
    place.symlink_to(real.name)


def planted(folder: Path) -> tuple[RunHome, Path]:
    """A home whose model.py writes a file when it is imported, and its saved code."""
    (folder / "model.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\ndef build(): ...")
    home, head, _ = begun(folder, folder / "storage")
    return home, folder / "storage" / "build" / str(head.identity[SAVED_CODE])


@pytest.mark.slow
def test_home_alone_exports_and_evaluates(lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = spec_of("build")
    lab.train_and_commit(spec, 3)
    home = str(lab.root / "storage" / "build")
    lab.code.rename(tmp_path / "gone")
    out = tmp_path / "model.weights.h5"
    assert main(["export", home, "--format", "weights", "--to", str(out)]) == 0
    assert out.is_file()
    (saved,) = (lab.root / "storage" / "build" / "code").iterdir()
    assert f"note: run file and code are those in {home}/code/{saved.name}" in capsys.readouterr().err
    assert main(["evaluate", home, "--json"]) == 0
    done = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (done["run"], done["step"], done["logged"]) == ("build", 3, None)
    assert main(["evaluate", home, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["agrees"] is True


def test_code_of_each_commit_is_kept_and_forked(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    from baton.tasks.init_or_restore.stage import init_or_restore

    spec = spec_of("build")
    first = lab.begin(spec)
    edited = lab.copy_of_code("edited", ("model.py", "rate=0.1", "rate=0.25"))
    call = InitOrRestoreCall(spec=spec, dataset=lab.prepare(spec), accept=("model.code", *ACCEPTED))
    changed = init_or_restore(call, edited.place(spec))
    home = RunHome.at(lab.storage, "build")
    assert len(list(lab.storage.files("build/code"))) == 2
    for head, text in ((first, "rate=0.1"), (changed, "rate=0.25")):
        run = saved_run(home, head)
        assert text in (run.folder / "model.py").read_text()
        assert (run.folder / "layers.py").read_bytes() == (lab.code / "layers.py").read_bytes()
        saved = read_saved_code(home.home, head.identity[SAVED_CODE])
        assert saved is not None
        model = saved.model
        assert model is not None
        assert [(layer.kind, layer.output_shape) for layer in model.layers] == [("Dense", "(None, 3)")]
        assert (model.trainable, model.frozen) == (21, 0)
        assert (run.spec.run, run.spec.storage, run.spec.model) == ("build", lab.storage.uri, spec.model)
    again = init_or_restore(call, edited.place(spec))
    assert (again, len(list(lab.storage.files("build/code")))) == (changed, 2)
    assert main(["fork", home.home.uri, "--as", "forked"]) == 0
    forked = open_run(f"{lab.storage.uri}/forked")
    newest = forked.require_head().identity[SAVED_CODE]
    assert read_saved_code(forked.home, newest) == read_saved_code(home.home, changed.identity[SAVED_CODE]) is not None
    capsys.readouterr()


def test_homes_without_code_say_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text("def build(): ...")
    home, head, _ = begun(tmp_path, tmp_path / "storage")
    earlier = head.model_copy(update={"identity": {"data.source": "x"}})
    with pytest.raises(InvalidInput, match=r"has no run file and no code: its log.*\nhint: name the run file"):
        saved_run(home, earlier)
    saved = tmp_path / "storage" / "build" / head.identity[SAVED_CODE]
    saved.write_bytes(saved.read_bytes().replace(b"def build()", b"def other()"))
    with pytest.raises(RunLogError, match="is damaged: its content does not have the digest in its name"):
        saved_run(home, head)
    saved.unlink()
    out = tmp_path / "out.keras"
    assert main(["export", home.home.uri, "--format", "keras", "--to", str(out)]) == 2
    assert "is missing, which has the run file and the code" in capsys.readouterr().err
    assert main(["audit", home.home.uri]) == 2
    assert "is missing, which has the run file and the code" in capsys.readouterr().err


@pytest.mark.parametrize("how", FOREIGN)
def test_code_of_others_is_named_and_runs_only_if_trusted(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "another user" in how and os.geteuid() != 0:
        pytest.skip("only root can give files away")
    home, code = planted(tmp_path)
    spoil, why = FOREIGN[how]
    spoil(tmp_path / "storage" / "build", code)
    to = ["--format", "keras", "--to", str(tmp_path / "out.keras")]
    for verb in (["export", home.home.uri, *to], ["evaluate", home.home.uri], ["audit", home.home.uri]):
        assert main(verb) == 2
        error = capsys.readouterr().err
        assert "has code that would run with your rights, and others can have written it" in error
        assert re.search(why, error), error
        assert "its files: model.py\n  it calls: model.py:build, data.py:load\n" in error
        assert f"{home.home.uri}/code/{code.name} (sha256 {hashlib.sha256(code.read_bytes()).hexdigest()})" in error
        assert "--trust-code" in error
        assert "--run-file FILE" in error
        assert main([*verb, "--trust-code"]) == 2  # the run has no checkpoint
        error = capsys.readouterr().err
        assert f"note: run file and code are those in {home.home.uri}/code/{code.name}" in error
        assert "others can have written it" not in error
    notes: list[str] = []
    with pytest.raises(InvalidInput, match=r"rights.*others can have(.|\n)*hint: if you trust.*trust_code: true"):
        run_of_deployment(home.home.uri, None, trust_code=False, note=notes.append)
    run = run_of_deployment(home.home.uri, None, trust_code=True, note=notes.append)
    assert (run.folder / "model.py").read_bytes() == (tmp_path / "model.py").read_bytes()
    assert not (tmp_path / "ran").exists()


def test_code_in_a_bucket_runs_only_if_trusted(
    tmp_path: Path, cloud: FakeGcs, capsys: pytest.CaptureFixture[str]
) -> None:
    home, code = planted(tmp_path)
    for path in home.root.files(""):
        cloud.store.put("bucket", f"team/{path}", home.root.read(path))
    words = ["export", "gs://bucket/team/build", "--format", "keras", "--to", str(tmp_path / "out.keras")]
    assert main(words) == 2
    assert f"gs://bucket/team/build/code/{code.name} is in a bucket, where others may write" in capsys.readouterr().err
    assert main([*words, "--trust-code"]) == 2
    assert "note: run file and code are those in gs://bucket/team/build/code" in capsys.readouterr().err
    assert main([*words, "--run-file", str(tmp_path / "run.yaml")]) == 2
    assert "run.yaml" in capsys.readouterr().err


def test_own_code_runs_unasked_through_links_and_shared_folders(tmp_path: Path) -> None:
    """A group's umask, a link to the home, and a storage folder that everybody may write to, as /tmp."""
    home, code = planted(tmp_path)
    for folder in (code.parent, tmp_path / "storage" / "build"):
        folder.chmod(0o775)
    (tmp_path / "storage").chmod(0o1777)
    (tmp_path / "link").symlink_to(tmp_path / "storage" / "build")
    (tmp_path / "storage" / "linked").symlink_to("build")
    for address in (home.home.uri, tmp_path / "link", tmp_path / "storage" / "linked"):
        opened = open_run(str(address))
        assert saved_run(opened, opened.require_head()).spec.run == opened.name


def test_code_that_runs_is_what_was_found_to_be_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read once, so nobody can exchange it between the two."""
    home, _ = planted(tmp_path)
    read = LocalStorage.read
    monkeypatch.setattr(
        LocalStorage, "read", lambda self, path: pytest.fail(path) if path.startswith("code/") else read(self, path)
    )
    assert saved_run(home, home.require_head()).spec.run == home.name
    monkeypatch.setattr(LocalStorage, "read_own", lambda _self, _path: b"the user's own")
    with pytest.raises(RunLogError, match="does not have the digest in its name"):
        saved_run(home, home.require_head())


def test_a_fork_does_not_make_others_code_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeRun(tmp_path / "storage").train(100)
    identity = {**run.head.identity, **save_code(run.home, spec_of("build"), lab_of(tmp_path, MODEL).code)}
    change = Change(environment=run.head.environment, identity=identity, accepted=("data",))
    run.log.append(lambda _: change, attempt="c")
    run.train(200)
    assert main(["fork", run.address, "--as", "mine"]) == 0
    assert run.root.exists(f"mine/{identity[SAVED_CODE]}")
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)  # what is there belongs to somebody else
    assert main(["fork", run.address, "--as", "theirs"]) == 0
    assert not run.root.exists(f"theirs/{identity[SAVED_CODE]}")


def test_trust_and_a_run_file_exclude_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home, _ = planted(tmp_path)
    (tmp_path / "run.yaml").write_text("run: x\n")
    assert main(["evaluate", home.home.uri, "--trust-code", "--run-file", str(tmp_path / "run.yaml")]) == 2
    assert "--trust-code is for the code in a home" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "run.yaml"), "--trust-code"]) == 2
    assert "--trust-code is for the code in a home" in capsys.readouterr().err


def test_written_run_file_is_the_one_of_the_home(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("def build(): ...")
    home, head, _ = begun(tmp_path, tmp_path / "storage", model__options={"rate": 1e-05, "name": "on", "n": None})
    run = saved_run(home, head)
    assert run.file is not None
    assert not run.file.exists()
    write_run_file(run)
    assert load_run_file(run.file).spec == run.spec


def test_files_that_code_reads_are_said_to_be_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab = lab_of(tmp_path, MODEL.replace("Dense(3)", 'Dense(int(open("units.txt").read()))'))
    (lab.code / "units.txt").write_text("3")
    lab.begin(spec_of("build"))
    home, words = f"{lab.storage.uri}/build", ["--format", "weights", "--to", str(tmp_path / "model.weights.h5")]
    assert main(["export", home, *words]) == 2
    error = capsys.readouterr().err
    assert "units.txt" in error
    assert "hint: run file and code are those in the home, which has no other files" in error


def test_code_beside_and_above_the_run_file_is_laid_out(tmp_path: Path) -> None:
    files = {"shared/model.py": "from . import parts\n", "shared/parts.py": "# \xe9\n", "run/data.py": "x = 1\r\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    home, head, _ = begun(tmp_path / "run", tmp_path / "storage", model__build="../shared/model.py:build")
    run = saved_run(home, head)
    for name, text in files.items():
        assert (run.folder / ".." / name.replace("run/", f"{run.folder.name}/")).read_bytes() == text.encode("latin-1")
    assert save_code(home.home, run.spec.model_copy(update={"storage": "unused"}), run.folder) == {
        SAVED_CODE: head.identity[SAVED_CODE]
    }


@pytest.mark.parametrize("path", ["/etc/x.py", "a/../../x.py", "../" * 17 + "x.py", "x.sh", "a\\x.py", "./x.py", ".."])
def test_paths_out_of_the_scratch_folder_are_refused(path: str) -> None:
    with pytest.raises(ValidationError):
        SavedFile.of(path, b"")


def test_options_that_no_reader_would_read_are_refused_before_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(home_files, "_MOST_LISTS", 200)
    code = lab_of(tmp_path, MODEL).code
    values = spec_of("build").model_dump(mode="json") | {"storage": str(tmp_path / "storage")}
    values["model"]["options"] = {"table": "HERE"}
    text = yaml.safe_dump(values).replace("HERE", "[" + "[]," * 201 + "[]]")
    (code / "run.yaml").write_text(text)
    assert trainer.main([str(code / "run.yaml")]) == 2
    words = capsys.readouterr().err
    assert "would have more than 200 lists or 1000000 values, more than such a file may have" in words
    assert "make smaller what goes into it: options in the run file" in words
    assert not (tmp_path / "storage").exists()


def test_code_too_large_is_refused_before_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = lab_of(tmp_path, MODEL).code
    with (code / "layers.py").open("a") as file:
        file.write(f'\nTABLE = "{"x" * MOST_BYTES}"\n')
    values = spec_of("build").model_dump(mode="json") | {"storage": str(tmp_path / "storage")}
    (code / "run.yaml").write_text(yaml.safe_dump(values))
    assert main(["run", str(code / "run.yaml")]) == 2
    words = capsys.readouterr().err
    assert f"more than the {MOST_BYTES} that are saved" in words
    assert "the largest is layers.py" in words
    assert "hint: keep data in a file that the code reads" in words
    assert not (tmp_path / "storage").exists()
