"""Kernels: they know tensors and nothing else of Headway.

Owns: ``cpu``, a decoder's forward pass in C; ``gpu``, the parts of one in Triton and CUDA; ``reference``, what those parts
compute, in plain torch. Must not know: rows, requests, protocols, checkpoints.
"""
