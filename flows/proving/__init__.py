"""The work of `baton prove`: trials in separate processes, straight and cut, compared bit by bit."""
