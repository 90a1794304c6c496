"""The five stages, one room each, and the foundation they stand on."""
