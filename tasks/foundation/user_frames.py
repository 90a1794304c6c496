"""Finds the user's own lines in an error: in its traceback, in AutoGraph's copy of it, and in TensorFlow's message.

TensorFlow reports an operation that fails in a graph with the stack of the code that made it, and an error in a
`tf.py_function` with its traceback, both as text. AutoGraph runs a copy of the user's code, and attaches the original
lines to the error.
"""

import linecache
import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_TEXT_FRAME = re.compile(r'^\s*File "([^"\n]+)", line (\d+)(?:, in (\S+))?', re.MULTILINE)
_GENERATED = "__autograph_generated_file"
_INSTALLED = {"site-packages", "dist-packages"}
_BATON = tuple(Path(__file__).resolve().parents[2] / name for name in ("tasks", "flows"))
_LIBRARY = tuple({Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_LINE_CHARACTERS = 200

# The folder of the run file that named code, by the folder of that code. A module is imported once per process, so this
# is a module global.
_run_folders: dict[Path, Path] = {}


@dataclass(frozen=True, slots=True)
class UserFrame:
    """A line of user code that an error passed.

    Attributes:
        file: path of the file.
        line: number of the line, from 1.
        function: name of the function; empty at the top of a module.
    """

    file: str
    line: int
    function: str

    def place(self, folder: Path | None = None) -> str:
        """The frame in words; the file is relative to the run file's folder, if it is inside."""
        where = f"{_shown_path(Path(self.file), folder)}, line {self.line}"
        return f"{where}, in {self.function}" if self.function else where

    def text(self) -> str:
        """The line itself; empty if the file cannot be read."""
        linecache.checkcache(self.file)
        line = linecache.getline(self.file, self.line).strip()
        return line if len(line) <= _LINE_CHARACTERS else f"{line[: _LINE_CHARACTERS - 1]}…"


def remember_run_folder(code: Path, folder: Path) -> None:
    """Remember that a folder, or a file, has user code.

    Args:
        code: the folder of a loaded file, or of a package.
        folder: the folder of the run file that names it.
    """
    _run_folders[code.resolve()] = folder


def user_frames(error: BaseException) -> list[UserFrame]:
    """Return the lines of user code that an error passed, the innermost last; none if it passed none."""
    seen: set[int] = set()
    fault: BaseException | None = error
    while fault is not None and id(fault) not in seen:
        seen.add(id(fault))
        found = [frame for frame in _frames(fault) if is_user_file(frame.file)]
        if found:
            return list(dict.fromkeys(found))  # the text of an error may repeat its traceback
        fault = fault.__cause__ or (None if fault.__suppress_context__ else fault.__context__)
    return []


def is_user_file(file: str) -> bool:
    """Whether a file is neither Baton's nor a library's, nor generated."""
    if _GENERATED in file or file.startswith("<"):
        return False
    path = Path(file)
    roots = [root for root in _run_folders if path.is_relative_to(root)]
    if roots:
        inside = path.relative_to(max(roots, key=lambda root: len(root.parts)))
        return not _INSTALLED.intersection(inside.parts)  # a virtual environment beside the run file
    if _INSTALLED.intersection(path.parts):
        return False
    return not any(path.is_relative_to(root) for root in (*_LIBRARY, *_BATON))


def _frames(error: BaseException) -> Iterator[UserFrame]:
    if isinstance(error, SyntaxError) and error.filename is not None:
        yield UserFrame(error.filename, error.lineno or 1, "")
        return
    converted = getattr(error, "ag_error_metadata", None)
    if converted is not None:
        yield from (
            _frame(each.filename, each.lineno, each.function_name) for each in reversed(converted.translated_stack)
        )
    else:
        for frame, line in traceback.walk_tb(error.__traceback__):
            yield _frame(frame.f_code.co_filename, line, frame.f_code.co_name)
    yield from _inside_baton(
        _frame(file, int(line), function) for file, line, function in _TEXT_FRAME.findall(_text(error))
    )


def _text(error: BaseException) -> str:
    """The message, in which KeyError would escape the ends of lines."""
    first = error.args[0] if error.args else ""
    return first if isinstance(first, str) and isinstance(error, KeyError) else str(error)


def _inside_baton(frames: Iterable[UserFrame]) -> list[UserFrame]:
    """Frames without those of the program that called Baton, which TensorFlow's stacks begin with."""
    every = list(frames)
    calls = [index for index, frame in enumerate(every) if Path(frame.file).is_relative_to(_BATON[0])]
    return every[calls[0] :] if calls else every


def _frame(file: str, line: int, function: str | None) -> UserFrame:
    return UserFrame(file, line, "" if function in {None, "None", "<module>"} else str(function))


def _shown_path(file: Path, folder: Path | None) -> str:
    roots = [root for root in _run_folders if file.is_relative_to(root)]
    folders = [*([folder] if folder is not None else []), *(_run_folders[root] for root in roots)]
    for each in folders:
        for base in (each, each.resolve()):
            if file.is_relative_to(base):
                return file.relative_to(base).as_posix()
    return str(file)
