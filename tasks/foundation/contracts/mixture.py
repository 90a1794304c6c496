"""Mixtures: `data.sources` in the run file, and what the manifest of a prepared mixture has."""

import hashlib
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.evaluation_sets import SetSpec
from tasks.foundation.contracts.safe_names import DatasetPath

# What happens when all examples of a source were used.
Exhausted = Literal["repeat", "drop"]

# A window of the mixed stream has at least one example of each source, so it cannot have any share.
SMALLEST_SHARE = 32_768


class SourceSpec(SetSpec):
    """One source of a mixture. Besides `weight`, the keys are those of `data`."""

    weight: float = Field(
        default=1,
        gt=0,
        allow_inf_nan=False,
        description="share of the examples, in relation to the other weights",
    )


def _from_list(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


SourcesField = Annotated[tuple[SourceSpec, ...], BeforeValidator(_from_list)]


def integer_weights(weights: Iterable[float]) -> tuple[int, ...]:
    """Return the smallest integers in the proportion of the weights, as they are written: 0.7 and 0.3 are 7 and 3."""
    exact = [Fraction(repr(weight)) for weight in weights]
    scale = math.lcm(*(each.denominator for each in exact))
    scaled = [int(each * scale) for each in exact]
    common = math.gcd(*scaled)
    return tuple(each // common for each in scaled)


def require_mixture(sources: Sequence[SourceSpec]) -> None:
    """Refuse sources that are no mixture.

    Raises:
        ValueError: there is a single source, one is named twice, or a weight is too small beside the others.
    """
    if len(sources) == 1:
        raise ValueError(f"sources has one source; write source: {sources[0].source}")
    for index, each in enumerate(sources):
        same = [other for other in sources[:index] if other.model_copy(update={"weight": each.weight}) == each]
        if same:
            raise ValueError(
                f"sources[{sources.index(same[0])}] and sources[{index}] are the same ({each.source}); "
                f"name it once, with weight: {same[0].weight + each.weight:g}"
            )
    weights = integer_weights(each.weight for each in sources)
    smallest = min(range(len(weights)), key=weights.__getitem__)
    if weights[smallest] * SMALLEST_SHARE < sum(weights):
        raise ValueError(
            f"sources[{smallest}].weight = {sources[smallest].weight:g} is less than 1/{SMALLEST_SHARE} of all "
            f"weights; give {sources[smallest].source} a larger weight, or leave it out"
        )


class MixedSource(Contract):
    """A source of a prepared mixture: a dataset of its own."""

    source: str = Field(description="as the run file names it")
    folder: DatasetPath
    content_digest: str
    weight: int = Field(ge=1, description="the weights are the smallest integers in their proportion")
    train_examples: int = Field(ge=1)
    validation_examples: int = Field(ge=0)


class Mixture(Contract):
    """The sources that a prepared dataset mixes. Their order and weights decide the order of the examples."""

    sources: tuple[MixedSource, ...] = Field(min_length=2)
    exhausted: Exhausted

    @property
    def digest(self) -> str:
        """The name of the dataset: sha256 over all that decides the examples and their order, 24 hex digits."""
        lines = [self.exhausted, *(f"{each.folder} {each.content_digest} {each.weight}" for each in self.sources)]
        return hashlib.sha256("\n".join(["mixture", *lines]).encode()).hexdigest()[:24]
