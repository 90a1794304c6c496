"""Faster imports of TensorFlow and Keras, which take most of the processor time of a start.

Two things take half of that time, and training needs neither. The garbage collector searches the growing heap again and
again, although imports leave next to no garbage. And Keras imports scikit-learn, SciPy and matplotlib for
`keras.wrappers` and `keras.visualization`, if they are installed. Here those two are loaded at their first use.
"""

import gc
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Final

_AT_FIRST_USE: Final = frozenset(
    {
        "keras.visualization",
        "keras.wrappers",
        "keras._tf_keras.keras.visualization",
        "keras._tf_keras.keras.wrappers",
        "keras.src.visualization",
    }
)


@contextmanager
def fast_imports() -> Iterator[None]:
    """Import packages in the block without garbage collection. Keras's optional parts are loaded at their first use.

    What exists at the end of the block counts as permanent: later collections skip it. In a process that has imported
    TensorFlow already, this does nothing.
    """
    if "tensorflow" in sys.modules:
        yield
        return
    if not any(isinstance(finder, _FirstUseFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _FirstUseFinder())
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


class _FirstUseFinder(importlib.abc.MetaPathFinder):
    """Finds the modules of `_AT_FIRST_USE` as usual, and gives them a loader that waits."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _AT_FIRST_USE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _FirstUseLoader(spec.loader)
        return spec


class _FirstUseLoader(importlib.abc.Loader):
    """Creates a module whose code runs when one of its names is first used."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader
        self.lock = threading.RLock()

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _Unloaded


class _Unloaded(ModuleType):
    """A module before its first use.

    `importlib.util.LazyLoader` would run the code as soon as anything reads `__file__`, as `inspect` and AutoGraph do
    with all modules.
    """

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        _load(self)
        value: object = getattr(self, name)
        return value

    def __dir__(self) -> list[str]:
        _load(self)
        return dir(self)


def _load(module: ModuleType) -> None:
    """Run the module's code, once."""
    spec = module.__spec__
    waiting = None if spec is None else spec.loader
    if spec is None or not isinstance(waiting, _FirstUseLoader):  # another thread has loaded it
        return
    with waiting.lock:
        is_unloaded = type(module) is _Unloaded
        if is_unloaded:
            module.__class__ = ModuleType
            try:
                waiting.loader.exec_module(module)
            except BaseException:
                module.__class__ = _Unloaded  # tried again at the next use, as a failed import is
                raise
            spec.loader = module.__loader__ = waiting.loader
