"""Tokens that the executor proposes: who may run some, and what came of it."""

from headway_scheduler.core.state.arrival import Origin
from specification.endings import Endings
from specification.losses import Losses
from specification.requests import SpecRequest
from specification.room import Room
from specification.state import SpecState
from specification_of_learning import SpecifiedSpeculation, SpecifiedStepTimes, Step


class Speculation:
    def __init__(self, state: SpecState, endings: Endings, losses: Losses, room: Room) -> None:
        self._state = state
        self._endings = endings
        self._losses = losses
        self._room = room
        self.policy = SpecifiedSpeculation(state.capacity.max_speculative_tokens, SpecifiedStepTimes())
        """For whom speculation pays. Steps have no duration here."""

    def speculate(self) -> None:
        """Decoding requests may run tokens that the executor proposes, with what nobody else has use for."""
        state, draft = self._state, self._state.draft
        decoding = [r for r in state.running if r.row in draft.tokens and r.computed >= r.prompt_end]
        is_minding_losses = self._losses.alone is not None or bool(self._losses.unproven)
        if not self.policy.most or is_minding_losses or not 0 < len(decoding) <= state.limits.max_speculating_seqs:
            return
        ready = sorted((r for r in decoding if r.computed >= r.speculation.resumes_at), key=lambda r: r.row)
        if not ready:
            return
        shape = Step(len(decoding), len(decoding), sum(r.computed for r in decoding))
        counts = self.policy.choose([(r.speculation, r.computed) for r in ready], shape, state.step, None)
        size = state.capacity.block_size
        for request, most in zip(ready, counts, strict=True):
            left = state.budget() - sum(draft.speculating.values())
            count = min(most, request.limit - 1 - request.computed - 1, left)
            missing = -(-(request.computed + 1 + count) // size) - len(request.blocks)
            if count > 0 and missing > 0:
                if draft.short or state.pool.num_free < missing + len(state.running):
                    count = len(request.blocks) * size - request.computed - 1
                else:
                    self._room.extend(request, 1 + count)
            if count > 0:
                draft.speculating[request.row] = count

    def take_accepted(
        self,
        request: SpecRequest,
        num_allowed: int,
        num_proposed: int,
        tokens: list[int],
        delivered: list[tuple[Origin, int, int]],
        ended: list[tuple[Origin, str, int]],
    ) -> None:
        """All of it is computed; what is behind the end of the request is not for anybody."""
        request.computed += len(tokens)
        self.policy.learn(
            request.speculation,
            request.computed,
            allowed=num_allowed,
            proposed=num_proposed,
            accepted=len(tokens),
        )
        for token in tokens:
            request.confirmed += 1  # the token before this one
            self._endings.deliver(request, token, delivered)
            self._endings.end_if_done(request, token, ended)
            if request.row is None:
                return
