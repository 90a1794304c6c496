"""The five stages, one room each, and the foundation that they share."""
