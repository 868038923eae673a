"""One step after the other."""
