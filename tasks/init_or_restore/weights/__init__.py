"""Initial weights: their source, and the variable of the model that each one initializes."""
