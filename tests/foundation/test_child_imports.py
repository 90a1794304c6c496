"""Child processes that start anew import the user's modules as their parent did."""

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.tasks.foundation.child_imports import Import, share_with_children
from tests.support.checkout import CHECKOUT

DATA = """
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np

from .parts.table import TABLE, doubled
from .parts import LATE

DRAWN = [random.random(), float(np.random.rand()), float(np.random.default_rng().random())]


def seen(number):
    return [doubled(number), DRAWN, TABLE, LATE, "tensor" "flow" in sys.modules]


def load(method):
    context = get_context(method)
    with context.Pool(2) as pool:
        first = pool.map(doubled, [1, 2])  # of a module that comes with data.py
        second = pool.map(seen, [3])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return [first, second, list(pool.map(seen, [4]))]
"""
TABLE = "import random\nTABLE = random.random()\ndef doubled(number):\n    return 2 * number, TABLE\n"
MODEL = """
import keras
import random
from multiprocessing import get_context

DRAWN = [random.random(), keras.random.uniform(()).numpy().item()]


def drawn(_):
    return DRAWN


def build():
    with get_context("spawn").Pool(1) as pool:
        return [DRAWN, *pool.map(drawn, [0])]
"""
SCRIPT = """
import json
from pathlib import Path

from baton.tasks.foundation.user_functions import load_function

if __name__ == "__main__":
    folder = Path("user").absolute()
    function = load_function("data.py:seen", folder, seed=5)
    own = function(0)[1:-1]
    found = [load_function("data.py:load", folder, seed=5)(method) for method in ("spawn", "forkserver")]
    print(json.dumps([own, found, load_function("model.py:build", folder, seed=5)()]))
"""


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """The address of a socket, such as that of a fork server, has at most 107 characters."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.slow
def test_children_import_as_their_parent(tmp_path: Path, short_folder: Path) -> None:
    parts = tmp_path / "user" / "parts"
    parts.mkdir(parents=True)
    (parts.parent / "data.py").write_text(DATA)
    (parts.parent / "tasks.py").write_text("raise RuntimeError('this is not of Baton')\n")
    (parts.parent / "model.py").write_text(MODEL)
    (parts / "__init__.py").write_text("import random\nLATE = random.random()\n")
    (parts / "table.py").write_text(TABLE)
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(CHECKOUT), "TMPDIR": str(short_folder), "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (drawn, table, late), found, (model, in_child) = json.loads(done.stdout.splitlines()[-1])
    for siblings, *seen in found:
        assert siblings == [[2, table], [4, table]]
        assert seen == [[[[6, table], drawn, table, late, False]], [[[8, table], drawn, table, late, False]]]
    assert in_child == model
    assert not list(short_folder.iterdir())


@pytest.fixture
def imports_elsewhere() -> Iterator[None]:
    """Another thread imports all the time, as Prefect's does at the start of a run."""
    ended, name, interval = threading.Event(), "module_of_this_test", sys.getswitchinterval()

    def work() -> None:
        while not ended.is_set():
            for number in range(100):
                sys.modules[f"{name}_{number}"] = sys
            for number in range(100):
                del sys.modules[f"{name}_{number}"]

    thread = threading.Thread(target=work)
    sys.setswitchinterval(1e-6)
    thread.start()
    yield
    ended.set()
    thread.join()
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("imports_elsewhere")
def test_another_thread_may_import_meanwhile(tmp_path: Path) -> None:
    began = Import(name="_baton_user_x.data", module="data.py", folder=str(tmp_path), seed=0, tensorflow=False)
    for _ in range(300):
        share_with_children("_baton_user_x", tmp_path, began)
