"""Modules of a package that reads its settings at import, imported once for many forks.

A fork server imports them and takes them out of `sys.modules`. When the program of a fork imports the package, they are
back, and the settings are read again from the program's environment.
"""

import copy
import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class KeptModules(MetaPathFinder):
    """Finds the kept modules of a package: the first import of the package brings back all of them."""

    def __init__(self, package: str, names: Iterable[str], *, reader: str, refresh: Callable[[], None]) -> None:
        """Import modules and keep them.

        Args:
            package: the package.
            names: modules of the package.
            reader: the module that reads the settings at import.
            refresh: reads them again; called when all modules are back. If it raises a ValueError, `reader` is imported
                as usual, which raises it too.
        """
        for name in names:
            importlib.import_module(name)
        self._kept = {name: module for name, module in sys.modules.items() if f"{name}.".startswith(f"{package}.")}
        self._reader, self._refresh = reader, refresh
        for name in self._kept:
            del sys.modules[name]
        sys.meta_path.insert(0, self)

    def forget(self, name: str) -> None:
        """Let a module be imported as usual, because it is the program."""
        self._kept.pop(name, None)

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        module = self._kept.get(name)
        if module is None or module.__spec__ is None:
            return None
        sys.modules.update(self._kept)
        self._kept = {}
        try:
            self._refresh()
        except ValueError:
            del sys.modules[self._reader]
        spec = copy.copy(module.__spec__)
        spec.loader = _Imported(module)
        return spec


class _Imported(Loader):
    """Loads a module that is imported already."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:  # noqa: ARG002
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
