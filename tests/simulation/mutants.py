"""Mistakes made on purpose, one at a time, to see that the simulation finds each: ``python -m simulation.mutants``.

Owns: the mistakes, each a few patched functions of the product, and the table of what caught them.
Must not know: which schedule shows which mistake; new seeds are run until one does.

A mutant that nothing catches is a hole in the simulation. Left out are mistakes that a second line of defence makes good,
such as an executor that overlooks a gap between frames: the number of the step tells it as well.
"""

import argparse
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from headway_executor.batch.batch_state import BatchState
from headway_executor.batch.block_tables import BlockTables
from headway_executor.host.statistics import ExecutorStatistics
from headway_gateway.link.ingress_link import IngressLink
from headway_gateway.link.live_sequence import LiveSequence
from headway_gateway.link.live_sequences import LiveSequences as SequencesOfLink
from headway_proto import framing
from headway_proto.columns import decode_columns
from headway_proto.ingress import Abort
from headway_proto.step import ExecutorOutput
from headway_scheduler import compiled_core, engine
from headway_scheduler.cells import brake
from headway_scheduler.cells.core_calls import CoreCalls
from headway_scheduler.cells.fleet import Fleet
from headway_scheduler.cells.live_sequences import LiveSequences, Name
from headway_scheduler.core import scheduler as core_scheduler
from headway_scheduler.core.admission.endings import Endings
from headway_scheduler.core.admission.fair_queue import FairQueue
from headway_scheduler.core.admission.moving import Moving
from headway_scheduler.core.admission.objectives import TightestObjective
from headway_scheduler.core.admission.running_requests import RunningRequests
from headway_scheduler.core.admission.start_window import StartWindow
from headway_scheduler.core.admission.waiting_queue import KeyedQueue, Lane
from headway_scheduler.core.admission.waiting_room import WaitingRoom
from headway_scheduler.core.choosing.cell_load import CellLoad
from headway_scheduler.core.memory import cached_prefixes
from headway_scheduler.core.memory.block_pool import BlockPool
from headway_scheduler.core.memory.epoch import Epoch
from headway_scheduler.core.memory.prefix_cache import PrefixCache
from headway_scheduler.core.memory.swapping import Swapping
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.events import StepEvents
from headway_scheduler.core.state.limits import SchedulerLimits
from headway_scheduler.core.state.request import FinishReason, Request, RequestStatus
from headway_scheduler.core.state.stop_tokens import StopTokens
from headway_scheduler.core.step.answer_checks import AnswerChecks
from headway_scheduler.core.step.answers import Answers
from headway_scheduler.core.step.decode_pass import DecodePass
from headway_scheduler.engine import SchedulerEngine
from headway_scheduler.gateways import delivery
from headway_scheduler.gateways.submissions import EarlySubmissions
from headway_scheduler.links import ingress_link
from headway_scheduler.links.executor_link import ExecutorLink, ExecutorLost, StepAnswered
from headway_scheduler.links.executor_links import ExecutorLinks
from headway_scheduler.links.ingress_link import GatewayLink, IngressLinks
from headway_scheduler.operators.administration import Administration
from headway_scheduler.placement.placement import Placement
from headway_scheduler.placement.transit import Transit
from simulation import hand_off_mutants, lane_mutants
from simulation.fault_schedule import draw
from simulation.fault_world import run

TABLE = Path(__file__).with_name("MUTANTS.md")
MOST_SECONDS = 120.0
FIRST_SEED = 1_000_000


class Patch(NamedTuple):
    """``owner.name`` becomes ``make(what it was)``."""

    owner: Any
    name: str
    make: Callable[[Any], Any]


class Mutant(NamedTuple):
    """A mistake in one sentence, and the patches that make it."""

    mistake: str
    patches: tuple[Patch, ...]
    num_executors: int | None = None
    """Of the schedules to run; None if it is drawn."""


class Verdict(NamedTuple):
    """What caught a mutant, after how many schedules and seconds; ``invariant`` is empty if nothing did."""

    name: str
    invariant: str
    num_schedules: int
    seconds: float


MUTANTS: dict[str, Mutant] = {}


