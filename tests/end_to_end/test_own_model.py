"""One's own model by following the README only: its files are taken from the README as they stand."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import CHECKOUT

pytestmark = pytest.mark.slow

BLOCK = re.compile(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def relay(folder: Path, *words: str) -> dict[str, object]:
    driver = Path(__file__).with_name("run_plainly.py")
    command = [sys.executable, str(driver), str(folder / "run.yaml"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=folder)
    assert done.returncode == (3 if "--max-segments" in command else 0), done.stderr[-3000:]
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_the_readme_files_train_and_resume_outside_the_checkout(tmp_path: Path) -> None:
    files = dict(BLOCK.findall((CHECKOUT / "README.md").read_text()))
    assert files.keys() == {"model.py", "layers.py", "data.py", "run.yaml"}
    results = {}
    for name in ("straight", "resumed"):
        folder = tmp_path / name
        folder.mkdir()
        for file, content in files.items():
            (folder / file).write_text(content)
        if name == "resumed":
            assert relay(folder, "--max-segments", "2")["exit_reason"] == "max_segments"
        results[name] = relay(folder)
        assert (folder / "runs" / "iris" / "log" / "00000000.json").is_file()
    assert results["straight"]["state_digest"] == results["resumed"]["state_digest"]
    assert results["straight"]["step"] == 400
    assert results["straight"]["metrics"]["validation_accuracy"] > 0.9  # type: ignore[index]


def test_a_data_function_may_use_tensorflow_before_two_replicas_are_set_up(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(
        "import tensorflow as tf\n\n\ndef load():\n    for i in range(60):\n"
        "        yield tf.image.resize(tf.ones((4, 4, 1)) * i / 60, (8, 8)).numpy(), i % 3\n"
    )
    (tmp_path / "model.py").write_text(
        "import keras\n\n\ndef build_model():\n"
        "    model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(3)])\n"
        "    model.compile('sgd', keras.losses.SparseCategoricalCrossentropy(from_logits=True))\n    return model\n"
    )
    (tmp_path / "run.yaml").write_text(
        "run: own\nstorage: ./runs\ndata: {source: data.py:load}\nmodel: model.py:build_model\n"
        "train: {steps: 6, global_batch_size: 10, log_every_steps: 3}\naccelerator: {kind: cpu, replicas: 2}\n"
    )
    assert relay(tmp_path)["step"] == 6
