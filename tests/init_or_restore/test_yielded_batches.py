"""Sources that yield batches are refused; single examples are accepted."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.contracts.dataset import Feature
from baton.tasks.foundation.errors import ModelError, SourceError
from tests.support.lab import Lab, lab_of, spec_of

MODEL = """
class Own(keras.Model):
    def __init__(self, width=3, flat=False):
        super().__init__()
        self.flat = keras.layers.Flatten() if flat else None
        self.last = keras.layers.Dense(width)

    def call(self, x, training=None):
        return self.last(x if self.flat is None else self.flat(x))


def _compiled(model, loss=None):
    model.compile("sgd", loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def own():
    return _compiled(Own())


def flat():
    return _compiled(Own(flat=True))


def squared():
    return _compiled(Own(width=1), "mse")


def declared():
    x = keras.Input((None, 8))
    return _compiled(keras.Model(x, keras.layers.Dense(3)(x)))


def declared_single():
    x = keras.Input((8,))
    return _compiled(keras.Model(x, keras.layers.Dense(3)(x)))


def recurrent():
    return _compiled(keras.Sequential([keras.layers.GRU(4, return_sequences=True), keras.layers.Dense(3)]))


def declared_sequence():
    x = keras.Input((2, 5))
    return _compiled(keras.Model(x, keras.layers.Dense(3)(keras.layers.Flatten()(x))))


def declared_pair():
    inputs = [keras.Input((5,)), keras.Input((5,))]
    return _compiled(keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Subtract()(inputs))))


class Joined(Own):
    def call(self, x):
        return self.last(keras.ops.reshape(keras.ops.convert_to_tensor(x), (-1, 10)))


class Unpacked(Own):
    def call(self, x):
        left, right = x
        return self.last(left - right)


def joined():
    return _compiled(Joined())


def unpacked():
    return _compiled(Unpacked())


def two_outputs(named=False):
    x = keras.Input((8,))
    outputs = [keras.layers.Dense(1, name=name)(x) for name in ("age", "size")]
    model = keras.Model(x, dict(zip(("age", "size"), outputs)) if named else outputs)
    model.compile("sgd", {"age": "mse", "size": "mae"} if named else ["mse", "mae"])
    return model


def pixels():
    return _compiled(keras.Sequential([keras.layers.Conv2D(3, 1)]))
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return lab_of(tmp_path_factory.mktemp("lab"), MODEL)


def begun(lab: Lab, build: str, x: list[int], y: list[int] | None, **changes: Any) -> Any:
    """Build a new run whose examples have these shapes of x and y."""
    from baton.tasks.foundation.machine.devices import acquire
    from baton.tasks.init_or_restore.new_run import build_new_run

    spec = spec_of(build, data__validation_fraction=0, **changes)
    features = [Feature(name="x", dtype="float32", shape=tuple(x))]
    if y is not None:
        features.append(Feature(name="y", dtype="int64", shape=tuple(y)))
    accelerator = acquire(spec.accelerator, None)
    return build_new_run(spec, features, code_folder=lab.code, accelerator=accelerator, telemetry=lab.recorder)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        ("own", "may yield batches: model.py:own takes x float32[16, 8] and y int64[16] as one example and as 16"),
        ("squared", "may yield batches"),
        ("flat", "yields batches: model.py:flat takes x float32[16, 8] and y int64[16] as 16 examples, but not as one"),
        ("declared_single", "yields batches: model.py:declared_single takes"),
    ],
)
def test_batches_are_refused_with_both_readings(build: str, words: str, lab: Lab) -> None:
    with pytest.raises(SourceError) as refused:
        begun(lab, build, [16, 8], [16])
    message = str(refused.value)
    assert words in message
    assert "as single examples: x float32[16, 8] and y int64[16]" in message
    assert "as batches of 16: x float32[8] and y int64[]" in message
    assert "yield from zip(x, y)" in message
    assert ("data.batched: false" in message) == ("may yield" in message)


@pytest.mark.parametrize(
    ("build", "x", "y", "changes"),
    [
        ("own", [16, 8], [16], {"data__batched": False}),
        ("own", [16, 8], [16], {"data__source": "npz"}),
        ("own", [1, 8], [1], {}),
        ("declared", [16, 8], [16], {}),
        ("recurrent", [16, 8], [16], {}),
        ("pixels", [6, 6, 1], [6, 6], {}),
        ("flat", [28, 28], [], {}),
        ("own", [8], [], {}),
    ],
)
def test_single_examples_are_accepted(build: str, x: list[int], y: list[int], changes: Any, lab: Lab) -> None:
    assert begun(lab, build, x, y, **changes).state.step == 0


PAIR = [Feature(name=f"x[{item}]", dtype="float32", shape=(5,)) for item in range(2)]
LABEL = Feature(name="y", dtype="int64", shape=())
BOTH = [
    "as several arrays: x[0] float32[5], x[1] float32[5] and y int64[]",
    "as one array: x float32[2, 5] and y int64[]",
]


