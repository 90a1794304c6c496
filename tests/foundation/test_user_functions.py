"""User functions are loaded by file with their siblings, and never shadow Baton's packages."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import baton
from baton.tasks.foundation.errors import ModelError
from baton.tasks.foundation.user_functions import USER_PACKAGE_PREFIX, load_function, require_function


@pytest.fixture(autouse=True)
def _forget_user_modules() -> Iterator[None]:
    yield
    # Only these, because importing a library such as NumPy twice breaks it.
    for name in [name for name in sys.modules if name.startswith(USER_PACKAGE_PREFIX)]:
        del sys.modules[name]


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def refusal(reference: str, folder: Path) -> str:
    with pytest.raises(ModelError) as refused:
        load_function(reference, folder)
    assert refused.value.exit_code == 2
    return str(refused.value)


def test_function_is_loaded_with_siblings(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        model="from .layers import WIDTH\nfrom . import deep\ndef build(): return WIDTH + deep.MORE",
        layers="WIDTH = 64",
        deep="from .layers import WIDTH\nMORE = WIDTH",
    )
    assert load_function("model.py:build", folder)() == 128


def test_users_modules_hide_none_of_baton(tmp_path: Path) -> None:
    model = "from .tasks import HERE\nfrom .baton import THERE\ndef build(): return HERE + THERE"
    folder = write(tmp_path, tasks="HERE = 1", flows="HERE = 2", baton="THERE = 4", model=model)
    assert load_function("model.py:build", folder)() == 5
    assert sys.modules["baton"] is baton
    assert str(folder) not in sys.path
    assert "model" not in sys.modules


def test_equal_module_names_do_not_collide(tmp_path: Path) -> None:
    one = write(tmp_path / "one", model="def build(): return 1")
    two = write(tmp_path / "two", model="def build(): return 2")
    assert (load_function("model.py:build", one)(), load_function("model.py:build", two)()) == (1, 2)


def test_file_in_subfolder_is_loaded(tmp_path: Path) -> None:
    write(tmp_path / "models", cnn="from .parts import PART\ndef build(): return PART", parts="PART = 'p'")
    assert load_function("models/cnn.py:build", tmp_path)() == "p"


def test_import_path_is_loaded(tmp_path: Path) -> None:
    assert load_function("os.path:basename", tmp_path)("a/b") == "b"


def test_module_is_executed_once(tmp_path: Path) -> None:
    folder = write(tmp_path, model="made = []\ndef build():\n    made.append(1)\n    return len(made)")
    assert [load_function("model.py:build", folder)() for _ in range(3)] == [1, 2, 3]


def test_missing_file_is_named_with_other_files(tmp_path: Path) -> None:
    folder = write(tmp_path, modell="", data="")
    message = refusal("model.py:build", folder)
    assert f"{folder / 'model.py'} does not exist" in message
    assert "its folder contains data.py, modell.py" in message
    assert "no Python files" in refusal("deep/model.py:build", folder)


def test_missing_function_is_named_with_existing_ones(tmp_path: Path) -> None:
    folder = write(tmp_path, model="def build_model(): ...\ndef _private(): ...\nbuild = 3")
    message = refusal("model.py:build", folder)
    assert "model.py has no function build; it has: build_model" in message
    assert "_private" not in message
    assert "it has: none" in refusal("model.py:build", write(tmp_path / "empty", model=""))


def test_import_error_has_message_and_line(tmp_path: Path) -> None:
    folder = write(tmp_path, model="from .layers import x", layers="\n\nraise RuntimeError('out of cheese')")
    message = refusal("model.py:build", folder)
    assert message.startswith("layers.py, line 3:\n    raise RuntimeError('out of cheese')\n")
    assert "importing it raised RuntimeError: out of cheese" in message


def test_missing_sibling_is_named(tmp_path: Path) -> None:
    message = refusal("model.py:build", write(tmp_path, model="from .layerz import x"))
    assert "layerz" in message
    assert message.startswith("model.py, line 1:\n    from .layerz import x\n")
    assert "No module named '.layerz'" in message


def test_syntax_error_has_its_line(tmp_path: Path) -> None:
    message = refusal("model.py:build", write(tmp_path, model="x = 1\ndef build(:\n    pass\n"))
    assert "SyntaxError" in message
    assert "model.py, line 2" in message


def test_failed_import_is_retried(tmp_path: Path) -> None:
    folder = write(tmp_path, model="raise RuntimeError('no')")
    refusal("model.py:build", folder)
    write(folder, model="def build(): return 'repaired, and of another length'")
    assert load_function("model.py:build", folder)().startswith("repaired")


def test_missing_module_is_refused(tmp_path: Path) -> None:
    assert "no_such_package" in refusal("no_such_package.models:build", tmp_path)


def test_module_that_exits_is_a_model_error(tmp_path: Path) -> None:
    (tmp_path / "leaving.py").write_text("raise SystemExit(0)\n")
    with pytest.raises(ModelError, match=r"leaving.py, line 1:\n.*\n.*importing it raised SystemExit: 0"):
        load_function("leaving.py:build", tmp_path)


@pytest.mark.parametrize(
    "code",
    [
        "import functools\nbuild=functools.partial(int, 3)\n",
        "class build:\n    pass\n",
        "from math import sqrt as build\n",
        "if True:\n    def build():\n        pass\n",
        "from math import *\n",
    ],
)
def test_name_that_may_be_defined_is_not_refused(tmp_path: Path, code: str) -> None:
    (tmp_path / "m.py").write_text(code)
    require_function("m.py:build", tmp_path)


def test_undefined_name_is_refused_without_import(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("def bild():\n    raise SystemExit\n")
    with pytest.raises(ModelError, match="no function build; it has: bild"):
        require_function("m.py:build", tmp_path)
