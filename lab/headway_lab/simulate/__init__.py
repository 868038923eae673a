"""``headway simulate``: the real scheduler core in virtual time.

Owns: what stands in for the world around the core: a device that is a cost model, clients that are a workload, and
the report. Must not know: how the core decides; it is called as the scheduler process calls it, and there is no other
scheduler here.

Which requests come and when is in ``headway_lab.workload``. Nothing in this package imports torch, and only ``picture`` imports matplotlib.

- ``hardware``, ``model_shapes``: the constants, each with its source; ``roofline``: the time of a step from them;
  ``device_file``: a device that was measured instead.
- ``device``: the executor's end of the step protocol; ``loop``: virtual time.
- ``measurement``: latencies and totals of a run; ``report``, ``picture``: how they are shown.
- ``cases``: which settings of the scheduler are compared; ``world``: one run of one of them; ``comparison``: those of a
  published comparison.
- ``options``, ``command``: from flags to runs to the report.
"""
