"""``headway top``: a live view of a running server in a terminal, with keys to steer it."""
