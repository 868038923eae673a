"""Keeps a deployment as it should be: each process in a place, with the scheduler's present addresses, and so many executors.

Owns: which processes are wanted, and where each is. Steps, tokens and blocks never come here. Must not know: the engine.
"""

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Any

from headway.cluster.description import EXECUTOR, GATEWAY, SCHEDULER, STOP_ORDER, ClusterPlan, ProcessOrder
from headway.cluster.engine import Engine, NoRoomError, Place, PlaceLostError, PlaceSilentError
from headway.cluster.member import Report
from headway.cluster.placing import Node, Placed, choose
from headway.cluster.scaling import Figures, Scaler, waiting_s
from headway.running.supervision import USER_ERROR_EXIT_CODES

TICK_S = 0.5
MOST_SILENT_S = 10.0
AVOID_S = 15.0
MOST_EVENTS = 50
_FIRST_DELAY_S, _MOST_DELAY_S = 0.5, 30.0


class Slot:
    """One process, wanted or not, and its place if it has one."""

    def __init__(self, order: ProcessOrder, wanted: bool) -> None:
        self.order = order
        self.wanted = wanted
        self.draining = False
        self.refused = ""
        self.place: Place | None = None
        self.node: Node | None = None
        self.report: Report | None = None
        self.losses = 0
        self.silent_since: float | None = None
        self.not_before = 0.0
        self.avoid: dict[str, float] = {}

    @property
    def state(self) -> str:
        """One word for operators."""
        if self.refused:
            return "refused"
        if self.place is None:
            return "no room" if self.wanted and self.avoid else "starting" if self.wanted else "absent"
        if self.draining:
            return "draining"
        return "running" if self.report is not None and self.report.has_begun else "starting"

    def row(self) -> dict[str, Any]:
        """Return it as a line of ``headway cluster status``."""
        report = self.report
        return {
            "process": self.order.name,
            "node": f"{self.node.address} {self.node.node_id[:8]}" if self.node else "",
            "pid": report.process_id if report else None,
            "state": self.state,
            "restarts": self.losses + (report.restarts if report else 0),
            "metrics": report.metrics if report else "",
            "log": report.log if report else "",
            "reason": self.refused,
        }


