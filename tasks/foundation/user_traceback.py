"""Messages for errors of user code: they begin with the user's own line, and leave out what TensorFlow repeats.

TensorFlow reports an operation that fails in a graph with the stack of the code that made it, and an error in a
`tf.py_function` with its traceback, both as text. AutoGraph runs a copy of the user's code, and attaches the original
lines to the error. So the user's lines are looked for in all three.
"""

import inspect
import linecache
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.tasks.foundation.text import message

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


USER_PACKAGE_PREFIX = "_baton_user_"
_CALLERS_SHOWN = 3
_TEXT_CHARACTERS = 700
# TensorFlow's messages about non-deterministic operations, and about random operations without a seed.
_DETERMINISM = re.compile(r"determinism is (enabled|not)|deterministic (\w+ )?implementation", re.IGNORECASE)
_DETERMINISM_REMEDY = (
    "; pass a seed to random operations (a keras.random.SeedGenerator, tf.random.Generator.from_seed), use another "
    "operation, or set train.deterministic: false"
)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_PRIVATE_PACKAGE = re.compile(rf"{USER_PACKAGE_PREFIX}[0-9a-f]+(\.?)")
# What Keras puts around the error of a layer.
_KERAS_CALL = re.compile(r"^\s*Exception encountered when calling (.+?)\.?\n\n", re.DOTALL)
_KERAS_SHAPES = re.compile(r"^\s*Could not automatically infer the output shape.*?Error encountered:\s*", re.DOTALL)
_KERAS_ARGUMENTS = re.compile(r"\s*Arguments received by [^\n]+?:\s*\n.*$", re.DOTALL)
# What TensorFlow puts around the error of an operation.
_FUNCTION_NODE = re.compile(r"\{\{function_node [^}]*\}\}\s*")
_EAGER_OP = re.compile(r"\s*\[Op:[^\]]*\](?: name:[^\n]*)?")
_NODE = re.compile(r"'\{\{node ([^}]+)\}\} = .+?\)'", re.DOTALL)
_PYTHON_ERROR = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning): ")
_CREATED_AT = "The op is created at:"  # XLA's, and the stack follows
_TRACEBACK = "Traceback (most recent call last):"
# Lines of TensorFlow's message that locate the error in a graph, and do not describe it.
_LOCATION_PREFIXES = (
    "Graph execution error",
    "Detected at node",
    "File ",
    "<stack traces",
    "[[",
    "Original stack trace",
)
_GRAPH = ("Graph execution error", "Detected at node", "[[{{node")


def user_error(
    what: str, error: BaseException, *, end: str = "", hints: Sequence[str] = (), folder: Path | None = None
) -> str:
    """Return the message of an error that passed user code.

    It begins with the user's line where the error was raised: file, number, function, and the line itself. Frames of
    Baton, of libraries and of AutoGraph's copies are left out; the traceback has them.

    Args:
        what: what failed, as `model.py:build_model raised`. The exception's class and text follow.
        end: text after the exception's.
        hints: remedies, one line each.
        folder: the run file's folder, if no code was loaded from it so far. Files inside are shown relative to it.
    """
    frames = user_frames(error)
    text = f"{what} {describe(error)}{end}"
    if not frames:
        return message(text, hints=hints)
    *callers, frame = frames
    details = [f"  {frame.text()}"] if frame.text() else []
    details += [text, *(f"called from {_with_line(caller, folder)}" for caller in callers[: -_CALLERS_SHOWN - 1 : -1])]
    return message(f"{frame.place(folder)}:", details=details, hints=hints)


def function_error(function: Callable[..., object], what: str) -> str:
    """Return the message of what a user's function does wrong without raising; it begins with the function's line.

    Args:
        function: the function or method.
        what: what is wrong, and the remedy.
    """
    plain = inspect.unwrap(function)
    code = getattr(getattr(plain, "__func__", plain), "__code__", None)
    if code is None or not is_user_file(code.co_filename):
        return what
    frame = UserFrame(code.co_filename, code.co_firstlineno, code.co_name)
    return message(f"{frame.place()}:", details=[f"  {frame.text()}", what])


def describe(error: BaseException) -> str:
    """Return an exception of user code as one line: its class and its text, without what TensorFlow repeats."""
    kind, text = _kind_and_text(error)
    text = _COLOURS.sub("", text)
    calls = []
    while (call := _KERAS_CALL.match(text)) is not None:
        calls.append(call[1])
        text = _KERAS_SHAPES.sub("", _KERAS_ARGUMENTS.sub("", text[call.end() :]))
    text = _FUNCTION_NODE.sub("", text)
    if any(word in text for word in _GRAPH):
        text = _graph_text(text)
    text = text.partition(_CREATED_AT)[0]
    before, found, _ = text.partition(_TRACEBACK)
    if found:
        text = before
    text = _NODE.sub(r"node \1", _EAGER_OP.sub("", text))
    text = _PRIVATE_PACKAGE.sub(lambda name: name[1], text)
    text = " ".join(text.split())
    if len(text) > _TEXT_CHARACTERS:
        text = f"{text[: _TEXT_CHARACTERS - 1]}…"
    if calls and not user_frames(error):
        text = f"{text} (in {calls[-1]})"  # Keras's own layer is the only place that is known
    # The error of a tf.py_function arrives as the text of another one.
    head = text if found and _PYTHON_ERROR.match(text) else f"{kind}: {text}"
    return f"{head}{determinism_remedy(text)}"


def describe_with_place(error: BaseException) -> str:
    """Return `describe`, with the innermost line of user code in parentheses if there is one."""
    frames = user_frames(error)
    return f"{describe(error)} ({frames[-1].place()})" if frames else describe(error)


def determinism_remedy(text: str) -> str:
    """Return the remedy if TensorFlow refuses a non-deterministic operation; "" for any other message."""
    return _DETERMINISM_REMEDY if _DETERMINISM.search(text) else ""


def _kind_and_text(error: BaseException) -> tuple[str, str]:
    converted = getattr(error, "ag_error_metadata", None)
    if converted is not None and converted.cause_message:
        kind, _, text = str(converted.cause_message).partition(": ")
        return kind, text
    kind = type(error).__name__
    if isinstance(error, SyntaxError):
        return kind, error.msg
    # str() of a KeyError would escape the lines and colours of Keras's messages.
    is_multiline = isinstance(error, KeyError) and any("\n" in str(each) for each in error.args)
    return kind, str(error.args[0] if is_multiline else error)


def _graph_text(text: str) -> str:
    """Return the first line of a graph's error that describes it."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    found = [line for line in lines if line and not line.startswith(_LOCATION_PREFIXES) and "root error(s)" not in line]
    following = next((line for line in found[1:] if line == _TRACEBACK), "")
    return f"{found[0]}\n{following}" if found else "no message"


def _with_line(frame: UserFrame, folder: Path | None) -> str:
    text = frame.text()
    return f"{frame.place(folder)}: {text}" if text else frame.place(folder)
