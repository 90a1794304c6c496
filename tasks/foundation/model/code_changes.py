"""What changed in the user's code since the home of its run saved it, as a person reads it.

A home has the code of its run (`save_code`). The functions and classes of the two files that differ by their syntax,
as the digests in the identity do, are shown as difflib compares their lines, with file, line and function. Comments
and docstrings count for nothing and are not shown.

Nothing is imported for it, so code can be refused before TensorFlow is imported. That is certain only for functions and
classes that the identity names: a function that builds the same model by other statements changes nothing.
"""

import ast
import difflib
import io
import posixpath
import re
import textwrap
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from baton.tasks.foundation.contracts.home_files import SAVED_CODE, SavedCode, is_saved_code, saved_code_path
from baton.tasks.foundation.contracts.identity import CALLBACKS, CODE, Difference
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import ModelError, RunLogError
from baton.tasks.foundation.model.saved_code import collect_code, files_beside, is_text, syntax_digest
from baton.tasks.foundation.storage.interface import Storage, best_effort
from baton.tasks.foundation.text import counted, shown

_LINES_SHOWN, _LINE_CHARACTERS = 20, 110
_LINE_END = re.compile(r"\r\n?")
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
# The identity keys that the function of `model` decides.
_OF_MODEL: Final = ("model.", "compile.")
_MODEL_CODE: Final = "model.code"


def read_saved_code(home: Storage, path: object) -> SavedCode | None:
    """The run file and the code that an identity names; None if it names none, or, with a warning, if it is damaged."""
    if not is_saved_code(path):
        return None
    where = f"{home.uri}/{path}"
    then = "restore it from a backup; until then, baton export and others need --run-file FILE"
    with best_effort(home, f"{path}, the saved code, cannot be read", then=then):
        data = home.read(str(path))
        if path != saved_code_path(data):
            raise RunLogError(f"{where} is damaged: its content does not have the digest in its name")
        return SavedCode.from_json(data, where=where, error=RunLogError)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeChange:
    """Neighboring statements that differ.

    Attributes:
        path: of the file, relative to the run file's folder.
        function: the qualified name of the function or class that they are in; "" at the top of the file.
        line: the first line that differs, from 1; of the saved file if nothing is left of them.
        gone: whether nothing is left of them.
        diff: the lines, each with `- ` (saved), `+ ` (now) or two spaces before.
    """

    path: str
    function: str
    line: int
    gone: bool
    diff: tuple[str, ...]

    @property
    def place(self) -> str:
        """Text such as `model.py:12, in Block.call`."""
        return f"{self.path}:{self.line}" + (f", in {self.function}" if self.function else "")

    def name_in(self, reference: str) -> str:
        """The name that the digests of a function's code have for the function or class at the top of the file."""
        within = posixpath.relpath(self.path, posixpath.dirname(reference.rpartition(":")[0]) or ".")
        module = within.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        return f"{module}.{self.function.partition('.')[0]}"


def code_changes(saved: SavedCode, spec: RunSpec, folder: Path) -> tuple[CodeChange, ...]:
    """Return the statements that differ between saved code and the user's files, by file and line.

    Args:
        saved: what a home has.

    Raises:
        ModelError: see `collect_code`.
    """
    now, before = collect_code(spec, folder), {file.path: file.content for file in saved.files}
    found: list[CodeChange] = []
    for path in sorted(before.keys() | now.keys()):
        old, new = _ParsedFile.of(before.get(path, b"")), _ParsedFile.of(now.get(path, b""))
        if old is not None and new is not None:
            found += sorted(_changes(path, old, new), key=lambda change: change.line)
    return tuple(found)


def changes_since_saved(
    home: Storage, recorded: Mapping[str, Any], spec: RunSpec, folder: Path
) -> tuple[CodeChange, ...]:
    """Return `code_changes` since the home of a run saved its code; nothing if the two cannot be compared.

    Args:
        home: the run's, which may be a stranger's.
    """
    saved = read_saved_code(home, recorded.get(SAVED_CODE))
    try:
        return () if saved is None else code_changes(saved, spec, folder)
    # What is too large, nested too deeply or in no encoding is said where it matters, when the code is imported.
    except (ModelError, ValueError, RecursionError, MemoryError):
        return ()


