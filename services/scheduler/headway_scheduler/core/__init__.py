"""The pure scheduler: events and the time in, decisions out.

Owns: queues, rows, block tables, budgets. Must not know: sockets, clocks, processes, randomness.
The same events give byte-identical decisions, so production, simulation and replay run this very code.

Why it always makes progress
----------------------------

Claim: if the executor answers every step, each accepted request ends, whatever the policies, however small the pool.

What the argument rests on. A request that could not fit the pool alone is rejected at the door, so each needs at most
``limit - 1`` places, and the pool has them. Outputs are bounded by ``max_tokens``. Blocks that nobody holds come free
when the steps in flight have been answered. Running requests have a total order, the *service order*: by rank, then by
first start, so that nobody who starts later comes before who runs, but for a rank. Its first is the *anchor*.

1. *Something runs.* While a request is live, some step is in flight or the next one runs a token. A decode needs no
   budget, since no more rows run than a step has tokens. If the anchor decodes and lacks a block, it waits for blocks
   behind a fence, or preempts requests after it in the service order until there is one (``preemption.choose_victim``
   names only those), which it can, because alone it fits. If the anchor is in its prompt, it gets blocks in the
   same way, and before all other prompts as soon as somebody who was preempted waits; if decodes have taken the whole
   budget, those run. Policies that
   let decodes sit out for prompts do not do so while a decode waits for a block. If nothing runs, everything is free,
   and the first waiting request starts: reservations ask for no more than the request can ever hold, headroom is asked
   only beside others, and budgets from objectives let through at least one tile of prompt tokens.
2. *The anchor ends.* It is preempted by nobody after it. Only a waiting request of a higher class can preempt it, and it
   makes way at most ``MAX_WAYS_MADE`` times in its life; from then on its rank is before all classes. So with a fixed set of
   requests the vector of the tokens that are left to compute and to sample, in service order, falls lexicographically
   with every answered step: where a preemption makes an entry larger, an earlier one has become smaller or a count of
   ways made, of which there are finitely many, has grown. Lexicographic orders over the naturals are well-founded.
3. *Waiting ends.* By 2 requests keep ending, so requests keep starting. Under an order that could pass somebody over for
   ever, one start in ``STARTS_PER_PROMOTION`` goes to the request that has waited longest, once it has waited for
   ``aging_s`` (at once behind the highest class; to the very head if that takes every start). Only finitely many requests
   came before it, so its turn comes. A prompt under way that gets no part of any step for as long, because higher classes
   fill them all, goes before all classes. Under ``fair`` every start and every token of other tenants raises their counters and
   not its own tenant's. A request that is passed over for a longer cached prefix is so at most ``MAX_PASSED_OVER`` times.
   A preempted request comes before those of its rank that have not started; the headroom that it must find is
   at most an eighth of the pool and nothing once nobody runs beside it.

Who is told to run alone (``Scheduler.run_alone``) is the anchor by decree: everybody else is preempted, and it starts when
what is in flight has returned, with the whole pool, in which it fits (or it would not have been accepted). The others go on when it
ends or is told otherwise; whoever gives the order has to see to that. Whoever comes back after a loss and finds the window full
(``Scheduler.start_slowly``) waits for some that run, of which the anchor is one or comes before all of them: each leaves
the window after as many tokens as steps can be in flight, or when it ends, or makes way and runs no more.

That preemption cannot eat up the work: whoever was preempted k times comes back only beside a block for each of the R
running rows, doubled k - 1 times, or an eighth of the pool. So between two preemptions of a request at least
``min(2^(k-1), P / 8R) * block_size`` tokens come out of each of those rows, P being the blocks of the pool.

Held to it by tests: ``tests/property`` (hypothesis over all combinations of policies in pools that hold barely one request,
a state machine with failing rows and new epochs, what has hung other schedulers one by one) and ``tests/simulation``.
"""

from headway_scheduler.compiled_core import search_path

__path__ = search_path()