def _mutant(mistake: str, *places: tuple[Any, str], num_executors: int | None = None) -> Callable[..., Any]:
    """Register the decorated function, named like the mutant, as the maker of the patched function at each place."""

    def register(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        name = make.__name__.strip("_").replace("_", "-")
        patches = tuple(Patch(owner, attribute, make) for owner, attribute in places)
        MUTANTS[name] = Mutant(mistake, patches, num_executors)
        return make

    return register


_SCOPED = ((PrefixCache, "find"), (PrefixCache, "register"))


def _checked(name: str, original: Any, mutated: Any) -> Any:
    """``mutated``, if it is called like the original: else the call is what fails, and nothing is seen of the mistake."""
    if callable(original) and callable(mutated):
        parameters = inspect.signature(original).parameters.values()
        named = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
        placed = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
        try:
            inspect.signature(mutated).bind(*placed, **dict.fromkeys(named))
        except TypeError as error:
            raise TypeError(f"the mutant {name} is not called like what it replaces: {error}") from error
    return mutated


@contextmanager
def infected(name: str) -> Iterator[None]:
    """The product with one mistake in it."""
    before = [(patch, getattr(patch.owner, patch.name)) for patch in MUTANTS[name].patches]
    for patch, original in before:
        setattr(patch.owner, patch.name, _checked(name, original, patch.make(original)))
    try:
        yield
    finally:
        for patch, original in before:
            setattr(patch.owner, patch.name, original)


def hunt(name: str, most_seconds: float = MOST_SECONDS, first_seed: int = FIRST_SEED) -> Verdict:
    """Run schedules until one catches the mutant. Seconds are those of the processor, since others may use it as well."""
    start = time.process_time()
    seed = first_seed
    with infected(name):
        while time.process_time() - start < most_seconds:
            violation = run(draw(seed, MUTANTS[name].num_executors)).violation
            seed += 1
            if violation is not None:
                return Verdict(name, violation.invariant, seed - first_seed, time.process_time() - start)
    return Verdict(name, "", seed - first_seed, time.process_time() - start)


# ---------------------------------------------------------------------------------------------------------- speculation


@_mutant(
    "the scheduler sends the next step before it knows how many proposals were right", (Scheduler, "awaits_answer")
)
def speculation_not_waited_for(original):
    del original
    return property(lambda self: False)


@_mutant("the executor forgets that accepted proposals are computed", (BatchState, "accept"))
def accepted_tokens_forgotten(original):
    def accept(self, accepted_tokens):
        original(self, accepted_tokens)
        self._num_computed_tokens[accepted_tokens[0]] -= accepted_tokens[2]

    return accept


@_mutant("what follows a stop among the accepted tokens is delivered as well", (Answers, "_append_to"))
def stop_among_accepted_overlooked(original):
    def append_to(self, request, token_ids, entries):
        stops, request.new = request.new, msgspec.structs.replace(request.new, stop_token_ids=frozenset())
        taken, end = original(self, request, token_ids, entries)
        request.new = stops
        return taken, end

    return append_to


# ------------------------------------------------------------------------------------------------- blocks and the cache


@_mutant("an aborted request keeps its blocks", (Endings, "finish"))
def skip_free_on_abort(original):
    def finish(self, request, reason, **named):
        if reason is not FinishReason.ABORT:
            return original(self, request, reason, **named)
        pool = self._epoch.pool
        pool.release = lambda blocks, fence: None
        try:
            return original(self, request, reason, **named)
        finally:
            del pool.release

    return finish


@_mutant("a block is free again while a step in flight may write it", (RunningRequests, "_fence_of"))
def reuse_a_block_in_flight(original):
    return lambda self, row: None


@_mutant("a block found in the prefix cache is not counted as held once more", (BlockPool, "share"))
def shared_block_not_counted(original):
    def share(self, blocks):
        original(self, blocks)
        self._ref_count[blocks] = np.maximum(self._ref_count[blocks] - 1, 1)

    return share


@_mutant("the blocks of a failed row enter the prefix cache", (RunningRequests, "release_row"))
def failed_row_is_cached(original):
    def release(self, row, *, owed_tokens, cache=True):
        if not cache:
            self._prefixes.register(self._rows.request_in(row), row, int(self._rows.num_computed_tokens[row]))
        original(self, row, owed_tokens=owed_tokens, cache=cache)

    return release


@_mutant("a cached prefix is told by its first block alone", (PrefixCache, "_num_equal"))
def prefix_compares_one_block(original):
    return lambda self, run_, place, token_bytes, done, most: most


@_mutant("a whole prompt is served from the prefix cache", (PrefixCache, "find"))
def nothing_left_to_sample_from(original):
    def find(self, token_bytes, max_blocks, scope=""):
        return original(self, token_bytes, len(token_bytes) // self._block_bytes, scope)

    return find


@_mutant("blocks on the host are lost when their request ends there", (Swapping, "forget"))
def host_blocks_leak(original):
    def forget(self, request):
        self._out.pop(request.arrival, None)
        request.host_blocks = request.host_blocks[:0]
        request.num_swapped_tokens = 0

    return forget


@_mutant("blocks come back from the host in the wrong order", (Swapping, "swap_in"))
def swapped_in_reversed(original):
    def swap_in(self, request, table, num_shared):
        request.host_blocks = request.host_blocks[::-1]
        original(self, request, table, num_shared)

    return swap_in


@_mutant("a preempted request is taken to have computed one token more", (Swapping, "swap_out"))
def wrong_num_computed_after_preemption(original):
    def swap_out(self, request, blocks, num_tokens):
        moved = original(self, request, blocks, num_tokens)
        if moved and request.num_swapped_tokens + 1 < len(request.token_ids):
            request.num_swapped_tokens += 1
        return moved

    return swap_out


@_mutant("blocks behind the fence of the last step stay there", (BlockPool, "complete_step"))
def fence_off_by_one(original):
    return lambda self, step: original(self, step - 1)


# ------------------------------------------------------------------------------------------------------------ decisions


@_mutant("an aborted request that runs keeps its row", (Endings, "finish"))
def row_kept_on_abort(original):
    def finish(self, request, reason, **named):
        if reason is not FinishReason.ABORT or request.status is not RequestStatus.RUNNING:
            return original(self, request, reason, **named)
        del self._state.requests[request.new.origin]
        return None

    return finish


@_mutant("nobody is promoted, however long it has waited", (KeyedQueue, "first"))
def age_ignored(original):
    return lambda self, now: self._head()


@_mutant("one token more than the budget", (Epoch, "__init__"))
def budget_off_by_one(original):
    def begin(self, *arguments, **named):
        original(self, *arguments, **named)
        self.max_num_batched_tokens += 1

    return begin


@_mutant("one step more in flight than allowed", (Scheduler, "schedule"))
def one_step_too_many_in_flight(original):
    def schedule(self, now):
        self._epoch.max_in_flight += 1
        try:
            return original(self, now)
        finally:
            self._epoch.max_in_flight -= 1

    return schedule


@_mutant("the queue takes whatever comes", (WaitingRoom, "check"))
def waiting_cap_ignored(original):
    del original
    return lambda self, tenant, num_tokens: None


@_mutant("who came last starts first", (KeyedQueue, "_place"))
def last_come_first_served(original):
    return lambda self, request, value: original(self, request, -request.arrival)


@_mutant("a preempted request goes to the end of the queue", (KeyedQueue, "push"))
def preempted_to_the_back(original):
    def push(self, request):
        original(self, request)
        if request.status is RequestStatus.PREEMPTED:
            self.move(request, Lane.LATE)

    return push


@_mutant("a row that found no block is forgotten", (DecodePass, "_extend_one_by_one"))
def stalled_row_forgotten(original):
    def extend(self, plan, due):
        original(self, plan, due)
        self._decoding.idle.update(self._decoding.stalled)
        self._decoding.stalled.clear()

    return extend


@_mutant("a stop token is overlooked", (Answers, "_end_at"))
def stop_token_ignored(original):
    def end_at(self, request, num_tokens, token_id):
        return original(self, request, num_tokens, -1)

    return end_at


@_mutant("one bad row fails its whole step", (Answers, "_fail_rows"))
def failure_spreads(original):
    def fail_rows(self, step, failed, finished):
        message = next(iter(failed.values()), None)
        if message is not None:
            failed = dict.fromkeys((row for row in step.sampling_rows.tolist() if row not in step.leavers), message)
        original(self, step, failed, finished)

    return fail_rows


@_mutant("after an epoch a request goes on without its output", (Scheduler, "begin_epoch"))
def output_lost_with_the_epoch(original):
    def begin_epoch(self, capacity, epoch, **named):
        before = {row: self.rows.request_in(row).token_ids for row in self.rows.live_rows().tolist()}
        requests = [(self.rows.request_in(row), token_ids) for row, token_ids in before.items()]
        events = original(self, capacity, epoch, **named)
        for request, token_ids in requests:
            request.token_ids = token_ids
        return events

    return begin_epoch


# -------------------------------------------------------------------------------------------------------- the step link


@_mutant("the scheduler takes answers of an epoch that is over", (ExecutorLink, "_on_numbered"))
def stale_epoch_accepted(original):
    def on_numbered(self, frame, now):
        if frame.epoch != self.epoch and isinstance(frame.body, ExecutorOutput):
            return [StepAnswered(frame.body)]
        return original(self, frame, now)

    return on_numbered


@_mutant("answers of an executor that was replaced are taken", (ExecutorLink, "receive"))
def replaced_executor_not_fenced(original):
    def receive(self, peer, data, now):
        frame = self._reader.decode(data) if len(data) > 3 and data[3] == 16 and self._peer is not None else None
        if frame is not None and peer != self._peer:
            return [StepAnswered(frame.body)]
        return original(self, peer, data, now)

    return receive


@_mutant("an executor's request for a new epoch is overheard", (ExecutorLink, "_on_resync"))
def resync_swallowed(original):
    return lambda self, frame, request, now: []


@_mutant("an executor that was lost stays in its epoch", (ExecutorLink, "_lose"))
def lost_executor_keeps_its_epoch(original):
    def lose(self, reason):
        self._peer = None
        return [ExecutorLost(reason)]

    return lose


@_mutant(
    "an executor is known by its connection, and when it makes another it is overheard", (ExecutorLink, "_on_hello")
)
def connection_taken_for_life(original):
    def on_hello(self, peer, frame, hello, now):
        if hello.incarnation == self._executor and peer != self.first_peer:
            return []
        self.first_peer = peer
        return original(self, peer, frame, hello, now)

    return on_hello


@_mutant("any executor that says hello takes over from one that lives", (ExecutorLink, "_on_hello"))
def takeover_of_the_living(original):
    def on_hello(self, peer, frame, hello, now):
        if self._peer is not None and peer != self._peer:
            self._heard_at = float("-inf")
        return original(self, peer, frame, hello, now)

    return on_hello


@_mutant("the most tokens that an executor takes are forgotten", (ExecutorLink, "_lower_limit"))
def smaller_steps_forgotten(original):
    return lambda self, max_num_batched_tokens: None


@_mutant("the state digest is never compared", (AnswerChecks, "take"))
def digest_never_checked(original):
    def take(self, output):
        if self._in_flight:
            self._in_flight[0].digest = None
        return original(self, output)

    return take


@_mutant("a row begins with a block of whoever had it before", (BlockTables, "give"))
def row_not_reset(original):
    def give(self, request):
        num_before = int(self.table[request.row, 0] > 0)
        given = original(self, request)
        self.num_blocks[request.row] += num_before
        return given

    return give


# --------------------------------------------------------------------------------------------------- frames and ingress


@_mutant("checksums are not compared", (framing.FrameReader, "decode"))
def checksums_ignored(original):
    def decode(self, data):
        payload = memoryview(data)[framing.HEADER_BYTES :]
        checksum = framing.crc32(payload, framing.crc32(memoryview(data)[: framing._HEADER_FIELDS.size]))
        start, end = framing._HEADER_FIELDS.size, framing.HEADER_BYTES
        return original(self, bytes(data[:start]) + framing._CRC.pack(checksum) + bytes(data[end:]))

    return decode


@_mutant("the gateway overlooks gaps between frames", (IngressLink, "receive"))
def gateway_ignores_gaps(original):
    def receive(self, data, now):
        if len(data) >= framing.HEADER_BYTES:
            epoch, sequence = int.from_bytes(data[4:8], "little"), int.from_bytes(data[8:16], "little")
            if epoch == self._epoch and sequence > self._next_sequence:
                self._next_sequence = sequence
        original(self, data, now)

    return receive


@_mutant("the scheduler overlooks gaps between a gateway's frames", (IngressLinks, "_on_numbered"))
def scheduler_ignores_gaps(original):
    def on_numbered(self, link, frame, now):
        link.next_sequence = max(link.next_sequence, frame.sequence)
        return original(self, link, frame, now)

    return on_numbered


@_mutant("the scheduler takes a gateway's frame twice", (IngressLinks, "_on_numbered"))
def repeated_frame_taken(original):
    def on_numbered(self, link, frame, now):
        link.next_sequence = min(link.next_sequence, frame.sequence)
        return original(self, link, frame, now)

    return on_numbered


@_mutant("a gateway that acknowledges nothing is sent tokens all the same", (GatewayLink, "flush"))
def credits_ignored(original):
    def flush(self):
        before = ingress_link.MAX_UNACKNOWLEDGED_FRAMES
        ingress_link.MAX_UNACKNOWLEDGED_FRAMES = 1 << 30
        try:
            return original(self)
        finally:
            ingress_link.MAX_UNACKNOWLEDGED_FRAMES = before

    return flush


@_mutant("the last token before an end is not delivered", (delivery, "_deliver_tokens"))
def last_token_dropped(original):
    def deliver_tokens(links, events):
        if events.finished:
            shorter = {name: getattr(events, name)[:-1] for name in ("owners", "handles", "indices", "token_ids")}
            events = msgspec.structs.replace(events, **shorter)
        original(links, events)

    return deliver_tokens


@_mutant("an end is told twice", (SchedulerEngine, "_deliver_end"))
def end_told_twice(original):
    def deliver_end(self, end, now):
        original(self, end, now)
        original(self, end, now)

    return deliver_end


@_mutant("the scheduler forgets a cancelled request and lets it run", (SchedulerEngine, "_on_abort"))
def abort_ignored(original):
    def on_abort(self, owner, abort, now):
        self.fleet.abort = lambda origin, why, now: None
        try:
            original(self, owner, Abort(handles=abort.handles), now)
        finally:
            del self.fleet.abort

    return on_abort


@_mutant("the requests of a gateway that is gone run on", (SchedulerEngine, "_on_gateway_gone"))
def orphans_of_a_gateway(original):
    def on_gateway_gone(self, event, now):
        self.fleet.abort = lambda origin, why, now: None
        try:
            original(self, event, now)
        finally:
            del self.fleet.abort

    return on_gateway_gone


@_mutant("the gateway forgets to tell the scheduler of a cancellation", (IngressLink, "abort"))
def cancel_not_propagated(original):
    def abort(self, sequences):
        original(self, sequences)
        self._aborted_handles.clear()

    return abort


@_mutant("on a new link the gateway submits nothing again", (IngressLink, "_open"))
def not_submitted_again(original):
    def open_(self, epoch, hello, now):
        if not self.counters.links_opened:
            original(self, epoch, hello, now)
            return
        live, self._live = self._live, {}
        original(self, epoch, hello, now)
        self._live = live

    return open_


def _nothing_held(original):
    return lambda self: self.submission


def _taken_again(original):
    def append_tokens(self, columns):
        for handle, _, token_id in zip(*decode_columns(columns, 3).tolist(), strict=True):
            if handle in self._live:
                self._live[handle].tokens.append(token_id)
                self._add_news(self._live[handle])
        return True

    return append_tokens


MUTANTS["delivered-again-after-restart"] = Mutant(
    "on a new link a request begins anew, and its tokens are delivered again",
    (Patch(LiveSequence, "to_submit", _nothing_held), Patch(SequencesOfLink, "_append_tokens", _taken_again)),
)


def _of_another_seed(original):
    def to_submit(self):
        seed = self.submission.sampling.seed ^ len(self.tokens)
        return msgspec.structs.replace(
            self.submission, sampling=msgspec.structs.replace(self.submission.sampling, seed=seed)
        )

    return to_submit


def _replaced(original):
    def append_tokens(self, columns):
        for handle, index, token_id in zip(*decode_columns(columns, 3).tolist(), strict=True):
            if handle in self._live:
                self._live[handle].tokens[index : index + 1] = [token_id]
                self._add_news(self._live[handle])
        return True

    return append_tokens


MUTANTS["delivered-tokens-replaced"] = Mutant(
    "on a new link a request begins anew with another seed, and what comes replaces what was delivered",
    (Patch(LiveSequence, "to_submit", _of_another_seed), Patch(SequencesOfLink, "_append_tokens", _replaced)),
)


@_mutant("a prompt that is to be reported is found in the cache", (cached_prefixes, "most_cached_tokens"))
def _prompts_found_in_the_cache(original):
    return lambda request: len(request.token_ids) - 1


@_mutant("a preempted request is told of its prompt again", (RunningRequests, "keep_tokens"))
def _prompts_told_again(original):
    def keep_tokens(self, request, reason):
        request.num_prompt_logprobs = 0
        original(self, request, reason)

    return keep_tokens


# ------------------------------------------------------------------------------- what is to be given back or forgotten


@_mutant("a tenant's waiting tokens are never given back", (WaitingRoom, "leave"))
def tenant_tokens_kept(original):
    def leave(self, request):
        original(self, request)
        if request.new.tenant in self._tenants:
            self._tenants[request.new.tenant][1] += request.num_queued_tokens

    return leave


@_mutant("a tenant's cache is told by the first eight characters of its name", *_SCOPED)
def _cache_scope_cut_short(original):
    def scoped(self, *arguments):
        *others, scope = arguments
        return original(self, *others, scope[:8])

    return scoped


@_mutant("the record of a sequence with a trace is never forgotten", (LiveSequences, "remove"))
def traceparents_kept(original):
    def remove(self, origin):
        live = original(self, origin)
        if live is not None and live.traceparent:
            self._by_name[live.name] = live
        return live

    return remove


@_mutant("what is submitted again does not say that it has run", (LiveSequence, "to_submit"))
def has_run_not_told(original):
    return lambda self: msgspec.structs.replace(original(self), has_run=False)


@_mutant("that a request has run is not passed on to the core", (engine, "new_request"))
def has_run_not_passed_on(original):
    return lambda *arguments: msgspec.structs.replace(original(*arguments), has_run=False)


@_mutant("what is held for a gateway is counted for ever", (GatewayLink, "flush"))
def held_tokens_counted_for_ever(original):
    def flush(self):
        num_held = self._num_held
        frame = original(self)
        self._num_held = num_held
        return frame

    return flush


@_mutant("an abort before an executor has joined is ignored", (SchedulerEngine, "_on_abort"))
def abort_before_the_executor_ignored(original):
    return lambda self, owner, abort, now: None if not self.fleet.cores else original(self, owner, abort, now)


@_mutant("tokens of who gave up before an executor joined count as waiting", (EarlySubmissions, "remove"))
def unjudged_bytes_kept(original):
    del original
    return lambda self, origin: self._submits.pop(origin, None)


@_mutant("ids of what has ended are remembered for ever", (Administration, "remember_ended"))
def ended_ids_kept(original):
    del original
    return lambda self, request_id: self._ended.update({request_id: None})


@_mutant("the brake is not told of a client's abort", (SchedulerEngine, "_on_abort"))
def brake_not_told_of_an_abort(original):
    def on_abort(self, owner, abort, now):
        brake = self.fleet.brake
        forget, brake.forget = brake.forget, lambda name: None
        try:
            original(self, owner, abort, now)
        finally:
            brake.forget = forget

    return on_abort


@_mutant("the brake is not told of an end", (SchedulerEngine, "_deliver_end"))
def brake_not_told_of_an_end(original):
    def deliver_end(self, end, now):
        brake = self.fleet.brake
        forget, brake.forget = brake.forget, lambda name: None
        try:
            original(self, end, now)
        finally:
            brake.forget = forget

    return deliver_end


@_mutant("an objective is counted for ever", (TightestObjective, "change"))
def objectives_kept(original):
    return lambda self, objective_ms, by: original(self, objective_ms, max(by, 0)) if by > 0 else None


@_mutant("the stop tokens of who has ended are kept", (StopTokens, "remove"))
def stop_tokens_kept(original):
    del original
    return lambda self, token_ids: None


@_mutant("tenants that have gone stay in the books", (FairQueue, "_drop"))
def idle_tenants_kept(original):
    del original
    return lambda self, name: None


@_mutant("who was refused for want of memory is held when it has ended", (Endings, "finish"))
def refused_kept(original):
    def finish(self, request, reason, **named):
        before = self._admission._foreseen
        end = original(self, request, reason, **named)
        self._admission._foreseen = before
        return end

    return finish


@_mutant("holes of a queue are never filled", (KeyedQueue, "remove"))
def holes_kept(original):
    del original

    def remove(self, request):
        del self._members[request.arrival]

    return remove


@_mutant("a gateway's address is kept when its link is dropped", (IngressLinks, "_drop"))
def addresses_kept(original):
    def drop(self, link, reason):
        events = original(self, link, reason)
        self._owner_of_peer[link.peer] = link.owner
        return events

    return drop


@_mutant("an operator's call is sent again after it was answered", (IngressLink, "_take_in"))
def answered_calls_kept(original):
    def take_in(self, body, now):
        calls = dict(self._admin_calls)
        original(self, body, now)
        self._admin_calls |= calls

    return take_in


@_mutant("a prompt that is submitted again loses its tenant", (LiveSequence, "to_submit"))
def tenant_lost_on_the_way(original):
    def to_submit(self):
        submit = original(self)
        return submit if submit is self.submission else msgspec.structs.replace(submit, tenant="")

    return to_submit


@_mutant("who ended while few might start keeps its place", (StartWindow, "forget"))
def place_in_the_window_kept(original):
    del original
    return lambda self, request: None


@_mutant("rows of an epoch that is over are never told to the backend", (BatchState, "begin_epoch"))
def rows_of_earlier_epochs_kept(original):
    def begin_epoch(self):
        self._rows_given_out = self._rows_given_out[:0]
        original(self)

    return begin_epoch


@_mutant("an executor's steps of an epoch that is over are counted as pending", (ExecutorStatistics, "record_epoch"))
def pending_steps_kept(original):
    def record_epoch(self):
        num_pending = self.num_pending
        original(self)
        self.num_pending = num_pending

    return record_epoch


# -------------------------------------------------------------------------------------------------- several executors

_several = partial(_mutant, num_executors=2)


@_several("a request that waits leaves a core and stays there as well", (Moving, "release_waiting"))
def moved_and_kept(original):
    del original
    return lambda self: list(self._state.waiting.queue.in_order())


@_several("the requests of a lost executor stay in its cell, although another is open", (Fleet, "state_lost"))
def lost_cell_keeps_its_requests(original):
    del original
    return lambda self, cell, now: None


@_several("the core of a lost executor keeps rows, blocks and steps", (Scheduler, "release_all"))
def lost_cell_keeps_its_blocks(original):
    del original

    def release_all(self):
        self.moving.recall(trusts_host=True)
        return self.moving.release_all()

    return release_all


@_several("requests end with the executor that ran them, although another is open", (Fleet, "_take_all"))
def lost_with_their_executor(original):
    def take_all(self, cell, now):
        for request in cell.core.requests() if cell.core is not None else ():
            end = cell.core.fail(request.new.origin, "its executor is gone")
            self._host.deliver(StepEvents(finished=(end,)), now)
        original(self, cell, now)

    return take_all


@_several("a request is found guilty when it was lost alone once", (brake, "LOSSES_ALONE"))
def guilty_at_once(original):
    del original
    return 1


@_several("an operator drains a cell, and what runs there goes on", (CoreCalls, "release"))
def drained_cell_keeps_its_requests(original):
    def release(self, origins):
        requests = [self.core.find(origin) for origin in origins]
        return original(self, [request.new.origin for request in requests if request is not None and request.row < 0])

    return release


@_several("a draining cell is given requests", (Transit, "loads"))
def draining_cell_is_used(original):
    def loads(self):
        open_cells = [cell for cell in self._cells if cell.is_open and cell.core is not None]
        return [CellLoad(cell.number, cell.view, accepts=True) for cell in open_cells]

    return loads


@_several("a cell that was drained stays so", (Fleet, "drain_cell"))
def drained_for_ever(original):
    def drain_cell(self, number, *, is_draining):
        if is_draining:
            original(self, number, is_draining=True)

    return drain_cell


@_several("a request that moves begins anew", (Moving, "adopt"))
def moved_without_its_output(original):
    def adopt(self, request, **named):
        request.token_ids = request.token_ids[: request.new.num_prompt_tokens]
        original(self, request, **named)

    return adopt


@_several("a step in flight still has the prompt of a request that left its core", (Moving, "release"))
def prompt_left_behind(original):
    def release(self, origin):
        before = [chunk for step in self._epoch.in_flight for chunk in step.chunks if chunk.counts]
        request = original(self, origin)
        for chunk in before:
            chunk.counts = True
        return request

    return release


@_several("requests in placement are numbered from 0, whatever cores have numbered", (Placement, "number_after"))
def arrivals_numbered_anew(original):
    del original
    return lambda self, requests: None


@_several("placement remembers where a request went after its end", (Placement, "count_end"))
def placed_for_ever(original):
    del original
    return lambda self, end: None


@_several("a request that waits in placement again is counted again", (Placement, "_forget_to_enter_again"))
def counted_again_in_placement(original):
    del original
    return lambda self, request: None


@_several("placement holds its oldest request back for the next", (Placement, "place_next"))
def placed_out_of_order(original):
    def place_next(self, cells, now):
        first = self._waiting.queue.first(now)
        if first is None or len(self._waiting.queue) < 2:
            return original(self, cells, now)
        self._waiting.leave(first)
        placed = original(self, cells, now)
        self._waiting.enter(first)
        return placed

    return place_next


@_several("placement gives nothing to a cell that is idle", (CellLoad, "has_room_for"))
def idle_cell_overlooked(original):
    def has_room_for(self, request):
        return self._view.num_running > 0 and original(self, request)

    return has_room_for


@_several("placement gives a cell one request at a time", (CellLoad, "has_room_for"))
def room_overlooked(original):
    def has_room_for(self, request):
        return self._view.num_running + self._view.num_waiting == 0 and original(self, request)

    return has_room_for


@_several("requests of lost steps are remembered after their end", (Fleet, "_take_all"))
def lost_steps_remembered(original):
    def take_all(self, cell, now):
        lost = cell.lost_steps_had
        original(self, cell, now)
        self._unproven.update(dict.fromkeys(lost))

    return take_all


@_several("each cell numbers its epochs by itself", (ExecutorLink, "__init__"))
def epochs_numbered_by_cell(original):
    def begin(self, incarnation, number=0, outgoing=None, epochs=None):
        del epochs
        original(self, incarnation, number, outgoing)

    return begin


@_several(
    "an executor without a link is spoken to in the numbered frames of another", (ExecutorLinks, "_ask_for_hello")
)
def stranger_disturbs_the_first(original):
    del original
    return lambda self, peer: self._links[0].announce_to(peer)


@_several("an answer is taken for that of another cell", (ExecutorLinks, "receive"))
def answer_of_another_cell(original):
    def receive(self, peer, data, now):
        number, events = original(self, peer, data, now)
        if len(self._links) > 1 and events and isinstance(events[0], StepAnswered):
            number = (number + 1) % len(self._links)
        return number, events

    return receive


@_mutant("a row begins with another's blocks where it has a state beside them", (SchedulerLimits, "fitting"))
def state_left_behind(original):
    del original
    return lambda self, capacity: self


@_mutant("a vector is made of the tokens that no cached prefix held", (Request, "runs_whole_prompt"))
def part_of_a_prompt_pooled(original):
    del original
    return property(lambda self: False)


@_mutant("a vector is not told", (GatewayLink, "hold_vector"))
def vectors_dropped(original):
    del original
    return lambda self, vector: None


@_mutant("the outputs of a request have one name", (engine, "name_of"))
def outputs_confused(original):
    del original
    return lambda submit: Name(submit.request_id, 0)


@_mutant("a request keeps its limit where the next executor has a shorter context", (core_scheduler, "limit_of"))
def former_limit_kept(original):
    del original
    return lambda new, max_request_tokens: new.num_prompt_tokens + new.max_tokens


for each in hand_off_mutants.MISTAKES:
    _several(each.sentence, *each.places)(each.make)
for each in lane_mutants.MISTAKES:
    _mutant(each.sentence, *each.places)(each.make)


def run_all(names: Sequence[str], most_seconds: float = MOST_SECONDS) -> list[Verdict]:
    """Hunt the mutants one after another."""
    verdicts = []
    for name in names:
        verdict = hunt(name, most_seconds)
        verdicts.append(verdict)
        caught = verdict.invariant or "NOT CAUGHT"
        sys.stdout.write(f"{name:38} {caught:20} {verdict.seconds:6.2f} s {verdict.num_schedules:6} schedules\n")
        sys.stdout.flush()
    return verdicts


def table_of(verdicts: Sequence[Verdict]) -> str:
    """The table, for ``MUTANTS.md``."""
    lines = [
        "# Mutants",
        "",
        "Mistakes made on purpose in the product, one at a time, and the invariant of the fault simulation that catches each",
        "(`python -m simulation.mutants` writes this page). Schedules are those of consecutive seeds from one million; the",
        "seconds are processor time of one core of a two-core machine. Mistakes that concern several executors meet schedules with",
        "two.",
        "",
        "| mutant | mistake | caught by | seconds | schedules |",
        "|---|---|---|---:|---:|",
    ]
    for name, invariant, num_schedules, seconds in verdicts:
        caught = invariant or "**not caught**"
        lines.append(f"| `{name}` | {MUTANTS[name].mistake} | {caught} | {seconds:.2f} | {num_schedules} |")
    num_caught = sum(bool(verdict.invariant) for verdict in verdicts)
    lines += ["", f"{num_caught} of {len(verdicts)} caught."]
    return "\n".join(lines) + "\n"


def main() -> int:
    if compiled_core.INTERPRET_VARIABLE not in os.environ:
        # Nothing of a compiled class can be patched.
        environment = os.environ | {compiled_core.INTERPRET_VARIABLE: "1"}
        os.execve(sys.executable, [sys.executable, "-m", "simulation.mutants", *sys.argv[1:]], environment)
    parser = argparse.ArgumentParser(prog="simulation.mutants", description="See which mistakes the simulation finds.")
    parser.add_argument("names", nargs="*", metavar="MUTANT", help="only these (default: all, and write the table)")
    parser.add_argument("--seconds", type=float, default=MOST_SECONDS, help="give up on one after so long")
    options = parser.parse_args()
    for name in MUTANTS:
        with infected(name):
            pass  # which says at once what no longer fits the product
    unknown = [name for name in options.names if name not in MUTANTS]
    if unknown:
        parser.error(f"{unknown[0]!r} is not a mutant; there are: {', '.join(MUTANTS)}")
    verdicts = run_all(options.names or list(MUTANTS), options.seconds)
    if not options.names:
        TABLE.write_text(table_of(verdicts))
    return 0 if all(verdict.invariant for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
