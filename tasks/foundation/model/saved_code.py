"""Digests of the user's code, and the code and run file as a home keeps them.

Comments, docstrings, layout and the folder's path do not change a digest. The saved code is create-only and named by
content. The log's identity names the newest; an accepted change adds another file. So the code of each commit can be
found, with its Git revision where the folder is in a Git checkout.
"""

import ast
import hashlib
import inspect
import logging
import os
import posixpath
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Final

from baton.tasks.foundation.contracts.home_files import (
    SAVED_CODE,
    GitRevision,
    ModelSummary,
    SavedCode,
    refuse_unreadable,
    saved_code_path,
)
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import FileAlreadyThere, FileTooLarge, ModelError
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.text import message
from baton.tasks.foundation.user_traceback import USER_PACKAGE_PREFIX

_LOGGER = logging.getLogger(__name__)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def module_digest(reference: str, folder: Path) -> str:
    """Return a sha256 over a module and what it imports from its own folder or package, 16 hex digits.

    Args:
        reference: `file.py:name`, or `package.module:name` of a module that is already loaded.
    """
    name = reference.partition(":")[0]
    code = _file_code(folder / name) if name.endswith(".py") else _package_code(sys.modules[name])
    digests = {key: source_digest(file.read_bytes()) for key, file, _ in _files(code)}
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()[:16]


def source_digest(source: bytes) -> str:
    """Return a sha256 over the code of one file, 16 hex digits; over its bytes if they are not Python."""
    tree = _parsed(source)
    return _digest(tree) if tree else hashlib.sha256(source).hexdigest()[:16]


def files_beside(module: str, folder: Path) -> dict[str, Path]:
    """Return a file of the run file's folder and those that it imports from its own folder; see `module_digest`.

    Args:
        module: the file, relative to `folder`; nothing is returned if it does not exist.

    Returns:
        The files by their path relative to the folder of `module`.
    """
    return {key: file for key, file, _ in _files(_file_code(folder / module))}


def user_code(thing: Any, reference: str) -> "UserCode":
    """Return the user's classes and functions that an object consists of, and those that they use.

    Args:
        thing: a model or a function.
        reference: the function's name in the run file; code in the same package is the user's.
    """
    code = UserCode("" if ".py:" in reference else reference.partition(":")[0].partition(".")[0])
    pending, seen = [thing], set()
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, list | tuple | set):
            pending.extend(item)
        elif isinstance(item, FunctionType | type):
            code.add(item)
        elif (_root(type(item)) == "keras" or code.owns(type(item))) and hasattr(item, "__dict__"):
            code.add(type(item))
            pending.extend(vars(item).values())
    return code


class UserCode:
    """Collects digests of classes and functions, each with the code that it refers to.

    Attributes:
        values: arrays, tables and other objects that this code refers to, at the top of a module or captured from an
            enclosing function, by name. They are no part of a digest.
    """

    def __init__(self, package: str) -> None:
        self.values: dict[str, Any] = {}
        # A factory makes several functions of one name, each with its own captured values.
        self._found: dict[str, set[str]] = {}
        self._seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is reused
        self._package = package

    def digests(self) -> dict[str, str]:
        """Return the digests by name, sorted by name."""
        return {name: " ".join(sorted(found)) for name, found in sorted(self._found.items())}

    def owns(self, kind: Any) -> bool:
        """Whether a class or function is the user's."""
        root = _root(kind)
        return root.startswith(USER_PACKAGE_PREFIX) or (bool(self._package) and root == self._package)

    def add(self, kind: Any) -> None:
        """Add a class with its bases, or a function, if it is the user's."""
        for part in kind.__mro__ if isinstance(kind, type) else (kind,):
            if id(part) in self._seen or not self.owns(part):
                continue
            self._seen[id(part)] = part  # first, because code may refer to itself
            module = sys.modules[part.__module__]
            # The private package's name depends on the folder's path.
            module_name = part.__module__.partition(".")[2]
            tree = _tree(part, module)
            constants: dict[str, str] = {}
            for used, value in (*_referred(tree, module), *self._captured(part)):
                if isinstance(value, FunctionType | type):
                    self.add(value)
                    continue
                if isinstance(value, (*_PLAIN, tuple, frozenset)):
                    constants[used] = _text(value)
                if not isinstance(value, _PLAIN):
                    self.values[f"{module_name}.{used}"] = value
            name = f"{module_name}.{part.__qualname__}"
            self._found.setdefault(name, set()).add(_digest(tree, repr(sorted(constants.items()))))

    def _captured(self, part: Any) -> Iterator[tuple[str, Any]]:
        """Yield values that a function, or a class's methods, captured from the enclosing function."""
        members = vars(part).values() if isinstance(part, type) else (part,)
        for member in members:
            function = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
            if not isinstance(function, FunctionType) or not self.owns(function):
                continue
            name = function.__name__
            for free, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                with suppress(ValueError):  # not assigned yet
                    yield f"{name}({free})", cell.cell_contents
            if "<locals>" not in function.__qualname__:
                continue  # its defaults are part of its source, or module-level names that it uses
            for position, default in enumerate(function.__defaults__ or ()):
                yield f"{name}(default {position})", default
            for key, default in (function.__kwdefaults__ or {}).items():
                yield f"{name}(default {key})", default


