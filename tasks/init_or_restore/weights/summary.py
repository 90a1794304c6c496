"""What became of initial weights, in words."""

from collections.abc import Iterator, Sequence

from tasks.foundation.contracts.weights_report import SourceReport, WeightsReport
from tasks.foundation.messages import abridged, message

_SHOWN = 4


def notes_of(report: WeightsReport) -> Iterator[tuple[str, bool]]:
    """Lines for people, each with whether it is a warning."""
    for source in report.sources:
        words = f"loaded {_count(len(source.loaded))} from {source.place} ({source.kind})"
        if source.ignored:
            words += f"; {source.ignored} entries that are no weights (optimizer, counters, metrics) were not looked at"
        if source.not_asked:
            words += f"; {_count(source.not_asked)} of it were not asked for"
        yield words, False
        for remark in source.remarks:
            yield f"{source.source}: {abridged(remark)}", True
        if source.cast:
            yield f"{source.source}: converted {_some(source.cast)}", False
        for label, names in _gaps(source):
            yield f"{source.source}: {label}: {_some(names)}", True
    if report.overlaid:
        yield f"in several sources, of which the last one holds: {_some(report.overlaid)}", False
    if report.left:
        yield f"left at their initial values: {_some(report.left)}", True


def misfit_words(source: SourceReport) -> str:
    """Why a source is refused, and what can be done."""
    return message(
        f"init.weights: {source.source} ({source.kind}) does not fit the model",
        details=[f"{label}: {_some(names)}" for label, names in _gaps(source)],
        hints=[
            "relate names with rename: {name in the model: name in the source}, or choose with include: and exclude:",
            "or load what fits, with strict: false",
        ],
    )


def _gaps(source: SourceReport) -> list[tuple[str, Sequence[str]]]:
    gaps = [
        ("not in the source", source.missing),
        ("in the source and not in the model", source.unused),
        ("of another shape or type", source.misfits),
    ]
    return [(label, names) for label, names in gaps if names]


def _some(names: Sequence[str]) -> str:
    """The count, and the first few."""
    shown = ", ".join(names[:_SHOWN])
    return f"{_count(len(names))}: {shown}{', …' if len(names) > _SHOWN else ''}"


def _count(number: int) -> str:
    return "1 variable" if number == 1 else f"{number} variables"
