"""What must hold in every simulated world, whatever goes wrong in it: one small function per invariant.

Owns: the names and the meaning of the invariants. Must not know: faults, links, virtual time.

Those of the scheduler look at its columns from outside and count for themselves; they do not ask the code under test
whether it is right. A function raises ``Violation`` or returns.
"""

from collections.abc import Collection, Mapping, Sequence

from headway_proto.ingress import Finished, Submit
from headway_proto.step import NO_LANE, LaneOutput, SchedulerOutput
from headway_scheduler.cells.brake import LEAST_LOSSES, LOSSES_ALONE
from headway_scheduler.cells.cell import LEAST_STEP_TOKENS
from headway_scheduler.cells.fleet import Fleet
from headway_scheduler.cells.live_sequences import Name
from headway_scheduler.core.admission.waiting_queue import STARTS_PER_PROMOTION, Lane, is_promoted
from headway_scheduler.core.admission.waiting_room import WaitingRoom
from headway_scheduler.core.memory.host_books import HostBooks
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.arrival import Origin
from headway_scheduler.core.state.limits import SchedulerLimits
from headway_scheduler.core.state.request import Request, RequestStatus
from headway_scheduler.engine import SchedulerEngine

NAMES = (
    "BLOCK-CONSERVATION",
    "BLOCK-EXCLUSIVITY",
    "NO-ORPHAN",
    "ONE-PLACE",
    "LEASES",
    "BUDGET",
    "LANES",
    "PREFIX-STABLE",
    "EXACTLY-ONCE",
    "ORACLE-EQUAL",
    "TERMINAL-ONCE",
    "FCFS",
    "NO-STARVATION",
    "EPOCH-FENCE",
    "MIRROR",
    "BOUNDED",
    "CANCEL-BOUND",
    "ISOLATION",
    "TENANT-ISOLATION",
    "AS-ASKED",
    "OWED-AN-END",
    "QUIESCENT-ZERO",
    "LIVENESS",
)
_OF_PROGRESS = frozenset({"token_ids", "has_run", "num_prompt_logprobs"})
"""What differs where a request has come further."""

MOST_UNSERVED_STEPS = 600
"""Steps that may be sent while somebody who could run gets nothing; no schedule needs half as many. With several lanes a step
may bring one token, and the last of ten requests waits for all tokens of the others: 251 steps were seen."""

MOST_WAIT_BESIDE_ROOM_S = 1.0
"""Seconds that all requests of placement may wait while a cell has room for each: four heartbeats."""

MOST_MEMORY_ERRORS = 24
"""Of one executor: six halvings, and some that a lost frame hides from the scheduler."""


class Violation(AssertionError):  # noqa: N818 - it names the finding
    """``invariant`` does not hold."""

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(f"{invariant}: {detail}")
        self.invariant = invariant
        self.detail = detail


def require(holds: bool, invariant: str, detail: str) -> None:
    if not holds:
        raise Violation(invariant, detail)


# ---------------------------------------------------------------------------------------------------- of the scheduler


def block_conservation(core: Scheduler) -> None:
    """Free, fenced and owned blocks together are all blocks, each in one place; so are the host's."""
    pool = core.pool
    pool._count_released()
    owned = {block for row in _live(core) for block in core.rows.blocks_of(row).tolist()}
    free = pool._plain[pool._plain_top :].tolist()
    queued = _queued(core)
    fenced = [block for _, parts in pool._fences for part in parts for block in part.tolist()]
    places = [*owned, *free, *queued, *fenced]
    require(
        len(places) == pool.num_blocks == len(set(places)),
        "BLOCK-CONSERVATION",
        f"{len(owned)} owned, {len(free) + len(queued)} free, {len(fenced)} fenced of {pool.num_blocks}",
    )
    swapping = core.swapping
    exported = [
        exported.host_blocks
        for step in core._epoch.in_flight
        if step.transfers is not None
        for exported in step.transfers.exported
        if exported.host_blocks is not None
    ]
    held_on_host = sum(len(request.host_blocks) for request in core._requests.values())
    held_on_host += sum(map(len, exported)) + swapping.books.num_leased
    require(
        held_on_host + swapping.num_free_host_blocks == swapping.num_host_blocks,
        "BLOCK-CONSERVATION",
        f"{held_on_host} host blocks held, {swapping.num_free_host_blocks} free of {swapping.num_host_blocks}",
    )


