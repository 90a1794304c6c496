"""Cheap checks of the run file, the code and the data files of a run, before anything is written."""

import importlib.util
import os
from pathlib import Path

from flows.run import Run
from tasks.foundation.accelerator.batches import per_replica_batch_size
from tasks.foundation.accelerator.cluster import cluster_of
from tasks.foundation.contracts.data_spec import DataSpec
from tasks.foundation.errors import RunFileError
from tasks.foundation.keras_config import require_keras_file
from tasks.foundation.user_code import require_function
from tasks.foundation.user_imports import require_imports
from tasks.init_or_restore.weights.location import locate_weights


def preflight(run: Run) -> None:
    """Check keras.json, the tracker, batch size, functions and weights, without importing Keras or the user's code.

    Raises:
        InvalidInput: one of them cannot be used.
    """
    spec, folder = run.spec, run.folder
    require_keras_file()
    _require_trackers(run)
    accelerator = spec.accelerator
    known = accelerator.replicas if accelerator.kind != "multi_worker" else len(cluster_of(os.environ).addresses)
    per_replica_batch_size(spec.train.global_batch_size, known, spec.train.accumulate)
    evaluating = spec.stages.evaluate.accelerator
    if evaluating is not None:
        per_replica_batch_size(spec.train.global_batch_size, evaluating.replicas)
    require_function(spec.model.build, folder)
    for reference in spec.data.all_sources:
        if ":" in reference:
            require_function(reference, folder)
    for reference in spec.data.transforms:
        require_function(reference, folder)
    if spec.train.callbacks is not None:
        require_function(spec.train.callbacks, folder)
    if spec.init.weights:
        head = run.log.head()
        if head is None or head.tip is None:  # a run that has begun has them in its checkpoint
            for source in spec.init.weights:
                locate_weights(source, folder)


def _require_trackers(run: Run) -> None:
    """Check that the packages of the trackers are installed, and that W&B's offline folder has a place."""
    asked = {"mlflow": run.spec.tracking.mlflow, "wandb": run.spec.tracking.wandb}
    for (key, settings), package in zip(asked.items(), ("mlflow-skinny", "wandb"), strict=True):
        if settings is not None and importlib.util.find_spec(key) is None:
            raise RunFileError(
                f"tracking.{key} is set, and package {key} is not installed here; install {package} (the extra "
                f"`{key}` of Baton), or drop the key"
            )
    if asked["wandb"] is not None and "://" in run.home.uri:
        raise RunFileError(
            f"tracking.wandb writes an offline run into the home, and storage is {run.spec.storage}; take a folder on "
            "a local disk, or drop the key"
        )


def require_packages_and_source(run: Run) -> None:
    """Check what this process needs to do the work: the packages that the user's code imports, the built-in source.

    A stage that runs as a deployment has its own packages and files, so they are not checked here.

    Raises:
        InvalidInput: a package is not installed, or the source cannot be read.
    """
    remote = run.spec.stages.remote()
    if "prepare_data" not in remote:
        _require_sources(run.spec.data, run.folder)
    if not {"init_or_restore", "train_segment"} <= remote.keys():
        for reference in (run.spec.model.build, run.spec.train.callbacks, *run.spec.data.transforms):
            if reference is not None:
                require_imports(reference, run.folder)


def _require_sources(data: DataSpec, folder: Path) -> None:
    """Check `data.source` or each source of a mixture, and the own sets."""
    from tasks.prepare_data.set_names import errors_of_set, errors_of_source

    if not data.sources:
        _require_source(data, folder)
    for index in range(len(data.sources)):
        with errors_of_source(index):
            _require_source(data.of_source(index), folder)
    for name in data.own_sets:
        with errors_of_set(name):
            _require_source(data.of_set(name), folder)


def _require_source(data: DataSpec, folder: Path) -> None:
    if ":" in data.source:
        require_imports(data.source, folder)
    else:
        from tasks.prepare_data.sources.opening import require_source  # verbs that only read need no source

        require_source(data, folder)


def require_lasting_storage(run: Run) -> None:
    """Refuse a storage that ends with the process: later commands read what this one leaves.

    Raises:
        RunFileError: storage is memory://.
    """
    if run.spec.storage.startswith("memory:"):
        raise RunFileError(f"storage is {run.spec.storage}, which ends with this process; name a folder, or gs://")
