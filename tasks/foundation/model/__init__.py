"""The user's model: load, build, and every variable it has."""
