"""How many examples the tests draw that run on drawn ones: ``EXAMPLES=10`` in the environment means ten times as many."""

import os

FACTOR = int(os.environ.get("EXAMPLES", "1"))
