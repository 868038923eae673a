"""``headway simulate``: the real scheduler core in virtual time.

Owns: a device that is a cost model, and the report; ``headway_lab.workload`` has the requests. Must not know: how the
core decides. Nothing here imports torch, and only ``picture`` imports matplotlib.

- ``hardware``, ``model_shapes``: constants and their sources; ``roofline``: a step's time from them;
- ``device_file``: a measured device instead; ``device``: the executor's end of the step protocol;
- ``loop``: virtual time; ``collector``: figures of a run; ``report``, ``picture``: how they are shown;
- ``cases``: the compared settings; ``world``: one run; ``comparison``: a published comparison.
"""
