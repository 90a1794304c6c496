"""Stage: committed checkpoint -> metrics in the log, and the report."""
