"""`baton verify` finds every byte that differs from the commit, names the file, and writes nothing."""

import json
import os
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from baton.flows.commands.main import main
from baton.flows.opened_run import open_run
from baton.flows.verification import verify_home
from baton.tasks.foundation.checkpoint.retention import KeepEvery, KeepLast, apply_retention
from baton.tasks.foundation.contracts.dataset import content_digest
from baton.tasks.foundation.contracts.home_files import SAVED_CODE, saved_code_path
from baton.tasks.foundation.contracts.log_entry import EvaluationOnTest
from baton.tasks.foundation.dataset.manifest import read_manifest
from baton.tasks.foundation.log.appends import quarantine
from baton.tasks.foundation.storage.local import LocalStorage
from tests.support.fake_run import DATASET, FakeRun, flip_a_byte
from tests.support.small_logs import signed


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path).train(100, 200, 300)


def verify(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    before = run.files()
    code = main(["verify", run.address, "--json"])
    assert run.files() == before, "verify only reports"
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_an_undamaged_run_verifies(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = verify(run, capsys)
    assert code == 0
    assert found["ok"]
    assert found["damages"] == []
    assert (found["entries"], found["checkpoints"], found["files"]) == (5, 4, 4 * 2 + 2)
    assert found["bytes"] > sum(2 * (1000 + step) for step in (0, 100, 200, 300))
    assert found["dataset"] == DATASET


def test_verify_text_for_a_run_file(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run.run_file())]) == 0
    out = capsys.readouterr().out
    assert "read 5 log entries, 4 checkpoints" in out
    assert "all bytes agree" in out


def log_evaluation_on_test(run: FakeRun, name: str) -> Path:
    """Write a test set and log an evaluation on it; returns its folder."""
    folder = f"datasets/{name}"
    shutil.copytree(run.root.root / DATASET, run.root.root / folder)
    edit(run.root.root / folder / "manifest.json", lambda it: it.update(digest=name))
    content = read_manifest(run.root, folder).content_digest
    body = EvaluationOnTest(
        checkpoint=run.tip, metrics={"loss": 1.0}, examples=20, seconds=0.5, content_digest=content, folder=folder
    )
    run.log.append(lambda _: body, attempt=uuid.uuid4().hex)
    return Path(run.root.root / folder)


