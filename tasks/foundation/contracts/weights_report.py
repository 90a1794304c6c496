"""What happened to initial weights: the report covers every variable of the model and of each source."""

from pydantic import Field

from tasks.foundation.contracts.base import Contract


class SourceReport(Contract):
    """One source of initial weights, and what was used of it."""

    source: str = Field(description="address as in the run file")
    kind: str = Field(description="kind of the source, in words")
    place: str = Field(description="where the weights were found; for a Baton run, the checkpoint's folder")
    step: int | None = Field(default=None, description="step of the checkpoint, for a Baton run")
    loaded: dict[str, str] = Field(description="path of each loaded variable -> its name in the source")
    missing: tuple[str, ...] = Field(description="requested variables that are not in the source")
    unused: tuple[str, ...] = Field(description="weights in the source that match no requested variable")
    misfits: tuple[str, ...] = Field(description="variables with another shape or type in the source, in words")
    cast: tuple[str, ...] = Field(description="variables cast from another floating type, in words")
    remarks: tuple[str, ...] = Field(description="how names that are not equal were matched, in words")
    not_asked: int = Field(ge=0, description="variables of the source that the patterns exclude")
    ignored: int = Field(ge=0, description="entries of the source that are not weights: optimizer, counters, metrics")


class WeightsReport(Contract):
    """What a run was initialized from, besides its seed."""

    sources: tuple[SourceReport, ...]
    left: tuple[str, ...] = Field(description="variables that keep their seeded initial value")
    overlaid: tuple[str, ...] = Field(description="variables in several sources; the last source wins")
    digest: str = Field(description="sha256 over the sorted (path, dtype, shape, bytes) of what was loaded")
