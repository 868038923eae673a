"""Kernels for GPUs: Triton, and the moves of blocks in CUDA by CuPy.

Each launches on the current stream, allocates nothing, reads nothing back and branches on no value that only the device
knows, so that a CUDA graph can capture a step. With ``TRITON_INTERPRET=1`` set before the import, Triton's kernels run
on a CPU.
"""
