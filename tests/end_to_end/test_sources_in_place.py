"""Runs on files that stay where they are: Parquet, Arrow, tar, Hugging Face and TFDS folders.

The same sixty examples lie in five files of each form. So every source must give the weights that TFRecord files give,
however the run is cut or killed, and on whatever replicas.
"""

import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.tasks.foundation.contracts.log_entry import Commit
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.errors import BatonError
from tests.support.homes import entries_of
from tests.support.lab import differing, in_fresh_process, lab_of
from tests.support.tfrecords import file_of, record
from tests.support.training_child import Child
from tests.support.worker_processes import THREADS, Workers

pytestmark = pytest.mark.slow

FILES, ROWS = 5, 12
MODEL = """
def build(width):
    x = keras.Input((3,))
    h = keras.layers.Dropout(0.2)(keras.layers.Dense(width, activation="tanh")(x))
    model = keras.Model(x, keras.layers.Dense(3)(h))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model
"""


def numbers(file: int) -> range:
    return range(file * ROWS, (file + 1) * ROWS)


def values(number: int) -> list[float]:
    return [float(number % 7), number / 4, float(-number)]


def records(file: int) -> list[bytes]:
    return [record(each, drop="image", values=values(each), label=[each % 3]) for each in numbers(file)]


def table(file: int) -> Any:
    import pyarrow as pa

    columns = {
        "values": pa.array([values(each) for each in numbers(file)], pa.list_(pa.float32(), 3)),
        "label": pa.array([each % 3 for each in numbers(file)]),
    }
    return pa.table(columns)


def tfrecord(folder: Path) -> dict[str, Any]:
    for file in range(FILES):
        (folder / f"part-{file}").write_bytes(file_of(records(file), folder.parent))
    features = {"values": {"dtype": "float32", "shape": [3]}, "label": {"dtype": "int64"}}
    return {"features": features, "x": "values", "y": "label"}


def parquet(folder: Path) -> dict[str, Any]:
    from pyarrow import parquet

    for file in range(FILES):
        parquet.write_table(table(file), folder / f"part-{file}.parquet")
    return {"x": "values", "y": "label"}


def arrow(folder: Path) -> dict[str, Any]:
    from pyarrow import feather

    for file in range(FILES):
        feather.write_feather(table(file), folder / f"part-{file}.arrow", compression="uncompressed")
    return {"x": "values", "y": "label"}


