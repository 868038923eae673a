"""A whole Headway in one process under a schedule of faults: real engine, real protocols, real executor cycle.

Owns: virtual time, links, what goes wrong, and how it is healed.
Must not know: which schedules there are, or the inside of any process.

Nothing is drawn here and no clock is read: the same schedule runs the same way. Time jumps from event to event, so that
a silence of ten seconds costs a few heartbeats. What is simulated is small (a hash for a model, dictionaries for links);
what decides anything is the code that production runs.
"""

import heapq
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import headway_executor.step.loop
import headway_gateway.link.ingress_link
import headway_scheduler.core.admission.fair_queue
import headway_scheduler.core.admission.objectives
import headway_scheduler.core.admission.waiting_queue
import headway_scheduler.core.memory.prefix_statistics
import headway_scheduler.core.step.sending
import headway_scheduler.figures.serving_statistics
import headway_scheduler.links.ingress_link
import headway_scheduler.operators.administration
from flight_logs import MemoryLog, recorder_into
from headway_proto.columns import encode_column
from headway_proto.operations import AdapterToLoad, AdminCall, PrefixToPin
from headway_scheduler.core.choosing.roles import Role
from headway_scheduler.core.state.limits import SchedulerLimits
from headway_scheduler.flight.recorder import FlightRecorder
from simulation import fault_invariants as invariants
from simulation.fault_executor import ExecutorProcess
from simulation.fault_gateway import Client, GatewayProcess
from simulation.fault_invariants import Violation
from simulation.fault_model import adapter_of
from simulation.fault_process import START_S, Process
from simulation.fault_rest import leftovers
from simulation.fault_schedule import (
    ADAPTER_FAULTS,
    ADAPTERS,
    BOTH,
    CLIENT_FAULTS,
    DOWN,
    EXECUTOR,
    FIRST_GATEWAY,
    OPERATOR_FAULTS,
    SCHEDULER,
    SECOND_EXECUTOR,
    UP,
    Fault,
    Schedule,
    executor_slots,
)
from simulation.fault_scheduler import SchedulerProcess
from simulation.fault_store import FaultPools

HEALED_WITHIN_S = 60.0
QUIET_WITHIN_S = 20.0
SETTLES_WITHIN_S = (0.01, 0.6, 20.0)
"""News takes its way, a heartbeat comes, links of gateways that are gone are given up."""
MOST_EVENTS = 60_000
BELIEVED_FOR_S = 0.01
RETIRED_FOR_S = 0.02


class Flight(NamedTuple):
    """What one life of the scheduler has recorded."""

    log: MemoryLog
    limits: SchedulerLimits
    recorder: FlightRecorder


class Link:
    """Between the scheduler and one place of a peer; frames queue in either direction unless something is wrong."""

    def __init__(self) -> None:
        self.armed: tuple[deque[Fault], deque[Fault]] = (deque(), deque())
        self.last: list[float] = [0.0, 0.0]
        self.cut_until: list[float] = [0.0, 0.0]
        self.held_until: list[float] = [0.0, 0.0]
        self.down_until = 0.0
        self.connection = 0
        """Grows whenever the connection is made anew, which gives its peers another name."""
        self.lost_before = 0
        """Frames of connections before this one are lost."""
        self.believed_until = 0.0
        """How long the scheduler's transport takes frames for connections that are no more."""
        self.num_faults = 0
        """Everything that has gone wrong on it so far."""


