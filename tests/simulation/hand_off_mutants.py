"""Mistakes made on purpose in hand-offs, host pools and roles. See ``simulation.mutants``, which runs them.

Owns: these mistakes. Must not know: how one is hunted.

Left out is what a second line makes good: a lease that is returned twice is unknown the second time, a lease that names the
wrong step is refused by the records, and a stale row that is given up is owed no token by later steps. Tests of their own
hold what few schedules would show: copies of an executor that was found in another state, what others have computed from
them, the epoch in a record, rows that share a block with a stale row, roles of the stranded.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from headway_executor.block_store import puller, records
from headway_executor.block_store.suspects import SuspectBlocks
from headway_proto.columns import EMPTY_COLUMN
from headway_scheduler.core.admission.moving import Moving
from headway_scheduler.core.memory.host_books import HostBooks
from headway_scheduler.core.memory.swapping import Swapping
from headway_scheduler.core.memory.transfers import Transfers
from headway_scheduler.core.step.handing_off import HandingOff
from headway_scheduler.placement.transit import Transit
from simulation import fault_store


class Mistake(NamedTuple):
    """In one sentence; ``make`` takes what is at each of ``places`` (owner and name) and returns what is put there."""

    sentence: str
    places: tuple[tuple[Any, str], ...]
    make: Callable[[Any], Any]


Make: TypeAlias = Callable[[Any], Any]


def registering(mistakes: list[Mistake]) -> Callable[..., Callable[[Make], Make]]:
    """Return a decorator that adds a mistake, in one sentence and with its places, to ``mistakes``."""

    def mistake(sentence: str, *places: tuple[Any, str]) -> Callable[[Make], Make]:
        def register(make: Make) -> Make:
            mistakes.append(Mistake(sentence, places, make))
            return make

        return register

    return mistake


MISTAKES: list[Mistake] = []
_mistake = registering(MISTAKES)


@_mistake("leases are never returned", (Transit, "return_leases"))
def lease_never_returned(original):
    del original
    return lambda self, leases: None


@_mistake("a lease ends when its blocks are asked for", (Transfers, "fetch"))
def lease_returned_too_soon(original):
    def fetch(self, request, table, num_shared):
        stored = request.stored
        own = original(self, request, table, num_shared)
        if self._fetched and self._fetched[-1].stored is stored:
            self._fetched.pop()
            self._ended.append(stored)
        return own

    return fetch


@_mistake("who gives up in placement keeps its lease", (Transit, "forget_stored"))
def lease_kept_by_who_gave_up(original):
    del original
    return lambda self, request: None


@_mistake("exported blocks are forgotten, and not leased", (HandingOff, "confirm"))
def exported_and_forgotten(original):
    def confirm(self, transfers):
        left = original(self, transfers)
        for exported in transfers.exported:
            exported.request.stored = None
        return left

    return confirm


@_mistake("exported blocks are leased and free at once", (Transfers, "lease"))
def leased_and_free(original):
    def lease(self, exported):
        stored = original(self, exported)
        if stored is not None:
            self._books.pool.release(stored.host_blocks)
        return stored

    return lease


@_mistake("the lease says one token more than was computed", (Transfers, "export"))
def lease_says_too_much(original):
    return lambda self, request, row, blocks, num_tokens: original(self, request, row, blocks, num_tokens + 1)


@_mistake("an export gets a host block that its step reads", (HandingOff, "export"))
def export_over_a_swap(original):
    def export(self, sampling):
        self._epoch.swapping.complete_plan()
        return original(self, sampling)

    return export


@_mistake("a row that leaves goes on", (HandingOff, "let_idle"))
def leaving_row_goes_on(original):
    del original
    return lambda self, rows: None


@_mistake("the books of a pool are kept for another pool", (HostBooks, "still_hold"))
def books_of_another_pool(original):
    del original
    return lambda self, capacity: len(self._epoch_of) == capacity.num_host_blocks


@_mistake("blocks that an earlier epoch wrote are taken for this epoch's", (HostBooks, "writings"))
def epoch_of_blocks_forgotten(original):
    del original
    return lambda self, blocks, epoch: []


@_mistake("the host keeps what it has of a request that leaves, and the request its host blocks", (Swapping, "lend"))
def lent_and_kept(original):
    def lend(self, request):
        host_blocks = request.host_blocks
        original(self, request)
        if request.stored is not None:
            request.host_blocks = host_blocks

    return lend


@_mistake("checksums of blocks are not compared", (puller, "checksums_fit"))
def block_checksums_ignored(original):
    del original
    return lambda found, blocks, host_blocks: np.ones(len(found), dtype=np.bool_)


@_mistake("the checksum of a block says nothing of its place", (records, "checksum"))
def place_not_in_the_checksum(original):
    return lambda contents, host_block: original(contents, 0)


@_mistake("the step that wrote a block is not compared", (fault_store, "_check"))
def step_of_a_block_ignored(original):
    def check(pulled, pull):
        pulled.records["step"] = pull.blocks[1]
        return original(pulled, pull)

    return check


@_mistake("the executor does not say which rows are stale", (SuspectBlocks, "stale_rows"))
def stale_rows_kept_secret(original):
    def stale_rows(self, batch, moves, fetched):
        original(self, batch, moves, fetched)
        return EMPTY_COLUMN

    return stale_rows


@_mistake("a stale row goes on with what it has", (HandingOff, "preempt_stale"))
def stale_row_goes_on(original):
    del original
    return lambda self, step, stale: None


@_mistake("what steps without an answer were to fetch is lost with the executor", (Moving, "_undo"))
def fetched_is_lost(original):
    def undo(self, transfers):
        original(self, type(transfers)(transfers.exported, []))

    return undo
