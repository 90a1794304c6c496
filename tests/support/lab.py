"""A small run for tests of the stages, taken through its stages one call at a time.

TensorFlow is imported only when a stage is called, so that a test module can configure the devices first.
"""

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.dataset import DatasetRef
from baton.tasks.foundation.contracts.log_entry import Entry, Head, MetricRow, SegmentRequest, SegmentResult
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.contracts.stage_calls import (
    CheckpointToGcsCall,
    EvaluateCall,
    InitOrRestoreCall,
    PrepareDataCall,
    TrainSegmentCall,
)
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.stage import Place
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.local import LocalStorage
from tests.support import forked
from tests.support.event_recorder import EventRecorder

ZOO = Path(__file__).with_name("zoo")
_RESULT = "result: "


def spec_of(build: str, *, run: str | None = None, form: str = "plain", replicas: int = 1, **changes: Any) -> RunSpec:
    """The run file of a model of the zoo; `train__seed=1` sets train.seed."""
    values: dict[str, Any] = {
        "run": run or build.replace("_", "-"),
        "storage": "unused",
        "data": {"source": "data.py:load", "options": {"form": form}, "validation_fraction": 0.2, "shard_examples": 9},
        "model": {"build": f"model.py:{build}"},
        "train": {"steps": 11, "global_batch_size": 8, "log_every_steps": 4},
        "accelerator": {"kind": "cpu", "replicas": replicas},
    }
    for key, value in changes.items():
        *parents, name = key.split("__")
        place = values
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = value
    return RunSpec.model_validate(values)


@dataclass
class Lab:
    """A storage root and a folder of user code."""

    root: Path
    code: Path = ZOO
    recorder: EventRecorder = field(default_factory=EventRecorder)

    @property
    def storage(self) -> Storage:
        return LocalStorage(self.root / "storage")

    def home(self, spec: RunSpec) -> Storage:
        return self.storage.at(spec.run)

    def log(self, spec: RunSpec) -> RunLog:
        return RunLog(self.home(spec))

    def folder(self, spec: RunSpec, ref: CheckpointRef) -> Path:
        return self.root / "storage" / spec.run / ref.path

    def copy_of_code(self, name: str, *edits: tuple[str, str, str]) -> "Lab":
        """The same storage with an edited copy of the user code; an edit is (file, old text, new text)."""
        code = self.root / name
        shutil.copytree(self.code, code, ignore=shutil.ignore_patterns("__pycache__"))
        for file, old, new in edits:
            text = (code / file).read_text(encoding="utf-8")
            if text.count(old) != 1:
                raise AssertionError(f"{file} contains {old!r} {text.count(old)} times")
            (code / file).write_text(text.replace(old, new), encoding="utf-8")
        return Lab(self.root, code, self.recorder)

    def copy(self, root: Path) -> "Lab":
        """A lab with a copy of the storage, and of the code if it lies beside it."""
        shutil.copytree(self.root, root, ignore=shutil.ignore_patterns("__pycache__"))
        inside = self.code.is_relative_to(self.root)
        return Lab(root, root / self.code.relative_to(self.root) if inside else self.code)

    def place(self, spec: RunSpec, **settings: Any) -> Place:
        """Where the stages of a run are called; a clock can be given."""
        return Place.of(self.storage, spec.run, code_folder=self.code, telemetry=self.recorder, **settings)

    def prepare(self, spec: RunSpec) -> DatasetRef:
        from baton.tasks.prepare_data.stage import prepare_data

        return prepare_data(PrepareDataCall(spec=spec), self.place(spec))

    def begin(self, spec: RunSpec) -> Head:
        from baton.tasks.init_or_restore.stage import init_or_restore

        return init_or_restore(InitOrRestoreCall(spec=spec, dataset=self.prepare(spec)), self.place(spec))

    def request(
        self, spec: RunSpec, start: CheckpointRef, until: int, *, base: int | None = None, skipped_batches: int = 0
    ) -> SegmentRequest:
        return SegmentRequest(
            spec=spec,
            dataset=self.prepare(spec),
            start=start,
            base=start.base + 1 if base is None else base,
            skipped_batches=skipped_batches,
            until_step=until,
            number=1,
        )

    def train(self, spec: RunSpec, start: CheckpointRef, until: int, **settings: Any) -> SegmentResult:
        """Train one segment; it is staged and not committed."""
        from baton.tasks.train_segment.stage import train_segment

        head = self.log(spec).head()
        assert head is not None
        request = self.request(spec, start, until, base=head.base, skipped_batches=head.skipped_batches)
        call = TrainSegmentCall.of(request, head.environment, settings.pop("accept", ()))
        return train_segment(call, self.place(spec, **settings))

    def train_and_commit(self, spec: RunSpec, *borders: int) -> Head:
        """Train and commit a segment to each of the borders."""
        from baton.tasks.checkpoint_to_gcs.stage import checkpoint_to_gcs

        head = self.log(spec).head() or self.begin(spec)
        for border in borders:
            assert head.tip is not None
            result = self.train(spec, head.tip, border)
            request = self.request(spec, head.tip, border, base=head.base)
            entry: Entry = checkpoint_to_gcs(CheckpointToGcsCall.of(request, result), self.place(spec))
            newest = self.log(spec).head()
            assert entry.head.tip == result.staged
            assert newest is not None
            head = newest
        return head

    def relay(self, spec: RunSpec, *borders: int, cold: bool = False, **settings: Any) -> Head:
        """Train and commit to each of the borders; continue after stops and rewinds.

        Args:
            cold: start each segment without a warm trainer, as a new process does.
        """
        from baton.tasks.checkpoint_to_gcs.stage import checkpoint_to_gcs
        from baton.tasks.foundation.state.warm_state import PROCESS_STATE

        head = self.log(spec).head() or self.begin(spec)
        while head.tip is not None and (left := [border for border in borders if border > head.tip.step]):
            if cold:
                PROCESS_STATE.forget()
            request = self.request(spec, head.tip, left[0], base=head.base)
            result = self.train(spec, head.tip, left[0], **settings)
            if result.staged is not None:
                checkpoint_to_gcs(CheckpointToGcsCall.of(request, result), self.place(spec))
            newest = self.log(spec).head()
            assert newest is not None
            head = newest
        return head

    def evaluate(self, spec: RunSpec, checkpoint: CheckpointRef, *, confusion_matrix: bool = False) -> dict[str, float]:
        from baton.tasks.evaluate.stage import evaluate

        head = self.log(spec).head()
        assert head is not None
        call = EvaluateCall(
            spec=spec,
            dataset=self.prepare(spec),
            checkpoint=checkpoint,
            recorded=head.environment,
            confusion_matrix=confusion_matrix,
        )
        return evaluate(call, self.place(spec)).metrics

    def tensors(self, spec: RunSpec, ref: CheckpointRef) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
        """Read a checkpoint with TensorFlow: key -> (dtype, shape, bytes), without the object graph."""
        import tensorflow as tf

        reader = tf.train.load_checkpoint(str(self.folder(spec, ref) / "ckpt"))
        keys = [key for key in reader.get_variable_to_shape_map() if key != "_CHECKPOINTABLE_OBJECT_GRAPH"]
        values = {key: reader.get_tensor(key) for key in keys}
        return {key: (str(value.dtype), value.shape, value.tobytes()) for key, value in values.items()}


