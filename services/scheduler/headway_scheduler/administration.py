"""What operators can ask and order: status, sequences, explanations, the flight log, the cache, cancel, pause, resume, drain, pins.

Owns: the answers to ``AdminCall``. Must not know: gRPC, frames, or who asked.
"""

from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from headway_process.histogram import Histogram
from headway_proto.columns import INT32, decode_column
from headway_proto.operations import (
    AdminCall,
    AdminReply,
    CacheChange,
    CacheChanges,
    CachePosition,
    EndCount,
    ExecutorState,
    FlightLogPlace,
    PinnedPrefix,
    PolicyNames,
    PredictionErrorState,
    PreemptionCount,
    PrefixToPin,
    RecentPercentiles,
    SequenceState,
    Status,
    StepTimeModelState,
    TenantPrefixUse,
    TenantServiceState,
    WastedTokens,
)
from headway_scheduler.bottleneck import bottleneck_of
from headway_scheduler.core.memory.pinned_prefixes import PinnedPrefix as CorePinnedPrefix
from headway_scheduler.core.memory.pinned_prefixes import PinRefused
from headway_scheduler.core.memory.prefix_cache import PINNED, REUSED
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.counters import SchedulerCounters
from headway_scheduler.core.state.request import Request
from headway_scheduler.serving_statistics import Rates, ServingStatistics, TenantService

if TYPE_CHECKING:
    from headway_scheduler.engine import SchedulerEngine

MAX_PIN_NAME_BYTES = 128
MOST_TOKENS_IN_A_REPLY = 1 << 18
"""Of changes of the cache: beyond it the reader is told that there are more."""

NO_FLIGHT_LOG = "flight_log: the scheduler records nothing; allowed: a directory (--flight-log DIRECTORY)"

MAX_REMEMBERED_ENDS = 16384
"""How many ended request ids are kept, so that cancelling one twice is no error."""


