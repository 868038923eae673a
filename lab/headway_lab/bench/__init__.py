"""``headway bench``: sends a load to a running server and measures the answers. Must not know: how any server works.

Latencies count from the intended time of sending, so a late client hides no wait ("coordinated omission").
"""
