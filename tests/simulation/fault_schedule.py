"""What happens in one simulated world: settings, requests and faults, all of them explicit and drawn from one seed.

Owns: how a schedule is drawn and written down. Must not know: how a world is run or judged.

A schedule is data. Requests and faults can be taken away from it, one by one, and what is left can still be run: that is
how a failing one is made small. Each seed draws its own mix of faults (many kinds in one schedule hide each other), its
own policies and its own sizes. Everything is small, because most mistakes need few requests and few blocks.
"""

import random

import msgspec

from headway_proto.pooling import NO_POOLING, POOL_CLS, POOL_LAST, POOL_MEAN
from headway_scheduler.core.choosing.roles import Role
from headway_scheduler.core.memory.preemption import PREEMPTIONS
from headway_scheduler.core.policies.batching import BATCHING_POLICIES
from headway_scheduler.core.policies.reservations import RESERVATIONS

EXECUTOR, SCHEDULER, FIRST_GATEWAY, SECOND_EXECUTOR = 0, 1, 2, 100
UP, DOWN, BOTH = 0, 1, 2
VOCABULARY = 40
END_TOKEN = 1
MAX_MODEL_LEN = 48
TENANTS = ("customers/a", "customers/b")
"""Alike for as long as a careless comparison may look."""

MOST_REQUESTS = 10
FLOOD_SHARE = 0.04
SLEEPS_SHARE = 0.2
FLOOD = 48

FRAME_FAULTS = ("drop", "duplicate", "corrupt", "delay")
LINK_FAULTS = ("partition", "hold", "reset")
PROCESS_FAULTS = ("crash", "stall", "rival", "supplant")
SCHEDULER_FAULTS = ("retire",)
"""The scheduler is told to stop, and another one starts once it has ended."""
STEP_FAULTS = ("fail", "memory", "flip")
CLIENT_FAULTS = ("cancel", "cancel_preempted")
OPERATOR_FAULTS = ("pause", "pin", "unpin")
CELL_FAULTS = ("kill", "drain")
"""Only where there are several executors: one is lost for good, and an operator drains a cell."""
HOST_FAULTS = ("leave",)
"""Only where host pools are shared: all that runs on an executor is to go on elsewhere."""
_MIXED = FRAME_FAULTS + LINK_FAULTS + PROCESS_FAULTS + STEP_FAULTS + CLIENT_FAULTS + OPERATOR_FAULTS
ROLE_FAULTS = ("role",)
"""Only where roles mean something: an operator gives an executor another role."""
ADAPTERS = ("a", "b", "c")
"""Every executor has all but the last from its start. An operator may load that, and unload any."""
ADAPTER_FAULTS = ("load", "unload", "spoil")
"""Only where there are adapters. Files that are spoiled cannot be read again; only those of the last adapter are."""
KINDS = (*_MIXED, "sleep", *CELL_FAULTS, *HOST_FAULTS, *ROLE_FAULTS, *ADAPTER_FAULTS, *SCHEDULER_FAULTS)

SEVERAL_WEIGHTS = (70, 20, 10)
"""How often there are one, two and three executors."""

