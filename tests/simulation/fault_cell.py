"""One cell of the simulated scheduler, watched: its core, its link, and the steps that are sent to its executor.

Owns: where the invariants of one cell are looked at, and what has to be remembered for them.
Must not know: other cells, what goes wrong, or why.
"""

from typing import TYPE_CHECKING, Any

from headway_proto.columns import decode_column, decode_columns
from headway_proto.step import LaneOutput, SchedulerOutput, TransferringOutput
from headway_scheduler.cells.blame import Verdict
from headway_scheduler.cells.cell import USED_WRONG_BLOCKS, Cell
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.request import Request
from headway_scheduler.core.step.sending import digest_of
from headway_scheduler.links.executor_link import (
    TAKEOVER_SILENCE_S,
    EpochOpened,
    ExecutorLost,
    InAnotherState,
    StepAnswered,
    StepEvent,
)
from simulation import fault_invariants as invariants
from simulation.fault_executor import incarnation_of
from simulation.fault_invariants import Violation
from simulation.fault_process import START_S
from simulation.fault_schedule import ADAPTERS, EXECUTOR

if TYPE_CHECKING:
    from simulation.fault_scheduler import SchedulerProcess


class CellWatch:
    """Wraps what a cell does with answers and steps. ``process``: the scheduler that has the cell."""

    def __init__(self, process: "SchedulerProcess", cell: Cell) -> None:
        self.cell = cell
        self._process = process
        self._world = process.world
        self._limits = limits = process.engine.limits
        self._incarnation = process.engine.incarnation
        self._holds: dict[int, str] = {}
        """By block: the tenant of whom its content is."""
        self._holds_on_host: dict[int, str] = {}
        self.written: dict[int, dict[int, Request]] = {}
        """By step in flight: the blocks that it writes, and for whom."""
        self._epoch = -1
        self._served: dict[int, int] = {}
        self._had_rows: set[int] = set()
        self._passed_over: dict[int, int] = {}
        self._overtaken: dict[int, int] = {}
        self._num_older: dict[int, int] = {}
        self._promotes = limits.order != "fair"
        self._checked: tuple[int, ...] | None = None
        self._blocks_checked: tuple[int, ...] | None = None
        self._watches_tenants = limits.enable_prefix_caching and limits.prefix_cache_scope == "tenant"
        passes_over = self._world.schedule.settings.has_adapters and limits.max_adapters < len(ADAPTERS)
        self._watches_fcfs = limits.order in {"fcfs", "priority"} and not limits.prefix_aware and not passes_over
        self._send_step, self._on_answer = cell.link.send_step, cell._on_answer
        cell.link.send_step = self._watched_send  # type: ignore[method-assign]
        cell._on_answer = self._watched_answer  # type: ignore[method-assign]
        self._on_events = cell.on_events
        cell.on_events = self._watched_events  # type: ignore[method-assign]
        self._on_epoch, self._on_lost = cell._on_epoch, cell._on_lost
        cell._on_epoch = self._watched_epoch  # type: ignore[method-assign]
        cell._on_lost = self._watched_lost  # type: ignore[method-assign]
        self._slot: int | None = EXECUTOR
        """The place of its executor; None: of one that was gone before it joined, by what it had said long before."""
        self._is_told = False
        """Whether what is acted on now tells that the executor has a wrong table."""
        self._drained_at: tuple[int, int] | None = None
        """Epoch and next step when it began to drain."""
        self._judge = cell._blame.judge
        cell._blame.judge = self._watched_judge  # type: ignore[method-assign]

    def _watched_send(self, output: SchedulerOutput) -> None:
        self.on_step(output)
        self._send_step(output)

    def _watched_answer(self, event: StepAnswered, now: float) -> None:
        process, core, output = self._process, self.cell.core, event.output
        assert core is not None
        oldest = core._epoch.in_flight[0].step if core._epoch.in_flight else -1
        given = (output.epoch, process.frame_epoch, output.step, incarnation_of(process.peer))
        invariants.epoch_fence("an answer", given, (core.epoch, core.epoch, oldest, self.cell.link._executor))
        failed = [(blocks, core.cache.holds(blocks).tolist()) for blocks in self._blocks_of_failed(core, output)]
        is_told = (self._incarnation, output.epoch, output.step) in process.world.must_reopen
        self._is_told |= is_told
        self._on_answer(event, now)
        if core.epoch == output.epoch:
            for blocks, held in failed:
                before = [block for block, is_held in zip(blocks.tolist(), held, strict=True) if is_held]
                after = blocks[core.cache.holds(blocks)].tolist()
                invariants.failed_not_cached(before, after, blocks.tolist())
            if is_told:
                raise Violation("MIRROR", f"the state digest of step {output.step} differs, and the epoch goes on")

    def _watched_events(self, events: list[StepEvent], now: float) -> None:
        """If these events tell of a wrong table, nobody may have a use for what was written by it once they are handled."""
        epochs = self._process.epochs
        self._is_told |= any(isinstance(event, InAnotherState) for event in events)
        self._on_events(events, now)
        if self._is_told:
            self._is_told = False
            self._world.pools.told(epochs[self.cell.number])
            self._world.pools.moot_epochs |= set(epochs.values()).difference(self._process.epochs.values())

    def _watched_epoch(self, event: EpochOpened, now: float) -> None:
        if event.reason == "an executor joined":
            executor = self._world.executor_named(self.cell.link.peer or b"")
            self._slot = None if executor is None else executor.slot
            self._world.joined |= {executor.life} if executor is not None else set()
        elif event.reason != USED_WRONG_BLOCKS or not self._world.num_flips:
            self._check_undisturbed(f"it begins an epoch: {event.reason}")
        self._on_epoch(event, now)

    def _watched_lost(self, event: ExecutorLost, now: float) -> None:
        self._check_undisturbed(f"it is lost: {event.reason}")
        self._on_lost(event, now)

    def _check_undisturbed(self, what: str) -> None:
        is_disturbed = self._slot is None or self._slot in self._world.disturbed
        invariants.undisturbed(is_disturbed, self.cell.number, what)

    def drain(self, *, is_draining: bool) -> None:
        """Remember when it began to drain."""
        core = self.cell.core
        at = (-1, 0) if core is None else (core.epoch, core.next_step)
        self._drained_at = at if is_draining else None

    def _watched_judge(self, core: Scheduler, reason: str, step: int | None) -> Verdict | None:
        verdict = self._judge(core, reason, step)
        if verdict is not None:
            in_flight = [core.find(origin) for origin in verdict.in_flight]
            lost = [request.new.request_id for request in in_flight if request is not None]
            self._process.num_losses.update(lost)
            if len(lost) == 1:
                self._process.num_losses_alone.update(lost)
            if verdict.guilty is not None and (guilty := core.find(verdict.guilty)) is not None:
                name = guilty.new.request_id
                invariants.may_be_guilty(self._process.num_losses[name], self._process.num_losses_alone[name])
                self._world.found_guilty.add(name)
        return verdict

    def follow_peer(self, before: bytes | None, heard: dict[bytes, float]) -> None:
        """After each frame. ``before``: the peer until then. ``heard``: when frames of each executor came."""
        after = self.cell.link.peer
        if before is not None and before != after is not None:
            silent_s = self._world.now - heard.get(before, START_S)
            invariants.one_executor(silent_s, TAKEOVER_SILENCE_S, before.decode())

    def on_step(self, output: SchedulerOutput) -> None:
        core = self.cell.core
        assert core is not None
        if core.epoch != self._epoch:
            self._epoch = core.epoch
            self.written.clear()
            self._holds.clear()
            self._holds_on_host.clear()
            self._served.clear()
            self._had_rows = set()
            self._passed_over.clear()
            self._overtaken.clear()
            self._num_older.clear()
        self._world.digests[self._incarnation, core.epoch, output.step] = digest_of(
            core.rows, has_lanes=core.capacity.num_lanes > 1
        )
        running = self._running(core, output)
        invariants.budget(core, self._limits, running, output)
        invariants.lanes(core, output, running)
        if isinstance(output, LaneOutput):
            invariants.lanes_take_turns(core, self._limits, output.lane, self._passed_over)
        if self._watches_tenants:
            self._follow_tenants(core, output)
        written = self._writes(core, running)
        unreturned = {step.step for step in core._epoch.in_flight}
        self.written = {step: blocks for step, blocks in self.written.items() if step in unreturned}
        in_flight = {block: request for blocks in self.written.values() for block, request in blocks.items()}
        invariants.write_exclusivity(in_flight, written)
        self.written[output.step] = written
        # Who may have brought an executor down runs alone, out of turn, and the others wait for that.
        is_trial = core.alone is not None
        if self._watches_fcfs and output.scheduled_new_reqs and not is_trial:
            invariants.first_come_first_served(core, output, self._had_rows)
        self._had_rows = {request.arrival for request in core.rows.requests[: core.rows.end] if request is not None}
        served = {core.rows.request_in(row).arrival for row in running}
        self._served = {
            request.arrival: 0 if request.arrival in served or is_trial else self._served.get(request.arrival, 0) + 1
            for request in core._requests.values()
        }
        invariants.no_starvation(self._served)
        if not is_trial:
            self._process.placement.count_step()
        if output.scheduled_new_reqs and self._promotes and not is_trial:
            self._count_overtaking(core, output)
        self.check_blocks(core)
        self._blocks_checked = _state_of(core)
        self._world.num_steps += 1

    def _follow_tenants(self, core: Scheduler, output: SchedulerOutput) -> None:
        """Note whose content blocks get, wherever it is copied, and see whose content a request starts with."""
        holds = self._holds
        for block, host in decode_columns(output.swap_out, 2).T.tolist():
            self._holds_on_host[host] = holds[block]
        for host, block in decode_columns(output.swap_in, 2).T.tolist():
            holds[block] = self._holds_on_host[host]
        if isinstance(output, TransferringOutput):
            # Whose content comes from a pool is seen when the executor runs on it.
            for pull in output.pulls:
                owner = self._owner_of_new_blocks(core, output)
                holds |= {block: owner[block] for block in decode_columns(pull.blocks, 3)[2].tolist()}
        for row, block in decode_columns(output.new_blocks, 2).T.tolist():
            holds[block] = self._world.client_of(core.rows.request_in(row).new.request_id).plan.tenant
        for new in output.scheduled_new_reqs:
            tenant = self._world.client_of(core.rows.request_in(new.row).new.request_id).plan.tenant
            blocks = decode_column(new.block_ids).tolist()
            num_computed = -(-new.num_computed_tokens // core.rows.block_size)
            invariants.tenant_isolation(tenant, [holds[block] for block in blocks[:num_computed]])
            holds |= dict.fromkeys(blocks[num_computed:], tenant)
        if isinstance(output, TransferringOutput):
            for block, host in decode_columns(output.exports, 2).T.tolist():
                self._holds_on_host[host] = holds[block]

    def _owner_of_new_blocks(self, core: Scheduler, output: SchedulerOutput) -> dict[int, str]:
        return {
            block: self._world.client_of(core.rows.request_in(new.row).new.request_id).plan.tenant
            for new in output.scheduled_new_reqs
            for block in decode_column(new.block_ids).tolist()
        }

    def _count_overtaking(self, core: Scheduler, output: SchedulerOutput) -> None:
        now, aging_s = self._world.now, self._limits.aging_s
        started = [core.rows.request_in(new.row).arrival for new in output.scheduled_new_reqs]
        waiting = sorted(request.arrival for request in core._requests.values() if request.row < 0)
        old = [
            request.arrival
            for request in core._requests.values()
            if request.row < 0 and request.start < 0 and now - request.arrival_time > aging_s
        ]
        self._overtaken = {
            arrival: self._overtaken.get(arrival, 0) + sum(other > arrival for other in started) for arrival in old
        }
        self._num_older = {arrival: max(waiting.index(arrival), self._num_older.get(arrival, 0)) for arrival in old}
        invariants.no_endless_overtaking(self._overtaken, self._num_older)

    @staticmethod
    def _running(core: Scheduler, output: SchedulerOutput) -> dict[int, int]:
        """Tokens per row by the rules of the wire: one each (of the step's lane, if there are several), but for the exceptions."""
        lane = output.lane if isinstance(output, LaneOutput) else None
        rows, counts = (
            decode_columns(output.num_scheduled_tokens, 2).tolist() if output.num_scheduled_tokens else ((), ())
        )
        exceptions = dict(zip(rows, counts, strict=True))
        running = {}
        for row, request in enumerate(core.rows.requests[: core.rows.end]):
            is_due = lane is None or core.rows.lane[row] == lane
            count = exceptions.get(row, int(is_due)) if request is not None else 0
            if count:
                running[row] = count
        return running

    @staticmethod
    def _writes(core: Scheduler, running: dict[int, int]) -> dict[int, Request]:
        size, written = core.rows.block_size, {}
        for row, count in running.items():
            end = int(core.rows.num_computed_tokens[row])
            request = core.rows.request_in(row)
            for block in core.rows.block_table[row, (end - count) // size : -(-end // size)].tolist():
                other = written.setdefault(block, request)
                invariants.write_exclusivity({block: other}, {block: request})
        return written

    @staticmethod
    def _blocks_of_failed(core: Scheduler, output: Any) -> list[Any]:
        rows = [error.row for error in output.errors if core.rows.requests[error.row] is not None]
        leavers = core._epoch.in_flight[0].leavers if core._epoch.in_flight else {}
        return [core.rows.blocks_of(row) for row in rows if row not in leavers]

    @staticmethod
    def check_blocks(core: Scheduler) -> None:
        invariants.block_conservation(core)
        invariants.block_exclusivity(core)
        invariants.no_orphan(core)

    def check(self) -> bool:
        """After each beat. Return whether anything may have changed since the last."""
        core = self.cell.core
        seen = None if core is None else _state_of(core)
        if core is not None and seen != self._blocks_checked:
            self.check_blocks(core)
            self._blocks_checked = seen
        if core is not None and self._drained_at is not None:
            invariants.drained_cell_is_empty(self.cell.number, core, *self._drained_at)
        is_news, self._checked = core is None or seen != self._checked, seen
        return is_news


def _state_of(core: Scheduler) -> tuple[int, ...]:
    """What changes whenever blocks or requests may have changed hands."""
    return (
        core.epoch,
        core.next_step,
        core.num_in_flight,
        len(core._requests),
        core.num_waiting,
        core.counters.num_finished,
    )