def begun_with_pair(lab: Lab, build: str, reading: Any = "lists", **changes: Any) -> Any:
    from baton.tasks.foundation.machine.devices import acquire
    from baton.tasks.init_or_restore.new_run import build_new_run

    spec = spec_of(build, data__validation_fraction=0, **changes)
    accelerator = acquire(spec.accelerator, None)
    return build_new_run(
        spec,
        [*PAIR, LABEL],
        reading=reading,
        code_folder=lab.code,
        accelerator=accelerator,
        telemetry=lab.recorder,
    )


@pytest.mark.parametrize(
    ("build", "words"),
    [
        ("flat", ["model.py:flat takes it as one array, but not as several"]),
        ("declared_sequence", ["model.py:declared_sequence takes it as one array, but not as several"]),
        ("joined", ["takes it as one array and as several", "yield a tuple: (left, right)"]),
    ],
)
def test_list_that_may_be_one_array_is_refused_with_both_readings(build: str, words: list[str], lab: Lab) -> None:
    with pytest.raises(SourceError) as refused:
        begun_with_pair(lab, build)
    assert [word for word in [*words, *BOTH, "np.stack"] if word not in str(refused.value)] == [], refused.value


@pytest.mark.parametrize(
    ("build", "reading"), [("declared_pair", "lists"), ("unpacked", "lists"), ("joined", "examples")]
)
def test_list_is_several_inputs(build: str, reading: str, lab: Lab) -> None:
    assert begun_with_pair(lab, build, reading).state.step == 0


@pytest.mark.parametrize(
    ("named", "remedy"),
    [
        (False, "for 2 outputs, yield (np.array([y0]), np.array([y1])) as y"),
        (True, "for 2 outputs, yield {'age': age, 'size': size} as y"),
    ],
)
def test_numbers_for_several_outputs_get_the_remedy(named: bool, remedy: str, lab: Lab) -> None:
    with pytest.raises(ModelError) as refused:
        begun(lab, "two_outputs", [8], [2], model__options={"named": named})
    assert remedy in str(refused.value)


def test_model_error_is_reported_unchanged(lab: Lab) -> None:
    with pytest.raises(ModelError, match="does not take a batch"):
        begun(lab, "declared_single", [16, 9], [16])


def test_check_for_batches_changes_no_bit(lab: Lab) -> None:
    checked = begun(lab, "recurrent", [16, 8], [16]).state.digest().root
    assert checked == begun(lab, "recurrent", [16, 8], [16], data__batched=False).state.digest().root


def test_started_run_continues_without_the_check(lab: Lab, tmp_path: Path) -> None:
    own = Lab(tmp_path, lab.code)
    (own.code / "batches.py").write_text(
        "import numpy as np\n\n\ndef load():\n    for i in range(20):\n"
        "        yield np.full((16, 8), i, np.float32), np.arange(16) % 3\n"
    )
    source = {"data__source": "batches.py:load", "data__options": {}}
    with pytest.raises(SourceError, match="may yield batches"):
        own.begin(spec_of("own", **source))
    assert own.log(spec_of("own")).head() is None
    head = own.begin(spec_of("own", data__batched=False, **source))
    assert own.begin(spec_of("own", **source)) == head


def test_batch_larger_than_the_data_warns_at_the_start(lab: Lab, tmp_path: Path) -> None:
    own = Lab(tmp_path, lab.code)
    spec = spec_of("own", train__global_batch_size=64)
    own.begin(spec)
    own.begin(spec)
    examples = own.prepare(spec).train_examples
    message = f"train.global_batch_size = 64 is larger than the number of training examples ({examples})"
    assert [message in text for text in own.recorder.warnings] == [True]


def test_rows_of_a_batch_are_not_refused_as_batches(lab: Lab) -> None:
    from baton.tasks.foundation.machine.devices import acquire
    from baton.tasks.init_or_restore.new_run import build_new_run

    spec = spec_of("own", data__validation_fraction=0)
    features = [Feature(name="x", dtype="float32", shape=(16, 8)), Feature(name="y", dtype="int64", shape=(16,))]
    run = build_new_run(
        spec,
        features,
        reading="rows",
        code_folder=lab.code,
        accelerator=acquire(spec.accelerator, None),
        telemetry=lab.recorder,
    )
    assert run.state.step == 0


def test_text_is_refused_on_a_tpu_with_the_remedy() -> None:
    from baton.tasks.foundation.machine.devices import acquire
    from baton.tasks.init_or_restore.model_requirements import require_placeable_text

    cpu = acquire(spec_of("own").accelerator, None)
    tpu = replace(cpu, environment=cpu.environment.model_copy(update={"accelerator": "tpu"}))
    features = [
        Feature(name="x/city", dtype="string", shape=(1,), encoding="text"),
        Feature(name="y", dtype="int64", shape=()),
    ]
    require_placeable_text(features, cpu, reference="data.py:load")
    require_placeable_text(features[1:], tpu, reference="data.py:load")
    with pytest.raises(SourceError, match=r"data\.py:load: the examples have x/city string\[1\], but a TPU") as refused:
        require_placeable_text(features, tpu, reference="data.py:load")
    assert "StringLookup" in str(refused.value)
