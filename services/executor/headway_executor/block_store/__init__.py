"""Blocks outside the device, where other executors and later processes reach them.

Owns: the memory of host blocks, the record of each, and the transports. Must not know: rows, attention, frames.
"""
