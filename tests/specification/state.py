"""Who waits, who runs, what is in flight, and the step that is being made. Must not know: any decision."""

from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from specification.pool import SpecPool
from specification.requests import SpecRequest, SpecStep
from specification_of_learning import SpecifiedLengths


class SpecDraft:
    """A step that is being made."""

    def __init__(self) -> None:
        self.short = False
        """Blocks have run out."""
        self.promised = 0
        self.tokens: dict[int, int] = {}  # row -> tokens in this step
        self.new_blocks: list[tuple[int, int]] = []
        self.new_requests: list[dict[str, object]] = []
        self.new_adapters: list[tuple[int, str]] = []
        self.new_pooled: list[tuple[int, int]] = []
        self.may_run: list[SpecRequest] = []
        self.num_chosen = 0
        self.most_tokens = 0
        self.held_back: list[SpecRequest] = []
        self.speculating: dict[int, int] = {}
        self.is_prompt_due = False
        self.start_of_step = 0.0


class SpecState:
    """Who waits, who runs, what is in flight; and the step that is being made."""

    def __init__(self, limits: SchedulerLimits, capacity: ExecutorCapacity) -> None:
        self.limits = limits
        self.capacity = capacity
        self.pool = SpecPool(capacity.num_blocks, capacity.block_size)
        self.waiting: list[SpecRequest] = []
        self.running: list[SpecRequest] = []
        self.in_flight: list[SpecStep] = []
        self.finished_rows: list[int] = []
        self.step = 0
        self.now = 0.0
        self.lane = 0
        self.batch_is_closed = False
        """static: somebody has decoded since the last time that nothing ran."""
        self.num_decode_only_steps = 0
        self.num_preemptions = 0
        self.num_hit_tokens = 0
        self.lengths = SpecifiedLengths()
        """What is to be expected of an output."""
        self.draft = SpecDraft()

    def begin_step(self) -> None:
        self.running.sort(key=lambda request: request.key)
        self.draft = SpecDraft()

    @property
    def ranks_classes(self) -> bool:
        return self.limits.order in {"priority", "class_deadline"}

    @property
    def max_batch(self) -> int:
        return min(self.limits.max_num_seqs, self.capacity.most_batched_tokens(self.limits.max_num_batched_tokens))

    @property
    def max_in_flight(self) -> int:
        return self.limits.max_steps_in_flight or self.capacity.num_lanes + 1

    @property
    def has_lanes(self) -> bool:
        return self.capacity.num_lanes > 1

    @property
    def protects_gaps(self) -> bool:
        return self.limits.protect_itl and any(r.itl_slo_s for r in self.running)

    @property
    def predicts(self) -> bool:
        return self.limits.order == "shortest" or self.reserve == "predicted"

    @property
    def reserve(self) -> str:
        if self.limits.reserve != "auto":
            return self.limits.reserve
        return {"static": "full", "orca": "full", "split_fuse": "none"}.get(self.limits.batching, "prompt")

    @property
    def max_running(self) -> int:
        if self.limits.batching == "orca":
            num_batches = self.capacity.num_lanes if self.has_lanes else self.max_in_flight
            return min(self.max_batch * num_batches, self.capacity.max_num_rows)
        most_tokens = self.capacity.most_batched_tokens(self.limits.max_num_batched_tokens)
        return min(self.limits.max_num_seqs, most_tokens * self.capacity.num_lanes, self.capacity.max_num_rows)

    def is_in_flight(self, request: SpecRequest) -> bool:
        return any(ran is request and stay == request.stay for step in self.in_flight for ran, stay, *_ in step.ran)

    def is_planned(self, request: SpecRequest) -> bool:
        """Whether part of its prompt is in this step."""
        return request.computed < request.prompt_end and request.row in self.draft.tokens

    def budget(self) -> int:
        return self.draft.most_tokens - sum(self.draft.tokens.values())
