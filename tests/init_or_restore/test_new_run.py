"""A new run has the same initial weights on every strategy and replica count."""

from pathlib import Path

import pytest

from tests.support.lab import Lab, built, in_fresh_process, lab_of, spec_of

MODEL = """
def build():
    x = keras.Input((6,))
    y = keras.layers.Dense(5, name="hidden", kernel_initializer="orthogonal")(x)
    y = keras.layers.Dropout(0.3)(keras.layers.BatchNormalization()(y))
    y = keras.layers.Dense(4, kernel_initializer=keras.initializers.RandomNormal())(layers.GeneratorNoise()(y))
    model = keras.Model(x, keras.layers.Dense(3)(y))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
"""


def digests(folder: str, replicas: int, seed: int = 0) -> list[str]:
    """Digests of the weights on each replica, without its seeds."""
    from baton.tasks.foundation.state.digest import digest_of

    lab = Lab(Path(folder), Path(folder) / "code")
    state = built(lab, spec_of("build", replicas=replicas, train__seed=seed))
    leaves = {leaf.path: leaf for leaf in state.leaves if leaf.path.startswith("model/") and not leaf.seed}
    return [
        digest_of(leaves, lambda path, index=index: leaves[path].components[index].numpy()).root  # type: ignore[misc]
        for index in range(replicas)
    ]


@pytest.mark.slow
def test_every_replica_count_starts_with_the_same_weights(tmp_path: Path) -> None:
    lab_of(tmp_path, MODEL)
    one = digests(str(tmp_path), 1)
    assert digests(str(tmp_path), 1) == one
    assert digests(str(tmp_path), 1, seed=1) != one
    for replicas in (2, 4):
        assert in_fresh_process(digests, folder=str(tmp_path), replicas=replicas) == one * replicas
