"""Kernels: they know tensors and nothing else of Headway.

Owns: ``cpu``, a decoder's forward pass in C. Must not know: rows, requests, protocols, checkpoints.
"""
