"""Executors with roles: whatever changes under load, every stream brings the undisturbed tokens and no block is lost."""

from collections import Counter
from typing import Any

import msgspec
import pytest

from headway_proto.sampling import SamplingParams
from headway_scheduler.cells.cell import Cell
from headway_scheduler.core.choosing.policies import POLICIES, PlacementSettings
from headway_scheduler.core.choosing.roles import Role, roles_of
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.flight.records import Adopted, LeaseReturned, LetLeave
from simulation.recorded_cells import RecordedCells
from simulation.sharing_executors import HostPools
from simulation.test_cells import finish, undisturbed_until
from simulation.test_nothing_is_lost import CONFIG, LIMITS, submit_some
from simulation.test_recorded_cells import check
from simulation.world import Trouble, World

SEEDS = range(4)
ROOMY = msgspec.structs.replace(CONFIG, num_kv_blocks=400)
SPLIT = "prefill,decode"


class RoleWorld(World):
    """Executors of one host with roles, whose host pools outlive them."""

    def __init__(
        self,
        roles: str,
        policy: str = "disaggregated",
        seed: int = 1,
        config: Any = CONFIG,
        row_s: float = 0.0,
        **limits: object,
    ) -> None:
        number = len(roles.split(","))
        self.pools = HostPools(row_s)
        super().__init__(
            msgspec.structs.replace(LIMITS, **limits),
            config,
            num_gateways=2,
            seed=seed,
            num_executors=number,
            placement=PlacementSettings(policy, roles_of(roles, number)),
            make_executor=self.pools.executor,
        )
        self.wait_for_executors(number)

    def wait_for_executors(self, number: int) -> None:
        self.run_until(lambda: len(self.engine.fleet.open_cells) == number, 20)

    def set_role(self, number: int, role: Role) -> None:
        self.engine.fleet.set_role(number, role)

    def core(self, number: int) -> Scheduler:
        core = self.engine.fleet.cells[number].core
        assert core is not None
        return core

    def finish(self) -> None:
        """All streams are as undisturbed ones, and no block is missing on any device or host."""
        finish(self)
        for cell in self.engine.fleet.open_cells:
            assert_host_is_free(cell)

    def until_handed_off(self, count: int) -> None:
        """Run until so many requests have left the executors that they started on."""
        self.run_until(lambda: self.engine.fleet.transit.num_moved >= count, 30)


def assert_host_is_free(cell: Cell) -> None:
    assert cell.core is not None
    books = cell.core.swapping.books
    assert books.num_leased == 0
    assert books.pool.num_free + books.pool.num_released == books.pool.num_blocks


@pytest.mark.parametrize("config", [CONFIG, ROOMY], ids=["tight", "roomy"])
@pytest.mark.parametrize("roles", [SPLIT, "prefill,prefill,decode", "prefill,decode,both"])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_policy_and_no_role_changes_a_token(policy: str, roles: str, config: Any) -> None:
    world = RoleWorld(roles, policy, config=config)
    submit_some(world, 60)
    world.finish()
    num_pulled = sum(core.counters.num_pulled_tokens for core in world.engine.fleet.cores)
    assert (num_pulled > 0) == (policy != "aggregated")


def test_prompts_are_computed_in_one_place_and_answers_in_another() -> None:
    world = RoleWorld(SPLIT, config=ROOMY)
    submit_some(world, 40)
    world.finish()
    first, second = world.core(0).counters, world.core(1).counters
    assert first.num_output_tokens <= 40, "the first token of each answer"
    assert second.num_output_tokens > 500
    assert second.num_prompt_tokens == 0 or second.num_pulled_tokens > 0
    assert not second.wasted_tokens
    assert world.engine.fleet.transit.num_moved == first.num_output_tokens - sum(
        sequence.submission.max_tokens == 1 for gateway in world.gateways for sequence in gateway.sequences
    )


