"""``headway simulate``: the real scheduler core in virtual time, on a device that is a cost model."""
