"""The table of the five stages."""

import subprocess
import sys
import typing

import pytest

from baton.tasks.foundation.contracts.placement import StagesSpec
from baton.tasks.foundation.stage import Place, Stage
from baton.tasks.stages import STAGES
from tests.support.checkout import CHECKOUT


def test_table_has_the_stages_of_the_run_file_in_order() -> None:
    assert [stage.name for stage in STAGES] == list(StagesSpec.model_fields)


def test_labels_are_the_names_of_the_flows() -> None:
    from baton.flows.with_prefect import stage_flows

    assert [getattr(stage_flows, stage.name).name for stage in STAGES] == [stage.label for stage in STAGES]


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_work_has_the_contracts_of_the_table(stage: Stage[typing.Any, typing.Any]) -> None:
    work = stage.load()
    assert work.__name__ == stage.name
    hints = typing.get_type_hints(work)
    assert (hints["call"], hints["place"], hints["return"]) == (stage.call, Place, stage.answer)


def test_table_imports_neither_tensorflow_nor_prefect() -> None:
    code = "import sys, baton.tasks.stages\nprint(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert not {"tensorflow", "keras", "prefect"} & set(done.stdout.split())
