"""The pure scheduler: events and the time in, decisions out.

Owns: queues, rows, block tables, budgets. Must not know: sockets, clocks, processes, randomness.

The same events give byte-identical decisions, so production, simulation and replay run this code.

Why it always makes progress
----------------------------

Claim: if the executor answers every step, each accepted request ends, under every policy and in every pool.

Facts: the door rejects a request that does not fit the pool alone; ``max_tokens`` bounds each output. A block without a
request is free once the steps in flight are answered. Running requests have one *service order*: by rank, then by first
start. Its first request is the *anchor*.

1. *Something runs* while a request is live. Decodes always fit the budget: there are no more rows than tokens in a
   step. An anchor that needs a block preempts requests after it or waits for fenced blocks; it succeeds, because it
   fits alone. While a preempted request waits, the anchor's prompt gets tokens before other prompts; if decodes take
   the whole budget, those run. No policy holds decodes back while one waits for a block. If nothing runs, all blocks
   are free and the first waiting request starts: reservations ask for no more than it can hold, headroom is asked only
   beside other requests, and a budget from objectives allows at least one tile.
2. *The anchor ends.* Only waiting requests of a higher class can preempt it, at most ``MAX_WAYS_MADE`` times; then its
   rank is above all classes. Take the tokens still to compute and to sample, in service order. For a fixed set of
   requests, each answered step makes this vector lexicographically smaller. If a preemption increases an entry, an
   earlier one has decreased, or a bounded count of preemptions has grown. This order is well-founded.
3. *Waiting ends.* Requests keep ending, so requests keep starting. If an order could pass a request over for ever, one
   start in ``STARTS_PER_PROMOTION`` goes to the request that has waited longest, after ``aging_s``: behind the highest
   class, or before it if it takes every start. Only finitely many requests came earlier. A prompt under way without
   tokens for ``aging_s`` moves above all classes. Under ``fair``, work of other tenants raises only their counters.
   Longer cached prefixes pass a request over at most ``MAX_PASSED_OVER`` times. A preempted request precedes new ones
   of its rank; its headroom is at most an eighth of the pool, and zero if it would run alone.

``Scheduler.run_alone`` makes one request the anchor and preempts all others; the caller must let these continue. After
a loss (``Scheduler.start_slowly``), requests may wait for the start window. Running requests leave it after a few
tokens; the anchor is one of them or comes before them.

Preemption cannot consume all work. A request preempted k times returns only beside a free block for each of the R
running rows, doubled k - 1 times, or beside an eighth of the P blocks. So between two of its preemptions each of those
rows yields at least ``min(2^(k-1), P / 8R) * block_size`` tokens.

Tests: ``tests/property`` and ``tests/simulation``.
"""

from headway_scheduler.compiled_core import search_path

__path__ = search_path()