@dataclass(frozen=True, slots=True)
class _ParsedFile:
    """A file: its syntax, and its lines without comments and docstrings."""

    tree: ast.Module
    lines: tuple[str, ...]

    @classmethod
    def of(cls, data: bytes) -> "_ParsedFile | None":
        """Parse a file; None if it is not Python."""
        try:
            tree = ast.parse(data)
        except (SyntaxError, ValueError):
            return None
        text = _LINE_END.sub("\n", data.decode("utf-8-sig", errors="replace"))
        lines = text.split("\n")
        with suppress(tokenize.TokenError, SyntaxError):
            for token in tokenize.generate_tokens(io.StringIO(text).readline):
                if token.type == tokenize.COMMENT:
                    row, column = token.start
                    lines[row - 1] = lines[row - 1][:column]
        for node in ast.walk(tree):
            for statement in node.body if isinstance(node, ast.Module | _Definition) else ():
                first, last = statement.lineno, statement.end_lineno or statement.lineno
                # A docstring with code on its lines stays.
                alone = not lines[first - 1].encode()[: statement.col_offset].strip()
                if is_text(statement) and alone and not lines[last - 1].encode()[statement.end_col_offset :].strip():
                    lines[first - 1 : last] = [""] * (last - first + 1)
        return cls(tree, tuple(line.rstrip() for line in lines))

    def numbered(self, statements: Sequence[ast.stmt]) -> list[tuple[int, str]]:
        """The lines of statements, each with its number; no empty ones."""
        numbers: dict[int, None] = {}
        for each in statements:
            numbers |= dict.fromkeys(range(_begin_of(each), (each.end_lineno or each.lineno) + 1))
        return [(number, self.lines[number - 1]) for number in numbers if self.lines[number - 1]]


def _sections(source: _ParsedFile) -> dict[str, list[ast.stmt]]:
    """The functions and classes at the top of a file by their names, and all else by ""."""
    found: dict[str, list[ast.stmt]] = {}
    for each in source.tree.body:
        found.setdefault(each.name if isinstance(each, _Definition) else "", []).append(each)
    return found


def _begin_of(statement: ast.stmt) -> int:
    """The first line of a statement, with its decorators."""
    decorators = statement.decorator_list if isinstance(statement, _Definition) else []
    return min([statement.lineno, *(each.lineno for each in decorators)])


def _function_at(tree: ast.Module, line: int) -> str:
    """The qualified name of the innermost function or class that has a line; "" if none has."""
    found = [node for node in ast.walk(tree) if isinstance(node, _Definition)]
    around = [node for node in found if _begin_of(node) <= line <= (node.end_lineno or node.lineno)]
    return ".".join(node.name for node in sorted(around, key=_begin_of))


def _changes(path: str, old: _ParsedFile, new: _ParsedFile) -> Iterator[CodeChange]:
    """Yield a change for each place where the lines of a function, of a class or of all else in a file differ."""
    before, after = _sections(old), _sections(new)
    for name in before.keys() | after.keys():
        parts = before.get(name, []), after.get(name, [])
        if [syntax_digest(each) for each in parts[0]] == [syntax_digest(each) for each in parts[1]]:
            continue
        was, now = old.numbered(parts[0]), new.numbered(parts[1])
        old_texts, new_texts = ([text for _, text in lines] for lines in (was, now))
        for hunk in difflib.SequenceMatcher(None, old_texts, new_texts, autojunk=False).get_grouped_opcodes(1):
            lines: list[tuple[str, str]] = []
            first: int | None = None
            for kind, begin, end, now_begin, now_end in hunk:
                if kind == "equal":
                    lines += [("  ", text) for text in old_texts[begin:end]]
                    continue
                lines += [("- ", text) for text in old_texts[begin:end]]
                lines += [("+ ", text) for text in new_texts[now_begin:now_end]]
                if first is None and now:
                    first = now[min(now_begin, len(now) - 1)][0]
            bare = textwrap.dedent("\n".join(text for _, text in lines)).split("\n")
            yield CodeChange(
                path=path,
                function=name and _function_at(new.tree if first else old.tree, first or was[0][0]),
                line=first or was[0][0],
                gone=not now,
                diff=tuple(f"{sign}{text}" for (sign, _), text in zip(lines, bare, strict=True)),
            )


def lines_of(changes: Sequence[CodeChange]) -> tuple[str, ...]:
    """Return what a message shows of changes: places, and the first lines of their diffs, without secrets."""
    found: list[str] = []
    for index, change in enumerate(changes):
        left = _LINES_SHOWN - len(found)
        if left < 3:  # noqa: PLR2004 - a place and two lines
            found.append(f"and {counted(len(changes) - index, 'more change')} of the code")
            break
        found.append(f"{change.place}{' is gone; it was' if change.gone else ''}:")
        cut = len(change.diff) > left - 1
        found += [f"  {shown(line, _LINE_CHARACTERS)}" for line in change.diff[: left - 2 if cut else None]]
        if cut:
            found.append(f"  ... and {counted(len(change.diff) - left + 2, 'more line')}")
    return tuple(found)