def _queued(core: Scheduler) -> list[int]:
    return (core.pool._evictable._place != -1).nonzero()[0].tolist()


def _live(core: Scheduler) -> list[int]:
    return [row for row, request in enumerate(core.rows.requests[: core.rows.end]) if request is not None]


def block_exclusivity(core: Scheduler) -> None:
    """A block's reference count is the number of tables that it is in; no table has it twice."""
    counts = [0] * core.pool.num_blocks
    for row in _live(core):
        blocks = core.rows.blocks_of(row).tolist()
        require(len(set(blocks)) == len(blocks), "BLOCK-EXCLUSIVITY", f"row {row} has a block twice: {blocks}")
        for block in blocks:
            counts[block] += 1
    actual = core.pool._ref_count.tolist()
    require(actual == counts, "BLOCK-EXCLUSIVITY", f"reference counts {actual}, holders {counts}")


def no_orphan(core: Scheduler) -> None:
    """Only who runs has a row, and only who is swapped out has blocks on the host; nobody has ended and holds anything."""
    in_rows = 0
    for row in _live(core):
        request = core.rows.request_in(row)
        in_rows += 1
        require(core._requests.get(request.new.origin) is request, "NO-ORPHAN", f"row {row} belongs to nobody alive")
        require(
            request.row == row and request.status is RequestStatus.RUNNING, "NO-ORPHAN", f"row {row}: {request.status}"
        )
        require(not len(request.host_blocks), "NO-ORPHAN", f"row {row} runs and has blocks on the host")
    num_waiting = 0
    for request in core._requests.values():
        if request.status is not RequestStatus.RUNNING:
            num_waiting += 1
            require(request.row < 0, "NO-ORPHAN", "a waiting request has a row")
            is_swapped = request.num_swapped_tokens > 0
            has_blocks = bool(len(request.host_blocks)) != (request.stored is not None)
            require(is_swapped == has_blocks, "NO-ORPHAN", "host blocks of who is not swapped out")
    for request in {chunk.request for step in core._epoch.in_flight for chunk in step.chunks if chunk.counts}:
        is_here = core._requests.get(request.new.origin) is request or request.status is RequestStatus.FINISHED
        require(
            is_here, "NO-ORPHAN", f"a step in flight has a prompt of {request.new.request_id}, which went elsewhere"
        )
    require(in_rows == core.num_running, "NO-ORPHAN", f"{in_rows} rows in use, {core.num_running} counted")
    require(num_waiting == core.num_waiting, "NO-ORPHAN", f"{num_waiting} wait, {core.num_waiting} are queued")
    require(in_rows + num_waiting == len(core._requests), "NO-ORPHAN", "a request is neither waiting nor running")


def budget(core: Scheduler, limits: SchedulerLimits, running: dict[int, int], output: SchedulerOutput) -> None:
    """A step has no more tokens and no more sequences than are allowed, and as many as it says. ``running``: row, tokens."""
    total = sum(running.values())
    require(
        total == output.total_num_scheduled_tokens,
        "BUDGET",
        f"{total} tokens, {output.total_num_scheduled_tokens} told",
    )
    most = limits.max_num_batched_tokens
    if core.capacity.max_num_batched_tokens:
        most = min(most, core.capacity.max_num_batched_tokens)
    require(0 < total <= most, "BUDGET", f"{total} tokens in step {output.step}; allowed: {most}")
    require(len(running) <= limits.max_num_seqs, "BUDGET", f"{len(running)} sequences; allowed: {limits.max_num_seqs}")
    require(core.num_running <= core.capacity.max_num_rows, "BUDGET", f"{core.num_running} rows")


