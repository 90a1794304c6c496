"""Uploads as many bytes as a checkpoint has with transfer_manager: `upload.py URL BYTES FILES`."""

import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

os.environ.setdefault("NO_GCE_CHECK", "true")
warnings.simplefilter("ignore")


def main() -> None:
    url, size, files = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage
    from google.cloud.storage import transfer_manager

    client = storage.Client(project="project", credentials=AnonymousCredentials(), client_options={"api_endpoint": url})
    bucket = client.bucket("bucket")
    with tempfile.TemporaryDirectory() as name:
        names = [f"part-{number}" for number in range(files)]
        for one in names:
            (Path(name) / one).write_bytes(os.urandom(size // files))
        for _ in range(2):  # the first one also connects
            began = time.perf_counter()
            transfer_manager.upload_many_from_filenames(
                bucket, names, source_directory=name, worker_type="thread", max_workers=8, raise_exception=True
            )
            sys.stdout.write(f"value seconds = {time.perf_counter() - began}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