def reason_in_code(
    changes: Sequence[CodeChange], found: Sequence[Difference], spec: RunSpec, folder: Path
) -> tuple[CodeChange, ...]:
    """Return the changes of the code that may be why the identity differs.

    A difference of a function's digest is that function, if its statements differ. Any other one may come from all that
    the function of `model`, of the callbacks, of a transform or of the data uses.

    Args:
        changes: of `code_changes`.
        found: what differs in the identity.
    """
    chosen: set[int] = set()
    for each in found:
        for reference in _references(each.of, spec):
            name = each.key.removeprefix(f"{each.of}.").removeprefix(f"{CODE}.")
            named = {index for index, change in enumerate(changes) if change.name_in(reference) == name}
            chosen |= named or _of_reference(changes, reference, folder)
    return tuple(change for index, change in enumerate(changes) if index in chosen)


def _references(key: str, spec: RunSpec) -> tuple[str, ...]:
    """The functions in files of the run file's folder that decide an identity key."""
    if key.startswith(_OF_MODEL):
        named: tuple[str | None, ...] = (spec.model.build,)
    elif key == CALLBACKS:
        named = (spec.train.callbacks,)
    elif key in spec.data.transform_of_key:
        named = (spec.data.transform_of_key[key],)
    elif key.startswith("data."):
        named = (*spec.data.all_sources, *spec.data.transforms)
    else:
        named = ()
    return tuple(each for each in named if each is not None and ".py:" in each)


def _of_reference(changes: Sequence[CodeChange], reference: str, folder: Path) -> set[int]:
    """The changes in a function's file and in what it imports; and in files that are gone, which it may have used."""
    module = reference.rpartition(":")[0]
    base = posixpath.dirname(module)
    files = {posixpath.normpath(posixpath.join(base, name)) for name in files_beside(module, folder)}
    return {index for index, each in enumerate(changes) if each.path in files or not (folder / each.path).is_file()}


def certain_changes(
    changes: Sequence[CodeChange], recorded: Mapping[str, Any], spec: RunSpec, folder: Path
) -> dict[str, Any]:
    """Return the identity keys that differ for certain, as far as the text of the code tells.

    Args:
        changes: of `code_changes`.

    Returns:
        The keys with their values now, where a changed function has another digest. Nothing if other statements changed
        too: what they make of model and data decides which keys differ.
    """
    now: dict[str, Any] = {}
    keys = (_MODEL_CODE, CALLBACKS, *spec.data.transform_of_key)
    for change in changes:
        known = False
        for key in keys:
            value = now.get(key, recorded.get(key))
            digests = value.get(CODE) if key != _MODEL_CODE and isinstance(value, Mapping) else value
            for reference in _references(key, spec):
                name = change.name_in(reference)
                if change.gone or not isinstance(digests, Mapping) or not _is_one(digests.get(name), change, folder):
                    continue
                known = True
                edited = {**digests, name: _EDITED}
                now[key] = edited if key == _MODEL_CODE else {**recorded[key], CODE: edited}
        if not known:
            return {}
    return now


# In place of a digest, which the values of constants decide too.
_EDITED: Final = "0" * 16


def _is_one(digest: object, change: CodeChange, folder: Path) -> bool:
    """Whether a digest is that of one function or class, which the file defines once, at its top."""
    if not isinstance(digest, str) or " " in digest:
        return False
    name = change.function.partition(".")[0]
    source = _ParsedFile.of((folder / change.path).read_bytes())
    nodes = [] if source is None else list(ast.walk(source.tree))
    defined = [node for node in nodes if isinstance(node, _Definition) and node.name == name]
    return source is not None and len(defined) == 1 and defined[0] in source.tree.body


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeReason:
    """Names the changes of the code behind differences of an identity, for `require_same_identity`.

    Attributes:
        home: the run's; its code is read when a difference is found.
        recorded: the identity in the log.
        spec: the run file.
        folder: its folder.
    """

    home: Storage
    recorded: Mapping[str, Any]
    spec: RunSpec
    folder: Path

    def __call__(self, found: Sequence[Difference]) -> tuple[str, ...]:
        """The lines of a message; none if the home has no code, or none that differs."""
        changes = changes_since_saved(self.home, self.recorded, self.spec, self.folder)
        return lines_of(reason_in_code(changes, found, self.spec, self.folder))
