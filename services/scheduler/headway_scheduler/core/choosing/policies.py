"""The placement policies by name: on which executors a request may start, and whether it leaves behind its prompt.

Owns: these choices. Must not know: which of the allowed executors is first, the queue, or how blocks travel.

- ``aggregated``: every executor does everything; roles are ignored.
- ``disaggregated``: prompts run on executors for prompts, and decode on those for decoding (DistServe, Zhong et al., OSDI
  2024; Splitwise, Patel et al., ISCA 2024).
- ``hybrid``: objectives decide, and roles are preferences. Tight first tokens are better served where every executor
  takes prompts, tight gaps where none does (TaiChi, arXiv 2508.01989), so both are possible for each request.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from headway_scheduler.core.choosing.cell_load import CellLoad
from headway_scheduler.core.choosing.roles import Role
from headway_scheduler.core.state.limits import SchedulerLimits
from headway_scheduler.core.state.request import Request

SLACK_TO_RECEIVE = 0.8
"""A running request goes where its gap is expected to be at most this share of the objective, so that it stays there, and
a prompt beside rows that decode where they leave the rest of the objective."""

SLACK_TO_STAY = 0.4
"""A request stays with the prompts of its executor if decoding takes at most this share of its objective there: then to
leave would win little for prompts, and cost a hand-off."""


RELIEVE_INTERVAL_S = 0.25
"""How often running requests may be sent elsewhere for their gaps. Whoever ends sooner relieves the others by that."""


class PlacementPolicy(Protocol):
    """Stateless. ``accepting``: the executors that take requests now."""

    @property
    def has_roles(self) -> bool: ...  # noqa: D102 - whether roles mean anything

    def cells_for(self, request: Request, accepting: Sequence[CellLoad]) -> Sequence[CellLoad]:
        """The executors that may get this request; at least one if any accepts."""

    def leaves(self, request: Request, cell: CellLoad, accepting: Sequence[CellLoad]) -> bool:
        """Whether a request that starts in ``cell`` goes on elsewhere behind its prompt."""

    def is_misplaced(self, request: Request, cell: CellLoad) -> bool:
        """Whether another executor that is as good otherwise is to be preferred."""

    def to_relieve(self, cells: Sequence[CellLoad]) -> list[tuple[int, Request]]:
        """Running requests that should go on elsewhere, at most one for each executor."""


class Aggregated:
    """Every executor does everything."""

    has_roles = False

    def cells_for(self, request: Request, accepting: Sequence[CellLoad]) -> Sequence[CellLoad]:
        """See ``PlacementPolicy``."""
        del request
        return accepting

    def leaves(self, request: Request, cell: CellLoad, accepting: Sequence[CellLoad]) -> bool:
        """Never."""
        del request, cell, accepting
        return False

    def is_misplaced(self, request: Request, cell: CellLoad) -> bool:
        """Never."""
        del request, cell
        return False

    def to_relieve(self, cells: Sequence[CellLoad]) -> list[tuple[int, Request]]:
        """Nobody."""
        del cells
        return []


class Disaggregated:
    """Prompts here, decoding there. Where no executor has the role, any serves."""

    has_roles = True

    def cells_for(self, request: Request, accepting: Sequence[CellLoad]) -> Sequence[CellLoad]:
        """Those with the role."""
        return [cell for cell in accepting if has_role(request, cell)] or accepting

    def leaves(self, request: Request, cell: CellLoad, accepting: Sequence[CellLoad]) -> bool:
        """If nobody decodes in ``cell``, and somebody does elsewhere."""
        if request.stored is not None or request.new.max_tokens <= 1 or cell.role.decodes:
            return False
        return any(other.role.decodes for other in accepting)

    def is_misplaced(self, request: Request, cell: CellLoad) -> bool:
        """Never: ``cells_for`` has decided."""
        del request, cell
        return False

    def to_relieve(self, cells: Sequence[CellLoad]) -> list[tuple[int, Request]]:
        """Nobody."""
        del cells
        return []


class Hybrid:
    """A request starts where its first token comes first without harm to others, and goes on where its gaps are kept."""

    has_roles = True

    def cells_for(self, request: Request, accepting: Sequence[CellLoad]) -> Sequence[CellLoad]:
        """A prompt goes where running requests keep their gaps beside it, a decode where it keeps its own.

        A decode does not wait for such an executor while another has room: its client would see the wait as one gap.
        """
        if request.stored is None:
            beside = [cell for cell in accepting if cell.keeps_gaps_beside(request, SLACK_TO_RECEIVE)]
            return beside or [cell for cell in accepting if cell.role.prefills] or accepting
        keeping = [cell for cell in accepting if cell.has_room_for(request) and cell.keeps_gap_of(request)]
        return [cell for cell in keeping if cell.role.decodes] or keeping or accepting

    def leaves(self, request: Request, cell: CellLoad, accepting: Sequence[CellLoad]) -> bool:
        """If its gaps are kept elsewhere, and here prompts come first or its gaps would be missed."""
        if request.stored is not None or request.new.max_tokens <= 1:
            return False
        others = [other for other in accepting if other is not cell and other.role.decodes]
        if cell.role.decodes:
            return not cell.keeps_gap_of(request) and any(other.keeps_gap_of(request) for other in others)
        stays = bool(request.itl_slo_ms) and cell.knows_its_speed and cell.keeps_gap_of(request, SLACK_TO_STAY)
        # Where gaps are missed everywhere, prompts would only be held up beside it here.
        return bool(others) and not stays

    def is_misplaced(self, request: Request, cell: CellLoad) -> bool:
        """If the executor has another role."""
        return not has_role(request, cell)

    def to_relieve(self, cells: Sequence[CellLoad]) -> list[tuple[int, Request]]:
        """The newest decoding request of each executor that misses its gaps, if another has slack and room.

        One that ends soon stays: it would be copied for a few tokens, or come back.
        """
        found = []
        for cell in cells:
            request = cell.newest_decoding(RELIEVE_INTERVAL_S) if cell.misses_gaps() else None
            if request is None:
                continue
            receiver = next((other for other in cells if other is not cell and _can_receive(other, request)), None)
            if receiver is not None:
                receiver.expect(request)
                found.append((cell.number, request))
        return found


def _can_receive(cell: CellLoad, request: Request) -> bool:
    may_start = cell.accepts and cell.can_hold(request) and cell.has_room_for(request)
    return may_start and cell.keeps_gap_of(request, SLACK_TO_RECEIVE)


def has_role(request: Request, cell: CellLoad) -> bool:
    """Whether the executor's role is what the request needs next: a prompt, or decoding from stored blocks."""
    return cell.role.prefills if request.stored is None else cell.role.decodes


AUTO = "auto"
POLICIES: dict[str, PlacementPolicy] = {
    "aggregated": Aggregated(),
    "disaggregated": Disaggregated(),
    "hybrid": Hybrid(),
}


class PlacementSettings(NamedTuple):
    """``policy``: ``AUTO`` or a name in ``POLICIES``. ``roles`` of the first executors; the others are ``both``."""

    policy: str = AUTO
    roles: tuple[Role, ...] = ()

    def role_of(self, number: int) -> Role:
        """The role that an executor begins with."""
        return self.roles[number] if number < len(self.roles) else Role.BOTH

    def name_for(self, limits: SchedulerLimits, max_executors: int) -> str:
        """The policy's name; ``AUTO``: hybrid with objectives, else what the roles say."""
        if self.policy != AUTO:
            return self.policy
        if max_executors > 1 and (limits.default_ttft_slo_ms or limits.default_itl_slo_ms):
            return "hybrid"
        return "disaggregated" if any(role is not Role.BOTH for role in self.roles) else "aggregated"
