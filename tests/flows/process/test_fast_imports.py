"""Optional parts of Keras are loaded at their first use, and imports run without garbage collection."""

import gc
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.process import fast_imports
from tests.support.checkout import CHECKOUT

OPTIONAL = "baton_test_package.optional"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package whose module `optional` is loaded at its first use, in a process without TensorFlow."""
    folder = tmp_path / "baton_test_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("loads = []\nfrom baton_test_package import optional as optional\n")
    (folder / "optional.py").write_text("import baton_test_package\nbaton_test_package.loads.append(1)\nvalue = 7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(fast_imports, "_AT_FIRST_USE", frozenset({OPTIONAL}))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    yield folder
    for name in ("baton_test_package", OPTIONAL):
        sys.modules.pop(name, None)
    gc.unfreeze()


def test_an_optional_module_is_loaded_at_its_first_use(package: Path) -> None:
    with fast_imports.fast_imports():
        import baton_test_package  # type: ignore[import-not-found]
    assert baton_test_package.loads == []
    assert baton_test_package.optional.__file__ == str(package / "optional.py")  # inspect reads it of all modules
    assert not hasattr(baton_test_package.optional, "__wrapped__")
    assert baton_test_package.loads == []
    assert baton_test_package.optional.value == 7
    from baton_test_package.optional import value  # type: ignore[import-not-found]

    assert value == 7
    assert baton_test_package.loads == [1]
    with pytest.raises(AttributeError):
        _ = baton_test_package.optional.other


@pytest.mark.usefixtures("package")
def test_listing_the_names_of_a_module_loads_it() -> None:
    with fast_imports.fast_imports():
        import baton_test_package
    assert "value" in dir(baton_test_package.optional)
    assert baton_test_package.loads == [1]


def test_a_module_that_fails_to_load_is_tried_again(package: Path) -> None:
    (package / "optional.py").write_text("raise ImportError('not yet')\n")
    with fast_imports.fast_imports():
        import baton_test_package
    with pytest.raises(ImportError, match="not yet"):
        _ = baton_test_package.optional.value
    (package / "optional.py").write_text("value = 'now, and of another length'\n")
    assert baton_test_package.optional.value == "now, and of another length"


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_pauses_during_imports(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    try:
        with fast_imports.fast_imports():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_nothing_is_done_once_tensorflow_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", sys)
    before = gc.get_freeze_count()
    with fast_imports.fast_imports():
        assert gc.isenabled()
    assert gc.get_freeze_count() == before


def test_keras_has_the_modules_that_wait() -> None:
    for name in fast_imports._AT_FIRST_USE:
        path = Path(*name.split("."))
        keras = importlib.util.find_spec("keras")
        assert keras is not None
        assert keras.origin is not None
        assert (Path(keras.origin).parents[1] / path / "__init__.py").is_file(), name


def test_keras_is_imported_without_scikit_learn_and_has_it() -> None:
    code = (
        "import sys\nfrom flows.process.fast_imports import fast_imports\n"
        "with fast_imports():\n    import keras\n"
        "later = {'sklearn', 'keras.src.visualization.plot_image_gallery'}\n"  # the second looks for matplotlib
        "assert not later & set(sys.modules), 'imported'\n"
        "import keras.wrappers\nfrom keras.visualization import plot_image_gallery\n"
        "assert keras.wrappers.SKLearnClassifier.__name__ == 'SKLearnClassifier'\n"
        "assert later <= set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=CHECKOUT)
