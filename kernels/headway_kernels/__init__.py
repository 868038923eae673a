"""Kernels: ``cpu`` is a decoder's forward pass in C, ``gpu`` its parts in Triton and CUDA, ``reference`` those in plain
torch.

Owns: arithmetic on tensors. Must not know: rows, requests, protocols, checkpoints.
"""
