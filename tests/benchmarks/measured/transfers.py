"""Parallel upload and download of files: Baton against google-cloud-storage's transfer_manager.

`transfers.py [--rounds 5] [--files 8] [--megabytes 64]`

Both use the same fake server in another process, in turns. The values are its time over Baton's, so above 1 Baton
is faster. transfer_manager runs with processes and with threads, and the better counts. The server computes no md5,
which would take most of the time for both.
"""

import argparse
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("NO_GCE_CHECK", "true")
warnings.simplefilter("ignore")

from tests.fakes.gcs.server import fake_gcs_process  # noqa: E402


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--megabytes", type=int, default=64)
    options = parser.parse_args()
    names = [f"part-{number}" for number in range(options.files)]
    with fake_gcs_process(("bucket",)) as server, tempfile.TemporaryDirectory() as name:
        os.environ["STORAGE_EMULATOR_HOST"] = server.url
        folder = Path(name)
        out = folder / "out"
        out.mkdir()
        for file in names:
            (folder / file).write_bytes(os.urandom(options.megabytes << 20))
        directions = ("upload", "download")
        for round_ in range(options.rounds + 1):
            ours, theirs = _ours(folder, out, names), _theirs(server.url, folder, out, names)
            if round_ == 0:
                continue  # the first round also connects and imports
            for direction, pair in zip(directions, zip(ours, theirs, strict=True), strict=True):
                sys.stdout.write(f"value {direction} = {pair[1] / pair[0]}\n")
                sys.stdout.flush()


def _ours(folder: Path, out: Path, names: list[str]) -> tuple[float, float]:
    from baton.tasks.foundation.storage.opening import open_storage
    from baton.tasks.foundation.storage.transfers import parallel_map

    store = open_storage("gs://bucket/ours", relative_to=folder)
    up = seconds(lambda: parallel_map(lambda file: store.upload(folder / file, file), names, workers=store.transfers))
    down = seconds(lambda: parallel_map(lambda file: store.download(file, out / file), names, workers=store.transfers))
    return up, down


def _theirs(url: str, folder: Path, out: Path, names: list[str]) -> tuple[float, float]:
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage
    from google.cloud.storage import transfer_manager

    client = storage.Client(project="project", credentials=AnonymousCredentials(), client_options={"api_endpoint": url})
    bucket = client.bucket("bucket")
    ups, downs = [], []
    for worker in ("process", "thread"):
        how = {"worker_type": worker, "max_workers": 8, "raise_exception": True}
        ups.append(
            seconds(
                lambda how=how: transfer_manager.upload_many_from_filenames(
                    bucket, names, source_directory=str(folder), blob_name_prefix="theirs/", **how
                )
            )
        )
        blobs = [f"theirs/{name}" for name in names]
        downs.append(
            seconds(
                lambda how=how, blobs=blobs: transfer_manager.download_many_to_path(
                    bucket, blobs, destination_directory=str(out), **how
                )
            )
        )
    return min(ups), min(downs)


if __name__ == "__main__":
    main()