class Controller:
    """One deployment. ``run`` tends it until ``stop``; all methods belong to one event loop."""

    def __init__(self, plan: ClusterPlan, engine: Engine) -> None:
        self._plan = plan
        self._engine = engine
        started: Counter[int] = Counter()
        self._slots: dict[str, Slot] = {}
        for order in plan.orders:
            wanted = order.service != EXECUTOR or started[order.entry] < plan.pools[order.entry].count
            started[order.entry] += 1
            self._slots[order.name] = Slot(order, wanted)
        self._scalers = [Scaler(pool.least, pool.most, pool.role, plan.cluster) for pool in plan.pools]
        self._drained: set[int] = set()
        self._links: dict[str, str] = {}
        self._figures: dict[str, Any] = {}
        self._is_serving = False
        self._events: deque[str] = deque(maxlen=MOST_EVENTS)
        self._running: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Tend the deployment from now on."""
        self._running = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End every process in order: gateway, scheduler, executors. Nothing is started any more."""
        if self._running is not None:
            self._running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._running
        for service in STOP_ORDER:
            stage = [slot for slot in self._slots.values() if slot.order.service == service]
            await asyncio.gather(*(self._end(slot) for slot in stage))

    def describe(self) -> dict[str, Any]:
        """Return the state of all, as plain values."""
        wanted = [slot for slot in self._slots.values() if slot.wanted]
        shown = [slot.row() for slot in self._slots.values() if slot.wanted or slot.place is not None]
        refused = [slot.refused for slot in wanted if slot.refused]
        return {
            "processes": shown,
            "is_ready": self._is_serving and all(map(self._takes_part, wanted)),
            "address": self._plan.probe.address,
            "refusal": refused[0] if refused else "",
            "events": list(self._events),
        }

    def _takes_part(self, slot: Slot) -> bool:
        if slot.order.service != EXECUTOR or not self._figures:
            return slot.state == "running"
        return self._status_of(slot).get("state") == "ready"

    async def _run(self) -> None:
        """A gateway that answers late must not hold up a process that needs a place."""
        await asyncio.gather(self._every_tick(self._tend_all), self._every_tick(self._watch_load))

    async def _every_tick(self, act: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await act()
            except Exception as error:  # noqa: BLE001  # whatever an engine may raise: the next tick tries again
                self._say(f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}")
            await asyncio.sleep(TICK_S)

    async def _tend_all(self) -> None:
        await asyncio.gather(*(self._tend(slot) for slot in self._slots.values()))

    async def _watch_load(self) -> None:
        await self._ask_gateway()
        await self._scale()

    async def _tend(self, slot: Slot) -> None:
        if slot.place is None:
            if slot.wanted and not slot.refused and time.monotonic() >= slot.not_before:
                await self._find_place(slot)
            if slot.place is None:
                return
        try:
            await self._look_after(slot, slot.place)
            slot.silent_since = None
        except PlaceLostError:
            await self._lose(slot, "its place is gone")
        except (PlaceSilentError, TimeoutError):
            slot.silent_since = slot.silent_since or time.monotonic()
            if time.monotonic() - slot.silent_since > MOST_SILENT_S:
                await self._lose(slot, f"silent for {MOST_SILENT_S:g} s")

    async def _look_after(self, slot: Slot, place: Place) -> None:
        wanted = self._links
        if slot.report is None or (slot.order.service != SCHEDULER and slot.report.links != wanted):
            slot.report = await place.call("start", slot.order, wanted)
        else:
            async with asyncio.timeout(MOST_SILENT_S):
                slot.report = await place.call("report")
        if slot.order.service == SCHEDULER and slot.report.links != wanted:
            self._links = slot.report.links
            self._say(f"the scheduler's links are {', '.join(self._links.values())}")
        code = slot.report.exit_code
        if code in USER_ERROR_EXIT_CODES:
            slot.refused = slot.report.reason
            await self._lose(slot, slot.refused)
        elif code is not None:
            await self._lose(slot, f"given up: {slot.report.reason}")

    async def _find_place(self, slot: Slot) -> None:
        if slot.order.service != SCHEDULER and not self._links:
            return
        now, order = time.monotonic(), slot.order
        slot.avoid = {node: until for node, until in slot.avoid.items() if until > now}
        node = choose(
            self._engine.nodes(),
            self._placed(),
            service=order.service,
            cpus=order.cpus,
            gpus=order.gpus,
            avoid=slot.avoid,
        )
        if node is None:
            slot.avoid = slot.avoid or {"": now + AVOID_S}
            return
        slot.node = node  # From now on others count it here.
        try:
            slot.place = await self._engine.place(order.name, node, order.cpus, order.gpus)
            self._say(f"{order.name} is on node {node.address} {node.node_id[:8]}")
        except NoRoomError:
            slot.avoid[node.node_id] = now + AVOID_S
            slot.node = None
        except (PlaceLostError, PlaceSilentError) as error:
            await self._lose(slot, f"could not be placed ({error})")

    def _placed(self) -> list[Placed]:
        return [
            Placed(node_id=slot.node.node_id, service=slot.order.service, cpus=slot.order.cpus, gpus=slot.order.gpus)
            for slot in self._slots.values()
            if slot.node is not None
        ]

    async def _lose(self, slot: Slot, why: str) -> None:
        self._say(f"{slot.order.name}: {why}")
        delay_s = min(_FIRST_DELAY_S * 2 ** min(slot.losses, 10), _MOST_DELAY_S)
        slot.losses += 1
        slot.not_before = time.monotonic() + delay_s
        await self._leave(slot)

    async def _leave(self, slot: Slot) -> None:
        slot.place = slot.node = slot.report = slot.silent_since = None
        await self._engine.remove(slot.order.name)

    async def _end(self, slot: Slot) -> None:
        if slot.place is None:
            return
        with contextlib.suppress(PlaceLostError, PlaceSilentError, TimeoutError):
            async with asyncio.timeout(slot.order.grace_s + MOST_SILENT_S):
                await slot.place.call("stop")
        slot.wanted = slot.draining = False
        await self._leave(slot)

    async def _ask_gateway(self) -> None:
        gateway = self._slots[GATEWAY].place
        is_serving, figures = False, {}
        if gateway is not None:
            with contextlib.suppress(PlaceLostError, PlaceSilentError, TimeoutError):
                async with asyncio.timeout(MOST_SILENT_S):
                    is_serving = await gateway.call("is_serving", self._plan.probe)
                    figures = await gateway.call("status", self._plan.probe)
        self._is_serving, self._figures = is_serving, figures

    async def _scale(self) -> None:
        if not self._figures:
            return
        for number, (pool, scaler) in enumerate(zip(self._plan.pools, self._scalers, strict=True)):
            slots = [slot for slot in self._slots.values() if slot.order.entry == number]
            for slot in slots:
                await self._drain_or_undo(slot)
            by = scaler.decide(self._pool_figures(slots, pool.max_num_seqs), time.monotonic())
            if by > 0:
                self._add(slots)
            elif by < 0:
                last = [slot for slot in slots if slot.wanted and not slot.draining][-1]
                last.draining = True
                self._say(f"{last.order.name} is drained: one fewer had been enough")

    def _pool_figures(self, slots: list[Slot], max_num_seqs: int) -> Figures:
        wanted = [slot for slot in slots if slot.wanted and not slot.draining]
        states = [state for slot in wanted if (state := self._status_of(slot)).get("state") == "ready"]
        ready = [state for state in states if not state["is_draining"]]
        rows = sum(state["num_running"] for state in ready) / max(1, len(ready) * max_num_seqs)
        blocks = sum(state["kv_usage"] for state in ready) / max(1, len(ready))
        wait_s = waiting_s(
            self._figures["num_waiting"],
            self._figures["num_waiting_tokens"],
            self._figures["prompt_tokens_per_s"],
            rows_free=rows < 1,
        )
        return Figures(num_wanted=len(wanted), num_ready=len(ready), wait_s=wait_s, use=max(rows, blocks))

    def _add(self, slots: list[Slot]) -> None:
        """Take back a drain that is not through, or start one more."""
        slot = next((slot for slot in slots if slot.draining), None) or next(
            (slot for slot in slots if not slot.wanted), None
        )
        if slot is not None:
            slot.wanted, slot.draining = True, False
            self._say(f"{slot.order.name} is added: requests wait")

    async def _drain_or_undo(self, slot: Slot) -> None:
        state, number = self._status_of(slot), slot.order.number
        if slot.draining:
            if not state.get("is_draining") and state.get("state") == "ready":
                self._drained.add(number)
                await self._ask_to_drain(slot)
            elif state.get("state") != "ready" or not (state["num_running"] or state["num_waiting"]):
                await self._end(slot)
                self._say(f"{slot.order.name} has ended with nothing left to do")
        elif slot.wanted and number in self._drained and state.get("state") == "ready":
            if state["is_draining"]:
                await self._ask_to_drain(slot, undo=True)
            else:
                self._drained.discard(number)

    async def _ask_to_drain(self, slot: Slot, *, undo: bool = False) -> None:
        gateway = self._slots[GATEWAY].place
        if gateway is None:
            return
        with contextlib.suppress(PlaceLostError, PlaceSilentError):
            refusal = await gateway.call("drain", self._plan.probe, slot.order.number, undo)
            if refusal:
                self._say(f"{slot.order.name}: {refusal}")
                slot.draining = False

    def _status_of(self, slot: Slot) -> dict[str, Any]:
        found: dict[str, Any] = self._figures.get("executors", {}).get(slot.order.number, {})
        return found

    def _say(self, text: str) -> None:
        self._events.append(f"{time.strftime('%H:%M:%S')} {text}")
