"""Where the proposals of a speculative step on a device come from: the text so far, a draft model, or another rank.

Owns: the proposers, and which one a rank has. Must not know: launches of a step, what is verified.
"""

import numpy as np
from torch import Tensor

from headway_executor.backend import NewRow, StepBatch
from headway_executor.gpu.device_model import DeviceModel
from headway_executor.gpu.device_parts import DeviceParts
from headway_executor.gpu.draft import DeviceDraftPass
from headway_executor.gpu.host_tokens import HostTokens
from headway_executor.gpu.runtime import Mark, Runtime, fetched, sent
from headway_executor.gpu.speculation import DeviceProposer, DeviceSpeculation, Tokens
from headway_executor.models.forward import Int64Array
from headway_executor.ranks.channel import Channel
from headway_executor.sampling.speculation.draft_model import DraftModel
from headway_executor.sampling.speculation.ngram import PromptLookup
from headway_executor.sampling.speculation.proposer import Asked, Proposer
from headway_executor.sampling.speculation.told import proposals_channel, take_proposals, tell_proposals
from headway_executor.sampling.speculation.verification import proposal_places
from headway_kernels.gpu.rows import store_sampled
from headway_proto.columns import Int32Array


def speculation_over(parts: DeviceParts) -> DeviceSpeculation | None:
    """What this rank does with steps that may have proposals; None: there are none."""
    config, store, runtime, group = parts.config, parts.rows.token_store, parts.runtime, parts.stage.group
    if config.speculation == "off":
        return None
    channel = None if group is None or config.speculation != "draft" else proposals_channel(group, config)
    proposer: DeviceProposer
    if parts.draft is not None:
        proposer = _drafted(parts, parts.draft, channel)
    elif channel is not None:
        proposer = Told(runtime, store, channel)
    else:
        proposer = LookedUp(runtime, store)
    return DeviceSpeculation(proposer, most_rows=parts.most_rows, most_tokens=config.max_num_batched_tokens)


def _drafted(parts: DeviceParts, model: DeviceModel, others: Channel | None) -> "Drafted":
    config = parts.config
    run = DeviceDraftPass(model, parts.upload, parts.sampler, config.max_num_batched_tokens)
    draft = DraftModel(
        run,
        max_model_len=parts.draft_model_len,
        num_blocks=parts.target.num_blocks,
        block_size=config.block_size,
    )
    return Drafted(parts.runtime, parts.rows.token_store, draft, others)


class LookedUp:
    """Prompt lookup, in a copy of the tokens in main memory."""

    def __init__(self, runtime: Runtime, token_store: Tensor) -> None:
        self._runtime = runtime
        self._store = token_store
        self._tokens = HostTokens(token_store.shape[0], token_store.shape[1] - 1)
        self._lookup = PromptLookup()

    def follow(self, batch: StepBatch, new_rows: tuple[NewRow, ...]) -> None:
        """See ``DeviceProposer``."""
        del batch
        self._tokens.add_rows(new_rows)

    def draw(self, batch: StepBatch, drawn: Tokens, reached: Mark) -> None:
        """See ``DeviceProposer``."""
        self._tokens.draw(batch, drawn, reached)

    def write(self, rows: Int32Array, positions: Int32Array, tokens: Int32Array) -> None:
        """See ``DeviceProposer``."""
        self._tokens.write(rows, positions, tokens)

    def forget_blocks(self, blocks: Int32Array) -> None:
        """See ``DeviceProposer``."""

    def propose(self, asked: Asked) -> tuple[Int64Array, Tokens]:
        """See ``DeviceProposer``."""
        self._tokens.catch_up()
        counts = self._lookup.propose(asked, self._tokens.token_ids)
        proposals: Int32Array = self._tokens.token_ids.numpy()[proposal_places(asked, counts)]
        _store(self._runtime, self._store, asked, counts, proposals)
        return counts, lambda: proposals

    def settle(self, asked: Asked, num_proposed: Int64Array, num_accepted: Int64Array) -> None:
        """See ``DeviceProposer``."""


class Drafted:
    """Proposals of a model that draws them into the token store. ``others``: the way to other ranks, or None."""

    def __init__(self, runtime: Runtime, token_store: Tensor, draft: Proposer, others: Channel | None) -> None:
        self._runtime = runtime
        self._store = token_store
        self._draft = draft
        self._others = others
        self.forget_blocks = draft.forget_blocks
        self.settle = draft.settle

    def follow(self, batch: StepBatch, new_rows: tuple[NewRow, ...]) -> None:
        """See ``DeviceProposer``."""
        del new_rows
        self._draft.follow(batch)

    def draw(self, batch: StepBatch, drawn: Tokens, reached: Mark) -> None:
        """See ``DeviceProposer``."""

    def write(self, rows: Int32Array, positions: Int32Array, tokens: Int32Array) -> None:
        """See ``DeviceProposer``."""

    def propose(self, asked: Asked) -> tuple[Int64Array, Tokens]:
        """See ``DeviceProposer``."""
        counts = self._draft.propose(asked, self._store)
        places = sent(self._runtime, np.stack(proposal_places(asked, counts)))
        proposals = fetched(self._runtime, self._store[places[0], places[1]])
        if self._others is not None:
            self._runtime.mark().wait()
            tell_proposals(self._others, asked, counts, proposals.numpy())
        return counts, proposals.numpy


class Told:
    """The proposals of rank 0, on another rank."""

    def __init__(self, runtime: Runtime, token_store: Tensor, channel: Channel) -> None:
        self._runtime = runtime
        self._store = token_store
        self._channel = channel

    def follow(self, batch: StepBatch, new_rows: tuple[NewRow, ...]) -> None:
        """See ``DeviceProposer``."""

    def draw(self, batch: StepBatch, drawn: Tokens, reached: Mark) -> None:
        """See ``DeviceProposer``."""

    def write(self, rows: Int32Array, positions: Int32Array, tokens: Int32Array) -> None:
        """See ``DeviceProposer``."""

    def forget_blocks(self, blocks: Int32Array) -> None:
        """See ``DeviceProposer``."""

    def propose(self, asked: Asked) -> tuple[Int64Array, Tokens]:
        """See ``DeviceProposer``."""
        counts, proposals = take_proposals(self._channel, asked)
        _store(self._runtime, self._store, asked, counts, proposals)
        return counts, lambda: proposals

    def settle(self, asked: Asked, num_proposed: Int64Array, num_accepted: Int64Array) -> None:
        """See ``DeviceProposer``."""


def _store(runtime: Runtime, token_store: Tensor, asked: Asked, counts: Int64Array, proposals: Int32Array) -> None:
    columns = sent(runtime, np.stack((proposals, *proposal_places(asked, counts))).astype(np.int32))
    store_sampled(columns[0], columns[1], columns[2], token_store)
