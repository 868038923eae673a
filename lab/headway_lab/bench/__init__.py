"""``headway bench``: a load against a server that runs, and what its clients see of it.

Owns: sending a load at the intended times, recording what comes back, and telling it. Must not know: how any server works;
peers are driven by the same client.

Latencies count from the time at which a request was *meant* to be sent. A client that sends late, because it or the server
was busy, does not hide the wait ("coordinated omission").

- ``options``, ``command``: from flags to runs to the report; ``session``: one load against one server, for programs.
- ``target``: what a server is to this package; ``headway_target`` (gRPC), ``openai_target`` (HTTP, with ``event_stream``
  and ``words``); ``targets`` chooses.
- ``runner``: sends a load; ``records``: what came of each request; ``lag``: whether the client itself was too slow.
- ``worker``, ``cooperation``: several client processes that share one load; ``pipe_messages``: what they say.
- ``figures``, ``report``, ``picture``: the figures and how they are shown; ``steady``: whether a rate was reached.
- ``capacity``: the highest rate that meets an objective.

Only ``openai_target`` imports aiohttp, only ``headway_target`` gRPC, and only ``picture`` matplotlib.
"""
