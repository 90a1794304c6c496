"""Runs real processes on the shipped run files and reads their checkpoints without Baton's own digest."""

import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked
from tests.support.prefect_server import running_server
from tests.support.shipped_runs import DRIVER, Finished, run_file, settings


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The API's URL of a Prefect server that the tests of this process share."""
    with running_server(tmp_path_factory.mktemp("prefect-server")) as url:
        yield url


@pytest.fixture(scope="session")
def train_without_prefect() -> Callable[..., Finished]:
    """Runs a shortened shipped run file through the real stages without Prefect, in another process."""

    def run(
        name: str,
        storage: Path,
        *options: str,
        replicas: int = 1,
        extra: Sequence[str] = (),
        code: int | None = 0,
        file: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Finished:
        command = [sys.executable, str(DRIVER), str(file or run_file(name))]
        command += settings(name, storage, replicas=replicas, extra=extra)
        env = {**os.environ, **(environment or {})}
        done = forked.run([*command, *options], capture_output=True, text=True, timeout=600, check=False, env=env)
        if code is not None:
            assert done.returncode in ({0, 3} if code == 0 else {code}), done.stderr[-3000:]
        lines = done.stdout.splitlines()
        result = json.loads(lines[-1]) if done.returncode in {0, 3} and lines else {}
        return Finished(code=done.returncode, result=result, stdout=done.stdout, stderr=done.stderr)

    return run


@pytest.fixture(scope="session")
def straight_digits(
    train_without_prefect: Callable[..., Finished], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The result of the digits in one segment, with the settings of `SHORT`: for comparisons, its home is not changed.

    All processes of the tests share it: the first one that asks trains it, and the others wait.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "straight-digits"
    folder.mkdir(exist_ok=True)
    file = folder / "result.json"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            done = train_without_prefect("digits", folder / "runs", extra=["train.segment_steps=1000"], code=0)
            file.write_text(json.dumps(done.result), encoding="utf-8")
    return dict(json.loads(file.read_text(encoding="utf-8")))


@pytest.fixture(scope="session")
def stored_bytes() -> Callable[[str], dict[str, tuple[str, tuple[int, ...], bytes]]]:
    """Reads every variable of a checkpoint with TensorFlow alone."""

    def read(checkpoint: str) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
        import tensorflow as tf

        reader = tf.train.load_checkpoint(f"{checkpoint}/ckpt")
        names = [name for name in reader.get_variable_to_shape_map() if name != "_CHECKPOINTABLE_OBJECT_GRAPH"]
        values = {name: reader.get_tensor(name) for name in names}
        return {name: (str(value.dtype), value.shape, value.tobytes()) for name, value in values.items()}

    return read
