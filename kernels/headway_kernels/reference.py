"""What the kernels of ``gpu`` compute, in plain torch, one function for each: slow, obvious, on any device.

Owns: the oracles. Must not know: how a kernel cuts its work.
"""
