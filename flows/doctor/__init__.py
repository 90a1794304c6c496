"""The checks of `baton doctor`, which find problems of a run before an accelerator is rented."""
