"""The checks of `baton doctor`: what can be found out about a run before anything is rented."""
