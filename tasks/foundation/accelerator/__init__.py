"""The distribution strategy of a process, its threads, and batch arithmetic."""
