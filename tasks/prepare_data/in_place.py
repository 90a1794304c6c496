"""Records that stay in their original files: counted, indexed and checked, but not copied."""

from tasks.foundation.contracts.dataset import DatasetManifest, HeldOut, ShardRecord, content_digest
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.dataset.manifest import Part, positions_of_part
from tasks.foundation.telemetry.events import Preparing, Sink
from tasks.prepare_data.example_checks import Checker
from tasks.prepare_data.sources.base import InPlace, Source
from tasks.prepare_data.split import held_out_rule

_REPORT_EVERY_EXAMPLES = 10_000


def index_in_place(
    spec: RunSpec, source: Source, in_place: InPlace, *, digest: str, checker: Checker, telemetry: Sink
) -> DatasetManifest:
    """Return the manifest of a dataset whose shards are ranges of the source's files; reads all of them.

    A range may hold training and validation examples. It is listed for each part that it has examples of; the
    manifest's held-out rule decides which these are.

    Args:
        spec: the run file.
        source: the source, whose records stay in place.
        in_place: its features and ranges.
        digest: the dataset's name.
        checker: checks every example.
        telemetry: receives progress events.

    Raises:
        SourceError: the source has no example, an invalid one, or a single one that cannot be split.
    """
    count = 0

    def check(where: str, example: object) -> None:
        nonlocal count
        checker.check(where, example)
        count += 1
        if count % _REPORT_EVERY_EXAMPLES == 0:
            telemetry.emit(Preparing(examples=count))

    shards: list[ShardRecord] = []
    first = 0
    for found in in_place.ranges(check, spec.data.shard_examples):
        shards.append(
            ShardRecord(
                path=found.path,
                begin=found.begin,
                size=found.size,
                crc32c=found.crc32c,
                first=first,
                records=found.records,
                examples=found.records,
            )
        )
        first += found.records
    telemetry.emit(Preparing(examples=count))
    held_out = held_out_rule(first, fraction=spec.data.validation_fraction, seed=spec.train.seed)
    train = _of_part("train", held_out, shards)
    validation = _of_part("validation", held_out, shards)
    return DatasetManifest(
        digest=digest,
        content_digest=content_digest(in_place.features, train, validation, held_out),
        source=spec.data.source,
        origin=dict(source.origin),
        features=in_place.features,
        train=train,
        validation=validation,
        held_out=held_out,
        extremes=checker.extremes,
    )


def _of_part(part: Part, held_out: HeldOut | None, shards: list[ShardRecord]) -> tuple[ShardRecord, ...]:
    if held_out is None:
        return tuple(shards) if part == "train" else ()
    counted = ((shard, len(positions_of_part(part, held_out, [shard]))) for shard in shards)
    return tuple(shard.model_copy(update={"examples": count}) for shard, count in counted if count)
