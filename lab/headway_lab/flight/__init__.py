"""``headway replay``, ``explain`` and ``timeline``: reports from a flight log."""