def huggingface(folder: Path) -> dict[str, Any]:
    """Write what `datasets.Dataset.save_to_disk` writes."""
    import pyarrow as pa

    features = {
        "values": {"feature": {"dtype": "float32", "_type": "Value"}, "length": 3, "_type": "List"},
        "label": {"names": ["a", "b", "c"], "_type": "ClassLabel"},
    }
    names = [f"data-{file:05d}-of-{FILES:05d}.arrow" for file in range(FILES)]
    for file, name in enumerate(names):
        made = table(file)
        schema = made.schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        with pa.OSFile(str(folder / name), "wb") as out, pa.ipc.new_stream(out, schema) as writer:
            writer.write_table(made.cast(schema))
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": "train"}
    (folder / "state.json").write_text(json.dumps({**state, "_format_type": None, "_output_all_columns": False}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    return {"x": "values", "y": "label"}


def tfds(folder: Path) -> dict[str, Any]:
    """Write what TensorFlow Datasets writes."""
    at = "tensorflow_datasets.core.features"
    shape = {"dimensions": ["3"]}
    features = {
        "values": {
            "pythonClassName": f"{at}.tensor_feature.Tensor",
            "tensor": {"dtype": "float32", "encoding": "none", "shape": shape},
        },
        "label": {"pythonClassName": f"{at}.class_label_feature.ClassLabel", "classLabel": {"numClasses": "3"}},
    }
    whole = {"pythonClassName": f"{at}.features_dict.FeaturesDict", "featuresDict": {"features": features}}
    info = {"name": "d", "fileFormat": "tfrecord", "splits": [{"name": "train", "shardLengths": [str(ROWS)] * FILES}]}
    (folder / "features.json").write_text(json.dumps(whole))
    (folder / "dataset_info.json").write_text(json.dumps(info))
    for file in range(FILES):
        target = folder / f"d-train.tfrecord-{file:05d}-of-{FILES:05d}"
        target.write_bytes(file_of(records(file), folder.parent))
    return {"x": "values", "y": "label"}


def tar(folder: Path) -> dict[str, Any]:
    def files(number: int) -> Iterator[tuple[str, bytes]]:
        made = io.BytesIO()
        np.save(made, np.asarray(values(number), np.float32))
        yield f"{number:04d}.values.npy", made.getvalue()
        yield f"{number:04d}.cls", str(number % 3).encode()

    for file in range(FILES):
        with tarfile.open(folder / f"part-{file}.tar", "w") as opened:
            for name, content in (each for number in numbers(file) for each in files(number)):
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                opened.addfile(entry, io.BytesIO(content))
    return {"x": "values.npy", "y": "cls"}


# The source of each form, and what writes its files and returns its options.
FORMS: dict[str, tuple[str, Callable[[Path], dict[str, Any]]]] = {
    "tfrecord": ("tfrecord", tfrecord),
    "parquet": ("table", parquet),
    "arrow": ("table", arrow),
    "huggingface": ("huggingface", huggingface),
    "tfds": ("tfds", tfds),
    "tar": ("tar", tar),
}


def source_of(root: Path, form: str) -> dict[str, Any]:
    """Write the files of a form, and return its source as in the run file."""
    source, write = FORMS[form]
    folder = root / form
    folder.mkdir(parents=True)
    return {"source": source, "options": {**write(folder), "path": str(folder)}}


def spec_of(data: dict[str, Any], replicas: int = 1) -> Any:
    from baton.tasks.foundation.contracts.run_spec import RunSpec

    return RunSpec.model_validate(
        {
            "run": "r",
            "storage": "unused",
            "data": {**data, "validation_fraction": 0.2, "window_shards": 2},
            "model": {"build": "model.py:build", "options": {"width": 4}},
            "train": {"steps": 14, "global_batch_size": 8, "log_every_steps": 4},
            "accelerator": {"kind": "cpu", "replicas": replicas},
        }
    )


def trained(folder: str, form: str, replicas: int, borders: list[int]) -> Any:
    """Train on files of a form, each segment like a new process; then change a file, and begin again."""
    from baton.tasks.foundation.machine.devices import acquire
    from tests.support.lab import keep_trainer

    root = Path(folder)
    root.mkdir()
    acquire(spec_of({"source": "digits"}, replicas).accelerator, None)
    data = source_of(root, form)
    lab, spec = lab_of(root, MODEL), spec_of(data, replicas)
    head = lab.relay(spec, *borders, cold=True)
    assert head.tip is not None
    tensors = {key: value[2].hex() for key, value in lab.tensors(spec, head.tip).items()}
    metrics = lab.evaluate(spec, head.tip)
    keep_trainer()
    file = sorted(path for path in (root / form).iterdir() if path.suffix != ".json")[3]
    replace_values(file)
    try:
        lab.begin(spec)
        refusal = ""
    except BatonError as fault:
        refusal = f"{fault.exit_code} {fault}"
    named = f"{file}: changed since" in refusal and refusal.startswith("2 ")
    return {"tensors": tensors, "metrics": metrics, "refusal": "names the file" if named else refusal}


def replace_values(file: Path) -> None:
    """Put examples of another file in its place, which is as valid."""
    other = file.with_name(file.name.replace("3", "1", 1))
    assert other != file
    file.write_bytes(other.read_bytes())


def trained_on_each(folder: str, forms: list[str], replicas: int) -> dict[str, Any]:
    """What `trained` returns for each form: straight on TFRecord files, cut on others."""
    straight = trained(f"{folder}/straight", "tfrecord", replicas, [14])
    return {"tfrecord": straight} | {form: trained(f"{folder}/{form}", form, replicas, [5, 14]) for form in forms}


BY_DAY = ["parquet", "tfds"]  # read as columns, and as records; tar files are below
OTHERS = [form for form in FORMS if form != "tfrecord"]


@pytest.mark.parametrize(
    ("forms", "replicas"),
    [(BY_DAY, 2), *(pytest.param(OTHERS, replicas, marks=pytest.mark.nightly) for replicas in (1, 2))],
)
def test_cut_run_has_the_bits_of_a_straight_one_on_records(tmp_path: Path, forms: list[str], replicas: int) -> None:
    found = in_fresh_process(trained_on_each, folder=str(tmp_path), forms=forms, replicas=replicas)
    expected = found["tfrecord"]
    for form, cut in found.items():
        assert differing(cut["tensors"], expected["tensors"]) == [], form
        assert cut["metrics"] == expected["metrics"], form
        assert cut["refusal"] == "names the file", form


def run_file(root: Path, *forms: str) -> Path:
    """Write a run file of a form, or of a mixture, with its files and its model."""
    sources = [{**source_of(root, form), "weight": 2 - index} for index, form in enumerate(forms)]
    data = {"sources": sources} if len(sources) > 1 else {key: sources[0][key] for key in ("source", "options")}
    values = {
        "run": "digits-cnn",  # as the helpers name the home
        "storage": "unused",
        "data": {**data, "validation_fraction": 0.2, "window_shards": 2},
        "model": {"build": "model.py:build", "options": {"width": 4}},
        "train": {"steps": 24, "global_batch_size": 8},
    }
    file = lab_of(root, MODEL).code / "run.yaml"
    file.write_text(json.dumps(values))
    return file


SHORT = ["train.steps=24", "evaluate.every_steps=null", *THREADS]


def killed(file: Path, root: Path, replicas: int, train: Callable[..., Any]) -> Any:
    """Kill a run after two commits, each batch of which takes a while, and continue it; returns the result."""
    settings = [*SHORT, "train.segment_steps=4"]
    child = Child(
        "digits",
        root / "killed",
        extra=[f"accelerator.replicas={replicas}", *settings],
        notes=root,
        file=file,
        env={"BATON_TEST_BATCH_SECONDS": "0.3"},
    )
    assert child.until_commits(3)
    assert child.kill()
    return train("digits", root / "killed", replicas=replicas, extra=settings, file=file).result


def test_mixture_of_two_forms_is_exact_if_killed_and_on_two_hosts(
    train_without_prefect: Callable[..., Any], stored_bytes: Callable[[str], Any], tmp_path: Path
) -> None:
    file = run_file(tmp_path, "parquet", "tar")
    resumed = killed(file, tmp_path, 2, train_without_prefect)
    hosts = Workers(2, tmp_path / "hosts", extra=SHORT, notes=tmp_path, file=file).finish()
    straight = hosts[0].result
    assert {host.result["state_digest"] for host in hosts} == {resumed["state_digest"]}
    assert stored_bytes(resumed["checkpoint"]) == stored_bytes(straight["checkpoint"])
    assert resumed["metrics"] == straight["metrics"]
    last = [entry.body for entry in entries_of(tmp_path / "hosts" / "digits-cnn") if isinstance(entry.body, Commit)][-1]
    assert [worker.examples for worker in last.workers] == [worker.steps * 4 for worker in last.workers]


def checked(file: str) -> list[str]:
    """What the doctor says of the data, and its verdict on the model."""
    from baton.flows.doctor.data_checks import check_data
    from baton.flows.doctor.model_checks import acquire_cpu, check_model
    from baton.flows.doctor.run_file_checks import check_accelerator

    run = load_run_file(Path(file))
    data = check_data(run, None, Path(file).parent / "sample", set_up=lambda: acquire_cpu(run, None))
    model = check_model(run, check_accelerator(run, None).value, data.value, log=None)
    return [data.text, data.verdict, model.verdict]


def test_doctor_checks_a_model_on_files_in_place(tmp_path: Path) -> None:
    """Records are decoded by TensorFlow, whose devices must be set up before."""
    text, *verdicts = in_fresh_process(checked, file=str(run_file(tmp_path, "tfds")))
    assert text == "the first 12 examples of the source are valid: x float32[3], y int64[]"
    assert verdicts == ["pass", "pass"]


@pytest.mark.nightly
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("form", [form for form in FORMS if form != "tfrecord"])
def test_killed_run_has_the_bits_of_the_straight_one(
    train_without_prefect: Callable[..., Any],
    stored_bytes: Callable[[str], Any],
    tmp_path: Path,
    form: str,
    replicas: int,
) -> None:
    file = run_file(tmp_path, form)
    settings: dict[str, Any] = {"replicas": replicas, "extra": SHORT, "file": file}
    straight = train_without_prefect("digits", tmp_path / "straight", **settings).result
    resumed = killed(file, tmp_path, replicas, train_without_prefect)
    assert stored_bytes(resumed["checkpoint"]) == stored_bytes(straight["checkpoint"])
    assert resumed["metrics"] == straight["metrics"]
