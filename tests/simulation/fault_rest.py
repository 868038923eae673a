"""What may be left of a load when nothing is to be done any more: nothing, but for what is named here.

Owns: QUIESCENT-ZERO, and the table of what may grow. Must not know: schedules, faults, or how a census is taken.

A scheduler, its gateways and its executors that have had work are compared with some that never had any: each container,
each number that can be reached from them must be as it is there. So whatever comes to be held tomorrow is looked at
without being named. A container in the table has a bound.
"""

import re
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from flight_logs import MemoryLog, recorder_into
from headway_executor.batch.batch_state import BatchState
from headway_executor.links.step_link import StepLink
from headway_executor.step.loop import StepCycle
from headway_gateway.link.ingress_link import IngressLink
from headway_proto.ingress import HEARTBEAT_INTERVAL_S
from headway_proto.step import BackendInfo
from headway_scheduler.cells import brake
from headway_scheduler.core.admission import fair_queue, waiting_queue
from headway_scheduler.core.state.limits import ExecutorCapacity
from headway_scheduler.engine import SchedulerEngine
from headway_scheduler.figures import serving_statistics
from headway_scheduler.flight.recorder import FlightRecorder
from headway_scheduler.operators import administration
from simulation.census import census
from simulation.fault_executor import Silent
from simulation.fault_process import START_S
from simulation.fault_schedule import ADAPTERS

if TYPE_CHECKING:
    from simulation.fault_world import FaultWorld

_Most = Callable[["FaultWorld"], int]


class _MayGrow(NamedTuple):
    """``pattern`` of paths in a census. ``most``: the bound of a container; None for numbers, which take no more memory when
    they are larger.
    """

    pattern: str
    most: _Most | None
    why: str


def _num_host_blocks(world: "FaultWorld") -> int:
    """Each at most once in the cache, and in what a step reads and writes."""
    return 4 * max(capacity.num_host_blocks for capacity in _capacities(world)) + 4


def _num_epochs(world: "FaultWorld") -> int:
    """Its own, and one of each other executor."""
    return _num_cells(world) + 1


def _num_blocks(world: "FaultWorld") -> int:
    return max(capacity.num_blocks for capacity in _capacities(world))


def _capacities(world: "FaultWorld") -> list[ExecutorCapacity | BackendInfo]:
    """Of the executors that there are, and of those that cores have had."""
    cores = world.scheduler.engine.fleet.cores
    return [*(executor.info for executor in world.executors), *(core.capacity for core in cores)]


def _num_rows(world: "FaultWorld") -> int:
    return world.schedule.settings.num_rows


def _num_tenants(world: "FaultWorld") -> int:
    return len({request.tenant for request in world.schedule.requests})


def _num_lives(world: "FaultWorld") -> int:
    return world.num_lives


def _num_pins(world: "FaultWorld") -> int:
    """Those that can be asked for: one for each request."""
    num_pins = max(len(core.pinned_prefixes.list()) for core in world.scheduler.engine.fleet.cores)
    return min(len(world.schedule.requests), num_pins)


def _num_watched(world: "FaultWorld") -> int:
    """Objectives that a core, or placement, keeps until it looks at them."""
    fleet = world.scheduler.engine.fleet
    watches = [fleet.placement._first_tokens, *(core._state.first_tokens for core in fleet.cores)]
    return max(watch._prune_at for watch in watches)


def _num_cells(world: "FaultWorld") -> int:
    return len(world.scheduler.engine.fleet.cells)


def _num_hellos(world: "FaultWorld") -> int:
    return int((world.now - START_S) / HEARTBEAT_INTERVAL_S) + 1


