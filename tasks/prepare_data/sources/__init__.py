"""The built-in sources and the user's own: each yields examples in order."""
