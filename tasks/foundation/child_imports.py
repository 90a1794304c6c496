"""Makes the private packages of user code importable in child processes that start anew.

A child of `multiprocessing` with the start method *spawn* or *forkserver* has no modules of its parent, and imports
those of the functions and values that it is sent. It gets the parent's `sys.path`. So a folder there has a file for
each private package: it says where the user's folder is, and how the modules were imported in the parent. In a child
they are imported with the same seeds, because what a module draws at its import must be equal in all processes. Each
child imports this module, so it imports little.

That folder is one of this process, below the folder for temporary files: files that others name and make go into it. It
is locked while its process lives (`storage/local_files.py`), so what is left of a killed process is swept by the next
one, and no process id or clock says whose it is.
"""

import atexit
import importlib
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

from baton.tasks.foundation.seeding import seeded_import
from baton.tasks.foundation.storage.local_files import temporary_folder

_PREFIX = "baton-process-"
# The folder of each process, by its id: a fork inherits its parent's entry. It is empty until the folder is needed.
_folders: dict[int, Path] = {}
_FOLDER = "packages"
_TENSORFLOW = (b"tensorflow", b"keras")


def process_folder() -> Path | None:
    """Return this process's folder, which is made at the first call; None if no folder can be made."""
    own = os.getpid()
    if own not in _folders:
        kept = ExitStack()
        try:
            _folders[own] = kept.enter_context(temporary_folder(_PREFIX)).resolve()
        except OSError:
            return None  # what needs temporary files says so, with the size that it needs

        def remove() -> None:
            if os.getpid() == own:  # a fork runs the functions of its parent, too
                kept.close()

        atexit.register(remove)
    return _folders[own]


def keep_generated_sources_together() -> None:
    """Let AutoGraph write the sources that it generates to this process's folder, if TensorFlow is imported.

    It removes them when the process exits, and a process that is killed does not exit.
    """
    if "tensorflow" not in sys.modules:
        return
    folder = process_folder()
    with suppress(ImportError):
        from tensorflow.python.autograph.pyct import loader  # no public setting names the folder

        if folder is not None and hasattr(loader, "tempfile"):
            named = partial(tempfile.NamedTemporaryFile, dir=folder)
            loader.tempfile = SimpleNamespace(NamedTemporaryFile=named)


class Import(NamedTuple):
    """How the parent has imported a module that a run file names.

    Attributes:
        name: the module's full name.
        module: as the run file names it, `data.py`.
        folder: the run file's folder.
        seed: `train.seed`.
        tensorflow: whether its source, or that of a module which came with it, mentions TensorFlow or Keras. Others
            are imported without TensorFlow, which takes seconds to start and much memory in each child.
    """

    name: str
    module: str
    folder: str
    seed: int
    tensorflow: bool = False


# Of each private package: by module, the import that has brought it. Modules are imported once per process, so this is
# a module global.
_imports: dict[str, dict[str, Import]] = {}


def share_with_children(package: str, place: Path, began: Import) -> None:
    """Let child processes import a private package. Call it before and after each import of one of its modules.

    Args:
        began: the import; what is new in the package has come with it.
    """
    known = _imports.setdefault(package, {})
    new = {began.name, *(name for name in list(sys.modules) if name.startswith(f"{package}."))} - known.keys()
    folder = process_folder()
    if folder is None or not new:
        return
    before = known.get(began.name, began)
    mentions = before.tensorflow or any(map(_mentions_tensorflow, (_source(place, package, name) for name in new)))
    began = began._replace(tensorflow=mentions)
    known.update(dict.fromkeys({began.name, *new}, began))
    packages = folder / _FOLDER
    file = packages / package / "__init__.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(
        "from baton.tasks.foundation.child_imports import as_in_parent\n"
        f"__path__ = as_in_parent({os.fspath(place)!r}, { {name: tuple(each) for name, each in known.items()}!r})\n",
        encoding="utf-8",
    )
    unfinished.replace(file)  # a child may import it now
    if os.fspath(packages) not in sys.path:
        sys.path.append(os.fspath(packages))


def as_in_parent(place: str, imports: Mapping[str, tuple[str, str, str, int, bool]]) -> list[str]:
    """Import the modules of a private package as the parent has; called in a child.

    Args:
        imports: by module, the import of the parent that has brought it.

    Returns:
        The package's `__path__`.
    """
    sys.meta_path.insert(0, _ImportsOfParent({name: Import(*each) for name, each in imports.items()}))
    return [place]


class _ImportsOfParent(MetaPathFinder, Loader):
    """Imports what a run file names under its seeds, and with it the modules that came with it in the parent."""

    def __init__(self, imports: dict[str, Import]) -> None:
        self._imports = imports
        self._begun: set[str] = set()

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        found = self._imports.get(fullname)
        return None if found is None or found.name in self._begun else spec_from_loader(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        found = self._imports[spec.name]
        self._begun.add(found.name)
        with seeded_import(found.module, Path(found.folder), found.seed, tensorflow=found.tensorflow):
            importlib.import_module(found.name)
        return importlib.import_module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: `create_module` has imported it."""


def _source(place: Path, package: str, name: str) -> Path:
    loaded = getattr(sys.modules.get(name), "__file__", None)
    return Path(loaded) if loaded else place.joinpath(*name.removeprefix(f"{package}.").split(".")).with_suffix(".py")


def _mentions_tensorflow(source: Path) -> bool:
    try:
        text = source.read_bytes()
    except OSError:
        return True
    return any(word in text for word in _TENSORFLOW)
