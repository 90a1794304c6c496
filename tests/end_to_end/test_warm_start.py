"""A run from pretrained weights, some of them frozen, on two replicas: straight and cut in two."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.flows.commands.main import main
from baton.tasks.foundation.contracts.log_entry import Commit
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.local import LocalStorage
from tests.support import forked
from tests.support.shipped_runs import DRIVER

pytestmark = pytest.mark.slow

FILES = {
    "data.py": (
        "import numpy as np\n\n\ndef load():\n    draw = np.random.default_rng(0)\n    for i in range(120):\n"
        "        yield draw.normal(size=6).astype(np.float32), i % 3\n"
    ),
    "model.py": (
        "import keras\n\n\ndef build_model():\n    x = keras.Input((6,))\n"
        "    y = keras.layers.Dense(8, name='first')(x)\n"
        "    y = keras.layers.BatchNormalization(name='norm')(y)\n"
        "    y = keras.layers.Dropout(0.3)(keras.layers.Dense(8, activation='relu', name='second')(y))\n"
        "    model = keras.Model(x, keras.layers.Dense(3, name='head')(y))\n"
        "    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)\n"
        "    model.compile(keras.optimizers.Adam(0.01), loss, metrics=['accuracy'])\n    return model\n"
    ),
    "weights.py": (
        "from pathlib import Path\n\nimport numpy as np\n\n\ndef load():\n"
        "    return dict(np.load(Path(__file__).with_name('weights.npz')))\n"
    ),
    "run.yaml": (
        "run: warm\nstorage: ./runs\ndata: {source: data.py:load, validation_fraction: 0}\n"
        "model: model.py:build_model\n"
        "train: {steps: 12, segment_steps: 4, global_batch_size: 16, log_every_steps: 5}\n"
        "init:\n  weights: {source: weights.py:load, exclude: head}\n  freeze: [first, norm]\n"
        "accelerator: {kind: cpu, replicas: 2}\n"
    ),
}
KEPT = {
    "first/kernel": (6, 8),
    "first/bias": (8,),
    "norm/gamma": (8,),
    "norm/beta": (8,),
    "norm/moving_mean": (8,),
    "norm/moving_variance": (8,),
    "second/kernel": (8, 8),
    "second/bias": (8,),
}


def relay(folder: Path, *words: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """Train the run file without Prefect in another process; returns its result and its standard error."""
    done = forked.run(
        [sys.executable, str(DRIVER), str(folder / "run.yaml"), *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == code, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}, done.stderr


def test_cut_warm_start_ends_with_the_same_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = np.random.default_rng(1)
    kept = {path: draw.uniform(0.1, 1, size=shape).astype(np.float32) for path, shape in KEPT.items()}
    for name in ("straight", "cut"):
        folder = tmp_path / name
        folder.mkdir()
        for file, content in FILES.items():
            (folder / file).write_text(content)
        np.savez(folder / "weights.npz", **kept)
    whole, output = relay(tmp_path / "straight")
    assert "loaded 8 variables from weights.py:load (a function)" in " ".join(output.split())
    assert "keep their initial values: 2 variables: head/kernel, head/bias" in " ".join(output.split())
    assert main(["status", str(tmp_path / "straight" / "runs" / "warm"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [source["variables"] for source in facts["initialized_from"]] == [8]

    cut = tmp_path / "cut"
    stopped, _ = relay(cut, "--max-segments", "1", code=3)
    assert stopped["step"] == 4
    (cut / "weights.py").unlink()
    (cut / "weights.npz").unlink()
    resumed, output = relay(cut)
    assert "loaded" not in output
    assert resumed["state_digest"] == whole["state_digest"]

    home = LocalStorage(cut / "runs" / "warm")
    log = RunLog(home)
    commit = log.entry(1).body
    assert isinstance(commit, Commit)
    assert commit.initialized_from is not None
    assert set(commit.initialized_from.sources[0].loaded) == set(kept)
    assert commit.initialized_from.left == ("head/kernel", "head/bias")

    import tensorflow as tf

    tip = log.require_head().tip
    assert tip is not None
    reader = tf.train.load_checkpoint(str(home.root / tip.path / "ckpt"))
    for path, value in kept.items():
        place = f"model/{path}/replica_1" if "moving" in path else f"model/{path}"
        now = reader.get_tensor(f"{place}/.ATTRIBUTES/VARIABLE_VALUE")
        assert np.array_equal(now, value) == (not path.startswith("second")), path


def test_missing_weights_are_refused_before_tensorflow_loads(tmp_path: Path) -> None:
    for file, content in FILES.items():
        (tmp_path / file).write_text(content)
    code = (
        "import sys; from baton.flows.commands.main import main; "
        "code = main(['run', 'run.yaml', '--set', 'init.weights=pretrained.keras']); "
        "assert 'tensorflow' not in sys.modules and 'prefect' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "does not exist" in done.stderr
    assert not (tmp_path / "runs").exists()
