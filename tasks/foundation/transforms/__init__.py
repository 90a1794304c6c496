"""The user's transforms: functions of the run file that change examples and batches in the input pipeline."""