@pytest.mark.parametrize("policy", ["disaggregated", "hybrid"])
@pytest.mark.parametrize("seed", SEEDS)
def test_roles_are_changed_under_load(seed: int, policy: str) -> None:
    world = RoleWorld("prefill,decode,both", policy, seed)
    submit_some(world, 40)
    changes = [(0, Role.BOTH), (1, Role.PREFILL), (0, Role.DECODE), (2, Role.PREFILL), (1, Role.BOTH), (2, Role.DECODE)]
    for place, (number, role) in enumerate(changes):
        undisturbed_until(world, 60 * (place + 1))
        world.set_role(number, role)
        submit_some(world, 5)
    world.finish()


def test_who_decodes_on_an_executor_that_is_for_prompts_from_now_on_leaves_with_its_blocks() -> None:
    world = RoleWorld("both,both", config=ROOMY)
    submit_some(world, 20)
    undisturbed_until(world, 60)
    running = world.core(0).num_running
    assert running > 3
    world.set_role(0, Role.PREFILL)
    world.run_until(lambda: world.core(0).num_running == 0, 1)
    assert world.core(0).counters.num_exported_blocks > 0
    assert not world.core(0).counters.wasted_tokens, "nothing is computed a second time"
    submit_some(world, 5)
    world.finish()
    assert world.core(1).counters.num_pulled_tokens > 0


def test_a_prompt_under_way_leaves_behind_its_end_if_the_role_changes_meanwhile() -> None:
    world = RoleWorld("both,both", config=ROOMY, max_num_batched_tokens=8)
    submit_some(world, 12)
    world.run_until(lambda: len(world.core(0).prefilling) > 0, 1)
    world.set_role(0, Role.PREFILL)
    world.run_until(lambda: longest_answer_in(world.core(0)) <= 3, 0.05)
    for _ in range(200):
        world.beat()
        assert longest_answer_in(world.core(0)) <= 3
    world.finish()


def longest_answer_in(core: Scheduler) -> int:
    running = [request for request in core.requests() if request.row >= 0]
    return max((core.num_tokens_of(one) - one.new.num_prompt_tokens for one in running), default=0)


def test_prompts_that_wait_where_none_are_wanted_any_more_go_back_to_the_queue() -> None:
    world = RoleWorld("both,both", config=ROOMY, max_num_batched_tokens=8)
    submit_some(world, 12)
    world.run_until(lambda: world.core(0).num_waiting > 0, 1)
    world.set_role(0, Role.DECODE)
    assert world.core(0).num_waiting == 0
    world.run_until(lambda: not len(world.core(0).prefilling), 5)
    started = world.core(0).counters.num_prompt_tokens
    submit_some(world, 12)
    world.finish()
    assert world.core(0).counters.num_prompt_tokens == started


@pytest.mark.parametrize("victim", [0, 1], ids=["prefill", "decode"])
@pytest.mark.parametrize("num_moved", [1, 6, 15])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_only_executor_of_a_role_is_lost_while_requests_are_handed_off(
    seed: int, num_moved: int, victim: int
) -> None:
    world = RoleWorld(SPLIT, seed=seed)
    submit_some(world, 40)
    world.until_handed_off(num_moved)
    world.kill_executor(victim)
    world.wait_for_executors(1)
    submit_some(world, 5)
    if seed % 2:
        undisturbed_until(world, 300)
        world.start_executor(victim)
        submit_some(world, 10)
    world.finish()


def test_whose_role_nobody_has_any_more_goes_on_where_it_can_until_the_role_is_back() -> None:
    world = RoleWorld(SPLIT, config=ROOMY)
    submit_some(world, 30)
    world.until_handed_off(5)
    world.kill_executor(1)
    world.wait_for_executors(1)
    submit_some(world, 5)
    before = world.core(0).counters.num_output_tokens
    undisturbed_until(world, 300)
    assert world.core(0).counters.num_output_tokens > before + 100, "it decodes all by itself"
    world.start_executor(1)
    world.wait_for_executors(2)
    moved = world.engine.fleet.transit.num_moved
    submit_some(world, 20)
    world.until_handed_off(moved + 5)
    world.finish()


