"""A step while it is planned, and while it is in flight.

Owns: the parts of one step. Must not know: how they are chosen.
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from mypy_extensions import mypyc_attr

from headway_proto.adapters import RowAdapter
from headway_proto.columns import encode_column, encode_columns
from headway_proto.step import NewRequest
from headway_scheduler.core.state.indices import BlockIndices, RowIndices
from headway_scheduler.core.state.request import Request
from headway_scheduler.core.state.step_shape import StepShape
from headway_scheduler.core.state.stored_blocks import StoredBlocks

MOST_NEW_BYTES = 1 << 26
"""Of the tokens of new requests in a step. With those of one more, and the blocks of all, the message is still a frame."""


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefillChunk:
    """Part of a prompt in a step, from ``start`` on; the last part (``completes``) samples.

    Afterwards ``row`` holds ``num_computed_tokens`` tokens, unless the request has been preempted since. It no longer
    ``counts`` if another core has the request, or if it ran on blocks that were not right.
    """

    __slots__ = ("completes", "counts", "num_computed_tokens", "num_preemptions", "request", "row", "start")

    def __init__(self, request: Request, row: int, start: int, num_computed_tokens: int, completes: bool) -> None:
        self.request = request
        self.row = row
        self.start = start
        self.num_preemptions = request.num_preemptions
        self.num_computed_tokens = num_computed_tokens
        self.completes = completes
        self.counts = True

    @property
    def end_of_prompt_logprobs(self) -> int:
        """One past the last position with a log probability from this part; the first is ``start`` + 1."""
        return max(min(self.num_computed_tokens + 1, self.request.new.num_prompt_tokens), self.start + 1)

    @property
    def holds_blocks(self) -> bool:
        """Whether the request still has this row."""
        request = self.request
        return self.counts and request.row == self.row and request.num_preemptions == self.num_preemptions


class StepLoad(NamedTuple):
    """The work of a step, and its objective, if any."""

    shape: StepShape
    sent_time: float
    objective_s: float | None


class StepPlan:
    """The rest of the budget, and the parts of the message."""

    __slots__ = (
        "_block_ids",
        "_block_rows",
        "adapters",
        "budget",
        "chunks",
        "exceptions",
        "has_lane",
        "held_back",
        "is_prompt_due",
        "max_new_requests",
        "new_requests",
        "newest_prompts",
        "now",
        "num_chunk_tokens",
        "num_completing",
        "num_new_bytes",
        "num_promised_blocks",
        "num_speculative_tokens",
        "pooled",
        "short_of_blocks",
        "sits_out",
        "speculating",
    )

    def __init__(self, budget: int, now: float, *, has_lane: bool = False) -> None:
        self.budget = budget
        self.now = now
        self.has_lane = has_lane
        """Whether it is one lane's of several, so that it lists every prompt that runs, and no other."""
        self.num_chunk_tokens = 0
        self.num_completing = 0
        """Prompts that end in this step."""
        self.exceptions: list[tuple[int, int]] = []
        """(row, tokens) of prompts, unless it is what a row of the step runs anyway."""
        self.new_requests: list[NewRequest] = []
        self.num_new_bytes = 0
        """Of their tokens in the message."""
        self.adapters: list[RowAdapter] = []
        """Those of new requests that have one."""
        self.pooled: list[tuple[int, int]] = []
        """(row, pooling) of new requests."""
        self.chunks: list[PrefillChunk] = []
        self.newest_prompts: list[Request] | None = None
        """The requests whose prompts were planned or sent last, latest first; computed on demand."""
        self.num_promised_blocks = 0
        """Fenced blocks that rows already wait for."""
        self.short_of_blocks = False
        self.sits_out: Collection[int] = ()
        """Live rows that may not be part of this step."""
        self.held_back: list[int] = []
        """Decoding rows that sit out only this step."""
        self.is_prompt_due = False
        """Whether too many steps in a row have only decoded while a prompt waited."""
        self.max_new_requests = budget
        self.speculating: list[tuple[int, int]] = []
        """(row, most proposals), rows ascending."""
        self.num_speculative_tokens = 0
        self._block_rows: list[RowIndices] = []
        self._block_ids: list[BlockIndices] = []

    @property
    def may_start_more(self) -> bool:
        """Whether the step may begin another row, and its message still be one that the executor takes."""
        return len(self.new_requests) < self.max_new_requests and self.num_new_bytes < MOST_NEW_BYTES

    def add_request(self, request: Request, new: NewRequest) -> None:
        """Begin a row, with the request's adapter and pooling."""
        self.new_requests.append(new)
        self.num_new_bytes += len(new.token_ids)
        if request.new.adapter:
            self.adapters.append(RowAdapter(new.row, request.new.adapter))
        if request.new.pooling:
            self.pooled.append((new.row, request.new.pooling))

    def add_blocks(self, rows: RowIndices, blocks: BlockIndices) -> None:
        """Append ``blocks[i]`` to the table of ``rows[i]``."""
        if len(blocks):
            self._block_rows.append(rows)
            self._block_ids.append(blocks)

    def add_chunk(self, row: int, num_tokens: int) -> None:
        """Run ``num_tokens`` prompt tokens of ``row``."""
        self.num_chunk_tokens += num_tokens
        if num_tokens != 1 or self.has_lane:
            self.exceptions.append((row, num_tokens))

    def leave_out(self, row: int) -> None:
        """Run nothing of a prompt under way."""
        if not self.has_lane:
            self.exceptions.append((row, 0))

    def let_speculate(self, row: int, num_tokens: int) -> None:
        """Allow ``num_tokens`` proposals; rows come in ascending order."""
        self.speculating.append((row, num_tokens))
        self.num_speculative_tokens += num_tokens

    def rows_in_prompt(self) -> set[int]:
        """Rows with a part of their prompt in this step."""
        return {chunk.row for chunk in self.chunks}

    def drop_row(self, row: int) -> None:
        """Remove a row that is preempted."""
        self.newest_prompts = None
        self.exceptions = [exception for exception in self.exceptions if exception[0] != row]
        if row in self.held_back:
            self.held_back.remove(row)
        for index, rows in enumerate(self._block_rows):
            stays = rows != row
            self._block_rows[index] = rows[stays]
            self._block_ids[index] = self._block_ids[index][stays]

    def new_blocks(self) -> bytes:
        """The column group (row, block id)."""
        if not self._block_ids:
            return b""
        if len(self._block_ids) == 1:
            return encode_columns((self._block_rows[0], self._block_ids[0]))
        return encode_columns((np.concatenate(self._block_rows), np.concatenate(self._block_ids)))

    def speculative_tokens(self) -> bytes:
        """The column group (row, most proposals)."""
        if not self.speculating:
            return b""
        rows, counts = zip(*self.speculating, strict=True)
        return encode_column([*rows, *counts])

    def pooled_rows(self) -> bytes:
        """The column group (row, pooling)."""
        rows, poolings = zip(*self.pooled, strict=True)
        return encode_column([*rows, *poolings])

    def scheduled_tokens(self, *sitting_out: Collection[int]) -> bytes:
        """The column group (row, tokens), rows ascending."""
        exceptions = dict(self.exceptions)
        for rows in sitting_out:
            if rows:
                exceptions.update(dict.fromkeys(rows, 0))
        if not exceptions:
            return b""
        in_order = sorted(exceptions)
        return encode_column(in_order + [exceptions[row] for row in in_order])


