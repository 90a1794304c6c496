"""What became of initial weights: every variable of the model and of each source is accounted for."""

from pydantic import Field

from tasks.foundation.contracts.base import Contract


class SourceReport(Contract):
    """One source of initial weights, and what of it was used."""

    source: str = Field(description="the address, as the run file has it")
    kind: str = Field(description="what was found there, in words")
    place: str = Field(description="where it lay; of a Baton run, the checkpoint's folder")
    step: int | None = Field(default=None, description="of a Baton run, the checkpoint's")
    loaded: dict[str, str] = Field(description="path of each variable that was loaded -> its name in the source")
    missing: tuple[str, ...] = Field(description="asked for, and not in the source")
    unused: tuple[str, ...] = Field(description="in the source, and of no variable that was asked for")
    misfits: tuple[str, ...] = Field(description="in both, of another shape or type; in words")
    cast: tuple[str, ...] = Field(description="loaded from another floating type; in words")
    remarks: tuple[str, ...] = Field(description="how names were related where they were not equal; in words")
    not_asked: int = Field(ge=0, description="variables of the source that the patterns leave out")
    ignored: int = Field(ge=0, description="entries of the source that are no weights: optimizer, counters, metrics")


class WeightsReport(Contract):
    """What a run began from, besides its seed."""

    sources: tuple[SourceReport, ...]
    left: tuple[str, ...] = Field(description="variables that keep their seeded initial value")
    overlaid: tuple[str, ...] = Field(description="variables that several sources have; the last one's values hold")
    digest: str = Field(description="sha256 over the sorted (path, dtype, shape, bytes) of what was loaded")
