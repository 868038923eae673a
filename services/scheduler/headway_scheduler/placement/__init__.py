"""Placement: which executor's core gets which request.

Owns: the requests that no core has yet, and the choice of a cell for each. Must not know: frames, sockets or clocks.
Pure and deterministic, like the core.
"""
