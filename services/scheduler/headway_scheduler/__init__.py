"""The scheduler process: tokens and blocks; no torch, text or GPU."""