class Administration:
    """Answers operators about one engine."""

    def __init__(self, engine: "SchedulerEngine") -> None:
        self._engine = engine
        self._ended: OrderedDict[str, None] = OrderedDict()

    def remember_ended(self, request_id: str) -> None:
        """A request ended; remember its id for a while."""
        self._ended[request_id] = None
        self._ended.move_to_end(request_id)
        if len(self._ended) > MAX_REMEMBERED_ENDS:
            self._ended.popitem(last=False)

    def answer(self, call: AdminCall, now: float) -> AdminReply:
        """Do what ``call`` asks for."""
        match call.method:
            case "status":
                return AdminReply(call_id=call.call_id, status=self.status(now), tenants=self._tenants())
            case "list":
                return AdminReply(call_id=call.call_id, sequences=self._sequences(now))
            case "explain":
                return self._explain(call, now)
            case "cancel":
                return self._cancel(call, now)
            case "pause" | "resume":
                return self._pause(call, paused=call.method == "pause")
            case "drain":
                self._engine.drain()
                return AdminReply(call_id=call.call_id)
            case "pin" | "unpin" | "pins":
                return self._answer_about_pins(call)
            case "flight_log":
                return self._flight_log(call, now)
        return self._answer_about_cache(call, now)

    def status(self, now: float) -> Status:
        """The figures of this moment."""
        engine, core, statistics = self._engine, self._engine.core, self._engine.statistics
        statistics.keep_time(now, core)
        limits = engine.limits if core is None else core.limits
        counters = None if core is None else core.counters
        worth = None if core is None else core.cache.num_worth()
        rates = Rates(0.0, 0.0) if core is None else statistics.rates(core, now)
        return Status(
            scheduler_state=engine.state,
            executor_state=engine.step_link.executor_state(now),
            epoch=engine.step_link.epoch,
            step=0 if core is None else core.next_step,
            num_running=0 if core is None else core.num_running,
            num_waiting=0 if core is None else core.num_waiting,
            num_preempted=0 if core is None else core.num_preempted,
            num_total_blocks=0 if core is None else core.pool.num_blocks,
            num_free_blocks=0 if core is None else core.pool.num_free,
            num_cached_blocks=0 if core is None else core.cache.num_cached,
            num_steps=counters.num_steps if counters else 0,
            num_prompt_tokens=counters.num_prompt_tokens if counters else 0,
            num_output_tokens=counters.num_output_tokens if counters else 0,
            num_preemptions=counters.num_preemptions if counters else 0,
            num_finished=counters.num_finished if counters else 0,
            num_prefix_query_tokens=counters.num_prefix_query_tokens if counters else 0,
            num_prefix_hit_tokens=counters.num_prefix_hit_tokens if counters else 0,
            max_num_batched_tokens=limits.max_num_batched_tokens if core is None else core.max_num_batched_tokens,
            max_num_seqs=limits.max_num_seqs,
            num_gateways=len(engine.gateways),
            num_prefix_queries=counters.num_prefix_queries if counters else 0,
            num_prefix_hits=counters.num_prefix_hits if counters else 0,
            num_prefix_resumed_tokens=counters.num_prefix_resumed_tokens if counters else 0,
            num_evicted_blocks=counters.num_evicted_blocks if counters else 0,
            num_reused_blocks=worth[REUSED] if worth else 0,
            num_pinned_blocks=worth[PINNED] if worth else 0,
            recent_prefix_hit_rate=0.0 if core is None else core.prefix_statistics.recent_hit_rate,
            steps_until_shortage=None if core is None else core.steps_until_shortage(),
            num_swapped_out_blocks=counters.num_swapped_out_blocks if counters else 0,
            num_host_blocks=0 if core is None else core.swapping.num_host_blocks,
            num_free_host_blocks=0 if core is None else core.swapping.num_free_host_blocks,
            uptime_s=0.0 if statistics.started_at is None else now - statistics.started_at,
            num_epochs=statistics.num_epochs,
            num_executor_losses=statistics.num_executor_losses,
            num_in_flight_steps=0 if core is None else core.num_in_flight,
            max_steps_in_flight=limits.max_steps_in_flight,
            num_waiting_tokens=0 if core is None else core.num_waiting_tokens,
            num_budget_tokens=0 if core is None else core.budget_in_force,
            budget_margin=1.0 if core is None else core.budget_margin,
            prompt_tokens_per_s=rates.prompt_tokens_per_s,
            output_tokens_per_s=rates.output_tokens_per_s,
            ttft=_percentiles(statistics.first_token_s),
            itl=_percentiles(statistics.gap_s),
            queue=_percentiles(statistics.queue_s),
            e2e=_percentiles(statistics.request_s),
            preemptions=_preemptions(counters),
            wasted_tokens=_wasted_tokens(counters),
            ends=_ends(statistics),
            step_time_model=None if core is None else _step_time_model(core),
            prediction_error=_prediction_error(statistics),
            executor=self._executor(now),
            policies=PolicyNames(
                order=limits.order, batching=limits.batching, budget=limits.budget, preemption=limits.preemption
            ),
            tenant_services=() if core is None else _tenant_services(statistics.tenant_services(core)),
            num_drafts=counters.num_drafts if counters else 0,
            num_draft_tokens=counters.num_draft_tokens if counters else 0,
            num_accepted_tokens=counters.num_accepted_tokens if counters else 0,
        )

    def _executor(self, now: float) -> ExecutorState | None:
        info, statistics = self._engine.info, self._engine.statistics
        if info is None or statistics.executor_since is None:
            return None
        last = statistics.last_answer_at
        return ExecutorState(
            backend=info.backend,
            model_name=info.model_name,
            device=info.device,
            dtype=info.dtype,
            age_s=now - statistics.executor_since,
            last_step_us=statistics.last_device_time_us,
            last_step_age_s=-1.0 if last is None else now - last,
        )

    def _tenants(self) -> tuple[TenantPrefixUse, ...]:
        core = self._engine.core
        if core is None:
            return ()
        return tuple(
            TenantPrefixUse(tenant=tenant, num_query_tokens=use.num_query_tokens, num_hit_tokens=use.num_hit_tokens)
            for tenant, use in core.prefix_statistics.tenants.items()
        )

    def _sequences(self, now: float) -> tuple[SequenceState, ...]:
        core = self._engine.core
        if core is None:
            return ()
        return tuple(_state_of(core, request, now) for request in core.requests())

    def _explain(self, call: AdminCall, now: float) -> AdminReply:
        core = self._engine.core
        origins = self._engine.origins_named(call.request_id)
        request = core.find(origins[0]) if core is not None and origins else None
        if core is None or request is None:
            return AdminReply(call_id=call.call_id, error="not found")
        return AdminReply(
            call_id=call.call_id,
            sequences=(_state_of(core, request, now),),
            explanation=self._explanation(core, request, now),
        )

    def _explanation(self, core: Scheduler, request: Request, now: float) -> str:
        age = f"It arrived {now - request.arrival_time:.1f} s ago"
        if not self._engine.step_link.is_open:
            return f"{age}. No executor is connected, so nothing runs; it keeps its place."
        if request.row >= 0:
            rows = core.rows
            computed, known = int(rows.num_computed_tokens[request.row]), int(rows.num_tokens[request.row])
            blocks = int(rows.num_blocks[request.row])
            doing = f"{computed} of {known} known tokens are computed, in {blocks} blocks"
            preempted = f" It was preempted {request.num_preemptions} times." if request.num_preemptions else ""
            return f"{age} and runs: {doing}.{preempted}{_speculation_of(request)}"
        ahead = core.num_ahead_of(request)
        lost = f", was preempted {request.num_preemptions} times" if request.num_preemptions else ""
        return f"{age}{lost} and waits behind {ahead} others: {bottleneck_of(core, request).text}."

    def _cancel(self, call: AdminCall, now: float) -> AdminReply:
        origins = self._engine.origins_named(call.request_id)
        if not origins and call.request_id not in self._ended:
            return AdminReply(call_id=call.call_id, error="not found")
        for origin in origins:
            self._engine.end(origin, now)
        return AdminReply(call_id=call.call_id)

    def _pause(self, call: AdminCall, *, paused: bool) -> AdminReply:
        if self._engine.core is None:
            return AdminReply(call_id=call.call_id, error="no executor has joined yet")
        self._engine.pause(is_paused=paused)
        return AdminReply(call_id=call.call_id)

    def _answer_about_cache(self, call: AdminCall, now: float) -> AdminReply:
        match call.method:
            case "flush":
                return self._flush(call, now)
            case "cache":
                return self._cache_changes(call)
        return AdminReply(call_id=call.call_id, error=f"unknown method {call.method!r:.64}")

    def _flush(self, call: AdminCall, now: float) -> AdminReply:
        """Drop cached blocks that nobody holds; the status tells what is left."""
        if self._engine.core is None:
            return AdminReply(call_id=call.call_id, error="no executor has joined yet")
        self._engine.drop_cached()
        return AdminReply(call_id=call.call_id, status=self.status(now))

    def _cache_changes(self, call: AdminCall) -> AdminReply:
        core, position = self._engine.core, call.position
        if core is None:
            return AdminReply(call_id=call.call_id, error="no executor has joined yet")
        block_size = core.capacity.block_size
        index = position.index if position is not None and position.life == core.epoch else None
        entries, next_index = core.cache.changes(index, max(1, MOST_TOKENS_IN_A_REPLY // block_size))
        changes = tuple(
            CacheChange(entry.first_node, entry.num_blocks, entry.parent_node, entry.token_bytes, entry.scope)
            for entry in entries
        )
        told = CacheChanges(
            position=CachePosition(core.epoch, next_index),
            block_size=block_size,
            changes=changes,
            more=core.cache.has_changes_from(next_index),
        )
        return AdminReply(call_id=call.call_id, cache=told)

    def _answer_about_pins(self, call: AdminCall) -> AdminReply:
        if self._engine.core is None:
            return AdminReply(call_id=call.call_id, error="no executor has joined yet")
        pins, prefix, recorder = self._engine.core.pinned_prefixes, call.prefix, self._engine.recorder
        if call.method == "pins":
            return AdminReply(call_id=call.call_id, pinned_prefixes=tuple(map(_told, pins.list())))
        if prefix is None:
            return AdminReply(call_id=call.call_id, error="prefix: there is none; allowed: one with a name")
        if call.method == "unpin":
            if recorder is not None:
                recorder.unpinned(prefix.name)
            return AdminReply(call_id=call.call_id, error="" if pins.unpin(prefix.name) else "not found")
        wrong = _wrong_with(prefix)
        if wrong:
            return AdminReply(call_id=call.call_id, error=wrong)
        try:
            pinned = pins.pin(prefix.name, prefix.tenant, decode_column(prefix.token_ids))
        except PinRefused as refusal:
            return AdminReply(call_id=call.call_id, error=str(refusal))
        if recorder is not None:
            recorder.pinned(prefix.name, prefix.tenant, prefix.token_ids)
        return AdminReply(call_id=call.call_id, pinned_prefixes=(_told(pinned),))

    def _flight_log(self, call: AdminCall, now: float) -> AdminReply:
        recorder, place = self._engine.recorder, call.place or FlightLogPlace()
        if recorder is None or recorder.pieces is None:
            return AdminReply(call_id=call.call_id, error=NO_FLIGHT_LOG)
        pieces = recorder.pieces
        if not place.life:
            recorder.flush(now, None, is_final=True)  # without the core, so that no segment begins amid a beat
            part = pieces.contents()
        elif place.mark and place.life == pieces.life:
            part = pieces.contents(place.mark)
        else:
            part = pieces.piece(place)
        return AdminReply(call_id=call.call_id, flight_log=part)


def _percentiles(histogram: Histogram) -> RecentPercentiles:
    recent = histogram.recent()
    return RecentPercentiles(
        count=recent.num_values, p50_ms=recent.p50 * 1e3, p90_ms=recent.p90 * 1e3, p99_ms=recent.p99 * 1e3
    )


def _speculation_of(request: Request) -> str:
    """How many tokens were proposed for a request, as a sentence; nothing if none were."""
    record = request.speculation
    if not record.num_proposed_tokens:
        return ""
    return f" Of {record.num_proposed_tokens} tokens proposed for it {record.num_accepted_tokens} were right."


def _preemptions(counters: SchedulerCounters | None) -> tuple[PreemptionCount, ...]:
    found = [] if counters is None else sorted(counters.preemptions.items())
    return tuple(PreemptionCount(mode=kind.mode, reason=kind.reason, count=count) for kind, count in found)


def _wasted_tokens(counters: SchedulerCounters | None) -> tuple[WastedTokens, ...]:
    found = [] if counters is None else sorted(counters.wasted_tokens.items())
    return tuple(WastedTokens(reason=reason, count=count) for reason, count in found)


def _ends(statistics: ServingStatistics) -> tuple[EndCount, ...]:
    found = sorted((reason.value, count) for reason, count in statistics.ends.items())
    return tuple(EndCount(reason=reason, count=count) for reason, count in found)


def _step_time_model(core: Scheduler) -> StepTimeModelState | None:
    figures = core.step_time_figures
    return None if figures is None else StepTimeModelState(**figures._asdict())


def _prediction_error(statistics: ServingStatistics) -> PredictionErrorState | None:
    error = statistics.prediction_error
    return PredictionErrorState(**msgspec.structs.asdict(error)) if error.count else None


def _tenant_services(services: list[TenantService]) -> tuple[TenantServiceState, ...]:
    return tuple(TenantServiceState(**service._asdict()) for service in services)


def _wrong_with(prefix: PrefixToPin) -> str:
    """What can be told without the core; empty if all is well."""
    if not 1 <= len(prefix.name.encode()) <= MAX_PIN_NAME_BYTES:
        return f"name: {prefix.name!r:.64} is not allowed; allowed: 1 to {MAX_PIN_NAME_BYTES} bytes"
    if len(prefix.token_ids) % INT32.itemsize:
        return f"token_ids: {len(prefix.token_ids)} bytes are no int32 column"
    return ""


def _told(pinned: CorePinnedPrefix) -> PinnedPrefix:
    return PinnedPrefix(
        name=pinned.name,
        tenant=pinned.tenant,
        num_tokens=pinned.num_tokens,
        num_blocks=pinned.num_blocks,
        num_resident_blocks=pinned.num_resident_blocks,
    )


def _state_of(core: Scheduler, request: Request, now: float) -> SequenceState:
    row, rows, new = request.row, core.rows, request.new
    num_tokens = len(request.token_ids) if row < 0 else int(rows.num_tokens[row])
    return SequenceState(
        request_id=new.request_id,
        index=new.index,
        state=request.status.value,
        priority=new.priority,
        tenant=new.tenant,
        num_prompt_tokens=new.num_prompt_tokens,
        num_output_tokens=num_tokens - new.num_prompt_tokens,
        num_computed_tokens=0 if row < 0 else int(rows.num_computed_tokens[row]),
        num_blocks=0 if row < 0 else int(rows.num_blocks[row]),
        num_preemptions=request.num_preemptions,
        age_ms=(now - request.arrival_time) * 1e3,
    )
