"""The built-in sources, one a file, and the user's own."""