_SHORT_S = (0.01, 0.03, 0.1, 0.3)
_LONG_S = (0.6, 1.1, 2.0, 5.5)
_VERY_LONG_S = (10.2, 12.0, 14.0)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Policies and sizes. Times in seconds; ``window`` is how many frames a gateway may leave unacknowledged."""

    order: str
    batching: str
    reserve: str
    preemption: str
    budget: str
    max_num_batched_tokens: int
    max_num_seqs: int
    max_steps_in_flight: int
    max_num_waiting: int
    enable_prefix_caching: bool
    prefix_aware: bool
    prefix_cache_scope: str
    aging_s: float
    shed_late: bool
    num_blocks: int
    block_size: int
    num_rows: int
    num_host_blocks: int
    num_gateways: int
    step_s: float
    wire_s: float
    window: int
    digest_every: int
    prefix_wait_tokens: int = 128
    max_speculative_tokens: int = 0
    executor_after_s: float = 0.0
    """When the first executor starts."""
    prefix_offload: str = "off"
    max_executors: int = 1
    """The most cells of the scheduler."""
    more_executors_after_s: tuple[float, ...] = ()
    """When each of the other executors starts."""
    shares_host: bool = False
    """Whether host pools can be read by others, and outlive their processes."""
    loses_pools: bool = False
    """Whether a new process finds no pool of the one before."""
    hands_off: float = 0.0
    """The share of requests that leave their first executor behind their prompt."""
    harm_of_pulls: float = 0.0
    """The share of pulls that something happens to."""
    protect_itl: bool = False
    max_decode_only_steps: int = 0
    placement: str = "aggregated"
    roles: tuple[str, ...] = ()
    """Of the first cells."""
    num_lanes: int = 1
    """Of each executor."""
    block_sizes: tuple[int, ...] = ()
    """One process of an executor after the other has one of these instead, and as many tokens in its blocks."""
    has_adapters: bool = False
    max_adapters: int = 16
    adapter_s: float = 0.0
    """How long it takes to read an adapter."""
    keeps_states: bool = False
    embeds: bool = False
    """Whether executors make vectors."""
    contexts: tuple[int, ...] = ()
    """One process of an executor after the other has one of these, in place of ``MAX_MODEL_LEN``."""


class RequestPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A client's request. ``fails_at``: the output token at which its logits are NaN. ``deadline_s``: 0 for none.
    ``is_bad``: a token id outside the vocabulary. ``output_of``: the request of which this is another output, the one with
    this ``index``; -1 for none.
    """

    at: float
    number: int
    gateway: int
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int = 0
    temperature: float = 0.0
    ignore_eos: bool = False
    stop: tuple[int, ...] = ()
    wants_logprobs: bool = False
    priority: int = 3
    tenant: str = ""
    ttft_slo_ms: int = 0
    itl_slo_ms: int = 0
    fails_at: int = -1
    deadline_s: float = 0.0
    is_bad: bool = False
    wants_prompt_logprobs: bool = False
    adapter: str = ""
    pooling: int = NO_POOLING
    output_of: int = -1
    index: int = 0

    @property
    def request_id(self) -> str:
        """All outputs of a request have the same."""
        return f"request-{self.number if self.output_of < 0 else self.output_of}"


def executor_slots(settings: Settings) -> tuple[int, ...]:
    """The places of the executors."""
    return (EXECUTOR, *range(SECOND_EXECUTOR, SECOND_EXECUTOR + len(settings.more_executors_after_s)))


