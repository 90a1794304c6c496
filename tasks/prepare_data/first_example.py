"""The features of a source's first example, read before anything is written, and their words for messages."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tasks.foundation.contracts.dataset import Feature
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.errors import SourceError
from tasks.prepare_data.example_checks import Checker
from tasks.prepare_data.sources.opening import open_source

Kinds = Mapping[str, tuple[str, tuple[int, ...]]]


def features_of_first_example(spec: RunSpec, code_folder: Path) -> tuple[Feature, ...]:
    """Return the features of the first example of `data.source`, which is read and not written.

    Global random numbers stay as they are, because other examples are being read meanwhile.

    Args:
        spec: the run file.
        code_folder: the run file's folder.

    Raises:
        SourceError: the source is missing or empty, or its first example is invalid.
        RunFileError: the source or an option cannot be used.
    """
    from tasks.foundation.model.isolated_build import preserved_global_state

    data = spec.data
    with preserved_global_state():
        source = open_source(data, code_folder, spec.train.seed)
        if source.in_place is not None:
            return source.in_place.features
        checker = Checker(data)
        first = next(source.read(), None)
        if first is None:
            raise SourceError(f"data.source: {data.source}: it has no examples; check data.options")
        checker.check(*first)
        return checker.features


def kinds_of(features: Sequence[Feature]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of each feature, by name."""
    return {each.name: (each.dtype, each.shape) for each in features}


def words_of(kinds: Kinds) -> str:
    """Return `x float32[3], y int64[]`."""
    return ", ".join(f"{name} {dtype}{list(shape)}" for name, (dtype, shape) in kinds.items())
