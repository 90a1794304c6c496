"""The lines of Python that load a `.keras` file, from its configuration."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tasks.evaluate.export import Loading
from tasks.foundation.user_code import load_function

FILES = {
    "layers.py": "class Scale: ...\nclass Shift: ...\ndef bent(x): ...\n",
    "heads.py": "from .layers import Scale, bent\nclass Head: ...\n",
}
REFERENCE = "heads.py:Head"


@dataclass(frozen=True)
class Code:
    """A folder of user code, loaded as Baton loads it."""

    folder: Path
    package: str

    def of(self, name: str, file: str = "layers", **more: Any) -> dict[str, Any]:
        return {"module": f"{self.package}.{file}", "class_name": name, "registered_name": name, "config": {}, **more}


@pytest.fixture
def code(tmp_path: Path) -> Code:
    folder = tmp_path / "iris"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return Code(folder, load_function(REFERENCE, folder).__module__.partition(".")[0])


def function(name: str) -> dict[str, Any]:
    return {"module": "builtins", "class_name": "function", "config": name, "registered_name": "function"}


def lines(config: Any, here: Path) -> tuple[str, ...]:
    return Loading.of_config(config, REFERENCE).lines(Path("out.keras"), here=here)


def test_model_of_keras_layers_needs_no_imports(code: Code) -> None:
    dense = {"module": "keras.layers", "class_name": "Dense", "config": {"activation": function("relu")}}
    spec = {"module": "tensorflow.python.framework.tensor", "class_name": "__typespec__", "registered_name": None}
    assert lines({"layers": [dense, spec]}, code.folder) == ("keras.saving.load_model('out.keras')",)


def test_custom_objects_are_passed_or_imported(code: Code) -> None:
    layers = [code.of("Scale"), code.of("Scale"), code.of("Shift", registered_name="own>Shift")]
    assert lines({"config": layers, "activation": function("bent")}, code.folder) == (
        "from layers import Scale, bent, Shift",
        "import keras",
        "keras.saving.load_model('out.keras', custom_objects={'Scale': Scale, 'bent': bent})",
    )


def test_code_of_another_folder_is_added_to_the_path(code: Code, tmp_path: Path) -> None:
    """A file with relative imports is imported as part of its folder."""
    assert lines([code.of("Scale"), code.of("Head", "heads")], tmp_path / "elsewhere") == (
        "import sys",
        f"sys.path.insert(0, {str(tmp_path)!r})",
        f"sys.path.insert(0, {str(code.folder)!r})",
        "from iris.heads import Head",
        "from layers import Scale",
        "import keras",
        "keras.saving.load_model('out.keras', custom_objects={'Head': Head, 'Scale': Scale})",
    )


def test_objects_that_cannot_be_imported_cause_warnings(code: Code) -> None:
    layer = {"class_name": "Lambda", "module": "keras.layers", "config": {"function": {"class_name": "__lambda__"}}}
    config = [layer, code.of("Inner"), function("closure"), code.of("Scale"), code.of("Scale", "heads")]
    loading = Loading.of_config(config, REFERENCE)
    assert loading.lines(Path("out.keras"), here=code.folder)[-1].endswith(", safe_mode=False)")
    warned = "\n".join(loading.warnings())
    assert "Inner, closure: defined inside a function or class" in warned
    assert "Scale: several classes have this name" in warned
    assert "a lambda is stored as code" in warned
