"""Sets have one order in all processes of a run, and imports are fast and change nothing."""

import gc
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.flows import process_start
from baton.flows.process_start import keep_hash_seed
from baton.tasks.foundation.machine.processes import hash_seed
from tests.support.checkout import CHECKOUT
from tests.support.unknown_user import can_become_unknown, command_of_unknown_user

COMMAND = """
import sys
from baton.flows.process_start import begin_with_fixed_hashes, keep_hash_seed

verb, recorded, *_ = sys.argv[1:]
begin_with_fixed_hashes(verb)
warning = keep_hash_seed(None if recorded == "none" else int(recorded))

import os
from baton.tasks.foundation.machine.processes import hash_seed

print(os.getpid(), hash_seed(), sys.flags.safe_path, sys.argv[1:], hash("a"), warning)
"""


def of_command(folder: Path, *options: str, verb: str = "run", recorded: str = "none", **variables: str) -> list[str]:
    """What a command prints, without its process id, which must be that of the process that was started."""
    (folder / "command.py").write_text(COMMAND, encoding="utf-8")
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    command = [sys.executable, *options, "command.py", verb, recorded, "a b"]
    process = subprocess.Popen(command, cwd=folder, env=inherited | variables, stdout=subprocess.PIPE, text=True)
    pid, rest = process.communicate(timeout=60)[0].strip().split(" ", 1)
    assert process.returncode == 0
    assert pid == str(process.pid)
    return rest.split(" ", 2)


@pytest.mark.parametrize(
    ("variables", "recorded", "expected"),
    [
        ({}, "none", "0"),
        ({"PYTHONHASHSEED": "random"}, "none", "0"),
        ({"PYTHONHASHSEED": "0"}, "0", "0"),
        ({"PYTHONHASHSEED": "5"}, "none", "5"),
        ({}, "7", "7"),
        ({"PYTHONHASHSEED": "5"}, "7", "7"),
        ({"PYTHONHASHSEED": "5"}, "0", "0"),
    ],
)
def test_command_has_the_seed_of_its_run(
    tmp_path: Path, variables: dict[str, str], recorded: str, expected: str
) -> None:
    seed, safe_path, rest = of_command(tmp_path, "-P", recorded=recorded, **variables)
    assert (seed, safe_path) == (expected, "True")
    arguments, hashed = rest.rsplit(" ", 1)
    assert arguments == str(["run", recorded, "a b"])
    assert hashed == of_command(tmp_path, PYTHONHASHSEED=expected)[2].rsplit(" ", 1)[1]


@pytest.mark.parametrize("options", [(), ("-E",)])
def test_process_that_may_not_or_cannot_start_anew_goes_on(tmp_path: Path, options: tuple[str, ...]) -> None:
    """A verb that runs no code of the user; Python that ignores the variable."""
    verb = "run" if options else "status"
    seed, _, rest = of_command(tmp_path, *options, verb=verb, recorded="7")
    assert seed == "None"
    assert "sets have another order here" in rest
    assert "PYTHONHASHSEED=7, and this one has none; start it with PYTHONHASHSEED=7 too" in rest


def test_process_of_no_command_is_warned() -> None:
    own = hash_seed()
    assert keep_hash_seed(None) == ""
    assert own is None or keep_hash_seed(own) == ""
    assert f"which have PYTHONHASHSEED={(own or 0) + 1}" in keep_hash_seed((own or 0) + 1)


@pytest.mark.parametrize("inherited", ["3", "0", None])
def test_variable_set_after_the_start_has_no_effect(inherited: str | None) -> None:
    """Many a `seed_everything` sets it."""
    program = """
import os
from baton.tasks.foundation.machine.processes import hash_seed
os.environ["PYTHONHASHSEED"] = "42"
print(hash_seed())
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    environment |= {} if inherited is None else {"PYTHONHASHSEED": inherited}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(inherited)


@pytest.mark.parametrize("recorded", ["none", "7"])
def test_process_with_closed_streams_starts_anew(tmp_path: Path, recorded: str) -> None:
    (tmp_path / "command.py").write_text(f"{COMMAND}\nopen('seed', 'w').write(str(hash_seed()))\n", encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    shell = f"exec {sys.executable} command.py run {recorded} >&- 2>&-"
    assert subprocess.run(["/bin/sh", "-c", shell], cwd=tmp_path, env=environment, check=False).returncode == 0
    assert (tmp_path / "seed").read_text() == recorded.replace("none", "0")


@pytest.mark.skipif(not can_become_unknown(), reason="needs root and setpriv")
def test_temporary_home_stays_with_the_program_that_made_it(tmp_path: Path) -> None:
    program = """
import os, pathlib, sys
from baton.flows.process_start import begin_with_fixed_hashes, keep_hash_seed
from baton.flows.process import provide_home_folder
begin_with_fixed_hashes()
provide_home_folder()
keep_hash_seed(7)
print(len(list(pathlib.Path(os.environ["TMPDIR"]).iterdir())), pathlib.Path.home().is_dir())
"""
    tmp_path.chmod(0o777)
    command = command_of_unknown_user(sys.executable, "-c", program, TMPDIR=str(tmp_path), PYTHONPATH=str(CHECKOUT))
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "1 True\n"
    assert not list(tmp_path.iterdir())


OPTIONAL = "baton_test_package.optional"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package whose module `optional` is loaded at its first use, in a process without TensorFlow."""
    folder = tmp_path / "baton_test_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("loads = []\nfrom baton_test_package import optional as optional\n")
    (folder / "optional.py").write_text("import baton_test_package\nbaton_test_package.loads.append(1)\nvalue = 7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(process_start, "_AT_FIRST_USE", frozenset({OPTIONAL}))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    yield folder
    for name in ("baton_test_package", OPTIONAL):
        sys.modules.pop(name, None)
    gc.unfreeze()


def test_an_optional_module_is_loaded_at_its_first_use(package: Path) -> None:
    with process_start.fast_imports():
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
    with process_start.fast_imports():
        import baton_test_package
    assert "value" in dir(baton_test_package.optional)
    assert baton_test_package.loads == [1]


def test_a_module_that_fails_to_load_is_tried_again(package: Path) -> None:
    (package / "optional.py").write_text("raise ImportError('not yet')\n")
    with process_start.fast_imports():
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
        with process_start.fast_imports():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_nothing_is_done_once_tensorflow_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", sys)
    before = gc.get_freeze_count()
    with process_start.fast_imports():
        assert gc.isenabled()
    assert gc.get_freeze_count() == before


def test_keras_has_the_modules_that_wait() -> None:
    for name in process_start._AT_FIRST_USE:
        path = Path(*name.split("."))
        keras = importlib.util.find_spec("keras")
        assert keras is not None
        assert keras.origin is not None
        assert (Path(keras.origin).parents[1] / path / "__init__.py").is_file(), name


def test_keras_is_imported_without_scikit_learn_and_has_it() -> None:
    code = (
        "import sys\nfrom baton.flows.process_start import fast_imports\n"
        "with fast_imports():\n    import keras\n"
        "later = {'sklearn', 'keras.src.visualization.plot_image_gallery'}\n"  # the second looks for matplotlib
        "assert not later & set(sys.modules), 'imported'\n"
        "import keras.wrappers\nfrom keras.visualization import plot_image_gallery\n"
        "assert keras.wrappers.SKLearnClassifier.__name__ == 'SKLearnClassifier'\n"
        "assert later <= set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=CHECKOUT)
