"""The stage `evaluate`, the report and exports."""
