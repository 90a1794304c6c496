"""Describes what happened to initial weights."""

from collections.abc import Iterator, Sequence

from tasks.foundation.contracts.weights_report import SourceReport, WeightsReport
from tasks.foundation.messages import abridged, counted, message

_SHOWN = 4


def report_notes(report: WeightsReport) -> Iterator[tuple[str, bool]]:
    """Yield notes, each with whether it is a warning."""
    for source in report.sources:
        words = f"loaded {counted(len(source.loaded), 'variable')} from {source.place} ({source.kind})"
        if source.ignored:
            words += (
                f"; ignored {counted(source.ignored, 'entry', 'entries')} not of weights (optimizer, counters, metrics)"
            )
        if source.not_asked:
            words += f"; {counted(source.not_asked, 'variable')} of it were not selected"
        yield words, False
        for remark in source.remarks:
            yield f"{source.source}: {abridged(remark)}", True
        if source.cast:
            yield f"{source.source}: converted {_first_names(source.cast)}", False
        for label, names in _gaps(source):
            yield f"{source.source}: {label}: {_first_names(names)}", True
    if report.overlaid:
        yield f"in several sources, the last one is used: {_first_names(report.overlaid)}", False
    if report.left:
        yield f"not loaded, keep their initial values: {_first_names(report.left)}", True


def describe_mismatch(source: SourceReport) -> str:
    """Describe why a source is refused, with hints."""
    return message(
        f"init.weights: {source.source} ({source.kind}) does not fit the model",
        details=[f"{label}: {_first_names(names)}" for label, names in _gaps(source)],
        hints=[
            "match names with rename: {name in the model: name in the source}, or select with include: and exclude:",
            "or load only what fits, with strict: false",
        ],
    )


def _gaps(source: SourceReport) -> list[tuple[str, Sequence[str]]]:
    gaps = [
        ("missing in the source", source.missing),
        ("missing in the model", source.unused),
        ("with another shape or dtype", source.misfits),
    ]
    return [(label, names) for label, names in gaps if names]


def _first_names(names: Sequence[str]) -> str:
    """Return the number of names, and the first few."""
    shown = ", ".join(names[:_SHOWN])
    return f"{counted(len(names), 'variable')}: {shown}{', …' if len(names) > _SHOWN else ''}"
