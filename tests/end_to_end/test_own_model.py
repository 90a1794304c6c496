"""The files in README.md and tasks/README.md train as they are printed there."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from baton.flows.commands.main import VERBS
from tests.support import forked
from tests.support.checkout import CHECKOUT
from tests.support.homes import read_history, tip_of
from tests.support.prefect_server import environment_with
from tests.support.shipped_runs import DRIVER

pytestmark = pytest.mark.slow

BLOCK = re.compile(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def relay(folder: Path, *words: str) -> dict[str, object]:
    command = [sys.executable, str(DRIVER), str(folder / "run.yaml"), *words]
    done = forked.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=folder)
    assert done.returncode == (3 if "--max-segments" in command else 0), done.stderr[-3000:]
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def printed(page: str) -> dict[str, str]:
    """The files that a page prints, by name."""
    return dict(BLOCK.findall((CHECKOUT / page).read_text(encoding="utf-8")))


def typed_in_the_readme() -> list[str]:
    """The lines of the block of commands that run the files of README.md."""
    readme = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    [block] = re.findall(r"^```\n(baton .*?)^```$", readme, flags=re.MULTILINE | re.DOTALL)
    return str(block).splitlines()


def test_readme_example_trains_by_its_commands(server: str, tmp_path: Path) -> None:
    files = printed("README.md")
    assert files.keys() == {"model.py", "data.py", "run.yaml"}
    for file, content in files.items():
        (tmp_path / file).write_text(content)
    environment = environment_with(tmp_path / "prefect", PREFECT_API_URL=server) | forked.forking_python()
    steps, outputs = [], []
    for line in typed_in_the_readme():
        program, *words = shlex.split(line, comments=True)
        assert program == "baton"
        command = [sys.executable, "-m", "baton.flows.commands.main", *words]
        done = forked.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        outputs.append(done.stdout)
        steps.append(tip_of(tmp_path / "runs" / "iris").step)
    assert steps == [400, 800, 800, 800]
    for output, shown in zip(outputs, ("400 of 400", "800 of 800", "800", "bit"), strict=True):
        assert shown in output
    assert dict(read_history(tmp_path / "runs" / "iris")[1])[400]["accuracy"] > 0.8


def test_comment_of_the_readme_names_verbs() -> None:
    [named] = re.findall(r"# also (.+)$", "\n".join(typed_in_the_readme()), flags=re.MULTILINE)
    assert set(named.split(", ")) <= set(VERBS)


def test_files_of_the_page_train_and_resume(tmp_path: Path) -> None:
    files = printed("tasks/README.md")
    assert files.keys() == {"model.py", "layers.py", "data.py", "run.yaml"}
    for file, content in files.items():
        (tmp_path / file).write_text(content)
    assert relay(tmp_path, "--max-segments", "2")["exit_reason"] == "max_segments"
    assert (tmp_path / "runs" / "iris" / "log" / "00000000.json").is_file()
    result = relay(tmp_path)
    assert result["step"] == 400
    assert result["metrics"]["validation_accuracy"] > 0.9  # type: ignore[index]
    export_is_told_how_to_load(tmp_path)


def export_is_told_how_to_load(folder: Path) -> None:
    """Baton has read the file back with such lines; `test_export.py` runs those that it prints."""
    command = [sys.executable, "-m", "baton.flows.commands.main", "export", "run.yaml", "--format", "keras"]
    done = forked.run([*command, "--to", "iris.keras"], capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "warning" not in done.stderr  # its layer is registered
    lines = [line.strip() for line in done.stdout.partition("load with")[2].splitlines()]
    assert lines == ["from layers import Scale", "import keras", "keras.saving.load_model('iris.keras')"]


def test_user_code_may_print_to_nobody_and_use_tensorflow(tmp_path: Path) -> None:
    """Printing to a closed pipe raises, and the first use of TensorFlow fixes its devices: here two replicas."""
    (tmp_path / "data.py").write_text(
        "import tensorflow as tf\n\n\ndef load():\n    for i in range(60):\n        print(i, flush=True)\n"
        "        yield tf.image.resize(tf.ones((4, 4, 1)) * i / 60, (8, 8)).numpy(), i % 3\n"
    )
    (tmp_path / "model.py").write_text(
        "import keras\n\n\ndef build_model():\n    print('here', flush=True)\n"
        "    model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(3)])\n"
        "    model.compile('sgd', keras.losses.SparseCategoricalCrossentropy(from_logits=True))\n    return model\n"
    )
    (tmp_path / "run.yaml").write_text(
        "run: own\nstorage: ./runs\ndata: {source: data.py:load}\nmodel: model.py:build_model\n"
        "train: {steps: 6, global_batch_size: 10, log_every_steps: 3}\naccelerator: {kind: cpu, replicas: 2}\n"
    )
    process = forked.Popen(
        [sys.executable, str(DRIVER), "run.yaml"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()
    assert process.wait(300) == 0
    assert tip_of(tmp_path / "runs" / "own").step == 6
