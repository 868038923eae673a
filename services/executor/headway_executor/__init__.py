"""The executor knows rows and tensors, and runs what the scheduler decides."""
