"""The stage init-or-restore begins a run, or finds the checkpoint from which it continues."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.log_entry import Commit, Entry
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import IdentityChanged, ModelError, NothingToRestore
from tests.support.lab import Lab, lab_of, spec_of

MODEL = """
class Scaled(keras.layers.Layer):
    def __init__(self, scale, **config):
        super().__init__(**config)
        self.scale = scale

    def call(self, x):
        return x * self.scale

    def get_config(self):
        return super().get_config()


def build(width=5, metric="accuracy", scale=1.0):
    x = keras.Input((6,))
    y = layers.SeededNoise()(x)
    y = keras.layers.Dense(width, activation="tanh", name="hidden")(Scaled(scale)(y))
    model = keras.Model(x, keras.layers.Dense(3, activation="softmax")(y))
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=[metric])
    return model
"""


@pytest.fixture
def new_lab(tmp_path: Path) -> Lab:
    return lab_of(tmp_path, MODEL)


def entries(lab: Lab, spec: RunSpec) -> list[Entry]:
    return list(lab.log(spec).entries())


def flip(lab: Lab, spec: RunSpec, ref: CheckpointRef) -> None:
    file = lab.folder(spec, ref) / "ckpt.data-00000-of-00001"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_new_run_commits_its_origin_and_step_0(new_lab: Lab) -> None:
    spec = spec_of("build")
    head = new_lab.begin(spec)
    assert [entry.body.kind for entry in entries(new_lab, spec)] == ["origin", "checkpoint"]
    first = entries(new_lab, spec)[-1].body
    assert isinstance(first, Commit)
    assert first.target == spec.train.target
    assert head == new_lab.log(spec).head()
    assert head.tip is not None
    assert (head.tip.step, head.base, head.commits) == (0, 1, 1)
    assert head.tip.base == 0
    assert head.environment.replicas == 1
    assert set(head.identity) >= {"data.content_digest", "model.config", "model.code", "compile.optimizer"}


def test_second_call_has_nothing_to_do(lab: Lab) -> None:
    spec = spec_of("build")
    first = lab.log(spec).require_head()
    files = {path: path.stat().st_mtime_ns for path in lab.root.rglob("storage/**/*") if path.is_file()}
    assert lab.begin(spec) == first
    assert {path: path.stat().st_mtime_ns for path in lab.root.rglob("storage/**/*") if path.is_file()} == files


def test_run_begins_with_the_same_bits_in_every_home(new_lab: Lab, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    heads = [each.begin(spec_of("build")) for each in (new_lab, lab_of(elsewhere, MODEL))]
    assert len({head.tip.state_digest for head in heads if head.tip is not None}) == 1
    assert heads[0].identity == heads[1].identity


# More of them in test_changes.py, with the keys to accept.
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "metric": (
        {"model__options": {"metric": "sparse_categorical_crossentropy"}},
        "compile.metrics: ['accuracy'] -> ['sparse_categorical_crossentropy']",
    ),
    "width": ({"model__options": {"width": 7}}, "units: 5 -> 7"),
    "option": ({"model__options": {"scale": 2.0}}, "model.options.scale: absent -> 2.0"),
    "examples": ({"data__options__examples": 59}, "data.content_digest: "),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_run_of_the_same_name_is_refused(lab: Lab, change: str) -> None:
    changes, text = CHANGES[change]
    spec = spec_of("build")
    before = lab.log(spec).require_head()
    with pytest.raises(IdentityChanged) as refused:
        lab.begin(spec_of("build", **changes))
    assert refused.value.exit_code == 2
    assert text in str(refused.value)
    assert f"{lab.root}/storage/build was started with other settings, data or code" in str(refused.value)
    assert re.search("\nhint: (restore|leave) ", str(refused.value))  # the way back comes first
    assert lab.log(spec).head() == before


@pytest.mark.parametrize(
    ("file", "old", "new", "text"),
    [
        (
            "layers.py",
            "return x + keras.random.normal(ops.shape(x), seed=self.seeds)",
            "return x",
            "SeededNoise: changed",
        ),
        ("model.py", 'activation="tanh"', 'activation="relu"', "activation: tanh -> relu"),
    ],
)
def test_other_code_is_refused(lab: Lab, file: str, old: str, new: str, text: str) -> None:
    with pytest.raises(IdentityChanged) as refused:
        lab.copy_of_code("changed", (file, old, new)).begin(spec_of("build"))
    assert text in str(refused.value)
    assert re.search(rf"\n  {re.escape(file)}:\d+, in .*\n(.*\n)*    - .*{re.escape(old)}", str(refused.value))


def test_log_without_a_key_is_continued(new_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    from baton.tasks.init_or_restore import stage

    spec = spec_of("build", model__options={"scale": 2.0})
    complete = stage.run_identity
    with monkeypatch.context() as earlier:
        earlier.setattr(
            stage,
            "run_identity",
            lambda *given: {key: value for key, value in complete(*given).items() if key != "model.options"},
        )
        before = new_lab.begin(spec)
    assert "model.options" not in before.identity
    assert new_lab.begin(spec) == before


def test_operational_keys_may_change(lab: Lab) -> None:
    before = lab.log(spec_of("build")).require_head()
    moved = lab.copy_of_code(
        "moved/elsewhere",
        ("model.py", "def build(", "# A comment.\n\n\ndef build("),
        ("layers.py", "from keras import ops", "from keras import ops  # and another"),
    )
    after = moved.begin(
        spec_of(
            "build",
            train__steps=500,
            train__segment_steps=3,
            train__log_every_steps=2,
            checkpoint__keep_last=1,
            checkpoint__keep_best={"metric": "accuracy", "mode": "max"},
            evaluate__every_steps=5,
        )
    )
    assert after == before
    assert lab.recorder.warnings == []


@pytest.mark.slow
def test_changed_environment_is_reported_and_logged(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    from baton.tasks.init_or_restore import stage

    spec = spec_of("build")
    before = lab.log(spec).require_head()
    acquired = stage.acquire(spec.accelerator, None)
    versions = {**acquired.environment.versions, "keras": "9.9"}
    other = type(acquired)(acquired.strategy, acquired.environment.model_copy(update={"versions": versions}))
    monkeypatch.setattr(stage, "acquire", lambda *_, **_settings: other)
    for _ in range(2):
        head = lab.begin(spec)
        assert (head.tip, head.base) == (before.tip, before.base)
        assert head.environment.versions["keras"] == "9.9"
    assert [entry.body.kind for entry in entries(lab, spec)] == ["origin", "checkpoint", "change"]
    assert len(lab.recorder.warnings) == 1
    assert "the environment changed, so the bits may differ" in lab.recorder.warnings[0]
    assert lab.recorder.warnings[0].endswith("-> 9.9")


def test_untrainable_model_is_refused_before_the_run_begins(new_lab: Lab) -> None:
    spec = spec_of("build")
    wrong = new_lab.copy_of_code(
        "wrong",
        ("layers.py", "seed=self.seeds) if training", "seed=OUTSIDE[0]) if training"),
        ("layers.py", "class SeededNoise", "OUTSIDE = []\n\n\nclass SeededNoise"),
        ("layers.py", "self.seeds = keras.random.SeedGenerator(5)", "OUTSIDE[:] = [keras.random.SeedGenerator(5)]"),
    )
    with pytest.raises(ModelError, match=r"train_step uses variables .* would miss them: \S*seed_generator"):
        wrong.begin(spec)
    assert new_lab.log(spec).head() is None
    # Otherwise the corrected model would be refused as another run.
    assert new_lab.begin(spec).tip is not None


@pytest.mark.slow
def test_side_effects_of_tracing_are_not_in_the_identity(tmp_path: Path) -> None:
    marked = """
    class Marked(keras.layers.Layer):
        def __init__(self, **settings):
            super().__init__(**settings)
            self.marks = 0

        def call(self, x, training=False):
            self.marks += bool(training)
            return x

        def get_config(self):
            return {**super().get_config(), "marks": self.marks}


    def build():
        model = keras.Sequential([keras.Input((6,)), Marked(), keras.layers.Dense(3)])
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model
    """
    lab, spec = lab_of(tmp_path, marked), spec_of("build")
    assert lab.begin(spec) == lab.begin(spec)


def test_damaged_tip_is_quarantined(lab: Lab) -> None:
    spec = spec_of("build")
    middle = lab.train_and_commit(spec, 3)
    last = lab.train_and_commit(spec, 6)
    assert middle.tip is not None
    assert last.tip is not None
    flip(lab, spec, last.tip)
    head = lab.begin(spec)
    assert head.tip == middle.tip
    assert head.quarantined == (last.tip,)
    assert head.base > last.base
    assert entries(lab, spec)[-1].body.kind == "quarantine"
    assert len(lab.recorder.warnings) == 1
    assert f"checkpoint {last.tip.path} is damaged and quarantined" in lab.recorder.warnings[0]
    assert "crc32c" in lab.recorder.warnings[0]
    # The files stay for inspection, and training the lost steps again gives the same bits.
    assert lab.folder(spec, last.tip).is_dir()
    again = lab.train_and_commit(spec, 6).tip
    assert again is not None
    assert again.state_digest == last.tip.state_digest


def test_run_with_only_damaged_checkpoints_is_refused(lab: Lab) -> None:
    spec = spec_of("build")
    head = lab.train_and_commit(spec, 3, 6)
    for ref in head.retained:
        flip(lab, spec, ref)
    for _ in range(2):
        with pytest.raises(NothingToRestore) as refused:
            lab.begin(spec)
        assert refused.value.exit_code == 4
        for ref in head.retained:
            assert ref.path in str(refused.value)
        assert "Restore their files from a backup" in str(refused.value)


def test_damaged_step_0_is_created_again(lab: Lab) -> None:
    spec = spec_of("build")
    before = lab.log(spec).require_head().tip
    assert before is not None
    flip(lab, spec, before)
    after = lab.begin(spec).tip
    assert after is not None
    assert after.path != before.path
    assert (after.step, after.state_digest) == (0, before.state_digest)
    assert [entry.body.kind for entry in entries(lab, spec)] == ["origin", "checkpoint", "quarantine", "checkpoint"]
    assert lab.train_and_commit(spec, 3).tip is not None


def test_crash_before_the_commit_of_step_0_is_recovered(lab: Lab) -> None:
    spec = spec_of("build")
    first = lab.log(spec).require_head()
    home = lab.root / "storage" / spec.run
    # The process died between staging and committing.
    (home / "log" / "00000001.json").unlink()
    (home / "log" / "HINT").unlink()
    again = lab.begin(spec)
    assert [entry.body.kind for entry in entries(lab, spec)] == ["origin", "checkpoint"]
    assert first.tip is not None
    assert again.tip is not None
    assert again.tip.path != first.tip.path
    assert again.tip.state_digest == first.tip.state_digest


def test_unknown_files_in_the_home_are_ignored(lab: Lab) -> None:
    spec = spec_of("build")
    before = lab.log(spec).require_head()
    assert before.tip is not None
    checkpoints = lab.root / "storage" / spec.run / "checkpoints"
    (checkpoints / "checkpoint").write_text('model_checkpoint_path: "elsewhere"', encoding="utf-8")
    shutil.copytree(lab.folder(spec, before.tip), checkpoints / "00000009-00000001-foreign")
    (lab.root / "storage" / spec.run / "log" / ".unfinished-x").write_text("{", encoding="utf-8")
    assert lab.begin(spec) == before
