"""The one strategy of a process, its threads, and batch arithmetic."""