MAY_GROW = (
    # Numbers that say which one it is, or how many there have been.
    _MayGrow("*epoch", None, "lives of a link or of an executor are numbered"),
    _MayGrow("*incarnation", None, "names of lives"),
    _MayGrow("engine.fleet.links._links[]._executor", None, "the name of a life"),
    _MayGrow("engine.fleet.links._links[].served_another_life", None, "where an executor came from"),
    _MayGrow("engine.fleet.links._refused", None, "the name of a life"),
    _MayGrow("*.next_sequence", None, "frames are numbered"),
    _MayGrow("*._next_sequence", None, "frames are numbered"),
    _MayGrow("executor._link._expected_sequence", None, "frames are numbered"),
    _MayGrow("*._acknowledged", None, "frames are numbered"),
    _MayGrow("*next_step", None, "steps are numbered"),
    _MayGrow("engine.fleet.transit._cores[].*._tick", None, "steps of a lane are numbered"),
    _MayGrow("engine.fleet.transit._cores[].*._is_changed", None, "whether rows have stopped since the newest step"),
    _MayGrow("engine.fleet.transit._cores[].*._next_end", None, "a step in which a row would have ended"),
    _MayGrow("engine.fleet.transit._cores[].*._all_due_from", None, "a step in which a row would have needed a block"),
    _MayGrow(
        "engine.fleet.transit._cores[].*._sampling[]._num_since", None, "steps since the rows that sampled last came"
    ),
    _MayGrow("engine.fleet.transit._cores[].*._newest_lane", None, "the lane of the newest step"),
    _MayGrow(
        "engine.fleet.transit._cores[].*.lane", None, "the first lane that is seen, perhaps that of the newest step"
    ),
    _MayGrow("executor._link._failed_step", None, "the number of a step"),
    _MayGrow("engine.fleet.transit._cores[].*._ask_again_at", None, "the number of a step"),
    _MayGrow("engine.fleet.transit._cores[].*_uncounted_fence", None, "the number of a step"),
    _MayGrow("engine.fleet.transit._cores[].*observer._next_*", None, "numbers of steps"),
    _MayGrow("engine.fleet.transit._cores[].*num_started", None, "requests are numbered"),
    _MayGrow("engine.fleet.*num_arrivals", None, "requests are numbered"),
    _MayGrow("engine.fleet.adapters._num_changes", None, "changes are numbered"),
    _MayGrow("len(executor._adapters._loaded)", lambda world: len(ADAPTERS), "adapters that an operator has loaded"),
    _MayGrow("len(engine.fleet.adapters._known)", lambda world: len(ADAPTERS), "adapters that an operator has loaded"),
    _MayGrow("engine.fleet.transit._cores[].*_last_number", None, "runs of cached blocks are numbered"),
    _MayGrow("engine.fleet.transit._cores[].*_log._*_index", None, "changes of the cache are numbered"),
    _MayGrow("engine.gateways._last_owner", None, "links are numbered"),
    _MayGrow("engine.gateways._links[].owner", None, "links are numbered"),
    _MayGrow("*.number", None, "links are numbered"),
    _MayGrow("gateway._link_number", None, "links are numbered"),
    _MayGrow("gateway._last_call_id", None, "calls are numbered"),
    _MayGrow("gateway.*_version", None, "changes are numbered"),
    _MayGrow("engine.*recorder._[in]*", None, "records are numbered"),
    _MayGrow("engine.recorder._latest.cell", None, "the cell of the newest record"),
    _MayGrow("engine.fleet.cells[].num_answers", None, "a total"),
    _MayGrow("*.num_damaged_frames", None, "a total"),
    _MayGrow("engine.fleet.transit.num_moved", None, "a total"),
    _MayGrow("len(engine.fleet._settings*)", lambda world: len(world.executors), "the roles that were asked for"),
    _MayGrow("*counters.*", None, "totals"),
    _MayGrow("gateway.num_steps", None, "a total, as the scheduler told it"),
    _MayGrow("gateway.num_unfinished", None, "as the scheduler told it with its last heartbeat"),
    _MayGrow("engine.statistics.*num_*", None, "totals"),
    _MayGrow("engine.statistics.prediction_error.*", None, "totals"),
    _MayGrow("executor.statistics.num_[er]*", None, "totals of epochs and errors"),
    _MayGrow("executor.statistics.num_*_tokens", None, "totals"),
    _MayGrow("executor.statistics.*pull*", None, "totals"),
    _MayGrow("executor.statistics.*exported*", None, "totals"),
    _MayGrow("executor.statistics.num_stale_blocks", None, "a total"),
    _MayGrow(
        "len(engine.fleet.transit._cores[].*books.sources)",
        _num_cells,
        "executors whose blocks were used, while they run",
    ),
    _MayGrow(
        "len(engine.fleet.transit._cores[]._epoch.distrusted)",
        _num_epochs,
        "of an executor that is away, until it begins anew",
    ),
    _MayGrow("len(executor._suspects._*)", _num_blocks, "until something else is written there"),
    _MayGrow("engine.fleet.transit._cores[].*._num_decode_only_steps", None, "of the newest steps"),
    _MayGrow("engine.fleet.cells[]._pause._num_failures", None, "steps that failed since one was answered"),
    _MayGrow("*._a[sn]*_limit", None, "the most tokens that an executor takes"),
    # What was learned.
    _MayGrow("engine.fleet.*lengths._num_*", None, "what was learned of outputs, in columns of one size"),
    _MayGrow("len(engine.fleet.*lengths._slot_of_key)", lambda world: 1023, "a curve each, dropped for new ones"),
    _MayGrow(
        "len(engine.fleet.*lengths._unpublished)",
        lambda world: 3 * 64,
        "observations that do not show yet",
    ),
    _MayGrow("size(engine.fleet.*lengths._*)", lambda world: 1 << 24, "columns made when first asked for"),
    _MayGrow("engine.fleet.transit._cores[].*step_times.*", None, "what was learned of step times: seven numbers"),
    _MayGrow(
        "engine.fleet.transit._cores[].*observer.is_wanted",
        None,
        "once somebody has asked for step times they are learned",
    ),
    _MayGrow("engine.fleet.transit._cores[].*budget.*", None, "the largest step so far"),
    _MayGrow(
        "len(engine.fleet.transit._cores[].*budget._tail._before)", lambda world: 4, "the newest values of one number"
    ),
    _MayGrow("engine.fleet.transit._cores[].*._first_pause", None, "what was learned of proposals: one number"),
    # What is to be told or looked at next time.
    _MayGrow("len(*.swapping._kept*)", _num_host_blocks, "prefixes that the next step copies to the host"),
    _MayGrow("size(*.swapping._kept*)", _num_host_blocks, "prefixes that the next step copies to the host"),
    _MayGrow("len(*.swapping.books.prefixes.*)", _num_host_blocks, "what the host keeps: each entry has a block"),
    _MayGrow("size(*.swapping.books.prefixes.*)", _num_host_blocks, "what the host keeps: each entry has a block"),
    _MayGrow("*.swapping.books.prefixes.*", None, "numbers of blocks and runs"),
    _MayGrow("*.swapping.books.pool._top", None, "returned blocks are free with the next step"),
    _MayGrow("len(*.swapping.books.pool._released)", _num_host_blocks, "returned blocks are free with the next step"),
    _MayGrow("size(*.swapping.books.pool._released*)", _num_host_blocks, "returned blocks"),
    _MayGrow("len(engine.fleet.transit._cores[].*finished_rows)", _num_rows, "told to the executor with the next step"),
    _MayGrow("len(executor.*_rows*)", _num_rows, "rows of which the executor is told with the next step"),
    _MayGrow(
        "size(executor._state._speculating)",
        lambda world: 2 * _num_rows(world),
        "rows of a step that failed, and limits",
    ),
    _MayGrow("size(executor._state._*)", _num_rows, "rows of which the executor is told with the next step"),
    _MayGrow("size(engine.fleet.*queue._num_charged)", _num_tenants, "of the rows that sampled last"),
    _MayGrow("size(engine.fleet.*queue._charged_rows)", _num_rows, "the rows that sampled last"),
    _MayGrow("size(engine.fleet.transit._cores[].*._sampling[].*)", _num_rows, "of the rows that sampled last"),
    _MayGrow("len(engine.fleet.transit._cores[].*._sampling[]._gone)", _num_rows, "those that had gone since"),
    _MayGrow("size(engine.fleet.transit._cores[].*._indices)", _num_rows, "the rows that decoded in the newest step"),
    _MayGrow("size(engine.fleet.transit._cores[].*._rows_of_turn[])", _num_rows, "the rows that needed a block last"),
    _MayGrow("engine.fleet.transit._cores[].rows.end", None, "the highest row that was ever live"),
    _MayGrow(
        "len(engine.fleet.transit._cores[].admission.refused)", lambda world: 2, "why the newest step let nobody start"
    ),
    _MayGrow("engine.fleet.transit._cores[].*._any_decoded", None, "asked again when somebody starts"),
    _MayGrow("engine.fleet.transit._cores[].*.budget_in_force", None, "of the newest step with prompts"),
    _MayGrow("engine.fleet.transit._cores[].*.num_tokens_alone", None, "of no meaning while nobody runs alone"),
    _MayGrow("engine.fleet.transit._cores[].*.window._[wn]*", None, "of no meaning while nobody needs a place"),
    _MayGrow("engine.fleet.*queue._num_*starts", None, "starts since a promotion"),
    _MayGrow("len(engine.fleet.*queue._heap)", lambda world: waiting_queue._MAX_HOLES, "holes, skipped later"),
    _MayGrow(
        "len(engine.fleet.*queue._arrivals)",
        lambda world: waiting_queue._MAX_HOLES,
        "holes, skipped later",
    ),
    _MayGrow("engine.fleet.transit._cores[].*decoding._is_changed", None, "looked at when the next step is made"),
    _MayGrow(
        "len(engine.fleet.*first_tokens._due)",
        _num_watched,
        "objectives are looked at when their time comes, or when there are many",
    ),
    _MayGrow("engine.fleet.*first_tokens._prune_at", None, "how many are many: twice those that there were"),
    # Caches, and what was asked to be kept.
    _MayGrow("engine.fleet.transit._cores[].*num_cached", None, "blocks in the prefix cache"),
    _MayGrow("len(engine.fleet.transit._cores[].*cache._runs)", _num_blocks, "each has a block"),
    _MayGrow("len(engine.fleet.transit._cores[].*cache._branches)", _num_blocks, "each has a block"),
    _MayGrow("engine.fleet.transit._cores[].*_evictable.num_queued", None, "cached blocks"),
    _MayGrow("engine.fleet.transit._cores[].*_plain_top", None, "cached blocks are not on the stack"),
    _MayGrow("len(engine.fleet.transit._cores[].pinned_prefixes._*)", _num_pins, "an operator's pins"),
    _MayGrow("len(engine.fleet.transit._cores[].*_pins)", _num_pins, "an operator's pins"),
    _MayGrow("len(engine.fleet.transit._cores[].*_awaited)", _num_pins, "one for each pin"),
    # The newest of many.
    _MayGrow("len(engine.administration._ended)", lambda world: administration.MAX_REMEMBERED_ENDS, "the newest ids"),
    _MayGrow("len(engine.fleet.brake._suspicions)", lambda world: brake.MAX_SUSPICIONS, "of who lost a gateway"),
    _MayGrow(
        "len(engine.fleet.brake._verdicts)", lambda world: brake.MAX_VERDICTS, "for a gateway that loses its link"
    ),
    _MayGrow("len(engine.fleet.*queue._tenants)", lambda world: fair_queue.MAX_IDLE_TENANTS, "the order's books"),
    _MayGrow("len(engine.fleet.*queue._idle)", lambda world: fair_queue.MAX_IDLE_TENANTS, "the order's books"),
    _MayGrow(
        "len(engine.fleet.*queue._names)",
        lambda world: fair_queue.MAX_IDLE_TENANTS + _num_tenants(world),
        "places in them",
    ),
    _MayGrow(
        "len(engine.fleet.*queue._free_indices)",
        lambda world: fair_queue.MAX_IDLE_TENANTS + _num_tenants(world),
        "places in them",
    ),
    _MayGrow("engine.fleet.*queue._last_to_leave", None, "the place of a tenant in the order's books"),
    _MayGrow("len(engine.*statistics.tenants)", lambda world: serving_statistics.MAX_TENANTS, "those heard of last"),
    _MayGrow("len(engine.fleet.transit._loads)", _num_cells, "one of each cell"),
    _MayGrow("len(engine.fleet.transit._capacities)", _num_cells, "at most one of each cell"),
    _MayGrow("engine.fleet.transit._loads[]*", None, "what was read of a cell when something last waited"),
    _MayGrow("engine.fleet.placement.policy.has_roles", None, "as the operator has set it"),
    _MayGrow("len(engine.fleet.links._by_peer)", _num_cells, "connections in use; a cell may have lost its executor"),
    # A kind each.
    _MayGrow("len(engine.statistics.ends)", lambda world: 5, "one count for each way to end"),
    _MayGrow("len(engine.fleet.transit._cores[].*counters.*)", lambda world: 6, "one count for each reason"),
    # With a wrong table, a step may also read where the model has nothing.
    _MayGrow(
        "len(executor.statistics.failures)", lambda world: 2 + (world.num_flips > 0), "one for each kind of error"
    ),
    _MayGrow("len(engine.statistics._totals)", lambda world: 2, "the newest marks"),
    _MayGrow("len(engine.statistics.*_s._marks)", lambda world: 12, "the newest marks"),
    # One for each life of a peer, or each time that one said hello.
    _MayGrow("len(gateway._epochs_of_this_number)", _num_hellos, "epochs that answered the hellos of one link"),
    _MayGrow("executor._store*", None, "the host pool, which outlives a process"),
    _MayGrow("len(executor._link._former_schedulers)", _num_lives, "whose late frames are told by their names"),
)


