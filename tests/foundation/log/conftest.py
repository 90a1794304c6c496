"""Storage fixtures for runs."""

from tests.support.stores import home, memory, scene, store

__all__ = ["home", "memory", "scene", "store"]