class Fault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """At ``at``, something goes wrong with a process (or its link): ``target`` is EXECUTOR, SCHEDULER, FIRST_GATEWAY + n or SECOND_EXECUTOR + n.

    ``role``: ``count`` is the place of the new role among all, ``load`` and ``unload``: of the adapter. ``cancel_preempted`` gives up whoever is preempted next. ``direction`` of frames; ``seconds`` it lasts, or by how much a frame is late; ``count`` of frames, steps, tokens, or the
    number of the request that is cancelled or whose prompt an operator pins. An executor that crashes comes back smaller if
    ``count`` is above 1. ``place`` where in a frame a bit is turned, or when in a sleep the others give the connection up,
    0 to 1.
    """

    at: float
    kind: str
    target: int = EXECUTOR
    direction: int = BOTH
    seconds: float = 0.0
    count: int = 1
    place: float = 0.0


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one run depends on; nothing is drawn while it runs."""

    seed: int
    settings: Settings
    requests: tuple[RequestPlan, ...]
    faults: tuple[Fault, ...]
    heal_at: float

    def to_json(self) -> str:
        """One line, for ``kept_seeds.txt``."""
        return msgspec.json.encode(self).decode()


def from_json(line: str) -> Schedule:
    """The inverse of ``Schedule.to_json``."""
    return msgspec.json.decode(line, type=Schedule)


def draw(seed: int, num_executors: int | None = None) -> Schedule:
    """The schedule of a seed. ``num_executors``: None to draw it as well."""
    rng = random.Random(seed)
    settings = _draw_settings(rng)
    # From another stream: schedules of seeds that were drawn before there was speculation stay what they were.
    most = random.Random(f"speculation {seed}").choice((0, 0, 1, 3, 6))
    after_s = random.Random(f"executor {seed}").choice((0.0, 0.0, 0.0, 0.03, 0.2))
    if random.Random(f"order {seed}").random() < 0.1:
        settings = msgspec.structs.replace(settings, order="class_deadline")
    offload = random.Random(f"offload {seed}").choice(("off", "off", "off", "always", "auto"))
    settings = msgspec.structs.replace(
        settings, max_speculative_tokens=most, executor_after_s=after_s, prefix_offload=offload
    )
    requests = _draw_requests(rng, settings)
    if rng.random() < FLOOD_SHARE:
        settings, requests = _flooded(rng, settings, requests)
    faults = _draw_faults(rng, settings, min(len(requests), MOST_REQUESTS))
    faults = _with_sleeps(random.Random(f"sleeps {seed}"), settings, faults)
    settings, requests = _with_prompts(random.Random(~seed), settings, requests)
    settings, faults = _with_executors(random.Random(f"executors {seed}"), settings, faults, num_executors)
    settings, faults = _with_host(random.Random(f"host {seed}"), settings, faults)
    settings, faults = _with_roles(random.Random(f"roles {seed}"), settings, faults)
    settings = _with_lanes(random.Random(f"lanes {seed}"), settings)
    settings = _with_block_sizes(random.Random(f"block sizes {seed}"), settings)
    settings, requests, faults = _with_adapters(random.Random(f"adapters {seed}"), settings, requests, faults)
    settings, faults = _with_states(random.Random(f"states {seed}"), settings, faults)
    settings = _with_contexts(random.Random(f"contexts {seed}"), settings)
    settings, requests = _with_pooled(random.Random(f"pooled {seed}"), settings, requests)
    requests = _with_outputs(random.Random(f"outputs {seed}"), requests)
    faults = _with_retiring(random.Random(f"retiring {seed}"), faults)
    ends = [fault.at + (0.0 if fault.kind == "delay" else fault.seconds) for fault in faults]
    heal_at = max([0.3, *ends, *(request.at for request in requests)]) + rng.choice((0.0, 0.2, 0.5))
    return Schedule(seed=seed, settings=settings, requests=requests, faults=faults, heal_at=round(heal_at, 4))


def _with_lanes(rng: random.Random, settings: Settings) -> Settings:
    """Executors that work on several steps at once; drawn by itself as well."""
    num_lanes = rng.choice((1, 1, 1, 2, 3, 4))
    if num_lanes == 1:
        return settings
    depth = rng.choice((0, 0, settings.max_steps_in_flight))
    return msgspec.structs.replace(settings, num_lanes=num_lanes, max_steps_in_flight=depth)


def _with_block_sizes(rng: random.Random, settings: Settings) -> Settings:
    """Executors with blocks of other sizes, beside each other and after each other; drawn by itself as well."""
    if settings.max_executors == 1 or rng.random() < 0.7:
        return settings
    sizes = tuple(rng.choice((1, 2, 4, 8, 16)) for _ in range(rng.choice((2, 2, 3))))
    return msgspec.structs.replace(settings, block_sizes=sizes)


def _with_adapters(
    rng: random.Random, settings: Settings, requests: tuple[RequestPlan, ...], faults: tuple[Fault, ...]
) -> tuple[Settings, tuple[RequestPlan, ...], tuple[Fault, ...]]:
    """Requests with adapters, and operators who load and unload them; drawn by itself as well."""
    if rng.random() < 0.75:
        return settings, requests, faults
    settings = msgspec.structs.replace(
        settings, has_adapters=True, max_adapters=rng.choice((1, 2, 16)), adapter_s=rng.choice((0.0, 0.02, 0.2))
    )
    requests = tuple(
        msgspec.structs.replace(request, adapter=rng.choice(("", *ADAPTERS, ADAPTERS[-1]))) for request in requests
    )
    added = [
        Fault(
            at=round(rng.random() * 0.4, 4),
            kind=rng.choice(("load", *ADAPTER_FAULTS)),
            target=FIRST_GATEWAY + rng.randrange(settings.num_gateways),
            count=rng.choice((0, 2, 2)),
        )
        for _ in range(rng.choice((0, 1, 3)))
    ]
    first = Fault(at=0.0005, kind="load", target=FIRST_GATEWAY, count=2)
    return settings, requests, tuple(sorted((first, *faults, *added), key=lambda fault: fault.at))


def _with_states(
    rng: random.Random, settings: Settings, faults: tuple[Fault, ...]
) -> tuple[Settings, tuple[Fault, ...]]:
    """Models whose rows have states beside their blocks, and so nothing to swap or to propose; drawn by itself as well."""
    if rng.random() < 0.85:
        return settings, faults
    settings = msgspec.structs.replace(
        settings,
        keeps_states=True,
        num_host_blocks=0,
        max_speculative_tokens=0,
        prefix_offload="off",
        shares_host=False,
        loses_pools=False,
        hands_off=0.0,
        harm_of_pulls=0.0,
    )
    return settings, tuple(fault for fault in faults if fault.kind not in HOST_FAULTS)


def _with_contexts(rng: random.Random, settings: Settings) -> Settings:
    """An executor that comes back with another context, beside which there is none; drawn by itself as well."""
    if settings.max_executors > 1 or settings.more_executors_after_s or rng.random() < 0.8:
        return settings
    others = tuple(rng.choice((MAX_MODEL_LEN, MAX_MODEL_LEN - 8, MAX_MODEL_LEN // 2)) for _ in range(2))
    return msgspec.structs.replace(settings, contexts=(MAX_MODEL_LEN, *others))


def _with_pooled(
    rng: random.Random, settings: Settings, requests: tuple[RequestPlan, ...]
) -> tuple[Settings, tuple[RequestPlan, ...]]:
    """Requests for vectors, beside others; drawn by itself as well."""
    if rng.random() < 0.8:
        return settings, requests
    share = rng.choice((0.3, 0.7, 1.0))
    fields = {"max_tokens": 1, "ignore_eos": True, "stop": (), "wants_logprobs": False, "wants_prompt_logprobs": False}
    return msgspec.structs.replace(settings, embeds=True), tuple(
        msgspec.structs.replace(request, pooling=rng.choice((POOL_LAST, POOL_LAST, POOL_MEAN, POOL_CLS)), **fields)
        if rng.random() < share
        else request
        for request in requests
    )


def _with_outputs(rng: random.Random, requests: tuple[RequestPlan, ...]) -> tuple[RequestPlan, ...]:
    """Requests of several outputs; drawn by itself as well."""
    if rng.random() < 0.8:
        return requests
    others = [(request, index) for request in requests for index in range(1, rng.choice((1, 1, 2, 3, 4)))]
    first = 1 + max(request.number for request in requests)
    return requests + tuple(
        msgspec.structs.replace(
            request,
            number=number,
            output_of=request.number,
            index=index,
            seed=(request.seed + index) % (1 << 16),
            wants_prompt_logprobs=False,
        )
        for number, (request, index) in enumerate(others[:MOST_REQUESTS], first)
    )


def _with_retiring(rng: random.Random, faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """Schedulers that are told to stop; drawn by itself as well."""
    if rng.random() < 0.85:
        return faults
    added = [
        Fault(
            at=round(rng.random() * 0.4, 4),
            kind="retire",
            target=SCHEDULER,
            seconds=round(rng.choice((0.0, *_SHORT_S, *_LONG_S)) * (0.5 + rng.random()), 4),
        )
        for _ in range(rng.choice((1, 1, 2)))
    ]
    return tuple(sorted((*faults, *added), key=lambda fault: fault.at))


def _with_prompts(
    rng: random.Random, settings: Settings, requests: tuple[RequestPlan, ...]
) -> tuple[Settings, tuple[RequestPlan, ...]]:
    """What is drawn by itself, so that the rest of a seed's schedule stays what it was: what concerns prompts."""
    settings = msgspec.structs.replace(settings, prefix_wait_tokens=rng.choice((0, 1, 4, 8, 128)))
    share = rng.choice((0.0, 0.3, 0.8))
    return settings, tuple(
        msgspec.structs.replace(request, wants_prompt_logprobs=rng.random() < share) for request in requests
    )