def test_the_test_set_of_the_newest_entry_is_read(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    earlier, newest = (log_evaluation_on_test(run, name) for name in ("earlier", "newest"))
    shutil.rmtree(earlier)  # a run may change its test set
    code, found = verify(run, capsys)
    assert (code, found["files"], found["dataset"]) == (0, 4 * 2 + 2 + 2, DATASET)
    flip_a_byte(newest / "train-00000.tfrecord")
    code, found = verify(run, capsys)
    assert (code, [each["file"] for each in found["damages"]]) == (4, ["datasets/newest/train-00000.tfrecord"])
    shutil.rmtree(newest)
    code, found = verify(run, capsys)
    assert (code, [each["file"] for each in found["damages"]]) == (4, ["datasets/newest/manifest.json"])


def test_another_test_set_than_the_logged_one_is_damage(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    folder = log_evaluation_on_test(run, "test")
    logged = read_manifest(run.root, "datasets/test")
    other = content_digest(logged.features, logged.train, logged.train)
    edit(folder / "manifest.json", lambda it: it.update(validation=it["train"], content_digest=other))
    code, found = verify(run, capsys)
    assert (code, len(found["damages"])) == (4, 1)
    assert f"has content {other}, but the log has {logged.content_digest}" in found["damages"][0]["what"]


def test_shard_changed_together_with_its_checksum_is_damage(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    """The manifest's digest covers the checksums, and the log has the digest."""
    name = f"{DATASET}/train-00000.tfrecord"
    flip_a_byte(run.root.root / name)
    crc = run.root.checksum(name).crc32c
    edit(run.root.root / DATASET / "manifest.json", lambda it: it["train"][0].update(crc32c=crc))
    code, found = verify(run, capsys)
    assert (code, [each["file"] for each in found["damages"]]) == (4, [f"{DATASET}/manifest.json"])
    assert "its content_digest does not match the shards it lists" in found["damages"][0]["what"]


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a JSON file; an entry of the log gets the digest of its new bytes."""
    data = json.loads(path.read_text())
    change(data)
    path.write_bytes(signed(data) if path.parent.name == "log" else json.dumps(data).encode())


def in_place_of(path: Path, what: Literal["folder", "link", "link out", "pipe", "file"]) -> None:
    """Put something else where a file or a folder was."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if what == "folder":
        path.mkdir()
    elif what == "link":
        path.symlink_to("nowhere")
    elif what == "link out":
        path.symlink_to("/etc/passwd")
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(b"")


def tip_file(run: FakeRun, name: str) -> Path:
    return run.path(f"{run.tip.path}/{name}")


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (lambda run: flip_a_byte(tip_file(run, "ckpt.data-00000-of-00001")), "ckpt.data-00000-of-00001"),
        (lambda run: tip_file(run, "ckpt.index").unlink(), "ckpt.index"),
        (lambda run: tip_file(run, "ckpt.index").write_bytes(b""), "ckpt.index"),
        (lambda run: tip_file(run, "manifest.json").write_bytes(b'{"schema_'), "manifest.json"),
        (lambda run: tip_file(run, "manifest.json").unlink(), "manifest.json"),
        (lambda run: flip_a_byte(run.path(f"{run.head.retained[0].path}/ckpt.index")), "ckpt.index"),
        (lambda run: run.path("log/00000002.json").write_bytes(b'{"number": 2'), "log/00000002.json"),
        (lambda run: run.path("log/00000002.json").unlink(), "log/00000002.json"),
        (lambda run: run.path("log/00000000.json").unlink(), "log/00000000.json"),
        (lambda run: run.path("log/00000004.json").write_bytes(b""), "log/00000004.json"),
        (
            lambda run: edit(run.path("log/00000003.json"), lambda entry: entry["head"].update(commits=9)),
            "log/00000003.json",
        ),
        (lambda run: edit(run.path("log/00000003.json"), lambda entry: entry.update(number=4)), "log/00000003.json"),
        (
            lambda run: edit(run.path("log/00000003.json"), lambda entry: entry["body"]["checkpoint"].update(size=1)),
            "log/00000003.json",
        ),
        (
            lambda run: flip_a_byte(run.root.root / DATASET / "train-00000.tfrecord"),
            f"{DATASET}/train-00000.tfrecord",
        ),
        (lambda run: in_place_of(run.path("log/00000004.json"), "folder"), "log/00000004.json"),
        (lambda run: in_place_of(run.path("log/00000004.json"), "link"), "log/00000004.json"),
        (lambda run: in_place_of(run.path("log/00000005.json"), "folder"), "log/00000005.json"),
        (lambda run: in_place_of(run.path("log/00000002.json"), "folder"), "log/00000002.json"),
        *(
            (lambda run, path=path, what=what: in_place_of(run.path(path.replace("TIP", run.tip.path)), what), path)
            for path in (
                "log/00000002.json",
                "log/00000004.json",
                "TIP/ckpt.index",
                "TIP/manifest.json",
                f"../{DATASET}/manifest.json",
            )
            for what in ("link out", "pipe")
        ),
        (lambda run: in_place_of(tip_file(run, "ckpt.index"), "folder"), "ckpt.index"),
        (lambda run: in_place_of(tip_file(run, "ckpt.index"), "link"), "ckpt.index"),
        (lambda run: in_place_of(tip_file(run, "ckpt.index").parent, "file"), "manifest.json"),
        (lambda run: in_place_of(run.root.root / DATASET / "manifest.json", "folder"), f"{DATASET}/manifest.json"),
        (lambda run: (run.root.root / DATASET / "manifest.json").write_bytes(b"\xef\xbb\xbf{}"), "manifest.json"),
        (lambda run: (run.root.root / DATASET / "manifest.json").unlink(), f"{DATASET}/manifest.json"),
        (
            lambda run: edit(run.root.root / DATASET / "manifest.json", lambda it: it.update(content_digest="d" * 64)),
            f"{DATASET}/manifest.json",
        ),
    ],
)
def test_damage_is_found_and_named(
    run: FakeRun, capsys: pytest.CaptureFixture[str], harm: Callable[[FakeRun], object], named: str
) -> None:
    harm(run)
    code, found = verify(run, capsys)
    assert code == 4
    assert not found["ok"]
    name = named.removeprefix("TIP/").removeprefix("../")
    assert any(damage["file"].endswith(name) and name in damage["what"] for damage in found["damages"]), found


def run_with_code(folder: Path) -> tuple[FakeRun, Path]:
    """A run whose identity names saved code, and the file of that code."""
    data = b'{"format": 1, "files": []}'
    run = FakeRun(folder, identity={SAVED_CODE: saved_code_path(data)}).train(100)
    run.home.write(saved_code_path(data), data)
    return run, run.path(saved_code_path(data))


def test_saved_code_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, file = run_with_code(tmp_path)
    code, found = verify(run, capsys)
    assert (code, found["files"]) == (0, 2 * 2 + 2 + 1)
    for harm, words in ((lambda: flip_a_byte(file), "does not have the digest in its name"), (file.unlink, "names it")):
        harm()
        code, found = verify(run, capsys)
        assert (code, [each["file"] for each in found["damages"]]) == (4, [f"code/{file.name}"])
        assert words in found["damages"][0]["what"]
        assert "--run-file FILE" in found["damages"][0]["what"]


@pytest.mark.parametrize("verb", ["verify", "fork"])
def test_a_file_that_is_too_large_is_not_read(
    run: FakeRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    shard = run.root.root / DATASET / "train-00000.tfrecord"
    for file in (tip_file(run, "ckpt.index"), shard):
        with file.open("r+b") as sparse:
            sparse.truncate(10 << 30)

    read, real = [], LocalStorage.checksum

    def checksum(storage: LocalStorage, path: str, **options: Any) -> Any:
        read.append(path)
        return real(storage, path, **options)

    monkeypatch.setattr(LocalStorage, "checksum", checksum)
    monkeypatch.setattr(LocalStorage, "stat", lambda _, path: read.append(path))
    assert main([verb, run.address, *(["--as", "new"] if verb == "fork" else [])]) == 4
    printed = capsys.readouterr()
    assert "ckpt.index has 10737418240 bytes" in printed.out + printed.err
    assert verb == "fork" or "train-00000.tfrecord has 10737418240 bytes" in printed.out
    large = {f"{run.tip.path}/ckpt.index", shard.name}
    assert not [path for path in read if path in large or (verb == "fork" and path.endswith("ckpt.index"))]


def test_each_damaged_file_is_named(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("ckpt.index", "ckpt.data-00000-of-00001"):
        flip_a_byte(tip_file(run, name))
    tip_file(run, "manifest.json").parent.joinpath("foreign").write_text("not in the manifest: ignored")
    flip_a_byte(run.path(f"{run.head.retained[1].path}/ckpt.index"))
    assert main(["verify", run.address]) == 4
    out = capsys.readouterr().out
    assert len(re.findall(r"^damaged: ", out, re.MULTILINE)) == 3
    for path in (f"{run.tip.path}/ckpt.index", f"{run.tip.path}/ckpt.data", f"{run.head.retained[1].path}/ckpt.index"):
        assert f"damaged: {run.address}/{path}" in out


def test_later_checkpoints_are_verified_after_a_lost_entry(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    flip_a_byte(tip_file(run, "ckpt.index"))
    run.path("log/00000002.json").unlink()
    run.path("log/HINT").unlink()
    _, found = verify(run, capsys)
    assert {damage["file"] for damage in found["damages"]} == {
        "log/00000002.json",
        f"{last_retained_path(run)}/ckpt.index",
    }


def last_retained_path(run: FakeRun) -> str:
    return run.log.entry(4).head.retained[-1].path


def test_files_that_no_entry_names_are_ignored(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.path("checkpoints/00000999-00000000-abc/ckpt.index").parent.mkdir()
    run.path("checkpoints/00000999-00000000-abc/ckpt.index").write_text("unfinished")
    run.path("checkpoints/checkpoint").write_text("model_checkpoint_path: elsewhere")
    run.path("log/.unfinished-x").write_text("half an en")
    run.path("log/HINT").write_text("4711")
    code, found = verify(run, capsys)
    assert (code, found["entries"], found["checkpoints"]) == (0, 5, 4)


def test_retired_and_quarantined_checkpoints_are_not_read(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.retire(keep_last=2)
    tip = run.tip
    flip_a_byte(tip_file(run, "ckpt.index"))
    quarantine(run.log, tip, "flipped", attempt="q" * 32)
    code, found = verify(run, capsys)
    assert (code, found["checkpoints"], found["quarantined"]) == (0, 1, 1)


def test_a_checkpoint_retired_during_verify_is_not_damage(
    run: FakeRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    oldest, real = run.head.retained[0], LocalStorage.checksum

    def checksum(storage: LocalStorage, path: str, **options: Any) -> Any:
        if path.startswith(oldest.path) and oldest in run.head.retained:
            run.retire(keep_last=3)
            run.home.delete(oldest.path)
        return real(storage, path, **options)

    monkeypatch.setattr(LocalStorage, "checksum", checksum)
    assert main(["verify", run.address, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoints"] == 3


def test_a_single_bad_read_is_not_damage(
    run: FakeRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, wrong = LocalStorage.checksum, []

    def checksum(storage: LocalStorage, path: str, **options: Any) -> Any:
        stored = real(storage, path, **options)
        if path.endswith("ckpt.index") and not wrong:
            wrong.append(path)
            return stored.model_copy(update={"crc32c": "00000000"})
        return stored

    monkeypatch.setattr(LocalStorage, "checksum", checksum)
    code, _ = verify(run, capsys)
    assert wrong
    assert code == 0


def test_damaged_checkpoints_but_the_tip_are_quarantined_if_asked(run: FakeRun) -> None:
    run.train(400)
    _, older, tip = run.head.retained[-3:]
    for ref in (older, tip):
        flip_a_byte(run.path(f"{ref.path}/ckpt.index"))
    base = run.head.base
    opened = open_run(run.address, None)
    assert len(verify_home(opened).damages) == 2
    assert run.head.quarantined == ()
    found = {each.file: each.what for each in verify_home(opened, quarantine=True).damages}
    assert found[f"{older.path}/ckpt.index"].endswith("; the checkpoint is quarantined now")
    assert "quarantined" not in found[f"{tip.path}/ckpt.index"]
    assert (run.head.quarantined, run.head.tip, run.head.base) == ((older,), tip, base)


def test_checkpoints_that_are_kept_for_good_are_read(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (400, 500):
        run.train(step)
        apply_retention(run.log, [KeepLast(1), KeepEvery(200)], attempt="keeper")
    assert [ref.step for ref in run.head.retained] == [500]
    assert run.head.kept_for_good == 3
    code, found = verify(run, capsys)
    assert (code, found["checkpoints"]) == (0, 4)
    kept = next(folder for folder in run.path("checkpoints").iterdir() if folder.name.startswith("00000200"))
    flip_a_byte(kept / "ckpt.index")
    code, found = verify(run, capsys)
    assert (code, [each["file"] for each in found["damages"]]) == (4, [f"checkpoints/{kept.name}/ckpt.index"])
