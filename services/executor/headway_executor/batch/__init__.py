"""The executor's copy of the batch: rows, their blocks, and the checks of a diff."""
