"""The settings of an executor: their names, and their checks."""
