"""Build the images that tests/containers needs: `python -m tests.support.build_images`.

The tests build what is missing. `.ci/run` builds the images beside other work, because that leaves a core idle.
"""

from tests.support.engine import find_engine

IMAGES = ("checkpoint", "train-cpu", "prepare-data")

if __name__ == "__main__":
    engine = find_engine()
    for image in IMAGES:
        engine.build(image)
