"""The scheduler's rules, written to be read: plain lists, every request looked at in every step.

Owns: the executable specification that ``headway_scheduler.core`` must equal, decision for decision.
Must not know: columns, due ticks, or any other means by which the core avoids looking at every request.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from headway_proto.pooling import POOL_CLS, POOL_MEAN
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from specification_of_learning import (
    EVERYBODY,
    Curve,
    SpecifiedForecast,
    SpecifiedLengths,
    SpecifiedRecord,
    SpecifiedSpeculation,
    SpecifiedStepTimes,
    Step,
    specified_horizons,
)

DEAD = -1
"""The version of a block behind one that was evicted: it cannot be reached and is not cached."""


@dataclass(eq=False)
class SpecRequest:
    origin: Origin
    arrival: int
    arrival_time: float
    priority: int
    tenant: str
    rank: int
    latest_start: float | None
    tokens: list[int]
    num_prompt_tokens: int
    limit: int
    stops: frozenset[int]
    min_tokens: int
    adapter: str
    pooling: int
    scope: str
    """Only requests of the same scope share cached blocks."""
    row: int | None = None
    place: tuple[float, int] = (0.0, 0)
    """fair: where its tenant stood when it last started."""
    lane: int = 2
    """0 preempted, 1 about to miss its objective, 2 neither, 3 has missed it."""
    has_started: bool = False
    start: int = -1
    """How many had started when it did for the first time."""
    preemptions: int = 0
    ways_made: int = 0
    passed_over: int = 0
    swapped: int = 0
    """Tokens that are on the host, in ``host_blocks``."""
    host_blocks: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    stay: int = 0
    unreturned: int = 0
    stalled: bool = False
    """It decodes and found no block the last time it was served."""
    confirmed: int = 0
    """Tokens of this stay whose KV is known to be in the blocks."""
    chain: list[int] = field(default_factory=list)
    """Cache versions of the leading blocks that the cache knows."""
    prompt_end: int = 0
    """Tokens known when it took its row: all of them are prefilled before it decodes."""
    curve: Curve = EVERYBODY
    served_time: float = 0.0
    """When part of its prompt was last scheduled."""
    work: int = 0
    """shortest: what is expected of it."""
    objective_s: float = 0.0
    danger: int = 0
    """1: it has been told to be at risk, 2: to be too late."""
    itl_slo_s: float = 0.0
    token_time: float = 0.0
    """When its newest token came, or will come; only while some running request has an objective on gaps."""
    sampled_ahead: int = 0
    """Tokens that steps in flight will bring to this stay."""
    wants_prompt_logprobs: bool = False
    runs_whole: bool = False
    """Its vector is made of all tokens, so all run in one stay."""
    told: int = 0
    """Prompt tokens, from the second on, whose log probabilities are known."""
    speculation: SpecifiedRecord = field(default_factory=SpecifiedRecord)
    step_lane: int | None = None
    """In whose steps it decodes: those of the lane in which its prompt ended."""

    @property
    def key(self) -> tuple[int, int]:
        """Its place among those that run."""
        return self.rank, self.start

    @property
    def expected(self) -> int:
        return len(self.tokens) + self.sampled_ahead


@dataclass
class SpecStep:
    """One step in flight: what it runs, by request and stay."""

    number: int
    ran: list[tuple[SpecRequest, int, int, int, bool]]  # request, stay, row, computed afterwards, samples
    message: dict[str, object]
    speculating: dict[int, int]
    """Most proposals by row."""
    lane: int = 0
    sent_time: float = 0.0
    expected_s: float | None = None
    """How long it will take, if any running request had an objective on gaps."""


class SpecPool:
    """Blocks as lists: ``plain`` is a stack, ``evictable`` a queue per level of worth (found once, reused, pinned);
    ``cache`` maps (version of the block before, or the scope; own tokens) to (block, version); every registration is a
    new version."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.references = [0] * num_blocks
        self.plain = list(reversed(range(num_blocks)))
        self.evictable: list[list[int]] = [[], [], []]
        self.fenced: dict[int, int] = {}  # block -> step
        self.cache: dict[tuple[int | str, tuple[int, ...]], tuple[int, int]] = {}
        self.chain_of: dict[int, tuple[int | str, tuple[int, ...]]] = {}
        self.parent_of: dict[int, int | str] = {}
        self.versions = 0
        self.reused: set[int] = set()
        self.pins: dict[str, tuple[str, list[int]]] = {}
        self.resident: dict[str, list[int]] = {}
        """The blocks that hold the beginning of each pinned prefix."""
        self.num_evicted = 0

    @property
    def num_free(self) -> int:
        return len(self.plain) + sum(map(len, self.evictable))

    def is_evictable(self, block: int) -> bool:
        return any(block in queue for queue in self.evictable)

    def worth(self, block: int) -> int:
        if any(block in blocks for blocks in self.resident.values()):
            return 2
        return 1 if block in self.reused else 0

    def allocate(self, count: int) -> list[int]:
        self.make_room(count)
        blocks = [self.plain.pop() for _ in range(count)]
        for block in blocks:
            self.references[block] = 1
        return blocks

    def make_room(self, count: int) -> None:
        """Evict once for all of the next ``count`` blocks."""
        missing = count - len(self.plain)
        if missing > 0:
            self.plain = self._evict(missing)[::-1] + self.plain

    def _evict(self, needed: int) -> list[int]:
        """Evict whole batches, pinned blocks only if nothing else is left and no more of them than it takes."""
        once, reused, pinned = self.evictable
        while len(reused) > (len(once) + len(reused)) * 3 // 4:
            block = reused.pop(0)
            self.reused.remove(block)
            once.append(block)
        batch = max(1, len(self.references) // 64)
        evicted = (once + reused)[: -(-needed // batch) * batch]
        evicted += pinned[: max(0, needed - len(evicted))]
        for block in evicted:
            self.evictable[self.worth(block)].remove(block)
        for block in evicted:
            _, version = self.cache.pop(self.chain_of.pop(block))
            del self.parent_of[version]
            self.reused.discard(block)
        self.num_evicted += len(evicted)
        for name, (scope, tokens) in self.pins.items():
            before = self.resident[name]
            self.resident[name] = self.find(tokens, len(tokens), scope)[0]
            self._reorder([block for block in before[len(self.resident[name]) :] if block in self.chain_of])
        return evicted

    def pin(self, name: str, scope: str, tokens: list[int]) -> bool:
        """A pin keeps whole blocks; False if there is none, or if more than a quarter of the pool would be pinned."""
        whole = tokens[: len(tokens) // self.block_size * self.block_size]
        others = sum(len(kept) // self.block_size for other, (_, kept) in self.pins.items() if other != name)
        if not whole or len(whole) // self.block_size + others > len(self.references) // 4:
            return False
        self.unpin(name)
        self.pins[name] = scope, whole
        blocks = self.find(whole, len(whole), scope)[0]
        rising = [block for block in blocks if self.worth(block) < 2]
        self.resident[name] = blocks
        self._reorder(rising)
        return True

    def unpin(self, name: str) -> bool:
        if name not in self.pins:
            return False
        del self.pins[name]
        self._reorder(self.resident.pop(name))
        return True

    def _reorder(self, chain: list[int]) -> None:
        """The worth of some of these may have changed: those that did become the most recently used of their kind."""
        for block in reversed(chain):
            for level, queue in enumerate(self.evictable):
                if block in queue and level != self.worth(block):
                    queue.remove(block)
                    self.evictable[self.worth(block)].append(block)
                    break

    def release(self, blocks: list[int], fence: int | None) -> None:
        unused = []
        for block in blocks:
            self.references[block] -= 1
            if not self.references[block]:
                unused.append(block)
        for block in reversed(unused):
            self.fenced[block] = -1 if fence is None else fence
        if fence is None:
            self.complete(-1)

    def complete(self, step: int) -> None:
        back = [block for block, fence in self.fenced.items() if fence <= step]
        for block in sorted(back, key=lambda block: self.fenced[block]):  # stable: release order within a fence
            del self.fenced[block]
            (self.evictable[self.worth(block)] if block in self.chain_of else self.plain).append(block)

    def share(self, blocks: list[int], *, is_reuse: bool) -> None:
        """Take cached blocks; a request that finds again what it had computed itself does not reuse them."""
        for block in blocks:
            self.references[block] += 1
            self.fenced.pop(block, None)
            if self.is_evictable(block):
                self.evictable[self.worth(block)].remove(block)
            if is_reuse:
                self.reused.add(block)

    def find(self, tokens: list[int], most: int, scope: str) -> tuple[list[int], list[int]]:
        """The blocks that hold the first ``most`` tokens at most, and their versions."""
        blocks: list[int] = []
        versions: list[int] = []
        for end in range(self.block_size, most + 1, self.block_size):
            own = tuple(tokens[end - self.block_size : end])
            entry = self.cache.get((versions[-1] if versions else scope, own))
            if entry is None:
                break
            blocks.append(entry[0])
            versions.append(entry[1])
        return blocks, versions

    def register(self, request: SpecRequest, computed: int) -> None:
        size = self.block_size
        for index in range(len(request.chain), computed // size):
            parent = request.chain[-1] if request.chain else request.scope
            if not self._is_reachable(parent):
                request.chain.append(DEAD)
                continue
            chain = (parent, tuple(request.tokens[index * size : (index + 1) * size]))
            if chain not in self.cache:
                self.versions += 1
                self.cache[chain] = (request.blocks[index], self.versions)
                self.chain_of[request.blocks[index]] = chain
                self.parent_of[self.versions] = parent
            request.chain.append(self.cache[chain][1])
        for name, (scope, tokens) in self.pins.items():
            self.resident[name] = self.find(tokens, len(tokens), scope)[0]

    def _is_reachable(self, version: int | str) -> bool:
        while not isinstance(version, str):
            if version not in self.parent_of:
                return False
            version = self.parent_of[version]
        return True


class Specification:
    """The O(n) scheduler. ``schedule`` answers with the parts of the message as plain lists."""

    def __init__(
        self,
        limits: SchedulerLimits,
        capacity: ExecutorCapacity,
        predict_s: Callable[[int, int, int, int], float] | None = None,
    ) -> None:
        self.limits = limits
        self.capacity = capacity
        self.predict_s = predict_s
        """Of a step's tokens, rows, context tokens and pairs of prefill attention."""
        self.last_answer_time = [0.0] * capacity.num_lanes
        self.prompts_kept_out_since: float | None = None
        self.num_decode_only_steps = 0
        self.pool = SpecPool(capacity.num_blocks, capacity.block_size)
        self.waiting: list[SpecRequest] = []
        self.running: list[SpecRequest] = []
        self.in_flight: list[SpecStep] = []
        self.finished_rows: list[int] = []
        self.arrivals = 0
        self.num_started = 0
        self.step = 0
        self.newest_lane = -1
        self.owed: set[int] = set()
        """Lanes that decode before another prompt runs alone, since prompts had no block left."""
        self.num_preemptions = 0
        self.num_hit_tokens = 0
        self.batch_is_closed = False
        """static: somebody has decoded since the last time that nothing ran."""
        self.starts_since_promotion = 0
        self.highest_starts = 0
        """Since one of another class."""
        self.served: dict[str, float] = {}
        """fair: what each tenant has had, lifts included."""
        self.last_to_leave: str | None = None
        self.tenants_seen: list[str] = []
        self.free_host_blocks = list(range(capacity.num_host_blocks))
        self.host_blocks_to_come: list[list[int]] = []
        self.swap_out: list[tuple[SpecRequest, list[tuple[int, int]]]] = []
        self.swap_in: list[tuple[int, int]] = []
        self.shed: list[Origin] = []
        self.alone: SpecRequest | None = None
        self.unproven: list[tuple[SpecRequest, int]] = []
        """Who was in lost steps, each with the tokens with which it has come as far as those would have brought it."""
        self.window = 0
        """How many of them may run at once."""
        self.stopped: SpecRequest | None = None
        """The last one that ended by itself."""
        self.refused: SpecRequest | None = None
        """The first in the queue when one was foreseen not to fit; nobody is asked again before ``ask_again_at``, a step."""
        self.ask_again_at = 0
        self.policy = SpecifiedSpeculation(capacity.max_speculative_tokens, SpecifiedStepTimes())
        """For whom speculation pays. Steps have no duration here."""
        self.lengths = SpecifiedLengths()
        """What is to be expected of an output."""

    # -- requests

    def add(self, new: NewRequestEvent, now: float) -> None:
        tokens = new.token_ids.tolist()
        objective_ms = new.ttft_slo_ms or self.limits.default_ttft_slo_ms
        has_objective = objective_ms and len(tokens) == new.num_prompt_tokens and not new.has_run
        request = SpecRequest(
            origin=new.origin,
            arrival=self.arrivals,
            arrival_time=now,
            priority=new.priority,
            tenant=new.tenant,
            rank=2 * new.priority - 1 if self.ranks_classes else 3,
            # What a prefill takes is not known here: nothing has a duration.
            latest_start=now + objective_ms / 1e3 if has_objective else None,
            tokens=tokens,
            num_prompt_tokens=new.num_prompt_tokens,
            limit=min(new.num_prompt_tokens + new.max_tokens, self.capacity.max_request_tokens),
            stops=new.stop_token_ids,
            min_tokens=new.sampling.min_tokens,
            adapter=new.adapter,
            pooling=new.pooling,
            scope=(f"adapter {new.adapter} " if new.adapter else "")
            + (new.tenant if self.limits.prefix_cache_scope == "tenant" else ""),
        )
        request.objective_s = objective_ms / 1e3
        request.itl_slo_s = (new.itl_slo_ms or self.limits.default_itl_slo_ms) / 1e3
        request.wants_prompt_logprobs = new.sampling.prompt_logprobs >= 0
        request.told = new.num_prompt_logprobs
        request.runs_whole = new.pooling in {POOL_MEAN, POOL_CLS}
        # What a constraint allows behind a proposal is not known before that has been drawn.
        request.speculation = SpecifiedRecord(may_speculate=new.max_tokens > 1 and new.sampling.constraint is None)
        if self.predicts:
            request.curve = self.lengths.curve_of(new.tenant, new.num_prompt_tokens)
        self.arrivals += 1
        if new.tenant not in self.tenants_seen:
            self.tenants_seen.append(new.tenant)
        self._lift(new.tenant)
        request.work = self._expected_work(request)
        self.waiting.append(request)

    def _lift(self, tenant: str) -> None:
        """fair: who had nothing waiting begins no lower than those that had, but for a burst."""
        if self.limits.order == "fair" and not any(r.tenant == tenant for r in self.waiting):
            rivals = [self.served.get(r.tenant, 0.0) for r in self.waiting]
            left = self.last_to_leave
            floor = min(rivals) if rivals else self.served.get(left, 0.0) if left is not None else 0.0
            credit = min(4 * self.capacity.max_request_tokens, self.capacity.num_blocks * self.capacity.block_size // 2)
            self.served[tenant] = max(self.served.get(tenant, 0.0), floor - credit)

    def take_shed(self) -> list[Origin]:
        shed, self.shed = self.shed, []
        return shed

    def _leave_queue(self, request: SpecRequest) -> None:
        self.waiting.remove(request)
        if not any(r.tenant == request.tenant for r in self.waiting):
            self.last_to_leave = request.tenant

    # -- the queue

    def queue(self) -> list[SpecRequest]:
        """All that wait, in service order."""
        return sorted(self.waiting, key=self._queue_key)

    def _queue_key(self, request: SpecRequest) -> tuple[float, ...]:
        if self.limits.order == "fair":
            return (*self._tenant_place(request.tenant), request.lane, request.arrival)
        latest = 1 << 62 if request.latest_start is None else int(request.latest_start * 1e6)
        value = {"shortest": request.work, "deadline": latest, "class_deadline": latest}.get(self.limits.order, 0)
        return (request.rank, request.lane, value, request.arrival)

    def _tenant_place(self, tenant: str) -> tuple[float, int, int]:
        num_running = sum(r.tenant == tenant for r in self.running)
        return (self.served[tenant], num_running, self.tenants_seen.index(tenant))

    def _goes_before(self, request: SpecRequest, running: SpecRequest | None) -> bool:
        if running is None:
            return True
        if self.limits.order == "fair":
            return self._tenant_place(request.tenant)[:2] < running.place
        return request.rank < running.rank

    def first(self, now: float) -> SpecRequest | None:
        queue = self.queue()
        if not queue or self.limits.order == "fair" or self.starts_since_promotion < 8 or queue[0].rank % 2 == 0:
            return queue[0] if queue else None
        if queue[0].rank == 1 and self.highest_starts < 8:
            return queue[0]
        oldest = min(queue, key=lambda r: r.arrival)
        if oldest is queue[0] or now - oldest.arrival_time < self.limits.aging_s:
            return queue[0]
        oldest.rank = 0 if queue[0].rank == 1 else 2
        self.starts_since_promotion = 0
        return oldest

    def _next_to_start(self, now: float) -> tuple[list[SpecRequest], SpecRequest | None]:
        if self.alone is not None:
            return [], self.alone if not self.running and not self.in_flight else None
        first = self.first(now)
        if first is not None and any(first is r for r, _ in self.unproven) and self.num_in_window >= self.window:
            return [], None
        if first is None:
            return [], None
        has_place = self._has_place_for_adapter_of
        if first.passed_over >= 16 or self.unproven or (has_place(first) and not self.limits.prefix_aware):
            return [], first if has_place(first) else None
        queue = self.queue()
        if self.limits.order == "fair":
            alike = [r for r in queue if r.lane != 0 and r.tenant == first.tenant] if first.lane else [first]
        else:
            alike = [r for r in queue if (r.rank, r.lane) == (first.rank, first.lane)]
        few = alike[:8]
        allowed = [r for r in few if has_place(r)]
        if not allowed:
            return [], None
        best = max(allowed, key=lambda r: len(self._find_cached(r)[0])) if self.limits.prefix_aware else allowed[0]
        return few[: few.index(best)], best

    def _has_place_for_adapter_of(self, request: SpecRequest) -> bool:
        """Rows of at most so many adapters run."""
        adapters = {r.adapter for r in self.running if r.adapter}
        return not request.adapter or request.adapter in adapters or len(adapters) < self.limits.max_adapters

    def _find_cached(self, request: SpecRequest) -> tuple[list[int], list[int]]:
        if not self.limits.enable_prefix_caching:
            return [], []
        return self.pool.find(request.tokens, self._most_cached(request), request.scope)

    def _most_cached(self, request: SpecRequest) -> int:
        """Tokens that need not run: not the last, nor those from which log probabilities are still to come."""
        if request.runs_whole:
            return 0
        is_owed = request.wants_prompt_logprobs and request.told < request.num_prompt_tokens - 1
        return min(len(request.tokens) - 1, request.told) if is_owed else len(request.tokens) - 1

    def _waits_for_prefix(self, request: SpecRequest, start: int) -> bool:
        """Another computes a beginning of this prompt that is worth sharing, and some of it is in this step or in flight."""
        limits, size = self.limits, self.capacity.block_size
        if not limits.prefix_wait_tokens or not limits.enable_prefix_caching or limits.batching == "static":
            return False
        end = -(-(start + limits.prefix_wait_tokens) // size) * size
        if request.host_blocks or end > self._most_cached(request) // size * size:
            return False
        planned = [r for row in reversed(self.tokens) for r in self.running if r.row == row and self._is_planned(r)]
        in_flight = [
            r
            for step in reversed(self.in_flight)
            for r, stay, _, computed, _ in reversed(step.ran)
            if stay == r.stay and self._is_chunk(r, computed)
        ]
        newest = list(dict.fromkeys(planned + in_flight))[:8]
        return any(
            r is not request
            and r.scope == request.scope
            and r.prompt_end // size * size >= end
            and r.tokens[:end] == request.tokens[:end]
            for r in newest
        )

    def _is_chunk(self, request: SpecRequest, computed: int) -> bool:
        return request.row is not None and computed <= request.prompt_end

    def _mind_first_tokens(self, now: float) -> None:
        watched = [r for r in self.waiting if r.latest_start is not None and not r.has_started]
        events = []
        for r in watched:
            at_risk = max(r.arrival_time, r.latest_start - 0.5 * r.objective_s)
            if at_risk <= now and r.danger < 1:
                events.append((at_risk, 2 * r.arrival, r))
            if r.latest_start <= now and r.danger < 2:
                events.append((r.latest_start, 2 * r.arrival + 1, r))
        is_untried = not self.running
        for _, number, r in sorted(events, key=lambda event: event[:2]):
            r.danger = 1 + number % 2
            if number % 2 == 0:
                r.lane = self._lane(1)
            elif self.limits.shed_late and not is_untried:
                self.shed.append(r.origin)
                self._end(r)
            else:
                r.lane = self._lane(3)
                is_untried = False

    def _hurry(self) -> None:
        """Too many steps have only decoded while a prompt waited: the next request is urgent."""
        self.is_prompt_due = 0 < self.limits.max_decode_only_steps <= self.num_decode_only_steps
        self.is_prompt_due &= not (self.limits.batching == "static" and self.batch_is_closed)
        if self.is_prompt_due and self.waiting and self.queue()[0].lane in {2, 3}:
            self.queue()[0].lane = self._lane(1)

    def _lane(self, lane: int) -> int:
        return 2 if self.limits.order == "fair" else lane  # an objective gives no tenant more than its share

    def run_alone(self, origin: Origin | None) -> None:
        self.alone = next((r for r in self.waiting + self.running if r.origin == origin), None)

    def start_slowly(self, origins: list[Origin]) -> None:
        """Those who were in lost steps come back a few at a time: twice the square root of their number."""
        if self.limits.batching == "static":
            return
        known = [r for r, _ in self.unproven]
        more = [r for r in self.waiting + self.running if r.origin in origins]
        goals = {id(r): len(r.tokens) + self.max_in_flight for r in more}
        self.unproven = [(r, goals.get(id(r), goal)) for r, goal in self.unproven]
        self.unproven += [(r, goals[id(r)]) for r in more if r not in known]
        self.window = 2 * math.isqrt(len(self.unproven))

    def _count_window(self) -> None:
        self.unproven = [(r, goal) for r, goal in self.unproven if len(r.tokens) < goal]
        self.num_in_window = sum(r.row is not None for r, _ in self.unproven)

    def _clear_the_way(self) -> None:
        """Who is to run alone has everybody else make way."""
        if self.alone is not None:
            for request in sorted((r for r in self.running if r is not self.alone), key=lambda r: r.row):
                self._preempt(request)
            self.short = False

    def abort(self, origin: Origin) -> bool:
        for request in self.waiting + self.running:
            if request.origin == origin:
                self._end(request)
                return True
        return False

    # -- schedule

    def schedule(self, now: float) -> dict[str, object] | None:
        if len(self.in_flight) >= self.max_in_flight:
            return None
        if self.in_flight and self.in_flight[-1].speculating:
            return None  # what follows depends on what was right
        self.now = now
        self._begin_step()
        self._clear_the_way()
        self._count_window()
        if not self.running:
            self.batch_is_closed = False
        self._mind_first_tokens(now)
        for lane in self._lanes_in_turn():
            self.lane = lane
            message = self._schedule_in_lane(now)
            if message is not None:
                return message
        return None

    @property
    def max_in_flight(self) -> int:
        return self.limits.max_steps_in_flight or self.capacity.num_lanes + 1

    def _lanes_in_turn(self) -> list[int]:
        """Each lane once, from the one behind that of the newest step; not who has its share of the steps in flight."""
        num_lanes = self.capacity.num_lanes
        if num_lanes == 1:
            return [0]
        most = 1 if self.limits.batching == "orca" else -(-self.max_in_flight // num_lanes)
        in_turn = [(self.newest_lane + 1 + place) % num_lanes for place in range(num_lanes)]
        return [lane for lane in in_turn if sum(step.lane == lane for step in self.in_flight) < most]

    def _begin_step(self) -> None:
        self.running.sort(key=lambda request: request.key)
        self.short = False
        self.promised = 0
        self.tokens: dict[int, int] = {}  # row -> tokens in this step
        self.new_blocks: list[tuple[int, int]] = []
        self.new_requests: list[dict[str, object]] = []
        self.new_adapters: list[tuple[int, str]] = []
        self.new_pooled: list[tuple[int, int]] = []

    def _schedule_in_lane(self, now: float) -> dict[str, object] | None:
        self._begin_step()
        self._hurry()
        self.start_of_step = self._start_of_step() if self.protects_gaps else now
        self.may_run = self._who_may_run()
        self.num_chosen = len(self.may_run)
        self.most_tokens = self.capacity.most_batched_tokens(self.limits.max_num_batched_tokens)
        self.held_back: list[SpecRequest] = []
        if self.limits.batching in {"static", "prefill_first"}:
            self.owed &= {r.step_lane for r in self.running if not r.stalled and r.computed < r.limit - 1}
            if not any(request.stalled for request in self.running) and not self.owed:
                self._serve_prompts()
                self._admit()
                if self.short and not self.tokens:
                    self.owed = set(range(self.capacity.num_lanes))
            if not self.tokens:  # decodes run only in a step without a prompt
                self._protect_gaps()
                self._serve_decoding()
        else:
            self._protect_gaps()
            self._serve_decoding()
            self._serve_prompts()
            self._admit()
        if not self.tokens and any(r.row is not None for r in self.held_back):
            self.held_back = []  # those for which others sat out lack blocks
            self._serve_decoding()
        for blocks in self.host_blocks_to_come:
            self.free_host_blocks[:0] = blocks  # the last that were given up are taken first
        self.host_blocks_to_come = []
        total = sum(self.tokens.values())
        self.speculating: dict[int, int] = {}
        if total:
            self._speculate()
        return self._commit(total) if total else None

    def _speculate(self) -> None:
        """Decoding requests may run tokens that the executor proposes, with what nobody else has use for."""
        decoding = [r for r in self.running if r.row in self.tokens and r.computed >= r.prompt_end]
        is_minding_losses = self.alone is not None or bool(self.unproven)
        if not self.policy.most or is_minding_losses or not 0 < len(decoding) <= self.limits.max_speculating_seqs:
            return
        ready = sorted((r for r in decoding if r.computed >= r.speculation.resumes_at), key=lambda r: r.row)
        if not ready:
            return
        shape = Step(len(decoding), len(decoding), sum(r.computed for r in decoding))
        counts = self.policy.choose([(r.speculation, r.computed) for r in ready], shape, self.step, None)
        size = self.capacity.block_size
        for request, most in zip(ready, counts, strict=True):
            left = self._budget() - sum(self.speculating.values())
            count = min(most, request.limit - 1 - request.computed - 1, left)
            missing = -(-(request.computed + 1 + count) // size) - len(request.blocks)
            if count > 0 and missing > 0:
                if self.short or self.pool.num_free < missing + len(self.running):
                    count = len(request.blocks) * size - request.computed - 1
                else:
                    self._extend(request, 1 + count)
            if count > 0:
                self.speculating[request.row] = count

    @property
    def ranks_classes(self) -> bool:
        return self.limits.order in {"priority", "class_deadline"}

    @property
    def max_batch(self) -> int:
        return min(self.limits.max_num_seqs, self.capacity.most_batched_tokens(self.limits.max_num_batched_tokens))

    def _is_in_flight(self, request: SpecRequest) -> bool:
        return any(ran is request and stay == request.stay for step in self.in_flight for ran, stay, *_ in step.ran)

    def _who_may_run(self) -> list[SpecRequest]:
        if self.has_lanes:
            # Who decodes has a lane. Who is in its prompt may run in a step of any.
            return [r for r in self.running if r.step_lane in {None, self.lane}]
        if self.limits.batching != "orca":
            return list(self.running)
        # A request is in one batch at a time, and a batch has a size.
        ready = [r for r in self.running if not self._is_in_flight(r)]
        in_order = sorted(ready, key=self._urgency) if self.protects_gaps else ready
        return [r for r in ready if r in in_order[: self.max_batch]]

    @property
    def has_lanes(self) -> bool:
        return self.capacity.num_lanes > 1

    def _within_lane(self, chunk: int, left: int) -> int:
        """How much of a chunk may run in this step: nothing of it in a full one, and not the end of the prompt in a lane
        that has its share of those that run or soon will."""
        if not self.has_lanes:
            return chunk
        decoding = sum(r.step_lane == self.lane for r in self.running)
        if decoding + sum(map(self._is_planned, self.running)) >= self.max_batch:
            return 0
        coming = 0
        if self.waiting:
            coming = max(1, min(len(self.waiting), self.max_running - len(self.running), self.pool.num_free))
        share = -(-min(self.max_running, len(self.running) + coming) // self.capacity.num_lanes)
        ending = [r for r in self.running if self._is_planned(r) and r.computed + self.tokens[r.row] == r.prompt_end]
        return chunk if chunk < left or decoding + len(ending) < share else chunk - 1

    def _budget(self) -> int:
        return self.most_tokens - sum(self.tokens.values())

    # -- gaps between tokens

    @property
    def protects_gaps(self) -> bool:
        return self.limits.protect_itl and any(r.itl_slo_s for r in self.running)

    def _protect_gaps(self) -> None:
        """Who would miss an objective on gaps has lower classes sit out, if that is enough."""
        if not self.protects_gaps or self.predict_s is None:
            return
        slack, class_of = self._slack, self._class_of
        decodes = [r for r in self.may_run if r.computed >= r.prompt_end and not r.stalled and r.computed < r.limit - 1]
        decodes.sort(key=self._urgency)
        if not decodes:
            return

        def duration_s(running: list[SpecRequest], num_prompt_tokens: int = 0, num_before: int = 0) -> float:
            """Of a step in which these decode, and one more row runs part of a prompt."""
            pairs = num_prompt_tokens * num_before + num_prompt_tokens * (num_prompt_tokens + 1) // 2
            tokens = len(running) + num_prompt_tokens
            context = sum(r.computed for r in running) + num_before
            return self.predict_s(tokens, len(running) + (num_prompt_tokens > 0), context, pairs)

        running = decodes
        for number in sorted({class_of(r) for r in decodes}):
            not_lower = [r for r in decodes if class_of(r) <= number]
            slacks = [slack(r) for r in not_lower if class_of(r) == number and slack(r) >= duration_s(not_lower)]
            if slacks:
                kept = [
                    decodes[:count]
                    for count in range(len(not_lower), len(decodes) + 1)
                    if count == len(not_lower) or duration_s(decodes[:count]) <= min(slacks)
                ]
                running = min(running, kept[-1], key=len)
        self.held_back = decodes[len(running) :]
        if not self.is_prompt_due:
            self._limit_prompts(running, duration_s)

    def _slack(self, request: SpecRequest) -> float:
        has_objective = request.itl_slo_s > 0
        return request.token_time + request.itl_slo_s - self.start_of_step if has_objective else math.inf

    def _class_of(self, request: SpecRequest) -> int:
        """Who was promoted, or had no token for too long, goes before all classes."""
        is_starved = self.start_of_step - request.token_time >= self.limits.aging_s
        return 0 if request.rank % 2 == 0 or is_starved else request.priority

    def _urgency(self, request: SpecRequest) -> tuple[float, ...]:
        return (self._class_of(request), self._slack(request), request.token_time, *request.key)

    def _start_of_step(self) -> float:
        """When this step will start: those in flight bring their tokens before."""
        start = self.last_answer_time[self.lane]
        in_flight = [step for step in self.in_flight if step.lane == self.lane]
        for step in in_flight:
            if step.expected_s is not None:
                start = max(start, step.sent_time) + step.expected_s
            start = max(start, self.now)
            for request, stay, _, _, samples in step.ran:
                if samples and request.row is not None and stay == request.stay:
                    request.token_time = start
        return start if in_flight else self.now

    def _limit_prompts(self, running: list[SpecRequest], duration_s: Callable[..., float]) -> None:
        """Prompts get as many times 64 tokens as those of higher classes have time for."""
        under_way = [r for r in self.running if r.computed < r.prompt_end]
        prompts = under_way + self.queue()[:1]
        if not prompts:
            self.prompts_kept_out_since = None
            return
        highest = min(0 if r.rank % 2 == 0 else r.priority for r in prompts)
        protected = [r for r in running if self._class_of(r) < highest]
        slacks = [self._slack(r) for r in protected if r.itl_slo_s]
        keepable = [least for least in slacks if least >= duration_s(running)]
        before = max((r.computed for r in under_way), default=0)
        tiles = 1 if slacks and not keepable else 0
        for count in range(1, -(-(self.most_tokens - len(running)) // 64) + 1):
            if all(duration_s(running, 64 * count, before) <= least for least in keepable) and (keepable or not slacks):
                tiles = count
        if tiles:
            self.prompts_kept_out_since = None
        elif self.prompts_kept_out_since is None:
            self.prompts_kept_out_since = self.now
        since = self.prompts_kept_out_since
        if since is None or self.now - since < self.limits.aging_s:
            self.most_tokens = min(self.most_tokens, len(running) + 64 * tiles)

    def _expected_s(self) -> float:
        """How long this step will take."""
        rows = [r for r in self.running if r.row in self.tokens]
        chunks = [(self.tokens[r.row], r.computed) for r in rows if r.computed < r.prompt_end]
        pairs = sum(count * before + count * (count + 1) // 2 for count, before in chunks)
        return self.predict_s(sum(self.tokens.values()), len(rows), sum(r.computed for r in rows), pairs)

    # -- what runs

    def _serve_decoding(self) -> None:
        size = self.capacity.block_size
        in_need = []
        for request in [r for r in self.may_run if r.row is not None and r.computed >= r.prompt_end]:
            if request in self.held_back:
                continue
            if request.computed == request.limit - 1:
                continue  # only its last token is missing, which a step in flight will bring
            if len(request.blocks) * size > request.computed:
                self.tokens[request.row] = 1
            else:
                in_need.append(request)
        if len(in_need) <= self.pool.num_free:
            in_need.sort(key=lambda request: request.row)  # there is a block for everyone
            self.pool.make_room(len(in_need))
        for request in in_need:
            if request.row is None:
                continue  # preempted for a request before it
            if self._obtain_block(request):
                self._extend(request, 1)
                self.tokens[request.row] = 1
                request.stalled = False
            elif request.row is not None:
                request.stalled = True

    def _serve_prompts(self) -> None:
        prompts = [r for r in self.may_run if r.computed < r.prompt_end]
        if self.ranks_classes:
            for r in [r for r in self.running if r.computed < r.prompt_end]:
                if self.now - r.served_time >= self.limits.aging_s:
                    r.rank = 0  # nothing of it has run for long: it goes before all classes
            prompts.sort(key=lambda r: r.key)
        under_way = [(r, r.stay) for r in prompts]
        is_fair = self.limits.order == "fair" and not any(r.lane == 0 for r in self.waiting)  # nobody was preempted
        if is_fair:
            under_way.sort(key=lambda entry: (entry[0].place, entry[0].arrival))
        for request, stay in under_way:
            if is_fair or self.ranks_classes:
                self._admit(before=request)
            if request.row is None or request.stay != stay:
                continue  # preempted for a request before it
            left = request.prompt_end - request.computed
            wanted = self._within_lane(min(left, self._budget()), left)
            room = len(request.blocks) * self.capacity.block_size - request.computed
            if wanted <= 0 or (room == 0 and not self._obtain_block(request)):
                continue
            room += self.pool.num_free * self.capacity.block_size
            if room < wanted:
                self.short = True
            self._extend(request, min(wanted, room))
            self.tokens[request.row] = min(wanted, room)
            request.served_time = self.now

    def _extend(self, request: SpecRequest, num_tokens: int) -> None:
        missing = -(-(request.computed + num_tokens) // self.capacity.block_size) - len(request.blocks)
        blocks = self.pool.allocate(max(0, missing))
        request.blocks += blocks
        self.new_blocks += [(request.row, block) for block in blocks]

    def _obtain_block(self, request: SpecRequest) -> bool:
        while not self.pool.num_free:
            self.short = True
            if len(self.pool.fenced) > self.promised:
                self.promised += 1
                return False
            victim = self._victim_for(request)
            if victim is None:
                return False
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _is_planned(self, request: SpecRequest) -> bool:
        """Whether part of its prompt is in this step."""
        return request.computed < request.prompt_end and request.row in self.tokens

    def _victim_for(self, request: SpecRequest) -> SpecRequest | None:
        later = [r for r in self.running if r.key > request.key]
        if not later:
            return request
        later = [r for r in later if not self._is_planned(r)]
        if not later:
            return None
        lowest = max(r.priority for r in later)
        candidates = sorted((r for r in later if r.priority == lowest), key=lambda r: r.key)[-16:]
        return self._in_victim_order(candidates)[0]

    def _in_victim_order(self, candidates: list[SpecRequest]) -> list[SpecRequest]:
        def place(r: SpecRequest) -> tuple[int, int, tuple[int, ...]]:
            freed = self._num_freed(r)
            lost = 4 * r.computed // (freed * self.capacity.block_size) if freed else 1 << 63
            return (-r.priority, lost, tuple(-part for part in r.key))

        return sorted(candidates, key=place)

    def _num_freed(self, request: SpecRequest) -> int:
        return sum(self.pool.references[block] == 1 for block in request.blocks)

    def _may_preempt_for(self, request: SpecRequest) -> bool:
        return self.ranks_classes or request.lane == 1

    def _make_room(self, request: SpecRequest, num_blocks: int, needs_row: bool) -> bool:
        """Preempt running requests of lower classes, if all that is missing comes free by that."""
        if self.short or not self._may_preempt_for(request):
            return False
        num_blocks -= len(self.pool.fenced)
        if num_blocks <= 0 and not needs_row:
            return False
        own_class = 1 if request.rank % 2 == 0 else request.priority
        victims = []
        for r in self._in_victim_order(
            [
                r
                for r in self.running
                if r.rank % 2 and r.priority > own_class and r.computed < r.limit - 1 and not self._is_planned(r)
            ]
        ):
            victims.append(r)
            num_blocks -= self._num_freed(r)
            if num_blocks <= 0:
                break
        else:
            return False
        for victim in victims:
            victim.ways_made += 1
            if victim.ways_made >= 4:
                victim.rank = 0
            self._preempt(victim)
            if not self.ranks_classes:
                victim.lane = 2
        return bool(victims)

    def _preempt(self, victim: SpecRequest) -> None:
        self.tokens.pop(victim.row, None)
        self.new_blocks = [(row, block) for row, block in self.new_blocks if row != victim.row]
        num_blocks = -(-victim.computed // self.capacity.block_size)
        is_idle = victim.computed >= victim.limit - 1
        may_swap = self.limits.preemption == "swap" and not victim.runs_whole
        if may_swap and not is_idle and 0 < num_blocks <= len(self.free_host_blocks):
            victim.host_blocks = self.free_host_blocks[:num_blocks]
            del self.free_host_blocks[:num_blocks]
            victim.swapped = victim.computed
            self.swap_out.append((victim, list(zip(victim.blocks, victim.host_blocks, strict=False))))
        self._leave(victim, cache=True)
        victim.lane = 0
        victim.preemptions += 1
        self.short = True
        victim.unreturned = victim.sampled_ahead
        victim.sampled_ahead = 0
        victim.stay += 1
        self.num_preemptions += 1
        victim.work = self._expected_work(victim)
        self._lift(victim.tenant)
        self.waiting.append(victim)

    def _leave(self, request: SpecRequest, *, cache: bool) -> None:
        self.running.remove(request)
        if cache and self.limits.enable_prefix_caching:
            self.pool.register(request, request.confirmed)
        # Under orca, and with lanes, what is not in flight is written by nobody; otherwise nearly everything is in flight.
        looks = self.limits.batching == "orca" or self.has_lanes
        is_written = bool(self.in_flight) and (not looks or self._is_in_flight(request))
        self.pool.release(request.blocks, self.in_flight[-1].number if is_written else None)
        self.finished_rows.append(request.row)
        request.row, request.blocks, request.computed, request.chain = None, [], 0, []
        request.stalled = False
        request.step_lane = None

    @property
    def max_running(self) -> int:
        if self.limits.batching == "orca":
            num_batches = self.capacity.num_lanes if self.has_lanes else self.max_in_flight
            return min(self.max_batch * num_batches, self.capacity.max_num_rows)
        most_tokens = self.capacity.most_batched_tokens(self.limits.max_num_batched_tokens)
        return min(self.limits.max_num_seqs, most_tokens * self.capacity.num_lanes, self.capacity.max_num_rows)

    def _admit(self, before: SpecRequest | None = None) -> None:
        if self.limits.batching == "static" and self.batch_is_closed:
            return
        self.forecast = None
        most_new = self.capacity.most_batched_tokens(self.limits.max_num_batched_tokens)
        if self.limits.batching == "orca" and not self.has_lanes:
            most_new = self.max_batch - self.num_chosen
        while not self.short and len(self.new_requests) < most_new and not self._is_soon_after_refusal():
            passed_over, request = self._next_to_start(self.now)
            if request is None or request.unreturned or self._budget() <= 0 or not self._goes_before(request, before):
                return
            lacks_row = len(self.running) >= self.max_running - self._num_kept_rows(request)
            if lacks_row and not self._may_preempt_for(request):
                return
            if self.forecast is None:
                self._look_ahead()
            if not self._start(request, lacks_row):
                return
            for other in passed_over:
                other.passed_over += 1

    def _is_soon_after_refusal(self) -> bool:
        if self.alone is not None:  # The queue is not asked, and nobody in it is promoted.
            return False
        return self.step < self.ask_again_at and bool(self.running) and self.first(self.now) is self.refused

    def _num_kept_rows(self, request: SpecRequest) -> int:
        """fair: who runs its share of rows, as it would be with one tenant more, leaves a sixteenth of them alone."""
        if self.limits.order != "fair":
            return 0
        num_tenants = len({r.tenant for r in self.running + self.waiting})
        num_own = sum(r.tenant == request.tenant for r in self.running)
        return self.max_running // 16 if num_own * (num_tenants + 1) >= self.max_running else 0

    def _start(self, request: SpecRequest, lacks_row: bool) -> bool:
        """Let a waiting request run its first chunk, if it may be cut so and if enough blocks are free."""
        size = self.capacity.block_size
        shared, chain = self._find_cached(request)
        unshared = self.pool.num_free - sum(map(self.pool.is_evictable, shared))
        free = unshared - self._owed()
        start = max(len(shared) * size, request.swapped)
        if self._waits_for_prefix(request, start):
            return False
        chunk = self._first_chunk(len(request.tokens) - start, (len(shared) + free) * size - start)
        most = chunk if lacks_row else self._within_lane(chunk, len(request.tokens) - start)
        if most < chunk:
            chunk = most if self.limits.batching in {"chunked", "split_fuse"} else 0
        missing = self._num_missing(request, start + max(chunk, 1), len(shared), unshared)
        missing += self._headroom(request)
        if missing > 0 or (lacks_row and chunk > 0):
            if not self._make_room(request, missing, lacks_row):
                if self.reserve == "predicted" and missing > 0:
                    self.refused, self.ask_again_at = self.first(self.now), self.step + 2
                return False
            if missing > 0 and self.in_flight:
                return False
            self._look_ahead()
            return self._start(request, lacks_row=False)
        if chunk <= 0:
            return False
        if self.reserve == "predicted":
            self.forecast.add(len(request.tokens), self._chances(request))
        self._take_row(request, shared, chain, start, chunk)
        return True

    def _num_missing(self, request: SpecRequest, chunk_end: int, num_shared: int, unshared: int) -> int:
        """Blocks that ``request`` lacks to start; ``unshared`` are free beside those that it shares."""
        size = self.capacity.block_size
        if self.reserve == "predicted":
            peak = 0  # beside nobody, everything fits that was accepted
            if self.running:
                peak = self.forecast.peak_with(len(request.tokens), self._chances(request))
            return max(peak - self.num_usable, -(-chunk_end // size) - unshared) - num_shared
        wanted = {
            "none": chunk_end,
            "prompt": min(len(request.tokens) + 1, request.limit - 1),
            "full": request.limit - 1,
        }[self.reserve]
        return -(-wanted // size) - num_shared - (unshared - self._owed())

    def _first_chunk(self, left: int, room: int) -> int:
        """Of the tokens that are left of a prompt, those that may run, ``room`` having blocks."""
        chunk = min(left, self._budget())
        if self.limits.batching == "split_fuse":
            return min(chunk, room)
        if self.limits.batching == "chunked" or chunk == min(left, self.most_tokens):
            return chunk
        return 0  # the prompt is whole, or as much of it as a step can have

    def _look_ahead(self) -> None:
        """Foresee what those that run will come to hold."""
        size = self.capacity.block_size
        self.horizons = specified_horizons(size, self.capacity.max_model_len)
        self.forecast = SpecifiedForecast(size, self.horizons)
        for r in self.running:
            self.forecast.add(len(r.tokens), self._chances(r))
        num_used = sum(count > 0 for count in self.pool.references)
        num_counted_again = sum(len(r.blocks) for r in self.running) - num_used
        self.num_usable = len(self.pool.references) + max(num_counted_again, 0)

    def _chances(self, request: SpecRequest) -> list[float]:
        age = len(request.tokens) - request.num_prompt_tokens
        limit = request.limit - request.num_prompt_tokens
        return self.lengths.chances_to_go_on(request.curve, age, limit, self.horizons)

    def _expected_work(self, request: SpecRequest) -> int:
        """Tokens still to be computed, those of the output counted eightfold, when it takes its place in the queue."""
        age = len(request.tokens) - request.num_prompt_tokens
        most = request.limit - request.num_prompt_tokens
        predicted = self.lengths.predicted_output(request.curve, age, most)
        return len(request.tokens) + 8 * ((most if predicted is None else predicted) - age)

    @property
    def predicts(self) -> bool:
        return self.limits.order == "shortest" or self.reserve == "predicted"

    def _headroom(self, request: SpecRequest) -> int:
        if not request.preemptions or not self.running:
            return 0
        return min(len(self.running) << min(request.preemptions - 1, 16), len(self.pool.references) // 8)

    @property
    def reserve(self) -> str:
        if self.limits.reserve != "auto":
            return self.limits.reserve
        return {"static": "full", "orca": "full", "split_fuse": "none"}.get(self.limits.batching, "prompt")

    def _owed(self) -> int:
        """Blocks that running requests have been promised and do not hold."""
        size = self.capacity.block_size
        if self.reserve == "full":
            return sum(-(-(r.limit - 1) // size) - len(r.blocks) for r in self.running)
        if self.reserve == "prompt":
            return sum(-(-r.prompt_end // size) - len(r.blocks) for r in self.running if r.computed < r.prompt_end)
        return 0

    def _take_row(self, request: SpecRequest, shared: list[int], chain: list[int], start: int, count: int) -> None:
        taken = {r.row for r in self.running}
        self._leave_queue(request)
        if request.start < 0:
            request.start = self.num_started
            self.num_started += 1
        self.starts_since_promotion += 1
        self.highest_starts = self.highest_starts + 1 if request.rank == 1 else 0
        if self.limits.order == "fair":
            request.place = self._tenant_place(request.tenant)[:2]
            if not request.has_started:
                self.served[request.tenant] += len(request.tokens)
        self.pool.share(shared, is_reuse=not request.has_started)
        self.num_hit_tokens += 0 if request.has_started else len(shared) * self.capacity.block_size
        request.has_started = True
        request.row = min(set(range(len(taken) + 1)) - taken)
        request.blocks, request.chain = list(shared), chain
        request.computed = start
        request.token_time = 0.0
        request.confirmed = len(shared) * self.capacity.block_size  # what is swapped in is there when the step has run
        request.prompt_end = len(request.tokens)
        self.running.append(request)
        self.num_in_window += any(request is r for r, _ in self.unproven)
        before = list(self.new_blocks)
        self._extend(request, count)
        self.new_blocks = before  # a new request carries its blocks itself
        if request.host_blocks:
            pairs = list(zip(request.host_blocks, request.blocks, strict=False))
            self.swap_in += pairs[len(shared) :]
            self._give_up_host_blocks(request)
        self.tokens[request.row] = count
        request.served_time = self.now
        self.new_requests.append(
            {
                "row": request.row,
                "token_ids": list(request.tokens),
                "block_ids": list(request.blocks),
                "num_computed_tokens": start,
                "scheduled": count,
            }
        )
        if request.adapter:
            self.new_adapters.append((request.row, request.adapter))
        if request.pooling:
            self.new_pooled.append((request.row, request.pooling))

    def _give_up_host_blocks(self, request: SpecRequest) -> None:
        if request.host_blocks:
            self.host_blocks_to_come.append(request.host_blocks)
        request.host_blocks, request.swapped = [], 0

    def _commit(self, total: int) -> dict[str, object]:
        expected_s = None
        prompts = [r for r in self.running if r.computed < r.prompt_end]
        runs_prompts = any(r.row in self.tokens for r in prompts)
        if self.protects_gaps:
            expected_s = self._expected_s() if self.predict_s is not None else 0.0
            self.prompts_kept_out_since = None if runs_prompts else self.prompts_kept_out_since
        is_decode_only = not runs_prompts and bool(prompts or self.waiting)
        self.num_decode_only_steps = self.num_decode_only_steps + 1 if is_decode_only else 0
        exceptions = self._exceptions()
        ran = []
        by_row = {request.row: request for request in self.running}
        for row, count in self.tokens.items():  # in the order of service
            request = by_row[row]
            self.batch_is_closed |= request.computed >= request.prompt_end
            request.computed += count
            samples = request.computed == request.expected
            request.sampled_ahead += samples
            if samples and request.step_lane is None:
                request.step_lane = self.lane
            ran.append((request, request.stay, row, request.computed, samples))
        message: dict[str, object] = {
            "step": self.step,
            "new": self.new_requests,
            "finished_rows": sorted(self.finished_rows),
            "new_blocks": sorted(self.new_blocks, key=lambda entry: entry[0]),
            "exceptions": exceptions,
            "lane": self.lane if self.has_lanes else None,
            "swap_out": [pair for _, pairs in self.swap_out for pair in pairs],
            "swap_in": self.swap_in,
            "adapters": self.new_adapters,
            "pooled": self.new_pooled,
            "total": total,
            "speculative": sorted(self.speculating.items()),
        }
        self.swap_out, self.swap_in = [], []
        self.in_flight.append(SpecStep(self.step, ran, message, self.speculating, self.lane, self.now, expected_s))
        self.newest_lane = self.lane
        self.owed.discard(self.lane)
        self.finished_rows = []
        self.step += 1
        return message

    def _exceptions(self) -> list[tuple[int, int]]:
        """Rows, of those that the step would run anyway, that do not run one token; with lanes, all prompts that run."""
        if not self.has_lanes:
            return sorted((r.row, self.tokens.get(r.row, 0)) for r in self.running if self.tokens.get(r.row, 0) != 1)
        prompts = [(r.row, self.tokens[r.row]) for r in self.running if r.step_lane is None and r.row in self.tokens]
        return sorted(
            prompts + [(r.row, 0) for r in self.running if r.step_lane == self.lane and r.row not in self.tokens]
        )

    # -- update

    def sampling_rows(self) -> list[int]:
        """Rows of the oldest step in flight that bring a token, ascending."""
        return sorted(row for _, _, row, _, samples in self.in_flight[0].ran if samples)

    def update(
        self, sampled: list[int], accepted: dict[int, tuple[int, list[int]]] | None = None, now: float = 0.0
    ) -> tuple[list[tuple[Origin, int, int]], list[tuple[Origin, str, int]]]:
        """Take the oldest step's tokens in; answer with new tokens (origin, index, id) and ends (origin, why, stop).

        ``accepted`` by row that speculated: how many tokens were proposed, and what follows the first token.
        """
        step = self.in_flight.pop(0)
        self.pool.complete(step.number)
        by_row = dict(zip(sorted(row for _, _, row, _, samples in step.ran if samples), sampled, strict=True))
        for request, stay, _, computed, _ in step.ran:
            if request.row is not None and request.stay == stay:
                request.confirmed = computed
                self._cache_prompt(request)
            if request in self.running or request in self.waiting:
                request.told = max(request.told, min(computed, request.num_prompt_tokens - 1))
        delivered: list[tuple[Origin, int, int]] = []
        ended: list[tuple[Origin, str, int]] = []
        sampling = sorted((entry for entry in step.ran if entry[4]), key=lambda entry: entry[2])
        stays = [entry for entry in sampling if entry[0].row is not None and entry[0].stay == entry[1]]
        left = [entry for entry in sampling if entry[0] in self.waiting and entry[0].unreturned]
        self._record_token_times(step.lane, [request for request, *_ in stays], now)
        for request, _, row, _, _ in stays:
            request.sampled_ahead -= 1
            self._deliver(request, by_row[row], delivered)
        for request, _, row, _, _ in stays:
            self._end_if_done(request, by_row[row], ended)
        for request, _, row, _, _ in left:
            request.unreturned -= 1
            self._deliver(request, by_row[row], delivered)
            self._end_if_done(request, by_row[row], ended)
        for row, (num_proposed, tokens) in sorted((accepted or {}).items()):
            for request in [
                r for r, stay, its_row, *_ in step.ran if its_row == row and r.row == row and r.stay == stay
            ]:
                self._take_accepted(request, step.speculating[row], num_proposed, tokens, delivered, ended)
        return delivered, ended

    def _record_token_times(self, lane: int, requests: list[SpecRequest], now: float) -> None:
        self.last_answer_time[lane] = now
        if self.protects_gaps:
            for request in requests:
                request.token_time = now

    def _take_accepted(
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
            self._deliver(request, token, delivered)
            self._end_if_done(request, token, ended)
            if request.row is None:
                return

    def _cache_prompt(self, request: SpecRequest) -> None:
        # Output blocks are registered only when the request leaves: until then nobody is likely to ask for them.
        if self.limits.enable_prefix_caching and request.confirmed <= request.prompt_end:
            self.pool.register(request, request.confirmed)

    def _deliver(self, request: SpecRequest, token: int, delivered: list[tuple[Origin, int, int]]) -> None:
        if self.limits.order == "fair":
            self.served[request.tenant] += 2.0
        delivered.append((request.origin, len(request.tokens) - request.num_prompt_tokens, token))
        request.tokens.append(token)

    def _end_if_done(self, request: SpecRequest, token: int, ended: list[tuple[Origin, str, int]]) -> None:
        num_output = len(request.tokens) - request.num_prompt_tokens
        if token in request.stops and num_output >= request.min_tokens:
            ended.append((request.origin, "stop", token))
            self.stopped = request
        elif len(request.tokens) == request.limit:
            ended.append((request.origin, "length", -1))
        else:
            return
        self._end(request)

    def _end(self, request: SpecRequest) -> None:
        if request is self.alone:
            self.alone = None
        self.unproven = [(r, goal) for r, goal in self.unproven if r is not request]
        num_output = len(request.tokens) - request.num_prompt_tokens
        if self.predicts and num_output:
            self.lengths.observe(request.curve, num_output, is_censored=request is not self.stopped)
        if request.row is None:
            self._leave_queue(request)
            self.swap_out = [entry for entry in self.swap_out if entry[0] is not request]
            self._give_up_host_blocks(request)
        else:
            self._leave(request, cache=True)
