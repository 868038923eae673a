"""Kernels for GPUs: Triton, and the moves of blocks in CUDA by CuPy.

Each launches on the current stream, allocates nothing, reads nothing back and branches on no value of the device, so
that a CUDA graph can capture a step. With ``TRITON_INTERPRET=1`` set before the import, they run on a CPU.
"""