_INSIDE = _MayGrow("", None, "in a container that may grow")


@cache
def _row_of(path: str) -> _MayGrow | None:
    """The row for a path, or ``_INSIDE`` if it leads through a container that has one."""
    inner = re.sub(r"^(len|size)\((.*)\)$", r"\2", path)
    around = [inner[: match.start()] for match in re.finditer(r"\[\]", inner)]
    if any(_row_of(f"len({outer})") for outer in around):
        return _INSIDE
    return next((row for row in MAY_GROW if _regular(row.pattern).fullmatch(path)), None)


@cache
def _regular(pattern: str) -> re.Pattern[str]:
    """``*`` is anything, ``[abc]`` one of these letters, ``[]`` itself."""
    parts = [re.escape(part).replace(r"\[\]", "#") for part in pattern.split("*")]
    whole = re.sub(r"\\\[(\w+)\\\]", r"[\1]", ".*".join(parts))
    return re.compile(whole.replace("#", r"\[\]"))


def leftovers(world: "FaultWorld") -> list[str]:
    """What is not as in processes that never had work, and may not be so: QUIESCENT-ZERO."""
    fresh_engine, fresh_link = _before_any_work(world)
    engine = census(world.scheduler.engine, "engine")
    found = _differences(world, engine, census(fresh_engine, "engine"))
    at_rest = census(fresh_link, "gateway")
    for gateway in world.gateways:
        found += _differences(world, census(gateway.link, "gateway"), at_rest)
    for executor in world.executors:
        if not executor.is_dead:
            at_rest = census(_executor_of(executor.info), "executor")
            found += _differences(world, census(executor.cycle, "executor"), at_rest)
    return found


