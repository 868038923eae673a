"""``headway simulate``: the real scheduler core in virtual time, on a device that is a cost model.

Must not know: how the core decides. Nothing here imports torch, and only ``picture`` imports matplotlib.
"""
