"""The user's own lines are found in tracebacks, in TensorFlow's messages, and below any folder."""

import sysconfig
from pathlib import Path

import numpy as np
import pytest

from baton.tasks.foundation.user_functions import load_function
from baton.tasks.foundation.user_traceback import UserFrame, is_user_file, remember_run_folder, user_frames

BATON = Path(__file__).resolve().parents[2]


def raised_by(reference: str, folder: Path) -> Exception:
    function = load_function(reference, folder)
    with pytest.raises(ValueError) as raised:
        function()
    return raised.value


def test_frames_of_siblings_are_found_innermost_last(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "model.py").write_text("from .layers import deep\ndef build(): return deep()")
    (tmp_path / "net" / "layers.py").write_text(
        "import numpy as np\ndef deep():\n    return np.concatenate([np.zeros((2, 2)), np.zeros(3)])"
    )
    fault = raised_by("net/model.py:build", tmp_path)
    assert [(frame.place(), frame.text()) for frame in user_frames(fault)][-2:] == [
        ("net/model.py, line 2, in build", "def build(): return deep()"),
        ("net/layers.py, line 3, in deep", "return np.concatenate([np.zeros((2, 2)), np.zeros(3)])"),
    ]


def test_cause_is_used_if_the_error_passed_no_user_code(tmp_path: Path) -> None:
    (tmp_path / "causing.py").write_text("def build(): raise ValueError('inner')")
    inner = raised_by("causing.py:build", tmp_path)
    outer = RuntimeError("outer")
    outer.__cause__ = inner
    assert user_frames(outer)[-1].place() == "causing.py, line 1, in build"


def test_error_outside_user_code_has_no_frames() -> None:
    assert user_frames(ValueError("never raised")) == []


def test_stack_in_a_message_is_read_from_baton_on(tmp_path: Path) -> None:
    remember_run_folder(tmp_path, tmp_path)
    caller, own = tmp_path / "notebook.py", tmp_path / "model.py"
    text = "\n".join(
        f'  File "{file}", line {line}, in {name}\n'
        for file, line, name in (
            (caller, 1, "<module>"),
            (BATON / "tasks" / "train_segment" / "loop.py", 2, "run_steps"),
            (Path(np.__file__), 3, "dot"),
            (own, 4, "call"),
        )
    )
    assert user_frames(ValueError(f"Detected at node x:\n{text}bad")) == [UserFrame(str(own), 4, "call")]


@pytest.mark.parametrize(
    ("file", "own"),
    [
        ("{root}/model.py", True),
        ("{root}/.venv/lib/python3.11/site-packages/keras/layers.py", False),
        ("/home/me/helpers.py", True),
        ("/opt/lib/python3.11/site-packages/keras/layers.py", False),
        (f"{sysconfig.get_path('stdlib')}/json/decoder.py", False),
        (f"{BATON}/tasks/train_segment/loop.py", False),
        (f"{BATON}/deploy/runs/digits/model.py", True),
        ("/scratch/__autograph_generated_file1a.py", False),
        ("<string>", False),
    ],
)
def test_only_the_users_files_are_his(tmp_path: Path, file: str, own: bool) -> None:
    remember_run_folder(tmp_path, tmp_path)
    assert is_user_file(file.format(root=tmp_path)) == own


def test_file_outside_the_run_folder_has_its_whole_path(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    remember_run_folder(tmp_path / "run", tmp_path / "run")
    assert UserFrame(str(tmp_path / "other.py"), 3, "").place() == f"{tmp_path / 'other.py'}, line 3"
    assert UserFrame(str(tmp_path / "run" / "a.py"), 3, "f").place() == "a.py, line 3, in f"
    assert UserFrame(str(tmp_path / "gone.py"), 3, "").text() == ""
