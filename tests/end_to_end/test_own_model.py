"""The files in README.md and tasks/README.md train as they are printed there."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from flows.commands.main import VERBS
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
        command = [sys.executable, "-m", "flows.commands.main", *words]
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
    exported_model_loads(tmp_path / "straight")


def exported_model_loads(folder: Path) -> None:
    """Load the export with the printed lines, in the run file's folder, in a process without Baton."""
    command = [sys.executable, "-m", "flows.commands.main", "export", "run.yaml", "--format", "keras"]
    done = forked.run([*command, "--to", "iris.keras"], capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "warning" not in done.stderr  # its layer is registered
    lines = [line.strip() for line in done.stdout.partition("load with")[2].splitlines()]
    assert lines == ["from layers import Scale", "import keras", "keras.saving.load_model('iris.keras')"]
    program = "\n".join([*lines[:-1], f"print({lines[-1]}.count_params())"])
    command = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, '.')\n{program}"]
    loaded = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert loaded.returncode == 0, loaded.stderr[-3000:]
    assert loaded.stdout.splitlines()[-1] == str(4 + 4 * 32 + 32 + 32 * 3 + 3)


def test_run_continues_when_its_output_is_closed(tmp_path: Path) -> None:
    """The user's code prints too, and printing to a closed pipe raises."""
    files = printed("tasks/README.md")
    for name, print_at in (("data.py", "    for x, y in"), ("layers.py", "        return x")):
        assert print_at in files[name]
        indent = " " * (len(print_at) - len(print_at.lstrip()))
        files[name] = files[name].replace(print_at, f"{indent}print('here', flush=True)\n{print_at}")
    for file, content in files.items():
        (tmp_path / file).write_text(content)
    words = ["--set", "train.steps=20", "--set", "evaluate.every_steps=null"]
    process = forked.Popen(
        [sys.executable, str(DRIVER), "run.yaml", *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()
    assert process.wait(300) == 0
    assert max(int(path.name[:8]) for path in (tmp_path / "runs/iris/checkpoints").iterdir()) == 20


def test_data_function_may_use_tensorflow_before_two_replicas(tmp_path: Path) -> None:
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
