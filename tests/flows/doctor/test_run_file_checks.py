"""The checks that need the run file and the storage only, and how checks follow each other."""

from pathlib import Path

import pytest

from baton.flows.doctor.run_file_checks import (
    Checks,
    Finding,
    check_accelerator,
    check_batch,
    check_preflight,
    check_storage,
)
from baton.flows.opened_run import storage_of
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.errors import IdentityChanged
from baton.tasks.foundation.machine.tpu import TpuType
from tests.fakes.gcs.server import FakeGcs
from tests.support.fake_run import FakeRun
from tests.support.faulty_runs import SLICE, V5E, load_faulty_run, make_run


@pytest.mark.parametrize(
    ("batch", "verdict", "words"),
    [
        (64, "pass", "64 examples over 8 replicas: 8 each"),
        (16, "warn", "2 each; a TPU computes in tiles of 8 x 128 and pads them to 8"),
    ],
)
def test_tpu_padding_of_batch_is_reported(batch: int, verdict: str, words: str, tmp_path: Path) -> None:
    run = load_faulty_run(tmp_path, f"train.global_batch_size={batch}")
    found = check_batch(run, check_accelerator(run, V5E).value)
    assert found.verdict == verdict
    assert words in found.text


def test_cpu_replicas_come_from_run_file(tmp_path: Path) -> None:
    run = load_faulty_run(tmp_path, "accelerator.kind=cpu", "accelerator.replicas=4")
    target = check_accelerator(run, None).value
    assert (target.replicas, target.is_tpu) == (4, False)
    assert check_batch(run, target).text == "64 examples over 4 replicas: 16 each"
    named = check_accelerator(run, V5E)
    assert (named.verdict, named.value.replicas) == ("warn", 8)
    assert "kind: cpu" in named.text


def test_micro_batches_are_named(tmp_path: Path) -> None:
    run = load_faulty_run(tmp_path, "accelerator.kind=cpu", "train.accumulate=2")
    text = check_batch(run, check_accelerator(run, None).value).text
    assert text == "64 examples over 1 replica: 64 each, in 2 micro-batches of 32"


def test_slice_passes_with_its_number_of_hosts(tmp_path: Path) -> None:
    run = load_faulty_run(tmp_path)
    found = check_accelerator(run, SLICE)
    assert (found.verdict, found.value.replicas, found.value.has_servers) == ("pass", 16, True)
    assert "16 replicas of 16.0 GB, 4 hosts" in found.text
    assert "--set accelerator.kind=tpu --set accelerator.tpu=slice" in found.remedy
    assert check_batch(run, found.value).verdict == "warn"
    assert not check_accelerator(run, V5E).value.has_servers


@pytest.mark.parametrize("tpu", [SLICE, None])
def test_run_file_that_names_servers_is_for_them(tpu: TpuType | None, tmp_path: Path) -> None:
    run = load_faulty_run(tmp_path, "accelerator.kind=tpu", "accelerator.tpu=grpc://a:8470,grpc://b:8470")
    found = check_accelerator(run, tpu)
    assert (found.verdict, found.value.has_servers) == ("pass", True)
    assert "accelerator.tpu=slice" not in found.remedy


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.cache=memory", "data.cache: memory"),
        ("storage=memory://runs", "storage memory://runs"),
        ("stages.train_segment=train-segment/docker", "drop stages.train_segment"),
        ("accelerator={kind: cpu, replicas: 4}", "replicas: 4 needs kind: cpu"),
    ],
)
def test_what_a_slice_refuses_fails_for_its_type_only(override: str, words: str, tmp_path: Path) -> None:
    run = load_faulty_run(tmp_path, override)
    found = check_accelerator(run, SLICE, [override])
    assert (found.verdict, found.value.replicas) == ("fail", 16)
    assert words in found.text
    assert check_accelerator(run, V5E, [override]).verdict != "fail"


def test_preflight_of_existing_run(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path).train(100)
    (tmp_path / "model.py").write_text("def build_model(): ...", encoding="utf-8")
    before = fake.files()
    run = load_run_file(fake.run_file())
    assert check_preflight(run, storage_of(run)).text == "baton run would continue from step 100"
    other = load_run_file(fake.run_file(), ["train.seed=1"])
    with pytest.raises(IdentityChanged, match=r"train\.seed"):
        check_preflight(other, storage_of(other))
    assert fake.files() == before


def test_exception_in_a_check_becomes_its_finding() -> None:
    reported: list[Finding] = []
    checks = Checks(reported.append)

    def crash() -> Finding:
        raise ZeroDivisionError("by zero")

    first = checks.run("first", crash)
    checks.run("second", crash, first)
    checks.run("third", lambda: Finding(verdict="pass", text="fine"))
    assert [(each.check, each.verdict) for each in reported] == [
        ("first", "fail"),
        ("second", "skipped"),
        ("third", "pass"),
    ]
    assert "ZeroDivisionError: by zero" in reported[0].text
    assert reported[1].text == "needs first, which did not pass"
    assert checks.failed


@pytest.mark.parametrize(
    ("denied", "expected"),
    [
        (["storage.objects.create"], "no permission to create objects"),
        (["storage.objects.delete"], "no permission to delete or replace objects"),
        ([], "wrote, read and deleted a file"),
    ],
)
def test_bucket_permissions_are_checked(cloud: FakeGcs, denied: list[str], expected: str, tmp_path: Path) -> None:
    cloud.store.set_bucket("bucket", denied=denied)
    run = load_run_file(make_run(tmp_path / "run"), ["storage=gs://bucket/team"])
    checks = Checks(lambda _: None)
    found = checks.run("storage", lambda: check_storage(run))
    assert found.verdict == ("fail" if denied else "pass")
    assert expected in found.text
    left = cloud.store.names("bucket")
    assert len(left) == ("storage.objects.delete" in denied)
    assert all(name.startswith("team/.probe-") for name in left)
