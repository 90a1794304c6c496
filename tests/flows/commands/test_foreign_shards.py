"""A dataset's manifest may come from a stranger: it does not decide which files, devices and buckets are read."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import yaml
from pyarrow import parquet

from baton.flows.commands.main import main
from baton.tasks.foundation.contracts.stage_calls import PrepareDataCall
from baton.tasks.foundation.dataset.manifest import manifest_path
from baton.tasks.foundation.errors import DamagedDataset
from baton.tasks.foundation.stage import Place
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.prepare_data.sources.source_files import names_file
from baton.tasks.prepare_data.stage import prepare_data
from tests.fakes.gcs.server import FakeGcs
from tests.support.event_recorder import EventRecorder
from tests.support.fake_run import DATASET, FakeRun
from tests.support.hostile_homes import KINDS, HostileHome
from tests.support.lab import spec_of
from tests.support.light_verbs import run_light_verbs
from tests.support.tfrecords import PLAIN, file_of, record

# What a manifest names as a shard -> whether `verify` says that it was not read; otherwise the name itself is refused.
FOREIGN: dict[str, tuple[Callable[[Path], str], bool]] = {
    "file": (lambda around: f"{around}/victim/.bashrc", True),
    "address of a file": (lambda around: f"file://{around}/victim/.bashrc", True),
    "path around": (lambda around: f"{around}/storage/../victim/.bashrc", True),
    "folder": (lambda around: f"{around}/victim", True),
    "pipe": (lambda around: f"{around}/pipe", True),
    "device": (lambda _: "/dev/zero", True),
    "address of a device": (lambda _: "file:///dev/zero", True),
    "environment": (lambda _: "/proc/self/environ", True),
    "bucket": (lambda _: "gs://other/secret.tfrecord", True),
    "unknown store": (lambda _: "s3://other/secret.tfrecord", True),
    "path up": (lambda _: "../../../victim/.bashrc", False),
    "link out of the folder": (lambda around: linked(around / "storage/runs" / DATASET, around / "victim"), False),
}  # fmt: skip


def linked(folder: Path, target: Path) -> str:
    (folder / "shard-of-mine.tfrecord").symlink_to(target / ".bashrc")
    return "shard-of-mine.tfrecord"


def test_verify_reads_nothing_that_only_a_manifest_names(tmp_path: Path, cloud: FakeGcs) -> None:
    homes = {}
    for number, (kind, (path, _)) in enumerate(FOREIGN.items()):
        around = tmp_path / str(number)
        home = homes[kind] = HostileHome(around)
        os.mkfifo(around / "pipe")
        manifest = home.json_of(KINDS["dataset"])
        for shard in manifest["train"]:
            shard["path"] = path(around)
        home.spoil_files({KINDS["dataset"]: manifest})
    cloud.reset_counters()
    watched = [tmp_path, "/dev/zero", "/proc/self/environ"]
    outcomes = run_light_verbs([home.run.address for home in homes.values()], watched=watched)
    assert cloud.counts.total() == 0
    told = "not read: 1 shard in files outside of the storage; baton verify FILE reads those that the run file names"
    for (kind, home), done in zip(homes.items(), outcomes, strict=True):
        _, is_told = FOREIGN[kind]
        assert [each for each in done.opened if not each.startswith(str(home.storage.parent))] == [], kind
        assert set(done.codes.values()) <= {0, 2, 4}, (kind, done.codes)
        assert "Traceback" not in "".join(done.printed.values()), kind
        assert (told in done.printed["verify"]) == is_told, (kind, done.printed["verify"])
        assert done.codes["verify"] != 0 or is_told, kind


def test_verify_by_a_run_file_reads_the_files_that_it_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = spec_of("build", run="digits", storage=str(tmp_path / "runs"), data={"source": "tfrecord", "options": PLAIN})
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "a").write_bytes(file_of([record(number) for number in range(8)], tmp_path))
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(spec.model_dump(mode="json", exclude_defaults=True)))
    root = LocalStorage(tmp_path / "runs")
    place = Place.of(root, "digits", code_folder=tmp_path, telemetry=EventRecorder())
    ref = prepare_data(PrepareDataCall(spec=spec), place)
    run = FakeRun(tmp_path, identity={"data.folder": ref.folder, "data.content_digest": ref.content_digest})
    assert main(["verify", run.address, "--json"]) == 0
    without = json.loads(capsys.readouterr().out)
    assert main(["verify", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (without["not_read"], found["not_read"], found["files"] - without["files"]) == (1, 0, 1)
    manifest = tmp_path / "runs" / manifest_path(ref.folder)
    elsewhere = shutil.copytree(tmp_path / "records", tmp_path / "elsewhere")
    manifest.write_text(manifest.read_text().replace(f"{tmp_path}/records/", f"{elsewhere}/"))
    assert main(["verify", str(file)]) == 4
    assert f"{elsewhere}/a is outside of the storage, and data.options.path does not name it" in capsys.readouterr().out
    with pytest.raises(DamagedDataset, match=r"elsewhere/a, which is outside of the storage and not named by"):
        prepare_data(PrepareDataCall(spec=spec), place)


def test_verify_reads_the_footer_of_a_file_in_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = {"source": "table", "options": {"path": "a.parquet", "x": "x", "y": "y"}, "validation_fraction": 0.5}
    spec = spec_of("build", run="digits", storage=str(tmp_path / "runs"), data=data)
    rows = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"x": [0.5] * 8, "y": range(8)}), rows, row_group_size=4)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(spec.model_dump(mode="json", exclude_defaults=True)))
    place = Place.of(LocalStorage(tmp_path / "runs"), "digits", code_folder=tmp_path, telemetry=EventRecorder())
    ref = prepare_data(PrepareDataCall(spec=spec), place)
    FakeRun(tmp_path, identity={"data.folder": ref.folder, "data.content_digest": ref.content_digest})
    assert main(["verify", str(file)]) == 0
    content = bytearray(rows.read_bytes())
    content[-20] ^= 1
    rows.write_bytes(content)
    capsys.readouterr()
    assert main(["verify", str(file)]) == 4
    assert f"{rows}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "uri", "is_named"),
    [
        ("records", "/code/records/a.tfrecord", True),
        ("records", "/code/records/deep/a.tfrecord", True),
        ("records/", "/code/records/a.tfrecord", True),
        ("records", "/code/records", True),
        ("records", "/code/records2/a.tfrecord", False),
        ("records", "/code/records/../../etc/passwd", False),
        ("records", "/code/records//etc/passwd", False),
        ("records", "/etc/passwd", False),
        ("../data", "/code/../data/a.tfrecord", True),
        ("../data", "/data/a.tfrecord", False),  # a manifest has the path as the run file gives it
        ("records/*.tfrecord", "/code/records/a.tfrecord", True),
        ("records/*.tfrecord", "/code/records/deep/a.tfrecord", False),
        ("records/**/*.tfrecord", "/code/records/deep/a.tfrecord", True),
        ("records/*.tfrecord", "/code/records/a.txt", False),
        ("records/*.tfrecord", "/code/records/../a.tfrecord", False),
        ("/data/a-[0-9].tfrecord", "/data/a-7.tfrecord", True),
        ("file:///data", "/data/a.tfrecord", True),
        ("records", "file:///code/records/a.tfrecord", False),
        ("gs://bucket/train", "gs://bucket/train/a.tfrecord", True),
        ("gs://bucket/train/", "gs://bucket/train/a.tfrecord", True),
        ("gs://bucket/train/*", "gs://bucket/train/a.tfrecord", True),
        ("gs://bucket/train", "gs://bucket/training/a.tfrecord", False),
        ("gs://bucket/train", "gs://other/train/a.tfrecord", False),
        ("gs://bucket/*", "gs://bucket/a/b.tfrecord", False),
    ],
)
def test_a_run_file_names_files_by_folder_pattern_or_address(path: str, uri: str, *, is_named: bool) -> None:
    assert names_file(path, Path("/code"), uri) == is_named
