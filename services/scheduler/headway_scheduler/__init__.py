"""The scheduler process: knows tokens and blocks; no torch, no text, no GPU."""
