"""The executor: the process that knows rows and tensors, and runs what the scheduler decides."""
