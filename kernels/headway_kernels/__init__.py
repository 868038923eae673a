"""Kernels: ``cpu`` in C, ``gpu`` in Triton and CUDA, ``reference`` in plain torch.

Owns: arithmetic on tensors. Must not know: rows, requests, protocols, checkpoints.
"""
