"""Real processes on real run files, and a reader of checkpoints that does not trust Baton's own digest."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked
from tests.support.prefect_server import running_server
from tests.support.shipped_runs import DRIVER, Finished, run_file, settings


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prefect server of its own on a free port of 127.0.0.1; its API's address."""
    with running_server(tmp_path_factory.mktemp("prefect-server")) as url:
        yield url


@pytest.fixture(scope="session")
def plainly() -> Callable[..., Finished]:
    """Run a shipped run file, shortened, through the real stages without Prefect, in a process of its own."""

    def run(
        name: str, storage: Path, *options: str, replicas: int = 1, extra: Sequence[str] = (), code: int | None = 0
    ) -> Finished:
        command = [sys.executable, str(DRIVER), str(run_file(name))]
        command += settings(name, storage, replicas=replicas, extra=extra)
        done = forked.run([*command, *options], capture_output=True, text=True, timeout=600, check=False)
        if code is not None:
            assert done.returncode in ({0, 3} if code == 0 else {code}), done.stderr[-3000:]
        lines = done.stdout.splitlines()
        result = json.loads(lines[-1]) if done.returncode in {0, 3} and lines else {}
        return Finished(code=done.returncode, result=result, stdout=done.stdout, stderr=done.stderr)

    return run


@pytest.fixture(scope="session")
def stored_bytes() -> Callable[[str], dict[str, tuple[str, tuple[int, ...], bytes]]]:
    """Every variable of a checkpoint as TensorFlow itself reads it."""

    def read(checkpoint: str) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
        import tensorflow as tf

        reader = tf.train.load_checkpoint(f"{checkpoint}/ckpt")
        names = [name for name in reader.get_variable_to_shape_map() if name != "_CHECKPOINTABLE_OBJECT_GRAPH"]
        values = {name: reader.get_tensor(name) for name in names}
        return {name: (str(value.dtype), value.shape, value.tobytes()) for name, value in values.items()}

    return read


@pytest.fixture(scope="session")
def told() -> Callable[[str], tuple[Any, Any]]:
    """What a run's log tells: training rows and evaluations, each by step."""
    from tasks.foundation.runlog.history import history_of
    from tasks.foundation.runlog.log import RunLog
    from tasks.foundation.storage.local import LocalStorage

    def read(home: str) -> tuple[Any, Any]:
        history = history_of(RunLog(LocalStorage(Path(home))).entries())
        rows = [(row.step, row.metrics) for row in history.rows]
        return rows, [(item.checkpoint.step, item.metrics) for item in history.evaluations]

    return read