@pytest.mark.parametrize("both", [False, True])
def test_an_executor_that_begins_anew_while_its_blocks_are_wanted(*, both: bool) -> None:
    world = RoleWorld(SPLIT, config=ROOMY)
    submit_some(world, 40)
    world.until_handed_off(5)
    world.start_executor(0)
    if both:
        world.start_executor(1)
    world.finish()


@pytest.mark.parametrize("seed", SEEDS)
def test_pulls_that_find_nothing_are_computed_again(seed: int) -> None:
    world = RoleWorld(SPLIT, seed=seed)
    submit_some(world, 40)
    world.until_handed_off(4)
    world.pools.are_readable = False
    world.until_handed_off(20)
    world.pools.are_readable = True
    world.finish()
    num_stale = world.core(1).counters.num_stale_pulls
    assert 0 < num_stale <= 40, "nobody loses its blocks twice"
    assert world.pools.num_pulled_blocks > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_drained_executor_hands_its_blocks_on(seed: int) -> None:
    world = RoleWorld("prefill,decode,decode", seed=seed, config=ROOMY)
    submit_some(world, 40)
    undisturbed_until(world, 150)
    drained, other = world.core(1), world.core(2)
    assert drained.num_running > 2
    wasted, pulled = Counter(drained.counters.wasted_tokens), other.counters.num_pulled_tokens
    exported = drained.counters.num_exported_blocks
    world.engine.fleet.drain_cell(1, is_draining=True)
    world.run_until(lambda: not drained.num_unfinished, 1)
    assert drained.counters.num_exported_blocks > exported
    undisturbed_until(world, 400)
    assert other.counters.num_pulled_tokens > pulled
    assert Counter(drained.counters.wasted_tokens) == wasted, "nothing is computed a second time"
    world.engine.fleet.drain_cell(1, is_draining=False)
    submit_some(world, 10)
    world.finish()


def test_nobody_goes_on_with_what_an_executor_in_another_state_wrote() -> None:
    """Nor with what others have computed from it: 2 decodes what 1 decoded until it was drained."""
    pools = HostPools()
    placement = PlacementSettings("disaggregated", (Role.PREFILL, Role.DECODE, Role.DECODE, Role.DECODE))
    world = RecordedCells(4, seed=1, beats=25, placement=placement, make_executor=pools.executor)
    fleet = world.engine.fleet
    fleet.drain_cell(2, is_draining=True)
    fleet.drain_cell(3, is_draining=True)
    submit_some(world, 40)
    world.run_until(lambda: fleet.transit.num_moved >= 10, 30)
    fleet.drain_cell(2, is_draining=False)
    fleet.drain_cell(1, is_draining=True)
    cores = fleet.cores
    epochs = [core.epoch for core in cores]
    world.run_until(lambda: cores[2].swapping.books.sources >= {*epochs[:2]}, 30)
    executor = world.executors[0]
    assert executor is not None
    executor.state.digest = lambda: -1  # type: ignore[method-assign]
    world.run_until(lambda: cores[0].epoch != epochs[0], 30)
    del executor.state.digest
    assert [core.epoch != epoch for core, epoch in zip(cores, epochs, strict=True)] == [True, True, True, False]
    waiting = [*fleet.placement.requests(), *(request for core in cores for request in core.requests())]
    assert waiting
    assert not any(request.stored for request in waiting)
    assert not any(core.swapping.books.sources for core in cores)
    check(world)


def test_the_only_executor_that_decodes_is_drained() -> None:
    world = RoleWorld(SPLIT, config=ROOMY)
    submit_some(world, 30)
    world.until_handed_off(10)
    drained = world.core(1)
    world.engine.fleet.drain_cell(1, is_draining=True)
    world.run_until(lambda: not drained.num_unfinished, 1)
    submit_some(world, 5)
    world.finish()


