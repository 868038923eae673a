"""What of the running requests is in a step: decodes and chunks of prompts."""

from specification.admission import Admission
from specification.lanes import Lanes
from specification.room import Room
from specification.state import SpecState


class Serving:
    def __init__(self, state: SpecState, admission: Admission, lanes: Lanes, room: Room) -> None:
        self._state = state
        self._admission = admission
        self._lanes = lanes
        self._room = room

    def serve_decoding(self) -> None:
        state, draft = self._state, self._state.draft
        size = state.capacity.block_size
        in_need = []
        for request in [r for r in draft.may_run if r.row is not None and r.computed >= r.prompt_end]:
            if request in draft.held_back:
                continue
            if request.computed == request.limit - 1:
                continue  # only its last token is missing, which a step in flight will bring
            if len(request.blocks) * size > request.computed:
                draft.tokens[request.row] = 1
            else:
                in_need.append(request)
        if len(in_need) <= state.pool.num_free:
            in_need.sort(key=lambda request: request.row)  # there is a block for everyone
            state.pool.make_room(len(in_need))
        for request in in_need:
            if request.row is None:
                continue  # preempted for a request before it
            if self._room.obtain_block(request):
                self._room.extend(request, 1)
                draft.tokens[request.row] = 1
                request.stalled = False
            elif request.row is not None:
                request.stalled = True

    def serve_prompts(self) -> None:
        state, draft = self._state, self._state.draft
        prompts = [r for r in draft.may_run if r.computed < r.prompt_end]
        if state.ranks_classes:
            for r in [r for r in state.running if r.computed < r.prompt_end]:
                if state.now - r.served_time >= state.limits.aging_s:
                    r.rank = 0  # nothing of it has run for long: it goes before all classes
            prompts.sort(key=lambda r: r.key)
        under_way = [(r, r.stay) for r in prompts]
        is_fair = state.limits.order == "fair" and not any(r.lane == 0 for r in state.waiting)  # nobody was preempted
        if is_fair:
            under_way.sort(key=lambda entry: (entry[0].place, entry[0].arrival))
        for request, stay in under_way:
            if is_fair or state.ranks_classes:
                self._admission.admit(before=request)
            if request.row is None or request.stay != stay:
                continue  # preempted for a request before it
            left = request.prompt_end - request.computed
            wanted = self._lanes.within_lane(min(left, state.budget()), left)
            room = len(request.blocks) * state.capacity.block_size - request.computed
            if wanted <= 0 or (room == 0 and not self._room.obtain_block(request)):
                continue
            room += state.pool.num_free * state.capacity.block_size
            if room < wanted:
                draft.short = True
            self._room.extend(request, min(wanted, room))
            draft.tokens[request.row] = min(wanted, room)
            request.served_time = state.now
