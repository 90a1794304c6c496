"""How a process of Baton starts: with the hash seed of its run, with fast imports, and to end with its parent.

*One hash seed.* Python draws the seed of its hashes anew in each process, and with it the order of sets. A table that
is made from a set would then be another one after each cut. The log of a run has the seed that it began with
(`hash_seed` of the environment). A process cannot change its own, so the process of a command starts itself anew with
it: the same process id, streams, and arguments. Where nobody has set PYTHONHASHSEED it is 0, from the first line on, so
that this is rarely needed twice. Child processes inherit the variable. Only the process of a command may do so. In
others, such as a notebook or a flow run, a difference is a warning.

*Fast imports.* TensorFlow and Keras take most of the processor time of a start. Half of it training does not need: the
garbage collector searches the growing heap again and again, although imports leave next to no garbage; and Keras
imports scikit-learn, SciPy and matplotlib for `keras.wrappers` and `keras.visualization`, if they are installed. Here
those two are loaded at their first use.

*Ends with its parent.* `python -I -S process_start.py PARENT SIGNAL COMMAND...`, started by `process.py`, replaces
itself with the command, which keeps its process id. For this, and because a process that starts anew imports it twice,
this file imports only the standard library, and little of it.
"""

import gc
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Final, NoReturn

_DEFAULT = 0
# The verbs that run the user's code.
_VERBS = frozenset({"audit", "doctor", "evaluate", "export", "prove", "run"})
# Whether this process is that of a command; it is at most one element.
_of_command: list[bool] = []


def begin_with_fixed_hashes(verb: str = "run") -> None:
    """Call it first in the process of a command, before anything else is imported.

    Args:
        verb: of the command; nothing happens if it runs no code of the user.
    """
    if verb not in _VERBS:
        return

    from baton.tasks.foundation.machine.processes import hash_seed

    _of_command[:] = [True]
    if hash_seed() is None:
        _start_anew(_DEFAULT)


def keep_hash_seed(recorded: int | None) -> str:
    """Go on with the hash seed that a run began with. The process of a command starts anew with it, and never returns.

    Args:
        recorded: the seed in the run's log; None if it began with random ones, and may go on with any.

    Returns:
        A warning, if this process hashes otherwise and cannot start anew; or nothing.
    """
    from baton.tasks.foundation.machine.processes import HASH_SEED, hash_seed

    own = hash_seed()
    if recorded is None or recorded == own:
        return ""
    if _of_command:
        from baton.flows.process import HOME, has_temporary_home  # slow to import, but it is by now

        # A temporary home is removed once this program has ended; the next one makes its own.
        _start_anew(recorded, without=(HOME,) if has_temporary_home() else ())
    return (
        f"sets have another order here than in the run's other processes, which have {HASH_SEED}={recorded}, and this "
        f"one has {'none' if own is None else own}; start it with {HASH_SEED}={recorded} too"
    )


def _start_anew(seed: int, *, without: Collection[str] = ()) -> None:
    """Replace this process by one with another hash seed, unless that was tried, or Python ignores the variable.

    Args:
        without: variables that the new program does not get.
    """
    from baton.tasks.foundation.machine.processes import HASH_SEED

    if sys.flags.ignore_environment or os.environ.get(HASH_SEED) == str(seed):
        return
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: its descriptor is closed
        with suppress(OSError, ValueError):
            stream.flush()
    kept = {name: value for name, value in os.environ.items() if name not in without}
    command = [sys.executable, *sys.orig_argv[1:]]
    os.execve(sys.executable, command, {**kept, HASH_SEED: str(seed)})  # noqa: S606 - it is this process


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


PR_SET_PDEATHSIG = 1  # prctl(2): a signal when the thread that started this process ends; exec keeps the setting


def main(words: list[str]) -> NoReturn:
    """Request the death signal, and become the command.

    Args:
        words: the parent's process id; the number of the signal; the command.

    Raises:
        OSError: the kernel refuses the death signal, or the command cannot be started.
    """
    import ctypes  # most who import this module do not start so

    parent, number, command = int(words[0]), int(words[1]), words[2:]
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # the parent died before the request
        os._exit(1)
    os.execv(command[0], command)  # noqa: S606 - the command comes from Baton


if __name__ == "__main__":
    main(sys.argv[1:])
