"""Runs on mixtures of sources, refused when the mixture changes. One is killed in test_sources_in_place.py."""

from pathlib import Path
from typing import Any

import pytest

from baton.flows.doctor.data_checks import check_data
from baton.flows.opened_run import RunHome
from baton.flows.verification import verify_home
from baton.tasks.foundation.contracts.run_file import RunFile
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import IdentityChanged
from tests.support.homes import tip_of
from tests.support.watched_relay import command, home_of
from tests.train_segment.test_transforms import make_lab
from tests.train_segment.test_transforms import spec_of as transformed

pytestmark = pytest.mark.slow


def source(examples: int, weight: float, form: str = "plain") -> dict[str, Any]:
    return {"source": "data.py:load", "options": {"form": form, "examples": examples}, "weight": weight}


def spec_of(replicas: int = 1, **data: Any) -> RunSpec:
    return transformed(replicas, **({"source": "", "sources": [source(60, 2), source(22, 1)]} | data))


def epochs_of(spec: RunSpec, epochs: int) -> RunSpec:
    values = spec.model_dump(mode="json")
    values["train"] |= {"steps": None, "epochs": epochs}
    return RunSpec.model_validate(values)


def test_changed_weights_are_refused_and_can_be_accepted(tmp_path: Path) -> None:
    from baton.tasks.foundation.contracts.stage_calls import InitOrRestoreCall
    from baton.tasks.init_or_restore.stage import init_or_restore

    lab, spec = make_lab(tmp_path), spec_of()
    head = lab.begin(spec)
    assert head.identity["data.sources"] == {"weights": [2, 1], "exhausted": "repeat"}
    lab.begin(spec_of(sources=[source(60, 0.4), source(22, 0.2)]))  # the same proportions
    other = spec_of(sources=[source(60, 1), source(22, 1)])
    with pytest.raises(IdentityChanged, match=r"data\.sources\.weights: \[2, 1\] -> \[1, 1\]") as refused:
        lab.begin(other)
    assert "data.content_digest" not in str(refused.value)
    assert "--accept sources" in str(refused.value)
    with pytest.raises(IdentityChanged, match=r"data\.sources\.exhausted: repeat -> drop"):
        lab.begin(spec_of(exhausted="drop"))
    with pytest.raises(IdentityChanged, match=r"data\.content_digest"):
        lab.begin(spec_of(sources=[source(60, 2), source(21, 1)]))
    with pytest.raises(IdentityChanged, match=r"data\.sources"):
        lab.begin(transformed())
    call = InitOrRestoreCall(spec=other, dataset=lab.prepare(other), accept=("data.sources",))
    accepted = init_or_restore(call, lab.place(other))
    assert accepted.identity["data.sources"]["weights"] == [1, 1]
    assert accepted.identity["data.folder"] == lab.prepare(other).folder


def test_run_on_a_mixture_counts_epochs_and_is_verified(tmp_path: Path) -> None:
    lab = make_lab(tmp_path)
    spec = epochs_of(spec_of(exhausted="drop", batch_transform=None), 2)
    run = RunFile(path=lab.code / "run.yaml", spec=spec)
    sampled = check_data(run, lab.storage, tmp_path / "sample")
    assert sampled.text.startswith("the first 82 examples of the 2 sources are valid: x float32[6], y int64[]")
    assert not list(lab.storage.files("datasets"))
    result = command(lab, spec)
    ref = lab.prepare(spec)
    assert result.exit_reason == "complete"
    assert tip_of(home_of(lab, spec)).step == -(-2 * ref.train_examples // 8)
    assert sampled.value.train_examples == ref.train_examples
    prepared = check_data(run, lab.storage, tmp_path / "unused").value
    assert (prepared.is_whole, prepared.ref.folder) == (True, ref.folder)
    found = verify_home(RunHome.at(lab.storage, spec.run))
    assert not found.damages
    shards = [path for path in lab.storage.files("datasets") if not path.endswith("manifest.json")]
    assert len({Path(path).parent for path in shards}) == 2
    (lab.root / "storage" / shards[0]).write_bytes(b"damaged")
    assert [Path(each.file).name for each in verify_home(RunHome.at(lab.storage, spec.run)).damages] == [
        Path(shards[0]).name
    ]
