"""The load for the simulator and the bench.

Owns: which requests there are and when they come. Must not know: what serves them, or whether time is virtual.

``lengths`` has distributions, ``requests`` draws all requests from one seed, ``arrivals`` has their times, ``trace``
reads them from a file, and ``options`` and ``load`` make them from flags.
"""