def _with_executors(
    rng: random.Random, settings: Settings, faults: tuple[Fault, ...], num_executors: int | None
) -> tuple[Settings, tuple[Fault, ...]]:
    """Several executors, and faults of any of them; drawn by itself as well."""
    drawn = rng.choices((1, 2, 3), SEVERAL_WEIGHTS)[0]
    num_executors = num_executors or drawn
    if num_executors == 1:
        return settings, faults
    settings = msgspec.structs.replace(
        settings,
        max_executors=rng.choice((num_executors, num_executors, num_executors, 2, 3)),
        more_executors_after_s=tuple(rng.choice((0.0, 0.0, 0.03, 0.1, 0.4)) for _ in range(num_executors - 1)),
    )
    slots = executor_slots(settings)
    moved = [
        msgspec.structs.replace(fault, target=rng.choice(slots)) if fault.target == EXECUTOR else fault
        for fault in faults
    ]
    added = [
        Fault(
            at=round(rng.random() * 0.4, 4),
            kind=rng.choice(
                (*CELL_FAULTS, *CELL_FAULTS, "drain", "drain", "crash", "stall", "drop", "reset", "fail", "hold")
            ),
            target=rng.choice(slots),
            direction=rng.choice((UP, DOWN)),
            seconds=round(rng.choice((*_SHORT_S, *_LONG_S)) * (0.5 + rng.random()), 4),
            count=rng.choice((1, 1, 2, 3)),
        )
        for _ in range(rng.choice((0, 1, 2, 4, 6)))
    ]
    return settings, tuple(sorted((*moved, *added), key=lambda fault: fault.at))


