"""The load that requests make, for the simulator and for the bench alike.

Owns: which requests there are and when they come. Must not know: what serves them, or whether time is virtual.

- ``lengths``: distributions and their notation; ``requests``: lengths, tenants, priorities, objectives, shared prefixes
  and prompts, all from one seed.
- ``arrivals``: when requests come; ``trace``: requests from a file; ``options``, ``load``: all of it from flags.
- ``percentiles``: what both tell of latencies.
"""
