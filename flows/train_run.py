"""The flow train-run: prepare-data -> init-or-restore -> (train-segment -> checkpoint-to-GCS)* -> evaluate.

`python -m flows.train_run FILE` is `baton run FILE`.
"""

import signal
import sys
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":  # before Prefect is imported: the command sets up Prefect first
    from flows.process.hash_seed import begin_with_fixed_hashes

    begin_with_fixed_hashes()
    from flows.commands.main import main

    sys.argv[1:1] = ["run"]
    sys.exit(main())

from prefect import flow, tags
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.runtime import deployment, flow_run
from prefect.states import Completed

from flows.admit import Admitted, admit
from flows.opened_run import Goal, Run
from flows.prefect_compat.flow_run_beside import failed
from flows.prefect_compat.lease_shield import lease_shield
from flows.prefect_compat.prefect_offline import logger_of_stage, prefect_responds
from flows.prefect_ui.run_logger import PrefectRunLogger, tag_flow_run, tags_of
from flows.process.library_output import mask_library_output
from flows.process.main_module import keep_main_module_from_children
from flows.recorded_relay import recorded_relay
from flows.result import RelayResult
from tasks.foundation.contracts.identity import accepted_keys
from tasks.foundation.contracts.run_file import load_run_file
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.errors import BatonError, RunAtWork
from tasks.foundation.machine.environment import quiet_tensorflow
from tasks.foundation.machine.tpu import announce_tpu
from tasks.foundation.storage.transfers import PROCESS_DEADLINE
from tasks.foundation.telemetry.events import Note, Sink
from tasks.foundation.telemetry.formatting import metric_words, step_words

quiet_tensorflow()
mask_library_output()
announce_tpu()  # a Prefect worker imports this file first, and the stages import TensorFlow

# Exit reasons that the metadata server causes.
MACHINE_GOES = frozenset({"preempted", "maintenance"})


class MachineIsGoing(TerminationSignal):
    """The metadata server announced the end of this machine; Prefect treats it like SIGTERM.

    Attributes:
        reason: preempted or maintenance.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(signal=signal.SIGTERM)
        self.reason = reason


def target_name(spec: RunSpec, until_step: int | None) -> str:
    """Name of a flow run that trains: the run and its target, as `digits-cnn → 2000`."""
    target = until_step or spec.train.known_target
    return f"{spec.run} → {f'epoch {spec.train.epochs:g}' if target is None else target}"


def train_run_name() -> str:
    """Name of a deployment's flow run; see `target_name` and `run_name`."""
    return _named(lambda spec: target_name(spec, flow_run.parameters.get("until_step")))


def run_name() -> str:
    """Name of a flow run: the training run's, or the file's if the run file is refused.

    Prefect names a flow run before it begins. An error here would be the engine's: the flow run would crash, or stay
    pending. The flow itself meets the same refusal, and fails with its message.
    """
    return _named(lambda spec: spec.run)


def _named(name_of: Callable[[RunSpec], str]) -> str:
    file, overrides = Path(flow_run.parameters["run_file"]), flow_run.parameters.get("overrides")
    try:
        return name_of(load_run_file(file, overrides or []).spec)
    except BatonError:
        return file.name or str(file)


@flow(name="train-run", flow_run_name=train_run_name, validate_parameters=True)
def train_run(
    run_file: str,
    overrides: list[str] | None = None,
    *,
    until_step: int | None = None,
    max_segments: int | None = None,
    max_seconds: float | None = None,
    accept: list[str] | None = None,
    try_again: bool = False,
    take_over: bool = False,
) -> State[RelayResult] | State[str]:
    """Train a run to its goal, in segments, from wherever its log says that it is.

    It returns a `RelayResult`. A flow run that ends within its own limits (segments, seconds) with work left is
    `Stopped`, which Prefect counts as completed; one that loses its machine has crashed.

    Args:
        run_file: path of the run file.
        overrides: settings that replace those of the file, each as a.b=c.
        until_step: the absolute step to train to; left out: train.steps, or the end of train.epochs.
        max_segments: stop after this many segments.
        max_seconds: stop after this many seconds; left out: train.stop_after_seconds.
        accept: accepted changes of identity keys, as compile.optimizer.
        try_again: forget earlier attempts without progress.
        take_over: start even if another process trains the run; without it the flow run is `Stopped` at once.
    """
    PROCESS_DEADLINE.clear()
    keep_main_module_from_children(only_of="prefect")
    try:
        run = Run.open(load_run_file(Path(run_file), overrides or []))
        goal = Goal.of(run.spec, until_step=until_step, max_segments=max_segments, max_seconds=max_seconds)
        accepted = accepted_keys(",".join(accept or []))

        def admission(telemetry: Sink) -> Admitted | RelayResult:
            return admit(run, goal, accept=accepted, try_again=try_again, take_over=take_over, telemetry=telemetry)

        logger = PrefectRunLogger(logger_of_stage)
        tag_flow_run(run.spec, logger)
        with tags(*tags_of(run.spec)), lease_shield():
            # The process of a deployment's flow run exists for this run only.
            result = recorded_relay(run, admission, telemetry=logger, whole_process=deployment.id is not None)
    except RunAtWork as fault:
        # A scheduled flow run beside a run at work has nothing to do, and has not failed.
        return Completed(name="Stopped", message=str(fault).splitlines()[0], data=str(fault))
    except BatonError as fault:
        return failed(fault)
    if not prefect_responds():
        # The engine tries to record the last state, and then a failure to do so, each for a minute by its settings.
        logger.emit(Note(text="Prefect is not responding; retrying for up to two minutes", warning=True))
    return final_state(result, run.spec)


def final_state(result: RelayResult, spec: RunSpec) -> State[RelayResult]:
    """The flow run's last state, whose message says where the run stands.

    Raises:
        MachineIsGoing: the machine is about to go.
    """
    if result.exit_reason in MACHINE_GOES:
        raise MachineIsGoing(result.exit_reason)
    prefix = "validation_"
    evaluated = {name.removeprefix(prefix): value for name, value in result.metrics.items() if name.startswith(prefix)}
    words = metric_words(evaluated or result.metrics).replace("  ", ", ")
    where = f"{spec.run} is at {step_words(result.step, result.target, result.epoch)}"
    if words:
        where += f", {'validation' if evaluated else 'training'} {words}"
    if result.stopped:
        why = result.exit_reason.replace("_", " ")
        return Completed(name="Stopped", message=f"{why}: {where}, with work left to do", data=result)
    why = {"nothing_to_do": "nothing to do: ", "finished_early": "ended early: "}.get(result.exit_reason, "")
    return Completed(message=f"{why}{where}", data=result)
