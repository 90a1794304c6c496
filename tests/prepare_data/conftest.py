"""A workshop: a folder with the user's files, a store, and the prepare-data stage."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from baton.tasks.foundation.contracts.data_spec import DataSpec
from baton.tasks.foundation.contracts.dataset import DatasetRef
from baton.tasks.foundation.contracts.run_spec import RunSpec, TrainSpec
from baton.tasks.foundation.contracts.stage_calls import PrepareDataCall
from baton.tasks.foundation.dataset.manifest import load_manifest
from baton.tasks.foundation.dataset.shards import parse
from baton.tasks.foundation.stage import Place
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.telemetry.events import Event
from baton.tasks.foundation.user_traceback import USER_PACKAGE_PREFIX
from baton.tasks.prepare_data.stage import prepare_data


def make_spec(source: str, options: Mapping[str, Any] | None = None, *, seed: int = 0, **data: Any) -> RunSpec:
    return RunSpec(
        run="test",
        storage="store",
        data=DataSpec(source=source, options=dict(options or {}), **data),
        model="model.py:build_model",
        train=TrainSpec(steps=1, global_batch_size=1, seed=seed),
    )


@dataclass
class Workshop:
    """A folder with the user's files and a store. It prepares datasets and reads their examples."""

    code: Path
    storage: LocalStorage
    events: list[Event] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def write(self, name: str, content: str | bytes | Mapping[str, Any]) -> Path:
        """Write a file next to the run file; a mapping becomes a .npz file."""
        file = self.code / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Mapping):
            np.savez(file, **content)
        else:
            file.write_bytes(content.encode() if isinstance(content, str) else content)
        return file

    def prepare(self, source: str, options: Mapping[str, Any] | None = None, **changed: Any) -> DatasetRef:
        spec = make_spec(source, options, **changed)
        place = Place.of(self.storage, spec.run, code_folder=self.code, telemetry=self)
        return prepare_data(PrepareDataCall(spec=spec), place)

    def examples(self, ref: DatasetRef, part: str = "train") -> list[dict[str, Any]]:
        """Return name -> array for every example of a part, in shard order."""
        manifest = load_manifest(self.storage, ref)
        found = []
        for shard in getattr(manifest, part):
            file = self.storage.root / ref.folder / shard.path
            records = list(tf.data.TFRecordDataset(str(file)).as_numpy_iterator())
            assert len(records) == shard.examples
            batch = {name: tensor.numpy() for name, tensor in parse(tf.constant(records), manifest.features).items()}
            found += [{name: values[index] for name, values in batch.items()} for index in range(len(records))]
        return found

    def labels(self, ref: DatasetRef, part: str = "train") -> list[Any]:
        return [example["y"].tolist() for example in self.examples(ref, part)]

    def files(self) -> dict[str, int]:
        """Return every file of the store, with its modification time."""
        root = self.storage.root
        return {str(path.relative_to(root)): path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    """Its code is forgotten afterwards: each reading watches the random generators of all modules of users."""
    code = tmp_path / "code"
    code.mkdir()
    yield Workshop(code, LocalStorage(tmp_path / "store"))
    for name, module in list(sys.modules.items()):
        if name.startswith(USER_PACKAGE_PREFIX) and str(getattr(module, "__file__", None)).startswith(str(code)):
            del sys.modules[name]
