"""``headway doctor``: what this host can run, and how fast.

Missing packages are findings. ``host`` and ``examination`` gather ``findings``; ``expectation`` estimates a decode step
from the measured rates; ``rendering`` makes the text; ``command`` has the flags and the order of work.
"""
