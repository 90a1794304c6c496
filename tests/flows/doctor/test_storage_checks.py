"""The check of the storage."""

from pathlib import Path

import pytest

from flows.doctor.run_file_checks import Checks, check_storage
from tasks.foundation.contracts.run_file import load_run_file
from tests.fakes.gcs.server import FakeGcs
from tests.support.faulty_runs import make_run


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