def _differences(world: "FaultWorld", now: dict[str, float], at_rest: dict[str, float]) -> list[str]:
    found = []
    for path in now.keys() | at_rest.keys():
        number, expected = now.get(path, 0), at_rest.get(path, 0)
        if number == expected:
            continue
        row = _row_of(path)
        if row is None or (row.most is not None and number > max(row.most(world), expected)):
            found.append(f"{path} is {number:g}, {expected:g} at rest")
    return sorted(found)


def _before_any_work(world: "FaultWorld") -> tuple[SchedulerEngine, IngressLink]:
    """A scheduler and one of its gateways, with as many executors and gateways as there are."""
    engine = world.scheduler.engine
    infos = [cell.info or world.executors[-1].info for cell in engine.fleet.cells]
    recorder = recorder_into(MemoryLog(), engine.limits) if isinstance(engine.recorder, FlightRecorder) else None
    fresh = SchedulerEngine(engine.limits, 1, recorder, world.schedule.settings.max_executors)
    links = [IngressLink(incarnation=number, now=0.0) for number in range(len(world.gateways))]
    cycles = [_executor_of(info, 1 + number) for number, info in enumerate(infos)]
    _join(fresh, cycles, links)
    if recorder is not None:
        recorder.flush(0.0, None)
    for outgoing in (fresh.fleet.links.outgoing, fresh.gateways.outgoing):
        outgoing.clear()
    fresh.notices.take()
    return fresh, links[0]


def _join(fresh: SchedulerEngine, cycles: list[StepCycle], links: list[IngressLink]) -> None:
    """Let executors and gateways say hello and hear the answer."""
    now = 0.0
    for number, cycle in enumerate(cycles):
        for frame in cycle.tick(now):
            fresh.executor_frame(bytes([number]), frame, now)
    for number, link in enumerate(links):
        link.tick(now)
        for frame in link.take_frames():
            fresh.gateway_frame(bytes([number]), frame, now)
    fresh.run(now)
    for peer, frame in fresh.fleet.links.outgoing:
        for answer in cycles[peer[0]].receive(frame, now):
            fresh.executor_frame(peer, answer, now)
    fresh.run(now)
    for peer, frame in fresh.gateways.outgoing:
        links[peer[0]].receive(frame, now)
    for number, link in enumerate(links):
        for frame in link.take_frames():
            fresh.gateway_frame(bytes([number]), frame, now)


def _executor_of(info: BackendInfo, incarnation: int = 1) -> StepCycle:
    link = StepLink(incarnation=incarnation, info=info)
    return StepCycle(link=link, state=BatchState(info), backend=None, log=Silent(), wake=lambda: None)  # type: ignore[arg-type]
