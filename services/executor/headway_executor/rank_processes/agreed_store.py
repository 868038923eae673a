"""Pulls of a group: a block counts only if every rank has its part.

Owns: one rank's share of that agreement. Must not know: frames, other ranks.

All ranks begin the same steps, so the number of pulls so far names a step on each of them.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from headway_executor.batch.diff_checks import Pull
from headway_executor.block_store.puller import FetchedBlocks
from headway_executor.block_store.store import Store
from headway_executor.rank_place import RankPlace
from headway_executor.rank_processes.pools import part_of
from headway_proto.columns import Int32Array


class _Fetch(NamedTuple):
    number: int
    own: Future[FetchedBlocks]
    agreed: Future[FetchedBlocks]


class AgreedStore:
    """See ``store.Store``. ``place``: whose part of each block. ``wake`` is called once this rank's part is there; any thread may call it."""

    def __init__(self, store: Store, place: RankPlace, wake: Callable[[], None]) -> None:
        self._store = store
        self._place = place
        self._wake = wake
        self._number = 0
        self._fetch: _Fetch | None = None
        self._is_reported = False

    def begin_write(self, host_blocks: Int32Array) -> int:
        """See ``Store``."""
        return self._store.begin_write(host_blocks)

    def end_write(self, write: int, host_blocks: Int32Array, *, epoch: int, step: int) -> None:
        """See ``Store``."""
        self._store.end_write(write, host_blocks, epoch=epoch, step=step)

    def forget(self) -> None:
        """See ``Store``."""
        self._store.forget()

    def fetch(self, pulls: tuple[Pull, ...]) -> Future[FetchedBlocks]:
        """See ``Store``. The future waits for ``settle``."""
        self._number += 1
        own = self._store.fetch(tuple([part_of(pull, self._place) for pull in pulls]))
        fetch = _Fetch(self._number, own, Future())
        self._fetch, self._is_reported = fetch, False
        fetch.own.add_done_callback(lambda _: self._wake())
        return fetch.agreed

    def take_report(self) -> tuple[int, Int32Array] | None:
        """Return the number and the missing blocks of a fetch that has just ended here."""
        if self._fetch is None or self._is_reported or not self._fetch.own.done():
            return None
        self._is_reported = True
        return self._fetch.number, self._fetch.own.result().missing

    def settle(self, number: int, missing: Int32Array) -> None:
        """End the fetch with what no rank lacks; a fetch that was given up is ignored."""
        if self._fetch is not None and self._fetch.number == number and self._fetch.own.done():
            fetch, self._fetch = self._fetch, None
            fetch.agreed.set_result(_without(fetch.own.result(), missing))


def _without(fetched: FetchedBlocks, missing: Int32Array) -> FetchedBlocks:
    is_there = ~np.isin(fetched.blocks, missing)
    if is_there.all():
        return fetched._replace(missing=missing)
    return fetched._replace(contents=fetched.contents[is_there], blocks=fetched.blocks[is_there], missing=missing)
