"""The pure scheduler: events and the time in, decisions out.

Owns: queues, rows, block tables, budgets. Must not know: sockets, clocks, processes, randomness.
The same events give byte-identical decisions, so production, simulation and replay run this very code.

Why it always makes progress
----------------------------

Claim: if the executor answers every step, each accepted request ends, under every policy and in every pool.

Facts that the argument uses:

- The door rejects a request that does not fit the pool alone. ``max_tokens`` bounds each output.
- A block that no request holds is free again when the steps in flight have been answered.
- Running requests have one order, the *service order*: first by rank, then by first start. The first request in it is
  the *anchor*.

1. *Something runs.* While a request is live, a step is in flight or the next step runs a token. Decodes always fit the
   budget, because no more rows run than a step has tokens. An anchor that decodes and needs a block waits for blocks
   behind a fence, or it preempts requests after it in the service order (``preemption.choose_victim`` names no other).
   It succeeds, because it fits alone. An anchor in its prompt gets blocks in the same way. As soon as a preempted
   request waits, the anchor also gets its part of the budget before all other prompts; if decodes take the whole
   budget, those run. A policy that lets decodes sit out for prompts does not do so while a decode waits for a block. If
   nothing runs, every block is free and the first waiting request starts: a reservation never asks for more than the
   request can hold, headroom is asked only beside other requests, and a budget from objectives always lets one tile of
   prompt tokens through.
2. *The anchor ends.* No request after it preempts it. A waiting request of a higher class can, but at most
   ``MAX_WAYS_MADE`` times; then the anchor's rank is above all classes. Take the vector of tokens still to compute and
   to sample, in service order. With a fixed set of requests, each answered step makes it lexicographically smaller. If a
   preemption makes one entry larger, an earlier entry has become smaller or a count of ways made has grown, and those
   counts are bounded. Lexicographic orders over the naturals are well-founded.
3. *Waiting ends.* By 2, requests keep ending, so requests keep starting. Under an order that could pass a request over
   for ever, one start in ``STARTS_PER_PROMOTION`` goes to the request that has waited longest, once it has waited for
   ``aging_s``. (It goes at once behind the highest class, and to the very head if that class takes every start.) Only
   finitely many requests came before it, so its turn comes. A prompt under way that gets no tokens for ``aging_s``,
   because higher classes fill every step, moves above all classes. Under ``fair``, each start and each token of other
   tenants raises their counters only. A longer cached prefix passes a request over at most ``MAX_PASSED_OVER`` times. A
   preempted request comes before those of its rank that have not started. Its headroom is at most an eighth of the
   pool, and nothing if no request runs beside it.

``Scheduler.run_alone`` makes one request the anchor: all others are preempted, and it starts with the whole pool when the
steps in flight have been answered. The others continue when it ends or when the caller says so; the caller must see to
that. After a loss (``Scheduler.start_slowly``) a request may find the window full. It then waits for running requests;
the anchor is one of them or comes before them. Each leaves the window after as many tokens as steps can be in flight,
when it ends, or when it makes way.

Preemption cannot consume all the work. A request that was preempted k times returns only beside a free block for each of
the R running rows, doubled k - 1 times, or beside an eighth of the pool. So between two preemptions of a request, each
of those rows yields at least ``min(2^(k-1), P / 8R) * block_size`` tokens, where P is the number of blocks.

Tests: ``tests/property`` (all combinations of policies in pools that barely hold one request, a state machine with
failing rows and new epochs, the known hangs of other schedulers) and ``tests/simulation``.
"""

from headway_scheduler.compiled_core import search_path

__path__ = search_path()