class Exported(NamedTuple):
    """A row whose blocks are copied behind the step; None: the host has no room for them."""

    request: Request
    row: int
    host_blocks: BlockIndices | None
    num_tokens: int


class Fetched(NamedTuple):
    """A row with blocks from a host pool. ``stored``: the lease that ends with the answer; None: an own prefix."""

    request: Request
    row: int
    stored: StoredBlocks | None


class StepTransfers(NamedTuple):
    """What a step moves to and from host pools beyond swaps."""

    exported: list[Exported]
    fetched: list[Fetched]

    def without_exports_of(self, request: Request) -> "StepTransfers":
        """The same, but this request does not leave with this step."""
        return StepTransfers([each for each in self.exported if each.request is not request], self.fetched)


@mypyc_attr(allow_interpreted_subclasses=True)
class InFlightStep:
    """A step of ``lane`` that was sent and is not answered.

    ``sampling_rows``, ascending, bring one token each, those ``speculating`` (row, most proposals) perhaps more.
    ``leavers``: rows given up since, with the request that is still owed a token, or None. ``digest``: of the mirrored
    state after the step, if reported. ``transfers``: None for most steps.
    """

    __slots__ = (
        "_samples",
        "chunks",
        "digest",
        "lane",
        "leavers",
        "load",
        "num_moved_blocks",
        "sampling_rows",
        "speculating",
        "step",
        "transfers",
    )

    def __init__(
        self,
        step: int,
        sampling_rows: RowIndices,
        chunks: list[PrefillChunk],
        *,
        digest: int | None,
        load: StepLoad | None,
        num_moved_blocks: int,
        speculating: list[tuple[int, int]],
        transfers: StepTransfers | None = None,
        lane: int = 0,
    ) -> None:
        self.step = step
        self.lane = lane
        self.transfers = transfers
        self.speculating = speculating
        self.sampling_rows = sampling_rows
        self.chunks = chunks
        self.digest = digest
        self.load = load
        self.num_moved_blocks = num_moved_blocks
        self.leavers: dict[int, Request | None] = {}
        self._samples: bytes | None = None  # by row, 1 if it samples; computed on demand

    def ran_rows(self) -> set[int]:
        """The rows of this step that still belong to the same request."""
        rows = {*self.sampling_rows.tolist(), *(chunk.row for chunk in self.chunks if chunk.counts)}
        return rows.difference(self.leavers)

    def runs(self, row: int) -> bool:
        """Whether the request that has ``row`` is in this step, and so writes its blocks, whether or not that counts."""
        if row in self.leavers:
            return False
        return self.samples(row) or any(chunk.row == row for chunk in self.chunks)

    def disregard(self, request: Request) -> None:
        """What this step computes of the request's prompt does not count."""
        for chunk in self.chunks:
            if chunk.request is request:
                chunk.counts = False

    def samples(self, row: int) -> bool:
        """Whether this step brings a token for ``row``."""
        if self._samples is None:
            mask = np.zeros(int(self.sampling_rows[-1]) + 1 if len(self.sampling_rows) else 0, dtype=np.bool_)
            mask[self.sampling_rows] = True
            self._samples = mask.tobytes()
        return row < len(self._samples) and self._samples[row] == 1

    def place_of(self, row: int) -> int:
        """The place of ``row`` among the sampling rows; -1 if this step brings no token for it."""
        return int(self.sampling_rows.searchsorted(row)) if self.samples(row) else -1