class FaultWorld:
    """One run of one schedule. ``violation`` is what was found, None if every invariant held."""

    def __init__(self, schedule: Schedule, *, records: bool = False) -> None:
        """``records``: every scheduler has a flight recorder."""
        self.schedule = schedule
        self.flights: list[Flight] | None = [] if records else None
        self.now = START_S
        self.violation: Violation | None = None
        self.digests: dict[tuple[int | None, int, int], int] = {}
        self.disturbed: set[int] = set()
        """Places with which something has been wrong."""
        self.found_guilty: set[str] = set()
        """Requests that a brake has ended; a client may hear of it when that scheduler is gone."""
        self.must_reopen: set[tuple[int | None, int, int]] = set()
        self.num_steps = 0
        self.num_faults = 0
        self.num_flips = 0
        self.spoiled: set[str] = set()
        """Adapters whose files cannot be read any more."""
        self.unloaded: set[str] = set()
        """Adapters that an operator has asked to unload."""
        self.joined: set[int] = set()
        """Lives of executors that have joined a scheduler."""
        self.lives_at_load: tuple[int, int] | None = None
        """How many these were, and which scheduler there was, when all first had the adapter that an operator loads."""
        self.num_to_cancel = 0
        """Requests that are to be cancelled when they are preempted."""
        self._num_events = 0
        self._num_lives = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        settings = schedule.settings
        self._wire_s = settings.wire_s
        gateways = range(FIRST_GATEWAY, FIRST_GATEWAY + settings.num_gateways)
        self.links = {slot: Link() for slot in (*executor_slots(settings), *gateways)}
        self.pools = FaultPools(self)
        self.scheduler = SchedulerProcess(self, self._next_life())
        self.executors = [ExecutorProcess(self, self._next_life(), slot) for slot in executor_slots(settings)]
        self.gateways = [GatewayProcess(self, self._next_life(), slot) for slot in gateways]
        self.clients = {plan.number: Client(self, plan) for plan in schedule.requests}
        self._client_of: dict[tuple[str, int | None], Client] = {}
        for plan in schedule.requests:
            self._client_of |= dict.fromkeys(
                [(plan.request_id, plan.index), (plan.request_id, None)], self.clients[plan.number]
            )
        self.num_open = len(self.clients)

    def run(self) -> Violation | None:
        """Let everything happen, heal, and see it to its end."""
        with small_constants(self.schedule):
            try:
                self._run()
            except Violation as violation:
                self.violation = self.violation or violation
            except Exception as error:  # noqa: BLE001 - whatever the product raises is a finding
                place = traceback.extract_tb(error.__traceback__)[-1]
                what = f"{type(error).__name__} in {place.name}, line {place.lineno}: {error}"
                self.violation = self.violation or Violation("LIVENESS", what)
        return self.violation

    def _run(self) -> None:
        for process in (self.scheduler, *self.gateways):
            process.wake()
        settings = self.schedule.settings
        joins_s = (settings.executor_after_s, *settings.more_executors_after_s)
        for executor, after_s in zip(self.executors, joins_s, strict=True):
            self.at(START_S + after_s, executor.wake)
        for client in self.clients.values():
            self.at(START_S + client.plan.at, client.ask)
            if client.plan.deadline_s:
                self.at(START_S + client.plan.at + client.plan.deadline_s, client.cancel)
        for fault in self.schedule.faults:
            self.at(START_S + fault.at, lambda fault=fault: self.inflict(fault))  # type: ignore[misc]
        healed = START_S + self.schedule.heal_at
        self.at(healed, self.heal)
        self._run_until(lambda: self.now >= healed and not self.num_open, healed + HEALED_WITHIN_S)
        still_open = [number for number, client in self.clients.items() if not client.is_done]
        invariants.liveness(len(still_open), f"requests {still_open}, {self.scheduler.engine.state}")
        self._run_until(self._is_quiet, self.now + QUIET_WITHIN_S)
        for seconds in SETTLES_WITHIN_S:
            self._run_until(lambda: False, self.now + seconds)
            left_over = leftovers(self)
            if not left_over:
                return
        raise Violation("QUIESCENT-ZERO", "; ".join(left_over))

    def _run_until(self, is_done: Callable[[], bool], limit: float) -> None:
        queue = self._queue
        while queue and self.now < limit and not is_done():
            at, _, action = heapq.heappop(queue)
            self.now = max(self.now, at)
            action()
            if self.violation is not None:
                raise self.violation
            self._num_events += 1
            if self._num_events > MOST_EVENTS:
                raise Violation("LIVENESS", "events without end")

    def _is_quiet(self) -> bool:
        engine = self.scheduler.engine
        is_busy = any(core.num_in_flight for core in engine.fleet.cores)
        return not engine.num_unfinished and not engine.live and not is_busy

    def client_of(self, request_id: str, index: int | None = None) -> Client:
        """Who wants this output, or without ``index`` any of the request."""
        return self._client_of[request_id, index]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Violations must not be taken for errors of a step by the code under test."""
        try:
            yield
        except Violation as violation:
            if self.violation is None:
                self.violation = violation
            raise

    def new_recorder(self, limits: SchedulerLimits) -> FlightRecorder | None:
        """The recorder of another life of the scheduler."""
        if self.flights is None:
            return None
        log = MemoryLog()
        self.flights.append(Flight(log, limits, recorder_into(log, limits)))
        return self.flights[-1].recorder

    def at(self, at: float, action: Callable[[], None]) -> None:
        self._num_lives += 1
        heapq.heappush(self._queue, (at, self._num_lives, action))

    @property
    def num_lives(self) -> int:
        """Events and lives of processes are numbered together."""
        return self._num_lives

    def _next_life(self) -> int:
        self._num_lives += 1
        return self._num_lives

    # -------------------------------------------------------------------------------------------------------- links

    def executor_named(self, name: bytes) -> ExecutorProcess | None:
        """Whose name it is, or was on an earlier connection."""
        life = name.split(b"-")[1:2]
        return next((executor for executor in self.executors if life == [b"%d" % executor.life]), None)

    def send_up(self, slot: int, name: bytes, frame: bytes) -> None:
        """From a peer to the scheduler."""
        link = self.links[slot]
        if self.now < link.down_until or self.scheduler.is_dead:
            return
        scheduler, connection = self.scheduler, link.connection

        def arrive(data: bytes) -> None:
            if connection >= link.lost_before:
                scheduler.deliver(name, data)

        self._send(link, UP, frame, arrive)

    def send_down(self, name: bytes, frame: bytes) -> bool:
        """From the scheduler to a peer; False if the transport knows that it is not there."""
        process: ExecutorProcess | GatewayProcess | None
        if name.startswith(b"e"):
            process = self.executor_named(name)
        else:
            process = self.gateways[int(name[1 : name.index(b"-")]) - FIRST_GATEWAY]
        if process is None or process.is_dead:
            return False
        link = self.links[process.slot]
        if self.now < link.down_until:
            return False
        if process.name != name:
            return self.now < link.believed_until
        connection = link.connection

        def arrive(data: bytes) -> None:
            if connection >= link.lost_before:
                process.deliver(b"", data)

        self._send(link, DOWN, frame, arrive)
        return True

    def _send(self, link: Link, direction: int, frame: bytes, arrive: Callable[[bytes], None]) -> None:
        if self.now < link.cut_until[direction]:
            self._count(link)
            return
        at, copies, in_order = self.now + self._wire_s, 1, True
        if link.armed[direction]:
            fault = link.armed[direction].popleft()
            self._count(link)
            if fault.kind == "drop":
                return
            if fault.kind == "corrupt":
                damaged = bytearray(frame)
                damaged[int(fault.place * len(frame)) % len(frame)] ^= 1 << (fault.count % 8)
                frame = bytes(damaged)
            elif fault.kind == "delay":
                at, in_order = at + fault.seconds, False
            else:
                copies = 2
        if in_order:
            at = max(at, link.last[direction], link.held_until[direction])
            link.last[direction] = at
        for _ in range(copies):
            self.at(at, lambda: arrive(frame))

    def _count(self, link: Link) -> None:
        link.num_faults += 1
        self.num_faults += 1

    def reconnect(self, slot: int, seconds: float) -> None:
        """The connection is made anew after ``seconds``; what was on its way is lost."""
        link = self.links[slot]
        link.connection += 1
        link.lost_before = link.connection
        link.down_until = max(link.down_until, self.now + seconds)
        link.last = [0.0, 0.0]

    def is_clean(self, slot: int) -> bool:
        """Whether nothing is wrong with a link, its scheduler and what is under way on it."""
        link = self.links[slot]
        is_cut = max(*link.cut_until, *link.held_until, link.down_until) > self.now
        return not (is_cut or link.armed[UP] or link.armed[DOWN] or self.scheduler.is_dead or self.scheduler.is_stalled)

    # ------------------------------------------------------------------------------------------------------- faults

    def inflict(self, fault: Fault) -> None:
        if self.now >= START_S + self.schedule.heal_at:
            return
        self.num_faults += 1
        if fault.kind in OPERATOR_FAULTS + CLIENT_FAULTS + ADAPTER_FAULTS:
            pass
        elif fault.target == SCHEDULER:
            self.disturbed.update(self.links)
        else:
            self.disturbed.add(fault.target)
        getattr(self, f"_inflict_{fault.kind}")(fault)

    def _arm(self, fault: Fault) -> None:
        link = self.links[fault.target]
        for direction in _directions(fault):
            link.armed[direction].extend([fault] * (fault.count if fault.kind != "corrupt" else 1))

    _inflict_drop = _inflict_duplicate = _inflict_corrupt = _inflict_delay = _arm

    def _inflict_partition(self, fault: Fault) -> None:
        link = self.links[fault.target]
        for direction in _directions(fault):
            link.cut_until[direction] = max(link.cut_until[direction], self.now + fault.seconds)
        link.num_faults += 1

    def _inflict_hold(self, fault: Fault) -> None:
        """As a short partition looks through TCP: everything arrives, late."""
        link = self.links[fault.target]
        for direction in _directions(fault):
            link.held_until[direction] = max(link.held_until[direction], self.now + fault.seconds)
        link.num_faults += 1

    def _inflict_reset(self, fault: Fault) -> None:
        self.links[fault.target].num_faults += 1
        self.reconnect(fault.target, min(fault.seconds, 0.3))

    def _inflict_crash(self, fault: Fault) -> None:
        process = self._process(fault.target)
        process.is_dead = True
        if fault.target == SCHEDULER:
            for slot in self.links:
                self.reconnect(slot, 0.0)
        elif not _is_executor(fault.target):
            self._lose_streams(self.gateways[fault.target - FIRST_GATEWAY])
        self.at(self.now + fault.seconds, lambda: self._restart(fault.target, process, fault.count - 1))

    def _inflict_kill(self, fault: Fault) -> None:
        """It does not come back, unless no other is left."""
        self._process(fault.target).is_dead = True

    def _inflict_retire(self, fault: Fault) -> None:
        scheduler = self.scheduler
        if not scheduler.is_dead and not scheduler.is_stalled and not scheduler.engine.draining:
            scheduler.engine.drain()
            scheduler.wake()
            self._retire(scheduler, self.now + fault.seconds)

    def _retire(self, scheduler: SchedulerProcess, ends_at: float) -> None:
        """End it with its last request, or when its time is over."""
        if self.scheduler is not scheduler or scheduler.is_dead:
            return
        if self.now >= ends_at or not (scheduler.engine.num_unfinished or scheduler.is_stalled):
            self._inflict_crash(Fault(at=self.now, kind="crash", target=SCHEDULER, seconds=RETIRED_FOR_S))
        else:
            self.at(min(ends_at, self.now + RETIRED_FOR_S), lambda: self._retire(scheduler, ends_at))

    def _inflict_leave(self, fault: Fault) -> None:
        executor = self._process(fault.target)
        assert isinstance(executor, ExecutorProcess)
        self.scheduler.let_leave(executor, must_leave=fault.count > 1)

    def _inflict_role(self, fault: Fault) -> None:
        executor = self._process(fault.target)
        assert isinstance(executor, ExecutorProcess)
        self.scheduler.set_role(executor, tuple(Role)[fault.count % len(Role)])

    def _inflict_drain(self, fault: Fault) -> None:
        scheduler, executor = self.scheduler, self._process(fault.target)
        assert isinstance(executor, ExecutorProcess)
        number = scheduler.cell_number_of(executor)
        if number is not None:
            scheduler.drain(number, is_draining=True)
            self.at(self.now + fault.seconds, lambda: scheduler.drain(number, is_draining=False))

    def _lose_streams(self, gateway: GatewayProcess) -> None:
        for client in self.clients.values():
            if client.gateway is gateway and not client.is_done:
                client.gateway_died()

    def _restart(self, target: int, old: Process, shrunk: int = 0) -> None:
        if self._process(target) is not old:
            return
        process: Process
        if target == SCHEDULER:
            process = self.scheduler = SchedulerProcess(self, self._next_life())
        elif _is_executor(target):
            process = ExecutorProcess(self, self._next_life(), target, shrunk)
            others = [executor for executor in self.executors if not executor.is_dead or executor.slot != target]
            self.executors = [*others, process]
        else:
            process = GatewayProcess(self, self._next_life(), target)
            self.gateways[target - FIRST_GATEWAY] = process
        process.wake()

    def _inflict_stall(self, fault: Fault) -> None:
        self._stall(self._process(fault.target), fault.seconds)

    def _stall(self, process: Process, seconds: float) -> None:
        if process.is_dead:
            return
        process.stalled_until = max(process.stalled_until, self.now + seconds)
        for link in self.links.values():
            link.num_faults += 1
        self.at(process.stalled_until + 1e-6, process.wake)

    def _inflict_sleep(self, fault: Fault) -> None:
        """A process stands still until its peers give the connection up and make another.

        What they sent before waits in the old one and is read first; nothing passes over the new one until the process goes
        on. A scheduler that goes on is the last to hear that the old one is no more, so what it sends there is lost.
        """
        process = self._process(fault.target)
        slots = tuple(self.links) if fault.target == SCHEDULER else (fault.target,)
        self._stall(process, fault.seconds)
        self.at(self.now + fault.seconds * fault.place, lambda: self._give_up_connections(process, slots))

    def _give_up_connections(self, process: Process, slots: tuple[int, ...]) -> None:
        if process.is_dead or not process.is_stalled:
            return
        for slot in slots:
            link = self.links[slot]
            link.num_faults += 1
            link.connection += 1
            link.down_until = max(link.down_until, process.stalled_until)
            if process is self.scheduler:
                link.believed_until = process.stalled_until + BELIEVED_FOR_S

    def _inflict_rival(self, fault: Fault) -> None:
        """A second executor, beside the one that there is."""
        if len(self._executors_at(fault.target)) < 3:
            rival = ExecutorProcess(self, self._next_life(), fault.target)
            self.executors.append(rival)
            rival.wake()

    def _inflict_supplant(self, fault: Fault) -> None:
        """An executor freezes, another takes its place, and the first comes back."""
        self._stall(self._process(fault.target), 1.2 + fault.seconds)
        self._inflict_rival(fault)

    def _inflict_fail(self, fault: Fault) -> None:
        for executor in self._executors_at(fault.target):
            executor.num_failing += fault.count

    def _inflict_memory(self, fault: Fault) -> None:
        for executor in self._executors_at(fault.target):
            executor.memory_tokens = fault.count

    def _inflict_flip(self, fault: Fault) -> None:
        for executor in self._executors_at(fault.target):
            self.num_flips += executor.flip()

    def _inflict_cancel(self, fault: Fault) -> None:
        client = self.clients.get(fault.count)
        if client is not None and client.sequence is not None:
            client.cancel()

    def _inflict_pause(self, fault: Fault) -> None:
        self._operate(fault.target, "pause")
        self.at(self.now + min(fault.seconds, 1.0), lambda: self._operate(fault.target, "resume"))

    def _inflict_pin(self, fault: Fault) -> None:
        plan = self.clients[fault.count].plan if fault.count in self.clients else None
        if plan is not None and not plan.is_bad:
            prefix = PrefixToPin(name=f"pin-{plan.number}", tenant=plan.tenant, token_ids=encode_column(plan.prompt))
            self._operate(fault.target, "pin", prefix)

    def _inflict_unpin(self, fault: Fault) -> None:
        self._operate(fault.target, "unpin", PrefixToPin(name=f"pin-{fault.count}"))

    def _inflict_load(self, fault: Fault) -> None:
        adapter = adapter_of(ADAPTERS[fault.count])
        self._operate(fault.target, "load_adapter", adapter=AdapterToLoad(adapter.name, adapter.directory))

    def _inflict_unload(self, fault: Fault) -> None:
        self.unloaded.add(ADAPTERS[fault.count])
        self._operate(fault.target, "unload_adapter", adapter=AdapterToLoad(ADAPTERS[fault.count]))

    def _inflict_spoil(self, fault: Fault) -> None:
        self.spoiled.add(ADAPTERS[-1])

    def _operate(
        self, target: int, method: str, prefix: PrefixToPin | None = None, adapter: AdapterToLoad | None = None
    ) -> None:
        """Call what an operator calls, through any gateway."""
        gateway = self.gateways[target % len(self.gateways)]
        if not gateway.is_dead and not gateway.is_stalled:
            gateway.link.call_admin(AdminCall(method=method, prefix=prefix, adapter=adapter))
            gateway.flush()

    def _inflict_cancel_preempted(self, fault: Fault) -> None:
        self.num_to_cancel += 1

    def _process(self, target: int) -> Process:
        """Of the executors at one place one that the scheduler uses, or else the newest."""
        if target == SCHEDULER:
            return self.scheduler
        if not _is_executor(target):
            return self.gateways[target - FIRST_GATEWAY]
        there = self._executors_at(target)
        in_use = [self.executor_named(cell.link.peer or b"") for cell in self.scheduler.engine.fleet.cells]
        return next((executor for executor in in_use if executor in there), there[-1])  # type: ignore[return-value]

    def _executors_at(self, slot: int) -> list[ExecutorProcess]:
        return [executor for executor in self.executors if executor.slot == slot]

    def heal(self) -> None:
        """Nothing goes wrong any more: what is cut is joined, what is stalled goes on, what is dead comes back."""
        for link in self.links.values():
            link.armed[UP].clear()
            link.armed[DOWN].clear()
            link.cut_until, link.held_until, link.down_until = [0.0, 0.0], [0.0, 0.0], 0.0
        if self.scheduler.is_dead:
            self._restart(SCHEDULER, self.scheduler)
        if all(executor.is_dead for executor in self.executors):
            self._restart(EXECUTOR, self._process(EXECUTOR))
        for gateway in list(self.gateways):
            if gateway.is_dead:
                self._restart(gateway.slot, gateway)
        for executor in self.executors:
            executor.num_failing = executor.memory_tokens = 0
        self._wake_all()
        for cell in self.scheduler.engine.fleet.cells:
            self.scheduler.drain(cell.number, is_draining=False)
        for slot in self.links:
            self._operate(slot, "resume")

    def _wake_all(self) -> None:
        for process in (self.scheduler, *self.executors, *self.gateways):
            if process.stalled_until > self.now:
                process.stalled_until = 0.0
            process.wake()


def _is_executor(target: int) -> bool:
    return target == EXECUTOR or target >= SECOND_EXECUTOR


def _directions(fault: Fault) -> tuple[int, ...]:
    return (UP, DOWN) if fault.direction == BOTH else (fault.direction,)


@contextmanager
def small_constants(schedule: Schedule) -> Iterator[None]:
    """What takes thousands of frames or many steps in production comes about within a few here."""
    settings = schedule.settings
    changed: list[tuple[Any, str, object]] = [
        (headway_scheduler.core.step.sending, "DIGEST_INTERVAL_STEPS", settings.digest_every),
        (headway_executor.step.loop, "DIGEST_INTERVAL_STEPS", settings.digest_every),
        (headway_scheduler.links.ingress_link, "MAX_UNACKNOWLEDGED_FRAMES", settings.window),
        (headway_gateway.link.ingress_link, "ACKNOWLEDGE_EVERY_FRAMES", max(settings.window // 4, 1)),
        (headway_scheduler.operators.administration, "MAX_REMEMBERED_ENDS", 4),
        (headway_scheduler.figures.serving_statistics, "MAX_TENANTS", 1),
        (headway_scheduler.core.memory.prefix_statistics, "MAX_TENANTS", 1),
        (headway_scheduler.core.admission.fair_queue, "MAX_IDLE_TENANTS", 1),
        (headway_scheduler.core.admission.waiting_queue, "_MAX_HOLES", 4),
        (headway_scheduler.core.admission.objectives, "_LEAST_PRUNED", 4),
    ]
    before = [getattr(module, name) for module, name, _ in changed]
    for module, name, value in changed:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(changed, before, strict=True):
            setattr(module, name, value)


def run(schedule: Schedule) -> FaultWorld:
    """Run a schedule to its end."""
    world = FaultWorld(schedule)
    world.run()
    return world
