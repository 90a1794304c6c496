"""A source that the user writes: a function such as `data.py:load`."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from tasks.foundation.contracts.data_spec import DataSpec
from tasks.foundation.errors import ModelError, RunFileError, SourceError
from tasks.foundation.messages import counted
from tasks.foundation.model.code_digest import module_digest
from tasks.foundation.seeding import numpy_entropy_from, random_source, seed_as_after_import
from tasks.foundation.telemetry.events import Note
from tasks.foundation.user_code import in_user_folder, load_function
from tasks.prepare_data.sources.read_once import DrawWatch
from tasks.prepare_data.sources.returned_forms import WARN_AT_EXAMPLES, Reader, call_user, endless_warning
from tasks.prepare_data.sources.source import LocatedExample, Source, suggestion


def function(
    data: DataSpec,
    folder: Path,
    *,
    seed: int = 0,
    accepted: bool = False,
    note: Callable[[Note], None] = lambda _: None,
) -> Source:
    """Open a source of what the function returns or yields; it is called with the options as keyword arguments.

    Its content is its code, the code of modules that it imports from its folder or package, the options, and
    `data.version`: change the version when the data behind the function has changed.

    Args:
        data: the run file's `data`; its source is `data.py:load` or `package.module:load`.
        folder: the run file's folder; relative paths that the function opens start there.
        seed: `train.seed`; random numbers that module and function draw derive from it.
        accepted: the run has begun with these examples, so they are not refused as ambiguous.
        note: receives how it is read, and warnings.

    Raises:
        SourceError: there is no such function, or importing it raises.
        RunFileError: the function does not accept these options.
    """
    reference, options = data.source, data.options
    try:
        load = load_function(reference, folder, seed=seed, key="data.source")
    except ModelError as fault:
        raise SourceError(str(fault)) from fault
    # A file may contain several functions, so the name is part of the content; the file's path is not.
    content = f"{reference.partition(':')[2]} {module_digest(reference, folder)}"
    _check_options(reference, load, options)

    def read() -> Iterator[LocatedExample]:
        # Each reading draws the same random numbers.
        module = reference.partition(":")[0]
        seed_as_after_import(module, folder, seed)
        fresh_seeds = random_source(module, seed)

        @contextmanager
        def surroundings() -> Iterator[None]:
            with in_user_folder(folder), numpy_entropy_from(fresh_seeds):
                yield

        def warn(text: str) -> None:
            note(Note(text=text, warning=True))

        with DrawWatch(reference, warn).of_tf_data():
            returned = call_user(reference, lambda: load(**options), surroundings)
        reader = Reader(
            reference=reference,
            batched=data.batched,
            accepted=accepted,
            bounded=data.examples is not None,
            ragged=data.has_sequences,
            ordered=not data.shuffle,
            note=note,
            surroundings=surroundings,
        )
        yield from _first(reader.read(returned), data.examples, reference=reference, note=note)

    return Source(content=content, settings=options, origin={reference: f"sha256 {content}"}, length=None, read=read)


def _check_options(reference: str, load: Callable[..., object], options: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(load)
    except (TypeError, ValueError):
        return  # some callables have no signature; the call itself reports errors
    parameters = signature.parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        known = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL]
        for key, value in options.items():
            if key not in known:
                raise RunFileError(
                    f"data.options.{key}: {value!r}: {reference} has no such parameter; {suggestion(key, known)}"
                )
    try:
        signature.bind(**options)
    except TypeError as fault:
        raise RunFileError(
            f"data.options: {dict(options)}: {reference} cannot be called with them: {fault}; set the missing options"
        ) from fault


def _first(
    examples: Iterator[LocatedExample], count: int | None, *, reference: str, note: Callable[[Note], None]
) -> Iterator[LocatedExample]:
    """Yield the first `count` examples, or all.

    Raises:
        SourceError: there are fewer.
    """
    found = 0
    for found, example in enumerate(islice(examples, count), start=1):
        yield example
        if count is None and found == WARN_AT_EXAMPLES:
            note(Note(text=endless_warning(reference, found)))
    if count is not None and found < count:
        raise SourceError(
            f"data.examples: {count}: {reference} has {counted(found, 'example')} only; set it to {found} or remove it"
        )
