"""How stages are chained: flows, launching, and the `baton` command."""
