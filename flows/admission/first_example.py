"""A model is refused as soon as it is known what the examples hold, before a dataset is written for it."""

from collections.abc import Callable, Set
from typing import Any

from tasks.foundation.contracts.dataset import Feature
from tasks.foundation.contracts.run_file import RunFile
from tasks.foundation.telemetry.events import Phase, Sink


def first_look(
    run: RunFile, accelerator: Any, *, elsewhere: Set[str], telemetry: Sink
) -> dict[str, Callable[[tuple[Feature, ...]], None]]:
    """What prepare-data is given besides, where a run begins: `look`, or nothing.

    It begins the run without writing anything. Nothing where the data or the model are another process's: there
    init-or-restore looks first of all. Nor of several hosts, where the chief alone prepares the data and a model is
    built by all together.

    Args:
        run: the run file.
        accelerator: this process's.
        elsewhere: names of the stages that run in other processes.
        telemetry: is told what is done.
    """
    if elsewhere & {"prepare_data", "init_or_restore"} or accelerator.hosts > 1:
        return {}

    def look(features: tuple[Feature, ...]) -> None:
        from tasks.init_or_restore.new_run import try_beginning

        telemetry.emit(Phase(cause="build"))
        try_beginning(run.spec, features, code_folder=run.folder, accelerator=accelerator, telemetry=telemetry)
        telemetry.emit(Phase(cause="prepare-data"))

    return {"look": look}
