"""`data.py:load`: the user's own generator function."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.foundation.errors import ModelError, RunFileError, SourceError
from tasks.foundation.model.code_digest import module_digest
from tasks.foundation.seeding import seed_for_reading
from tasks.foundation.user_code import describe, load_function
from tasks.prepare_data.sources.base import Located, Source, suggestion
from tasks.prepare_data.sources.returned_arrays import require_examples

_REMEDY = "make it a generator function: yield x, (x, y) or (x, y, sample_weight) for each example"


def function(reference: str, options: Mapping[str, Any], folder: Path, *, settled: bool, seed: int = 0) -> Source:
    """What the function yields, called with the options as keyword arguments.

    Its content is its code, that of the modules of its folder or package that it imports, the options and
    `data.version`: change the version when the data behind it have changed.

    Args:
        reference: `data.py:load` or `package.module:load`.
        options: keyword arguments.
        folder: the run file's folder.
        settled: `data.batched: false` says that they are single examples, whatever they look like.
        seed: `train.seed`, from which what module and function draw follows.

    Raises:
        SourceError: there is no such function, or importing it raises.
        RunFileError: it does not take these options.
    """
    try:
        load = load_function(reference, folder, seed=seed)
    except ModelError as fault:
        raise SourceError(f"data.source: {fault}") from fault
    # A file may hold several functions; where it lies is not content.
    content = f"{reference.partition(':')[2]} {module_digest(reference, folder)}"
    _check_options(reference, load, options)

    def begin() -> None:
        """Each reading draws the same, whatever was drawn before it."""
        seed_for_reading(reference.partition(":")[0], folder, seed)

    return Source(
        content=content,
        settings=options,
        origin={reference: f"sha256 {content}"},
        length=None,
        read=lambda: _read(reference, load, options, settled=settled, begin=begin),
    )


def _check_options(reference: str, load: Callable[..., Any], options: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(load)
    except (TypeError, ValueError):
        return  # some callables tell none; calling them will
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
            f"data.options: {dict(options)}: {reference} cannot be called with them: {fault}; set what is missing"
        ) from fault


def _read(
    reference: str,
    load: Callable[..., Any],
    options: Mapping[str, Any],
    *,
    settled: bool,
    begin: Callable[[], None],
) -> Iterator[Located]:
    begin()
    try:
        examples = load(**options)
    except (Exception, SystemExit) as fault:
        raise SourceError(f"{reference}: raised {describe(fault)}; correct it") from fault
    if not isinstance(examples, Iterable) or isinstance(examples, str | bytes | Mapping):
        raise SourceError(f"{reference}: returned {_told(examples)}; {_REMEDY}")
    if not settled:
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


def _told(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