def lab_of(root: Path, model: str) -> Lab:
    """A lab whose model.py is this text after the usual imports, with the zoo's data.py and layers.py."""
    code = root / "code"
    code.mkdir()
    for file in ("data.py", "layers.py"):
        shutil.copy(ZOO / file, code / file)
    head = "import keras\nimport tensorflow as tf\nfrom keras import ops\n\nfrom . import layers\n\n\n"
    (code / "model.py").write_text(head + textwrap.dedent(model), encoding="utf-8")
    return Lab(root, code)


_KEPT: list[Any] = []


def keep_trainer() -> None:
    """Keep the warm trainer's iterator alive, in a process that ends soon.

    TensorFlow 2.19 sometimes waits up to a minute for autotuning when it destroys an iterator.
    """
    from baton.tasks.foundation.state.warm_state import PROCESS_STATE
    from baton.tasks.train_segment.trainer import Trainer

    kept = PROCESS_STATE.kept
    if kept is not None and (trainer := kept.companion(Trainer)) is not None:
        _KEPT.append((trainer, trainer._iterator))


def restored(lab: Lab, spec: RunSpec, ref: CheckpointRef) -> Any:
    """A new train state, restored from a checkpoint."""
    from baton.tasks.foundation.checkpoint.restore import restore_checkpoint

    state = built(lab, spec)
    restore_checkpoint(state, lab.home(spec), ref)
    return state


def built(lab: Lab, spec: RunSpec) -> Any:
    """A new train state with its initial values."""
    from baton.tasks.foundation.dataset.manifest import load_manifest, zero_examples
    from baton.tasks.foundation.machine.devices import acquire
    from baton.tasks.foundation.state.train_state import build_train_state

    accelerator = acquire(spec.accelerator, None)
    batch = zero_examples(
        load_manifest(lab.storage, lab.prepare(spec)).features, spec.train.global_batch_size // accelerator.replicas
    )
    return build_train_state(spec, code_folder=lab.code, accelerator=accelerator, batch=batch)


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Keys that are missing on one side or differ."""
    return sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))


def rows_of(results: Sequence[SegmentResult]) -> list[MetricRow]:
    return [row for result in results for row in result.history]


def in_fresh_process(function: Callable[..., Any], **arguments: Any) -> Any:
    """Call a function of a test module in another process; arguments and result are JSON."""
    done = forked.run(
        [
            sys.executable,
            "-m",
            "tests.support.call_function",
            function.__module__,
            function.__name__,
            json.dumps(arguments),
        ],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise AssertionError(f"{function.__name__} in a fresh process failed:\n{done.stderr[-6000:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    return json.loads(lines[-1].removeprefix(_RESULT))
