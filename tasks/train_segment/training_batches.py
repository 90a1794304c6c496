"""The stream of batches that a training reads, from any batch on."""

from typing import TYPE_CHECKING, Any

from tasks.foundation.accelerator.strategy import Accelerator
from tasks.foundation.dataset.class_weight import map_class_weight
from tasks.foundation.dataset.decoded_examples import decoded_bytes, fits_into_memory
from tasks.foundation.dataset.reader import training_dataset
from tasks.foundation.state.warm_state import Recipe
from tasks.foundation.storage.base import Storage
from tasks.foundation.telemetry.events import Note, Sink
from tasks.foundation.telemetry.formatting import size_words
from tasks.foundation.transforms.model_inputs import ModelInputs

if TYPE_CHECKING:
    import tensorflow as tf


def training_batches(
    recipe: Recipe, inputs: ModelInputs, accelerator: Accelerator, *, storage: Storage, batch: int, telemetry: Sink
) -> Any:
    """Return a distributed iterator over batches from global batch `batch` on.

    Args:
        recipe: what is trained, on which dataset.
        inputs: the transforms of the examples.
        accelerator: whose replicas take the batches.
        storage: the storage root.
        batch: index of the first global batch: step + skipped batches.
        telemetry: receives a warning if the examples do not fit into memory.
    """
    spec = recipe.spec
    in_memory = spec.data.cache == "memory" and _fits(recipe, storage, telemetry)

    def per_replica_batches(context: Any) -> "tf.data.Dataset":
        dataset = training_dataset(
            storage,
            recipe.dataset,
            seed=spec.train.seed,
            global_batch_size=spec.train.global_batch_size,
            window_shards=spec.data.window_shards,
            first_batch=batch,
            host=context.input_pipeline_id,
            hosts=context.num_input_pipelines,
            local_replicas=accelerator.replicas // context.num_input_pipelines,
            drop_remainder=spec.train.drop_remainder,
            shuffle=spec.data.shuffle,
            functions=inputs.training_functions,
            in_memory=in_memory,
        )
        return map_class_weight(dataset, spec.train.class_weight)

    return iter(accelerator.strategy.distribute_datasets_from_function(per_replica_batches))


def _fits(recipe: Recipe, storage: Storage, telemetry: Sink) -> bool:
    if fits_into_memory(storage, recipe.dataset):
        return True
    size = size_words(decoded_bytes(storage, recipe.dataset))
    text = f"data.cache: memory: the decoded examples take {size}, more than half of the free memory; reading records"
    telemetry.emit(Note(text=text, warning=True))
    return False