def _text(value: Any) -> str:
    """Return a constant as text that is the same in every process: no memory address, no set order."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    return type(value).__qualname__


def _root(kind: Any) -> str:
    return (getattr(kind, "__module__", "") or "").partition(".")[0]


def _tree(part: Any, module: ModuleType) -> ast.Module:
    """Return the code of a class or function; all lambdas of a lambda's line; or its module if it has no source."""
    try:
        if part.__name__ == "<lambda>":
            line = part.__code__.co_firstlineno
            nodes = ast.walk(ast.parse(inspect.getsource(module)))
            lambdas = [node for node in nodes if isinstance(node, ast.Lambda) and node.lineno == line]
            return ast.Module([ast.Expr(node) for node in lambdas], [])
        return ast.parse(textwrap.dedent(inspect.getsource(part)))
    except (OSError, TypeError, SyntaxError):  # a namedtuple, a class made by type(), or source that cannot be dedented
        file = Path(getattr(module, "__file__", None) or "")
        return (_parsed(file.read_bytes()) if file.is_file() else None) or ast.Module([], [])


def _referred(tree: ast.Module, module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the module-level names that code uses, with their values; those of a sibling module as `module.name`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in vars(module):
            yield node.id, vars(module)[node.id]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            sibling = vars(module).get(node.value.id)
            if isinstance(sibling, ModuleType) and node.attr in vars(sibling):
                yield f"{node.value.id}.{node.attr}", vars(sibling)[node.attr]


@dataclass(frozen=True, slots=True)
class _Code:
    """The files of a reference: the files to start with, and the folder or file that contains all its code."""

    first: tuple[Path, ...]
    root: Path
    imports_from: Path  # base folder for absolute imports


def _file_code(file: Path) -> _Code:
    file = file.resolve()
    return _Code((file,), file.parent, file.parent)


def _files(code: _Code) -> Iterator[tuple[str, Path, ast.Module | None]]:
    """Yield the files of a reference, each with its path relative to the root and its syntax tree."""
    pending, seen = list(code.first), set()
    while pending:
        file = pending.pop()
        if file in seen or not file.is_relative_to(code.root) or not file.is_file():
            continue
        seen.add(file)
        tree = _parsed(file.read_bytes())
        yield file.relative_to(code.root).as_posix(), file, tree
        pending.extend(_imported(tree, file, code.imports_from) if tree else ())


def _package_code(module: ModuleType) -> _Code:
    """Return a module's file and those of its parent packages, which run before it."""
    if not getattr(module, "__file__", None):
        return _Code((), Path(), Path())  # built into Python
    file = Path(inspect.getfile(module)).resolve()
    depth = module.__name__.count(".") + (file.name == "__init__.py")
    if depth == 0:
        return _Code((file,), file.parent, file.parent / file.stem)  # a single module; its neighbors are not its code
    around = file.parents[:depth]
    return _Code((file, *(folder / "__init__.py" for folder in around)), around[-1], around[-1].parent)


def _imported(tree: ast.Module, file: Path, imports_from: Path) -> Iterator[Path]:
    """Yield paths where the modules that a file imports may be; an imported name may itself be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = file.parents[node.level - 1] if 0 < node.level <= len(file.parents) else imports_from
            for alias in node.names:
                yield from _places(base, [*(node.module or "").split("."), alias.name])
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from _places(imports_from, alias.name.split("."))


def _places(base: Path, parts: list[str]) -> Iterator[Path]:
    for part in filter(None, parts):
        base = base / part
        yield base.with_name(f"{part}.py")
        yield base / "__init__.py"


def _parsed(source: bytes) -> ast.Module | None:
    """Return the syntax tree of a file's bytes; None if it is not Python, such as an extension module."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return None


def _digest(tree: ast.Module, more: str = "") -> str:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [statement for statement in node.body if not is_text(statement)]
    return hashlib.sha256((ast.dump(tree) + more).encode()).hexdigest()[:16]


def syntax_digest(statement: ast.stmt) -> str:
    """Return a digest of a statement, without the docstrings in it."""
    return _digest(ast.Module([statement], []))


def is_text(statement: ast.stmt) -> bool:
    """Whether a statement is a docstring, or a string used as a comment."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


_SECONDS = 10.0
_COMMIT = re.compile(rb"# branch\.oid ([0-9a-f]{40,64})")
# Nothing that the checkout configures is run, and its index is not written.
_GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false")
_STATUS = ("status", "--porcelain=v2", "--branch", "--untracked-files=all", "--ignored=matching")


def git_revision(folder: Path, files: Iterable[str]) -> GitRevision | None:
    """Ask Git for the commit that is checked out.

    Args:
        files: of the code, relative to `folder`.

    Returns:
        None without files or Git, outside a checkout, before its first commit, if Git refuses (a checkout of another
        user), or if it takes longer than ten seconds.
    """
    named = [f":(literal){name}" for name in files]
    if not named:
        return None
    # Variables that name another checkout, as in a hook, do not count.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    command = [*_GIT, "-C", str(folder), *_STATUS, "--", *named]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.splitlines()
    commit = next((found[1].decode() for line in lines if (found := _COMMIT.fullmatch(line))), None)
    if done.returncode or commit is None:
        return None
    return GitRevision(commit=commit, changed=any(not line.startswith(b"#") for line in lines))


MOST_BYTES: Final = 4 << 20
_FILE_REFERENCE = re.compile(r".+\.py:\w+")


def functions_of(spec: RunSpec) -> tuple[str, ...]:
    """Return the functions that a run file names, as `model.py:build_model` or `package.module:function`."""
    weights = (each.source for each in spec.init.weights if _FILE_REFERENCE.fullmatch(each.source))
    named = [spec.model.build, *spec.data.all_sources, spec.train.callbacks, *spec.data.transforms, *weights]
    return tuple(dict.fromkeys(reference for reference in named if reference is not None and ":" in reference))


def file_references(spec: RunSpec) -> tuple[str, ...]:
    """Return those of `functions_of` that are in files of the run file's folder."""
    return tuple(filter(_FILE_REFERENCE.fullmatch, functions_of(spec)))


def collect_code(spec: RunSpec, folder: Path) -> dict[str, bytes]:
    """Read the files of the functions that a run file names, and what they import from their own folders.

    Returns:
        The contents by path, relative to `folder`. A file that does not exist is left out.

    Raises:
        ModelError: they have more than `MOST_BYTES` bytes together, or a file cannot be read.
    """
    files: dict[str, bytes] = {}
    for reference in file_references(spec):
        module = reference.rpartition(":")[0]
        for name, file in files_beside(module, folder).items():
            path = posixpath.normpath(posixpath.join(posixpath.dirname(module), name))
            try:
                files[path] = file.read_bytes()
            except OSError as fault:
                raise ModelError(f"{reference}: {file} cannot be read: {fault.strerror}; check it") from fault
    size = sum(map(len, files.values()))
    if size > MOST_BYTES:
        largest = max(files, key=lambda path: len(files[path]))
        raise ModelError(
            message(
                f"the code of the run file has {size} bytes in {len(files)} files, more than the {MOST_BYTES} that "
                f"are saved in the run's home; the largest is {largest} ({len(files[largest])} bytes)",
                hints=[
                    "keep data in a file that the code reads, or name an installed package: package.module:function"
                ],
            )
        )
    return files


def require_savable(spec: RunSpec, folder: Path) -> None:
    """Refuse a run file and code that are too large to be saved in a home.

    Raises:
        ModelError: see `collect_code`.
        TooLargeToWrite: the run file has too many values.
    """
    data = SavedCode.of(spec, collect_code(spec, folder)).to_json()
    refuse_unreadable(saved_code_path(data), data)


def _is_whole(home: Storage, path: str) -> bool:
    with suppress(FileTooLarge):
        return path == saved_code_path(home.read(path))
    return False


def save_code(home: Storage, spec: RunSpec, folder: Path, model: ModelSummary | None = None) -> dict[str, str]:
    """Save the run file and its code, unless the home has them; if its file is damaged, once more, with a warning.

    Args:
        model: what the code builds.

    Returns:
        What the log's identity records of it.

    Raises:
        ModelError: see `collect_code`.
        StorageError: the store refused or failed.
    """
    files = collect_code(spec, folder)
    data = SavedCode.of(spec, files, git_revision(folder, files), model).to_json()
    path = saved_code_path(data)
    try:
        home.create(path, data)
    except FileAlreadyThere:  # it is named after its content
        if not _is_whole(home, path):
            _LOGGER.warning("%s/%s was damaged, and is written once more", home.uri, path)
            home.write(path, data)
    return {SAVED_CODE: path}
