"""Stores for runs, and a train state to stage."""

from tests.support.stores import home, memory, scene, store
from tests.support.train_states import lab, spec, staging_home, state

__all__ = ["home", "lab", "memory", "scene", "spec", "staging_home", "state", "store"]
