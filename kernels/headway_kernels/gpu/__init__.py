"""Kernels for GPUs: one file per family, in Triton, and the moves of blocks in CUDA by CuPy.

Each launches on the current stream, allocates nothing, reads nothing back and branches on nothing that only the device
knows, so that a step of a model can be captured in a CUDA graph. Triton's run on a CPU too, slowly, where
``TRITON_INTERPRET=1`` was set before they were imported. ``headway_kernels.reference`` says in plain torch what each one
computes.
"""