def _with_host(rng: random.Random, settings: Settings, faults: tuple[Fault, ...]) -> tuple[Settings, tuple[Fault, ...]]:
    """Shared host pools, hand-offs and what happens to them; drawn by itself as well."""
    settings = msgspec.structs.replace(
        settings, protect_itl=rng.random() < 0.1, max_decode_only_steps=rng.choice((0, 0, 0, 0, 0, 1, 3))
    )
    if not settings.num_host_blocks or rng.random() < 0.4:
        return settings, faults
    settings = msgspec.structs.replace(
        settings,
        shares_host=True,
        loses_pools=rng.random() < 0.15,
        hands_off=rng.choice((0.0, 0.5, 1.0, 1.0)),
        harm_of_pulls=rng.choice((0.0, 0.2, 0.5, 0.9)),
    )
    slots = executor_slots(settings)
    added = [
        Fault(
            at=round(rng.random() * 0.4, 4),
            kind=rng.choice(("leave", "leave", "crash", "kill") if len(slots) > 1 else ("leave", "crash")),
            target=rng.choice(slots),
            seconds=round(rng.choice(_SHORT_S) * (0.5 + rng.random()), 4),
            count=rng.choice((1, 1, 2, 3)),
        )
        for _ in range(rng.choice((0, 0, 1, 2, 4)))
    ]
    return settings, tuple(sorted((*faults, *added), key=lambda fault: fault.at))


