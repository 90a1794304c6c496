"""A source that the user writes: a generator function, such as `data.py:load`."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.foundation.errors import ModelError, RunFileError, SourceError
from tasks.foundation.model.code_digest import module_digest
from tasks.foundation.seeding import seed_as_after_import
from tasks.foundation.user_code import describe, load_function
from tasks.prepare_data.sources.base import LocatedExample, Source, suggestion
from tasks.prepare_data.sources.returned_arrays import require_examples

_REMEDY = "make it a generator function: yield x, (x, y) or (x, y, sample_weight) for each example"


def function(
    reference: str, options: Mapping[str, Any], folder: Path, *, single_examples: bool, seed: int = 0
) -> Source:
    """Open a source of what the function yields; it is called with the options as keyword arguments.

    Its content is its code, the code of modules that it imports from its folder or package, the options, and
    `data.version`: change the version when the data behind the function has changed.

    Args:
        reference: `data.py:load` or `package.module:load`.
        options: keyword arguments.
        folder: the run file's folder.
        single_examples: `data.batched: false` is set: the function yields single examples, whatever their shapes.
        seed: `train.seed`; random numbers that module and function draw derive from it.

    Raises:
        SourceError: there is no such function, or importing it raises.
        RunFileError: the function does not accept these options.
    """
    try:
        load = load_function(reference, folder, seed=seed)
    except ModelError as fault:
        raise SourceError(f"data.source: {fault}") from fault
    # A file may contain several functions, so the name is part of the content; the file's path is not.
    content = f"{reference.partition(':')[2]} {module_digest(reference, folder)}"
    _check_options(reference, load, options)

    def seed_random() -> None:
        """Seed random numbers, so that each reading draws the same."""
        seed_as_after_import(reference.partition(":")[0], folder, seed)

    return Source(
        content=content,
        settings=options,
        origin={reference: f"sha256 {content}"},
        length=None,
        read=lambda: _read(reference, load, options, single_examples=single_examples, seed_random=seed_random),
    )


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


def _read(
    reference: str,
    load: Callable[..., object],
    options: Mapping[str, Any],
    *,
    single_examples: bool,
    seed_random: Callable[[], None],
) -> Iterator[LocatedExample]:
    seed_random()
    try:
        examples = load(**options)
    except (Exception, SystemExit) as fault:
        raise SourceError(f"{reference}: raised {describe(fault)}; correct it") from fault
    if not isinstance(examples, Iterable) or isinstance(examples, str | bytes | Mapping):
        raise SourceError(f"{reference}: returned {_describe_type(examples)}; {_REMEDY}")
    if not single_examples:
        require_examples(reference, examples)
    index = 0
    iterator = iter(examples)
    while True:
        try:
            example = next(iterator)
        except StopIteration:
            return
        except (Exception, SystemExit) as fault:
            raise SourceError(f"{reference}: raised {describe(fault)} for example {index}; correct it") from fault
        yield f"{reference}, example {index}", example
        index += 1


def _describe_type(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
