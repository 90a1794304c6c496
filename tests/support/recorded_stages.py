"""Stages that Prefect records, for `tests.support.call_function`."""

import contextvars
import threading
from pathlib import Path
from typing import Any

from prefect import flow, tags

from baton.flows.runner import InProcess
from baton.flows.with_prefect.record import PrefectRunLogger
from baton.flows.with_prefect.task_runs import PrefectStatus, PrefectTasks, logger_of_stage
from baton.tasks.foundation.contracts.dataset import DatasetRef
from baton.tasks.foundation.contracts.stage_calls import PrepareDataCall
from baton.tasks.foundation.stage import Place, Stage
from baton.tasks.foundation.storage.memory import MemoryStorage
from baton.tasks.foundation.telemetry.events import Note
from tests.support.clock import FakeClock
from tests.support.event_recorder import EventRecorder
from tests.support.fake_prefect_api import DATASET
from tests.support.lab import spec_of

A_LONG_TIME = 60.0


def run_without_answers() -> dict[str, Any]:
    """Run three stages on a server that does not answer; say what happened by then, and what was reported."""
    recorder, clock = EventRecorder(), FakeClock(0.0)
    status = PrefectStatus(lambda: False, clock=clock)
    stages, tasks = InProcess(), PrefectTasks(recorder, status)
    place = Place.of(MemoryStorage("tests"), "run", code_folder=Path(), telemetry=tasks)
    call = PrepareDataCall(spec=spec_of("plain"))
    answers = 0
    with tags("baton"):
        for seconds in (0.0, 1.0, 30.0):
            clock.seconds = seconds
            answers += stages.run(_stage("prepare_data", lambda: None), call, place) == DATASET
    for thread in threading.enumerate():
        if thread.name.startswith("baton-"):
            thread.join(0.0 if status.reported_absent else A_LONG_TIME)
    notes = [event.text for event in recorder.events if isinstance(event, Note)]
    return {"answers": answers, "warnings": notes}


def run_beside() -> str:
    """Run a flow in which the commit of step 1 runs in another thread, beside the training to step 2.

    Returns:
        The id of the flow run.
    """
    training, committing = threading.Event(), threading.Event()

    @flow(name="beside")
    def beside() -> str:
        from prefect.runtime import flow_run

        call = PrepareDataCall(spec=spec_of("plain"))

        def commit() -> None:
            committing.set()
            assert training.wait(A_LONG_TIME)

        def train() -> None:
            assert committing.wait(A_LONG_TIME)
            record = tasks._last
            assert record is not None
            assert record.begun.wait(A_LONG_TIME)
            PrefectRunLogger(logger_of_stage).emit(Note(text="trained"))
            training.set()

        with tags("baton"), PrefectTasks(EventRecorder()) as tasks:
            place = Place.of(MemoryStorage("tests"), "run", code_folder=Path(), telemetry=tasks)
            stages = InProcess()
            stages.run(_stage("train_segment", lambda: None), call, place)
            thread = threading.Thread(
                target=contextvars.copy_context().run,
                args=(stages.run, _stage("checkpoint_to_gcs", commit), call, place),
            )
            thread.start()
            assert committing.wait(A_LONG_TIME)
            stages.run(_stage("train_segment", train), call, place)
            thread.join()
        return str(flow_run.id)

    return beside()


def _stage(name: str, work: Any) -> Stage[PrepareDataCall, DatasetRef]:
    def run(_call: PrepareDataCall, _place: Place) -> DatasetRef:
        work()
        return DATASET

    return Stage(
        name=name, call=PrepareDataCall, answer=DatasetRef, load=lambda: run, subject=lambda call: call.spec.run
    )
