"""Builds the model of a run and restores a committed checkpoint into it."""

import keras
import tensorflow as tf

from tasks.evaluate.loop import use_averages
from tasks.foundation.checkpoint.restore import restore_checkpoint
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.identity import difference_words, differences
from tasks.foundation.contracts.log_entry import Environment, Head
from tasks.foundation.contracts.placement import per_replica_batch_size
from tasks.foundation.contracts.run_file import RunFile
from tasks.foundation.contracts.run_spec import with_examples
from tasks.foundation.dataset.manifest import read_manifest, zero_examples
from tasks.foundation.errors import InvalidInput
from tasks.foundation.machine.devices import Accelerator
from tasks.foundation.machine.processes import HASH_SEED, hash_seed
from tasks.foundation.messages import message
from tasks.foundation.model.build import lengths_asked_for
from tasks.foundation.model.identity import model_identity
from tasks.foundation.state.train_state import build_train_state
from tasks.foundation.storage.base import Storage
from tasks.foundation.transforms.model_inputs import model_inputs
from tasks.foundation.user_code import keep_keras_config, load_function


def restored_model(
    run: RunFile, head: Head, ref: CheckpointRef, *, root: Storage, home: Storage, accelerator: Accelerator
) -> keras.Model:
    """Return the compiled model with the state of a checkpoint, and the averages of `use_ema`, as evaluation uses them.

    Args:
        run: the run file; it must build the model that the run was trained with.
        head: head of the run's log.
        ref: the checkpoint.
        root: storage root with the run's dataset, whose manifest has the shapes of the model's inputs.
        home: the run's home.
        accelerator: where the model is built.

    Raises:
        InvalidInput: the run file builds another model.
        StateMismatch: the run file builds a model with other variables.
        DamagedCheckpoint: the checkpoint differs from its manifest.
        DamagedDataset: the dataset's manifest is missing.
        ModelError: the model cannot be built.
    """
    batch_size = per_replica_batch_size(run.spec.train.global_batch_size, head.environment.replicas)
    manifest = read_manifest(root, head.identity["data.folder"])
    batch = zero_examples(model_inputs(run.spec, manifest.features, run.folder).train, batch_size)
    spec = with_examples(run.spec, manifest.train_examples)
    state = build_train_state(spec, code_folder=run.folder, accelerator=accelerator, batch=batch)
    _require_same_model(run, head, state.model, home, batch=batch_size)
    restore_checkpoint(state, home, ref)
    use_averages(state.model)
    return state.model


def one_replica_as_it_is(recorded: Environment) -> Accelerator:
    """The device that TensorFlow uses in this process, whose settings stay as they are; for a notebook.

    Keras's configuration becomes the run's: what the model computes depends on it.

    Args:
        recorded: the run's recorded environment.

    Raises:
        InvalidInput: Keras uses another backend in this process.
    """
    keep_keras_config(recorded.keras)
    environment = recorded.model_copy(update={"accelerator": "cpu", "replicas": 1, "hosts": 1})
    return Accelerator(strategy=tf.distribute.get_strategy(), environment=environment)


def _require_same_model(run: RunFile, head: Head, model: keras.Model, home: Storage, *, batch: int) -> None:
    """Refuse a run file that builds another model: its predictions would differ, even if the weights load."""
    now = model_identity(model, run.spec.model, run.folder, batch=batch)
    keys = [key for key in now if key.startswith("model.") and key in head.identity]
    recorded = {key: head.identity[key] for key in keys}
    if isinstance(options := recorded.get("model.options"), dict):
        # The length of the run, which a learning-rate schedule may use, does not change the predictions.
        function = load_function(run.spec.model.build, run.folder, seed=run.spec.train.seed)
        lengths = lengths_asked_for(run.spec, function)
        recorded["model.options"] = {name: value for name, value in options.items() if name not in lengths}
    found = differences(recorded, {key: now[key] for key in keys})
    if found:
        hints = []
        if head.environment.hash_seed not in {None, hash_seed()}:
            hints = [f"sets have another order in this process; start it with {HASH_SEED}={head.environment.hash_seed}"]
        what = (
            f"{run.path} builds another model than {home.uri} was trained with: {difference_words(found)}; use the "
            "run file and the code that the run was trained with"
        )
        raise InvalidInput(message(what, hints=hints))
