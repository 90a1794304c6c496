"""Upload and download of 8 files of 64 MB side by side: Baton's gs:// against google-cloud-storage's transfer_manager.

`python -m tests.benchmarks.cloud_transfers [--rounds 5] [--files 8] [--megabytes 64]`

Both against the same fake server in a process of its own, in turns within one run; the ratios are theirs to ours, so
above 1 Baton is the faster one. transfer_manager is measured with its processes and with threads, and the better of
the two counts. The server computes no md5: that would be most of the time, and is the same for all.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("NO_GCE_CHECK", "true")
warnings.simplefilter("ignore")

from tests.fakes.gcs.fake_gcs import fake_gcs_process  # noqa: E402 - its folder is on the path now


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
    with fake_gcs_process(("bucket",), "--no-md5") as server, tempfile.TemporaryDirectory() as name:
        os.environ["STORAGE_EMULATOR_HOST"] = server.url
        folder = Path(name)
        out = folder / "out"
        out.mkdir()
        for file in names:
            (folder / file).write_bytes(os.urandom(options.megabytes << 20))
        ratios: dict[str, list[float]] = {"upload": [], "download": []}
        for round_ in range(options.rounds + 1):
            ours, theirs = _ours(folder, out, names), _theirs(server.url, folder, out, names)
            if round_ == 0:
                continue  # connections, imports
            for way, pair in zip(ratios, zip(ours, theirs, strict=True), strict=True):
                ratios[way].append(pair[1] / pair[0])
            told = (f"{a:.2f} s against {b:.2f} s" for a, b in zip(ours, theirs, strict=True))
            sys.stdout.write("upload {}, download {}\n".format(*told))
        for way, found in ratios.items():
            low, middle, high = min(found), statistics.median(found), max(found)
            sys.stdout.write(
                f"{way}: transfer_manager / Baton = {low:.2f} / {middle:.2f} / {high:.2f} (min/median/max)\n"
            )


def _ours(folder: Path, out: Path, names: list[str]) -> tuple[float, float]:
    from tasks.foundation.storage.download import side_by_side
    from tasks.foundation.storage.opening import open_storage

    store = open_storage("gs://bucket/ours", relative_to=folder)
    up = seconds(lambda: side_by_side(lambda file: store.upload(folder / file, file), names, workers=store.transfers))
    down = seconds(lambda: side_by_side(lambda file: store.download(file, out / file), names, workers=store.transfers))
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