def lanes(core: Scheduler, output: SchedulerOutput, running: dict[int, int]) -> None:
    """Rows that decode are divided among the lanes, a step has rows of its own, and prompts end where there is room."""
    if core.capacity.num_lanes == 1:
        require(not isinstance(output, LaneOutput), "LANES", "a step names a lane, and there is one")
        return
    assert isinstance(output, LaneOutput)
    of_rows = core.rows.lane[: core.rows.end]
    for row in running:
        require(
            of_rows[row] in {output.lane, NO_LANE},
            "LANES",
            f"row {row} of lane {of_rows[row]} runs in lane {output.lane}",
        )
    for lane in core.lanes:
        elsewhere = [row for row in lane.indices().tolist() if of_rows[row] != lane.lane]
        require(not elsewhere, "LANES", f"rows {elsewhere} decode in lane {lane.lane}, and are not in it")
        num_rows = of_rows.count(lane.lane)
        require(num_rows == lane.num_rows, "LANES", f"lane {lane.lane}: {num_rows} rows, {lane.num_rows} counted")
    if any(chunk.completes for chunk in core._epoch.in_flight[-1].chunks):
        most = -(-(core.num_running + core.num_waiting) // len(core.lanes))
        num_rows = core.lanes[output.lane].num_rows
        require(num_rows <= most, "LANES", f"a prompt ends in lane {output.lane} with {num_rows} rows; allowed: {most}")


def lanes_take_turns(core: Scheduler, limits: SchedulerLimits, sent_lane: int, passed_over: dict[int, int]) -> None:
    """A lane that decodes and has not its share of the steps in flight has a step before any other has two.

    ``passed_over``, by lane: steps of others since then; brought up to date.
    """
    num_lanes = core.capacity.num_lanes
    share = 1 if limits.batching == "orca" else -(-_most_in_flight(core, limits) // num_lanes)
    for lane in core.lanes:
        num_in_flight = sum(step.lane == lane.lane for step in core._epoch.in_flight)
        is_due = lane.lane != sent_lane and len(lane.indices()) > 0 and num_in_flight < share
        passed_over[lane.lane] = passed_over.get(lane.lane, 0) + 1 if is_due else 0
        count = passed_over[lane.lane]
        require(count < num_lanes, "LANES", f"lane {lane.lane} was passed over {count} times")


def first_come_first_served(core: Scheduler, output: SchedulerOutput, had_rows: Collection[int]) -> None:
    """Nobody starts before somebody of its rank who was preempted (another lane) or came first.

    Left out is who may wait only since after others had started in the same step: who has been promoted, and who had a
    row in the step before (``had_rows``, by arrival).
    """
    waiting = [
        _place(request)
        for request in core._requests.values()
        if request.row < 0 and not is_promoted(request.rank) and request.arrival not in had_rows
    ]
    if not waiting:
        return
    first = min(waiting)
    for new in output.scheduled_new_reqs:
        place = _place(core.rows.request_in(new.row))
        require(place < first, "FCFS", f"(rank, lane, arrival) {place} starts, {first} waits")


def _place(request: Request) -> tuple[int, int, int]:
    """Where it belongs: a preempted one to the head of its rank, unless it made way for one that was about to be late."""
    lane = request.lane
    if request.status is RequestStatus.PREEMPTED and request.num_ways_made == 0:
        lane = Lane.RESUMING
    return request.rank, int(lane), request.arrival


def placed_in_order(placed: Request, waiting: Collection[Request], *, goes_on: bool) -> None:
    """No request goes to a cell before another of its rank that was preempted or came first.

    In the line of those who go on with their blocks all have run, and who made way for another comes behind the others.
    """

    def place(request: Request) -> tuple[int, int, int]:
        return (request.rank, request.num_ways_made > 0, request.arrival) if goes_on else _place(request)

    first = min((place(request) for request in waiting if not is_promoted(request.rank)), default=None)
    require(first is None or place(placed) < first, "FCFS", f"{place(placed)} is placed before {first}")


def no_starvation(unserved_steps: dict[int, int]) -> None:
    """Everybody who waits or runs gets something within a bounded number of steps. By arrival: steps since it did."""
    for arrival, count in unserved_steps.items():
        require(count <= MOST_UNSERVED_STEPS, "NO-STARVATION", f"arrival {arrival} got nothing for {count} steps")


def no_starvation_above(waited_steps: dict[int, int], num_cells: int) -> None:
    """A request waits in placement for a bounded number of steps of all cells. By arrival: steps since it waits there."""
    for arrival, count in waited_steps.items():
        most = MOST_UNSERVED_STEPS * num_cells
        require(count <= most, "NO-STARVATION", f"arrival {arrival} waits in placement for {count} steps")


def no_endless_overtaking(overtaken: dict[int, int], num_older: dict[int, int]) -> None:
    """Who is old enough to be promoted is overtaken by a bounded number of younger ones.

    By arrival: how many have started before it since then, and how many older ones have waited with it: each takes its turn
    to be promoted, after at most two rounds of ``STARTS_PER_PROMOTION`` starts; a round may be under way when it gets old.
    """
    for arrival, count in overtaken.items():
        most = 2 * STARTS_PER_PROMOTION * (num_older[arrival] + 1) + STARTS_PER_PROMOTION
        require(count <= most, "NO-STARVATION", f"arrival {arrival} was overtaken {count} times; allowed: {most}")


def bounded(engine: SchedulerEngine) -> None:
    """Every queue is within its cap, and no index outlives what it points to."""
    limits, early, live = engine.limits, engine.early, engine.live
    require(len(early) <= limits.max_num_waiting, "BOUNDED", f"{len(early)} wait for an executor")
    require(len(live._by_name) == len(live._by_origin), "BOUNDED", "names and origins differ in number")
    num_bytes = sum(len(submit.token_ids) for submit in early._submits.values())
    require(early._num_bytes == num_bytes, "BOUNDED", f"{early._num_bytes} bytes, not {num_bytes}")
    cores, placement = engine.fleet.cores, engine.fleet.placement
    num_waiting = len(placement)
    for core in cores:
        waiting_counted(core._state.waiting.room, core._requests.values())
        require(core.num_in_flight <= _most_in_flight(core, limits), "BOUNDED", f"{core.num_in_flight} steps in flight")
        require(len(core.rows._free_rows) + core.rows.num_live == core.rows.max_rows, "BOUNDED", "rows are lost")
        num_waiting += core.num_waiting
    # Those that ran may have to wait again, beside a full queue; and where requests leave, those that took their place.
    places = 1 if len(cores) == 1 else 2
    most = limits.max_num_waiting + places * sum(limits.max_num_seqs * _most_in_flight(core, limits) for core in cores)
    require(num_waiting <= most, "BOUNDED", f"{num_waiting} wait; allowed: {most}")
    waiting = [request for origin, request in placement._requests.items() if origin not in placement._homeless]
    waiting_counted(placement._waiting.room, waiting)
    in_one_place(live._by_origin.keys(), [placement._requests, *(core._requests for core in cores)])


def _most_in_flight(core: Scheduler, limits: SchedulerLimits) -> int:
    return limits.steps_in_flight(core.capacity.num_lanes)


def in_one_place(live: Collection[Origin], places: Sequence[Mapping[Origin, Request]]) -> None:
    """Each live request is in placement or in one core, and has an arrival number of its own."""
    held = [origin for place in places for origin in place]
    require(len(held) == len(set(held)), "ONE-PLACE", f"{len(held)} requests are held, {len(set(held))} different ones")
    require(live == set(held), "ONE-PLACE", f"{len(live)} requests are live, {len(held)} are held")
    arrivals = {request.arrival for place in places for request in place.values()}
    require(len(arrivals) == len(held), "ONE-PLACE", f"{len(held)} requests have {len(arrivals)} arrival numbers")


def lost_cells_are_empty(fleet: Fleet) -> None:
    """A cell whose executor is lost holds nothing while another is open."""
    for cell in fleet.cells if fleet.open_cells else ():
        num_held = 0 if cell.link.is_open or cell.core is None else len(cell.core._requests)
        require(not num_held, "ONE-PLACE", f"cell {cell.number} is lost and holds {num_held} requests")


def leases_are_owned(fleet: Fleet, books_of_pool: dict[str, HostBooks | None]) -> None:
    """Each leased host block is owned by one live request, or one that a step in flight fetches; nothing else is leased.

    ``books_of_pool``: the only books that a pool has had; None once there were others. An executor may join in another cell,
    with its pool, and the books there say nothing of older leases: then records alone keep its blocks apart.
    """
    owners: dict[tuple[str, int], int] = {}
    stored = [request.stored for request in fleet.placement.requests()]
    for core in fleet.cores:
        stored += [request.stored for request in core._requests.values()]
        for step in core._epoch.in_flight:
            stored += [] if step.transfers is None else [fetched.stored for fetched in step.transfers.fetched]
        require(
            not core._state.ended_leases, "LEASES", f"{len(core._state.ended_leases)} ended leases were not returned"
        )
    for lease in stored:
        for block in () if lease is None else lease.host_blocks.tolist():
            owners[lease.pool, block] = owners.get((lease.pool, block), 0) + 1
    for core in fleet.cores:
        books = core.swapping.books
        leased = books._is_leased.nonzero()[0].tolist()
        lost = [block for block in leased if not owners.get((books.name, block))]
        require(not lost, "LEASES", f"host blocks {lost} are leased, and nobody wants them")
        if books_of_pool.setdefault(books.name, books) is not books:
            books_of_pool[books.name] = None
            continue
        twice = [block for block in leased if owners.get((books.name, block), 0) > 1]
        require(not twice, "LEASES", f"host blocks {twice} are leased to several")
        wanted = [block for name, block in owners if name == books.name]
        free = [block for block in wanted if not books._is_leased[block]]
        require(not free, "LEASES", f"host blocks {free} are wanted, and are not leased any more")


def drained_cell_is_empty(number: int, core: Scheduler, epoch: int, next_step: int) -> None:
    """A draining cell holds requests until the steps that were in flight then are answered, and takes no others.

    ``epoch`` and ``next_step``: those of the core when the cell began to drain.
    """
    is_owed = core.epoch == epoch and any(step.step < next_step for step in core._epoch.in_flight)
    # Who was preempted as it was about to leave goes with the next answer.
    staying = [
        request
        for request in core._requests.values()
        if not (request.must_leave and (request.row >= 0 or core._epoch.in_flight))
    ]
    require(is_owed or not staying, "ONE-PLACE", f"cell {number} drains and holds {len(staying)} requests")


def undisturbed(is_disturbed: bool, number: int, what: str) -> None:
    """Of what goes wrong elsewhere, an executor notices nothing."""
    require(is_disturbed, "ISOLATION", f"nothing is wrong with the executor of cell {number}, and {what}")


def no_idle_cell(number: int, arrivals: Collection[int]) -> None:
    """No request waits in placement for a whole beat while a cell that takes it has nothing to do."""
    require(not arrivals, "LIVENESS", f"cell {number} is idle, arrivals {sorted(arrivals)} wait in placement")


def has_blocks_for(core: Scheduler, request: Request) -> bool:
    """Whether a request that comes now would find blocks for all of its tokens, and one to go on with."""
    return -(-len(request.token_ids) // core.rows.block_size) < core.pool.num_free


def no_wait_beside_room(
    room_since: Mapping[tuple[int, int, int], float], arrivals: Collection[int], now: float
) -> None:
    """Of the requests in placement, one goes soon to a cell with room.

    ``room_since``: since when there is room, by cell, epoch and arrival. An epoch that ends takes with it what the cell
    had computed, and those who had begun begin again before others.
    """
    waited = {
        arrival: max((now - since for (*_, other), since in room_since.items() if other == arrival), default=0.0)
        for arrival in arrivals
    }
    least = min(waited.values())
    require(least <= MOST_WAIT_BESIDE_ROOM_S, "LIVENESS", f"arrivals {sorted(waited)} wait {least:.1f} s beside room")


def credits_kept(sequence: int, acknowledged: int, window: int) -> None:
    """No tokens are sent to a gateway that has left a window of frames unacknowledged."""
    require(
        sequence - acknowledged < window, "BOUNDED", f"frame {sequence} sent, {acknowledged} acknowledged, {window}"
    )


def epoch_fence(what: str, given: tuple[int, ...], current: tuple[int, ...]) -> None:
    """What takes effect is of the current life, epoch and step."""
    require(given == current, "EPOCH-FENCE", f"{what}: {given} took effect in {current}")


def mirror(what: str, ours: object, theirs: object) -> None:
    """Both sides of the step protocol are in the same state after the same step."""
    require(ours == theirs, "MIRROR", f"{what}: scheduler {ours}, executor {theirs}")


def one_executor(silent_s: float, least_s: float, who: str) -> None:
    """An executor that is heard of is not replaced."""
    require(silent_s >= least_s, "EPOCH-FENCE", f"{who} was replaced {silent_s:.3f} s after it was heard")


def memory_respected(num_times: int, memory_tokens: int, num_requests: int) -> None:
    """An executor that ran out of memory is sent smaller steps: halved each time, they soon fit.

    Where it holds fewer tokens than the least that is tried, nothing fits, and one request after the other is blamed.
    """
    most = MOST_MEMORY_ERRORS if memory_tokens >= LEAST_STEP_TOKENS else MOST_MEMORY_ERRORS * (1 + num_requests)
    require(num_times <= most, "BUDGET", f"the executor ran out of memory {num_times} times")


def taken_once(is_first_life: bool, who: str) -> None:
    """A request is submitted once per link; only who lost a gateway may find itself there already."""
    require(not is_first_life, "EXACTLY-ONCE", f"{who} is there already")


def write_exclusivity(written_in_flight: dict[int, Request], written: dict[int, Request]) -> None:
    """No block is written for two requests by steps in flight together, nor twice in one step. By block: for whom."""
    for block, request in written.items():
        other = written_in_flight.get(block)
        require(
            other is None or other is request, "BLOCK-EXCLUSIVITY", f"block {block} is reused while a step writes it"
        )


def failed_not_cached(cached_before: Collection[int], cached_after: Collection[int], blocks: Sequence[int]) -> None:
    """What a failed row computed is found by nobody."""
    new = set(cached_after).difference(cached_before).intersection(blocks)
    require(not new, "ISOLATION", f"blocks {sorted(new)} of a failed row are in the prefix cache")


def waiting_counted(room: WaitingRoom, requests: Collection[Request]) -> None:
    """What the waiting room counts, of all and of each tenant, is what waits."""
    waiting = [request for request in requests if request.row < 0]
    tenants: dict[str, list[int]] = {}
    for request in waiting:
        counts = tenants.setdefault(request.new.tenant, [0, 0])
        counts[0] += 1
        counts[1] += request.num_queued_tokens
    require(room._tenants == tenants, "BOUNDED", f"{room._tenants} are counted as waiting, {tenants} wait")
    whole = [room.num_requests, room.num_tokens]
    require(whole == [len(waiting), sum(counts[1] for counts in tenants.values())], "BOUNDED", f"{whole} are counted")


def nobody_gone_is_suspected(engine: SchedulerEngine, without_a_gateway: Collection[Name]) -> None:
    """The brake knows of everybody who has ended; who has only lost its gateway may come back."""
    for name in engine.fleet.brake._suspicions:
        require(
            engine.live.named(name) is not None or name in without_a_gateway,
            "NO-ORPHAN",
            f"{name.request_id} has ended, and is suspected",
        )


def tenant_isolation(tenant: str, holders: Collection[str]) -> None:
    """Where each tenant has a cache of its own, nobody starts with what was computed for another."""
    others = [holder for holder in holders if holder != tenant]
    require(not others, "TENANT-ISOLATION", f"a request of tenant {tenant!r} starts with blocks of {others}")


def as_asked(submit: Submit, asked: Submit) -> None:
    """What is submitted, for the first time or again, is what the client asked for, whatever has come of it."""
    differing = [
        name
        for name in asked.__struct_fields__
        if name not in _OF_PROGRESS and getattr(submit, name) != getattr(asked, name)
    ]
    require(not differing, "AS-ASKED", f"{asked.request_id} is submitted with another {', '.join(differing)}")


def owed_an_end(has_been_told: bool, who: str) -> None:
    """Who has been told that it runs is not refused for being late."""
    require(not has_been_told, "OWED-AN-END", f"{who} has run, and would be refused for being late")


# ------------------------------------------------------------------------------------------------------ of the client


def prefix_stable(delivered: list[int], now_held: list[int]) -> None:
    """A delivered token never changes."""
    require(now_held[: len(delivered)] == delivered, "PREFIX-STABLE", f"{delivered} became {now_held}")


def oracle_equal(new: list[int], start: int, answer: list[int]) -> None:
    """Each token is the one of the undisturbed run."""
    expected = answer[start : start + len(new)]
    require(new == expected, "ORACLE-EQUAL", f"tokens from {start} are {new}, not {expected}")


def vector_equal(told: bytes, answer: bytes, who: str) -> None:
    """A vector is the one of the undisturbed run."""
    require(told == answer, "ORACLE-EQUAL", f"the vector of {who} is {told.hex()}, not {answer.hex()}")


def exactly_once(index: int, expected: int, who: str) -> None:
    """On one link, the tokens of a sequence are numbered without gap or repetition."""
    require(index == expected, "EXACTLY-ONCE", f"{who}: token {index} was sent where {expected} was due")


def terminal_once(num_ends: int, who: str) -> None:
    """A sequence ends once, and nothing comes behind its end."""
    require(num_ends <= 1, "TERMINAL-ONCE", f"{who} ended {num_ends} times, or went on behind its end")


def ends_as_it_should(reason: str, num_tokens: int, expected: str, num_expected: int, who: str) -> None:
    """A request fails only for its own faults (ISOLATION), and ends where the undisturbed run does (ORACLE-EQUAL)."""
    require(
        reason == expected or "error" not in {reason, expected}, "ISOLATION", f"{who} ended as {reason}, not {expected}"
    )
    ends = (reason, num_tokens), (expected, num_expected)
    require(ends[0] == ends[1], "ORACLE-EQUAL", f"{who} ended as {ends[0]}, not {ends[1]}")


def may_be_guilty(num_losses: int, num_losses_alone: int) -> None:
    """The brake ends a request for executors lost while it ran after so many losses, and not before.

    A request that makes no progress while the plug is pulled again and again cannot be told from one that pulls it.
    ``num_losses``: how often steps of it were lost; ``num_losses_alone``: how often with nothing beside it.
    """
    is_allowed = num_losses >= LEAST_LOSSES and num_losses_alone >= LOSSES_ALONE
    require(is_allowed, "ISOLATION", f"found guilty after {num_losses} losses, {num_losses_alone} of them alone")


def is_found_guilty(was_judged: bool, end: Finished) -> bool:
    """Whether a request ended for executors lost while it ran; then the brake has said so, also if its process is gone."""
    if not end.error.startswith("the executor was lost"):
        return False
    require(was_judged, "ISOLATION", "ended as guilty, and the brake has not found it so")
    return True


def may_lack_its_adapter(may_be_gone: bool, why: str, who: str) -> None:
    """An adapter that nobody unloaded stays, as long as somebody has it or can read it."""
    require(may_be_gone, "ISOLATION", f"{who} ended for its adapter: {why}")


def cancel_bound(is_live: bool, who: str) -> None:
    """On a link without faults, a cancelled sequence is gone from the scheduler when its Abort has arrived."""
    require(not is_live, "CANCEL-BOUND", f"{who} is still there")


def liveness(num_open: int, detail: str) -> None:
    """Once all faults are healed, everything ends."""
    require(num_open == 0, "LIVENESS", f"{num_open} have no end: {detail}")