def _with_roles(
    rng: random.Random, settings: Settings, faults: tuple[Fault, ...]
) -> tuple[Settings, tuple[Fault, ...]]:
    """Roles, policies that know them, and operators who change them; drawn by itself as well."""
    if settings.max_executors == 1 or rng.random() < 0.4:
        return settings, faults
    slots = executor_slots(settings)
    roles = tuple(rng.choice((*Role, Role.PREFILL, Role.DECODE)).value for _ in slots)
    settings = msgspec.structs.replace(
        settings, placement=rng.choice(("disaggregated", "disaggregated", "hybrid", "auto")), roles=roles
    )
    added = [
        Fault(at=round(rng.random() * 0.4, 4), kind="role", target=rng.choice(slots), count=rng.randrange(len(Role)))
        for _ in range(rng.choice((0, 0, 1, 3)))
    ]
    return settings, tuple(sorted((*faults, *added), key=lambda fault: fault.at))


def _with_sleeps(rng: random.Random, settings: Settings, faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """Processes that stand still for so long that their connections are made anew; drawn by itself as well."""
    if rng.random() >= SLEEPS_SHARE:
        return faults
    targets = (EXECUTOR, SCHEDULER, SCHEDULER, *range(FIRST_GATEWAY, FIRST_GATEWAY + settings.num_gateways))
    sleeps = [
        Fault(
            at=round(rng.random() * 0.4, 4),
            kind="sleep",
            target=rng.choice(targets),
            seconds=round(rng.choice((*_LONG_S, 12.0)) * (0.5 + rng.random()), 4),
            place=round(rng.random(), 4),
        )
        for _ in range(rng.choice((1, 1, 2, 3)))
    ]
    return tuple(sorted((*faults, *sleeps), key=lambda fault: fault.at))


def _draw_settings(rng: random.Random) -> Settings:
    block_size = rng.choice((2, 4, 4, 8))
    for_one = -(-MAX_MODEL_LEN // block_size)
    max_num_seqs = rng.choice((1, 2, 4, 4, 8))
    num_blocks = for_one + rng.choice((0, 1, 3, for_one // 2, 4 * for_one))
    return Settings(
        order=rng.choice(("deadline", "fair", "fcfs", "priority", "shortest", "fcfs")),
        batching=rng.choice((*sorted(BATCHING_POLICIES), "chunked", "chunked")),
        reserve=rng.choice((*sorted(RESERVATIONS), "auto", "none", "none")),
        preemption=rng.choice((*sorted(PREEMPTIONS), "swap")),
        budget=rng.choice(("fixed", "fixed", "slo")),
        max_num_batched_tokens=rng.choice((4, 8, 16, 64)),
        max_num_seqs=max_num_seqs,
        max_steps_in_flight=rng.choice((1, 2, 2, 3, 4)),
        max_num_waiting=rng.choice((3, 64, 64, 64)),
        enable_prefix_caching=rng.random() < 0.75,
        prefix_aware=rng.random() < 0.25,
        prefix_cache_scope=rng.choice(("shared", "shared", "tenant")),
        aging_s=rng.choice((0.02, 30.0)),
        shed_late=rng.random() < 0.2,
        num_blocks=num_blocks,
        block_size=block_size,
        num_rows=rng.choice((max_num_seqs, 2 * max_num_seqs, 4 * max_num_seqs)),
        num_host_blocks=rng.choice((0, 4, num_blocks, 2 * num_blocks)),
        num_gateways=rng.choice((1, 1, 2, 3)),
        step_s=rng.choice((0.0, 0.002, 0.008, 0.02)),
        wire_s=rng.choice((0.0, 0.0005, 0.003)),
        window=rng.choice((4, 16, 4096)),
        digest_every=rng.choice((2, 5, 64)),
    )


def _draw_requests(rng: random.Random, settings: Settings) -> tuple[RequestPlan, ...]:
    shared = tuple(rng.randrange(VOCABULARY) for _ in range(24))
    shares = rng.choice((0.0, 0.3, 0.9))
    repeats = rng.choice((0.0, 0.3))
    spread_s = rng.choice((0.0, 0.05, 0.4))
    objectives = rng.random() < 0.3
    longest = rng.choice((3, 8, 20, 30))
    requests = []
    for number in range(rng.randint(1, MOST_REQUESTS)):
        prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 14)))
        if rng.random() < shares:
            prompt = shared[: rng.randint(1, 24)] + prompt[: rng.randint(1, 8)]
        if requests and rng.random() < repeats:
            prompt = rng.choice([other.prompt for other in requests if not other.is_bad] or [prompt])
        is_bad = rng.random() < 0.03 and VOCABULARY not in prompt
        requests.append(
            RequestPlan(
                at=round(rng.random() * spread_s, 4),
                number=number,
                gateway=rng.randrange(settings.num_gateways),
                prompt=(*prompt, VOCABULARY) if is_bad else prompt,
                max_tokens=rng.randint(1, longest),
                seed=rng.randrange(1 << 16),
                temperature=float(rng.random() < 0.5),
                ignore_eos=rng.random() < 0.7,
                stop=(rng.randrange(VOCABULARY),) if rng.random() < 0.2 else (),
                wants_logprobs=rng.random() < 0.15,
                priority=rng.randint(1, 4),
                tenant=rng.choice(("", "", *TENANTS)),
                ttft_slo_ms=rng.choice((0, 20, 5000)) if objectives else 0,
                itl_slo_ms=rng.choice((0, 10)) if objectives else 0,
                fails_at=rng.randrange(6) if rng.random() < 0.08 else -1,
                deadline_s=rng.choice((0.01, 0.05, 0.1, 0.5)) if rng.random() < 0.12 else 0.0,
                is_bad=is_bad,
            )
        )
    return tuple(requests)


def _flooded(
    rng: random.Random, settings: Settings, requests: tuple[RequestPlan, ...]
) -> tuple[Settings, tuple[RequestPlan, ...]]:
    """Many small requests of the highest class, which orders like to start before all others, for as long as they come."""
    settings = msgspec.structs.replace(
        settings,
        order=rng.choice(("priority", "shortest")),
        max_num_seqs=1,
        max_num_waiting=64,
        max_steps_in_flight=rng.choice((1, 2)),
        aging_s=0.02,
        step_s=0.008,
    )
    flood = tuple(
        RequestPlan(
            at=round(number * 0.008, 4),
            number=number,
            gateway=rng.randrange(settings.num_gateways),
            prompt=(rng.randrange(VOCABULARY),),
            max_tokens=1,
            priority=1,
        )
        for number in range(MOST_REQUESTS, MOST_REQUESTS + FLOOD)
    )
    return settings, requests + flood


def _draw_faults(rng: random.Random, settings: Settings, num_requests: int) -> tuple[Fault, ...]:
    kinds = [kind for kind in _MIXED if rng.random() < 0.35] or ["cancel"]
    span_s = rng.choice((0.1, 0.4, 1.0))
    is_patient = rng.random() < 0.08
    faults = []
    for _ in range(rng.choice((0, 1, 2, 4, 8, 12))):
        kind = rng.choice(kinds)
        targets = [EXECUTOR, EXECUTOR, *range(FIRST_GATEWAY, FIRST_GATEWAY + settings.num_gateways)]
        if kind in {"crash", "stall"}:
            targets.append(SCHEDULER)
        target = EXECUTOR if kind in STEP_FAULTS or kind in {"rival", "supplant"} else rng.choice(targets)
        durations = (*_SHORT_S, *_LONG_S, *_VERY_LONG_S) if is_patient else (*_SHORT_S, *_SHORT_S, *_LONG_S)
        count = rng.choice((1, 1, 2, 3))
        if kind == "memory":
            count = rng.choice((2, 5, 12))
        elif kind in {"cancel", "pin", "unpin"}:
            count = rng.randrange(num_requests)
        faults.append(
            Fault(
                at=round(rng.random() * span_s, 4),
                kind=kind,
                target=target,
                direction=rng.choice((UP, DOWN, BOTH)) if kind in LINK_FAULTS else rng.choice((UP, DOWN)),
                seconds=round(rng.choice(durations) * (0.5 + rng.random()), 4),
                count=count,
                place=round(rng.random(), 4),
            )
        )
    return tuple(sorted(faults, key=lambda fault: fault.at))
