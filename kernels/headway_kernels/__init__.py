"""Kernels, each beside a plain reference: they know tensors and nothing else of Headway.

Owns: nothing yet; the torch backend runs on torch's own operators. Must not know: rows, requests, protocols.
"""
