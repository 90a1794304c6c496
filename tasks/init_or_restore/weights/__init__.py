"""Initial weights: found, read, related to the model's variables, and assigned. Only when a run is begun."""
