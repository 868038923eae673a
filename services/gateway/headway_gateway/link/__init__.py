"""The link to the scheduler, and the sequences that live on it."""
