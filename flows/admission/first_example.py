"""Refuses a model as soon as the features of the examples are known, before a dataset is written for it."""

from collections.abc import Callable, Set
from typing import TYPE_CHECKING

from flows.run import Run
from tasks.foundation.contracts.dataset import Feature, Reading
from tasks.foundation.hosts import OneHost
from tasks.foundation.telemetry.events import Phase, Sink

if TYPE_CHECKING:
    from tasks.foundation.machine.devices import Accelerator


def features_check(
    run: Run, accelerator: "Accelerator | OneHost", *, remote: Set[str], telemetry: Sink
) -> Callable[[tuple[Feature, ...], Reading], None] | None:
    """The check of the first example for a new run: it builds the model as the run would, and writes nothing.

    Args:
        run: the run, which has not begun.
        accelerator: this process's.
        remote: names of the stages that run in other processes.
        telemetry: receives the phases of the check.

    Returns:
        None if the data or the model belong to another process, where init-or-restore checks first of all. None with
        several hosts, where only the chief prepares the data but all hosts build the model together.
    """
    if remote & {"prepare_data", "init_or_restore"} or isinstance(accelerator, OneHost) or accelerator.hosts > 1:
        return None

    def check(features: tuple[Feature, ...], reading: Reading) -> None:
        from tasks.init_or_restore.new_run import check_new_run

        telemetry.emit(Phase(cause="build"))
        check_new_run(
            run.spec,
            features,
            reading=reading,
            code_folder=run.folder,
            accelerator=accelerator,
            telemetry=telemetry,
        )
        telemetry.emit(Phase(cause="prepare-data"))

    return check
