"""The command's process: signals, standard streams, child processes, exit."""
