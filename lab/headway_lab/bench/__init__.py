"""``headway bench``: a load against a running server, and what its clients see.

Owns: sending a load at the intended times, recording the answers, and reporting. Must not know: how any server works.

Latencies count from the intended time of sending, so a late client hides no wait ("coordinated omission").

- ``options``, ``command``: flags and the order of work; ``session``: one load against one server;
- ``target``: a server; ``headway_target`` (gRPC) and ``openai_target`` (HTTP, with ``event_stream`` and ``words``);
- ``runner``: sends a load; ``records``: its result; ``lag``: whether the client was too slow;
- ``worker``, ``cooperation``, ``pipe_messages``: several client processes that share one load;
- ``figures``, ``steady``, ``report``, ``picture``: the result; ``capacity``: the highest rate that meets an objective.

Only ``openai_target`` imports aiohttp, only ``headway_target`` gRPC, and only ``picture`` matplotlib.
"""
