"""Decoder-only transformer models: reading their configuration, positions, attention and the forward pass.

Owns: the mathematics of the supported families. Must not know: rows, steps, sampling, or where batches come from.
"""
