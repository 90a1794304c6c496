"""A missing package is found without any import, and reported only if it is certainly missing."""

import sys
from pathlib import Path

import pytest

from baton.tasks.foundation.errors import ModelError
from baton.tasks.foundation.user_functions import load_function, require_imports

MISSING = {
    "of the file": {"model.py": "import keras\nimport no_such_package.part as part\n"},
    "by name": {"model.py": "from no_such_package import part\n"},
    "of a sibling": {"model.py": "from .layers import Scale\n", "layers.py": "import no_such_package\n"},
    "of a sibling's sibling": {
        "model.py": "from . import layers\n",
        "layers.py": "from .more import Scale\n",
        "more.py": "from .layers import Other\nimport no_such_package\n",
    },
}
THERE = {
    "installed": "import keras\nimport numpy as np\nfrom collections import abc\nfrom . import layers\n",
    "in a try": "try:\n    import no_such_package\nexcept ImportError:\n    no_such_package = None\n",
    "in a condition": "import sys\nif sys.version_info < (3,):\n    import no_such_package\n",
    "in a function": "def build():\n    import no_such_package\n",
    "on a path of its own": "import sys\nsys.path.insert(0, '..')\nimport no_such_package\n",
    "no Python": "import (",
}


@pytest.mark.parametrize("case", MISSING)
def test_missing_package_is_named_with_its_line(case: str, tmp_path: Path) -> None:
    for name, text in MISSING[case].items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=r"line \d, imports no_such_package, which is not installed here"):
        require_imports("model.py:build", tmp_path)


@pytest.mark.parametrize("case", THERE)
def test_conditional_imports_are_not_refused(case: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(THERE[case])
    before = set(sys.modules)
    require_imports("model.py:build", tmp_path)
    assert "no_such_package" not in set(sys.modules) - before


def test_missing_package_in_run_file_is_refused(tmp_path: Path) -> None:
    require_imports("json.decoder:JSONDecoder", tmp_path)
    with pytest.raises(ModelError, match=r"no_such_package\.part:build: package no_such_package is not installed here"):
        require_imports("no_such_package.part:build", tmp_path)


def test_a_file_beside_it_is_imported_relatively(tmp_path: Path) -> None:
    (tmp_path / "prep.py").write_text("x = 1\n")
    (tmp_path / "data.py").write_text("from prep import x\n\n\ndef load(): ...\n")
    (tmp_path / "late.py").write_text("try:\n    import prep\nfinally:\n    pass\n\n\ndef load(): ...\n")
    words = r"prep\.py beside it; files of a run import each other relatively: from \.prep import"
    with pytest.raises(ModelError, match=rf"data\.py, line 1, imports prep, which is {words}"):
        require_imports("data.py:load", tmp_path)
    with pytest.raises(ModelError, match=f"hint: prep is {words}"):
        load_function("late.py:load", tmp_path)
    (tmp_path / "data.py").write_text("from .prep import x\n\n\ndef load(): ...\n")
    require_imports("data.py:load", tmp_path)
    load_function("data.py:load", tmp_path)