def test_who_misses_its_gaps_moves_with_its_blocks_to_an_executor_with_slack_and_stays_there() -> None:
    options = dict(CONFIG.options) | {"context_length": "512"}
    config = msgspec.structs.replace(ROOMY, num_kv_blocks=2000, max_model_len=512, options=options)
    world = RoleWorld("both,both", "hybrid", config=config, row_s=0.002, default_itl_slo_ms=13)
    world.kill_executor(1)
    world.wait_for_executors(1)
    for number in range(10):
        world.gateways[0].submit(f"r{number}", [number] * 8, 400, SamplingParams())
    undisturbed_until(world, 20)
    world.start_executor(1)
    world.run_until(lambda: world.core(0).num_running <= 6, 6)
    settled = world.now + 1.0
    world.run_until(lambda: world.now >= settled, 2)
    num_moved = world.engine.fleet.transit.num_moved
    assert 4 <= num_moved <= 6
    assert world.core(1).counters.num_pulled_tokens > 0
    assert not world.core(0).counters.wasted_tokens, "nothing is computed a second time"
    world.finish()
    assert world.engine.fleet.transit.num_moved == num_moved, "nobody goes back and forth"


@pytest.mark.parametrize("policy", ["disaggregated", "hybrid"])
def test_requests_are_cancelled_wherever_they_are_handed_off(policy: str) -> None:
    world = RoleWorld(SPLIT, policy)
    submit_some(world, 40)
    for count in range(1, 9):
        world.until_handed_off(count)
        gateway = world.gateways[count % 2]
        live = [one for one in gateway.sequences if one.end is None and one not in gateway.aborted]
        gateway.link.abort(live[:1])
        gateway.aborted += live[:1]
    world.finish()


@pytest.mark.parametrize("seed", SEEDS)
def test_bad_wires(seed: int) -> None:
    world = RoleWorld("prefill,decode,decode", seed=seed)
    world.trouble = Trouble(drop=0.01, duplicate=0.01, corrupt=0.01, delay=0.05)
    submit_some(world, 40)
    world.run_until(lambda: world.num_troubled > 100, 60)
    world.trouble = Trouble()
    world.finish()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_scheduler_that_restarts_knows_nothing_of_what_was_stored(seed: int) -> None:
    world = RoleWorld(SPLIT, seed=seed)
    submit_some(world, 30)
    world.until_handed_off(8)
    world.set_role(1, Role.BOTH)
    world.start_scheduler()
    world.finish()
    assert [cell.role for cell in world.engine.fleet.cells] == [Role.PREFILL, Role.DECODE]


@pytest.mark.parametrize(
    ("victim", "policy"),
    [
        (0, "disaggregated"),
        (1, "hybrid"),
        *(
            pytest.param(*case, marks=pytest.mark.deep)
            for case in ((None, "disaggregated"), (None, "hybrid"), (0, "hybrid"), (1, "disaggregated"))
        ),
    ],
)
def test_what_executors_with_roles_did_replays_to_the_byte(victim: int | None, policy: str) -> None:
    pools = HostPools()
    placement = PlacementSettings(policy, (Role.PREFILL, Role.DECODE, Role.BOTH))
    world = RecordedCells(3, seed=6, beats=25, placement=placement, make_executor=pools.executor)
    submit_some(world, 50)
    undisturbed_until(world, 150)
    if victim is not None:
        world.kill_executor(victim)
        world.run_until(lambda: len(world.engine.fleet.open_cells) == 2, 20)
    world.engine.fleet.set_role(2, Role.PREFILL)
    submit_some(world, 10)
    undisturbed_until(world, 400)
    world.engine.fleet.set_role(2, Role.DECODE)
    if victim is not None:
        world.start_executor(victim)
    submit_some(world, 10)
    check(world)
    kinds = Counter(type(record) for record in world.log.records)
    assert kinds[LetLeave] > 0
    assert kinds[LeaseReturned] > 0
    assert any(isinstance(record, Adopted) and record.is_leaving for record in world.log.records)
