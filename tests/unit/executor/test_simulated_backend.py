"""The simulated backend: its tokens, its watch over the cache, its time and its failures."""

import json
import time

import numpy as np
import pytest

from backend_driver import BackendDriver, Request
from headway_executor.backend import (
    BackendConfig,
    BackendConfigError,
    ExecutorBackend,
    ModelFilesError,
    StepOutOfMemoryError,
)
from headway_executor.backends.simulated import SimulatedBackend
from headway_executor.batch.batch_state import BatchState
from headway_executor.simulated.pool import CacheMismatch
from headway_executor.startup.registry import backend_names, create_backend
from headway_proto.columns import encode_column
from headway_proto.sampling import SamplingParams
from headway_proto.step import ERRORED_ROW, NewRequest, SchedulerOutput
from step_columns import NO_PAIRS, encoded_pairs

GREEDY = SamplingParams(temperature=0)
BLOCK_SIZE = 4


class Driver:
    """A backend behind a real ``BatchState``, driven by diffs."""

    def __init__(self, *, num_rows: int = 8, seed: int = 0, **options) -> None:
        self.backend = SimulatedBackend()
        self.info = self.backend.open(
            BackendConfig(
                model="",
                block_size=BLOCK_SIZE,
                num_kv_blocks=64,
                max_model_len=64,
                max_num_seqs=num_rows,
                seed=seed,
                options={name: str(value).lower() for name, value in options.items()},
            )
        )
        self.state = BatchState(self.info)
        self.step = 0

    def run(self, *new, finish=(), scheduled=(), blocks=(), total=None, **columns):
        """One step; ``scheduled`` lists (row, n), every other row runs one token."""

        listed = dict(scheduled)
        live = {*self.state.live_rows.tolist(), *(request.row for request in new)} - set(finish)
        output = SchedulerOutput(
            epoch=1,
            step=self.step,
            scheduled_new_reqs=new,
            finished_rows=encode_column(list(finish)),
            new_blocks=encoded_pairs(blocks),
            num_scheduled_tokens=encoded_pairs(list(listed.items())),
            total_num_scheduled_tokens=sum(listed.get(row, 1) for row in live),
            **{name: encoded_pairs(values) for name, values in columns.items()},
        )
        self.step += 1
        batch, moves = self.state.apply(output)
        if moves is not None:
            self.backend.move_blocks(copies=moves.copies, swap_out=moves.swap_out, swap_in=moves.swap_in)
        return self.backend.execute(batch)


def request(row, tokens, blocks, *, computed=0, sampling=GREEDY, num_prompt=None) -> NewRequest:
    return NewRequest(
        row=row,
        token_ids=encode_column(tokens),
        num_prompt_tokens=num_prompt or len(tokens),
        block_ids=encode_column(blocks),
        num_computed_tokens=computed,
        sampling=sampling,
    )


def generate(driver: Driver, row: int, count: int) -> list[int]:
    return [int(driver.run().sampled_token_ids[row]) for _ in range(count)]


PROMPT = list(range(100, 110))


def test_it_is_a_backend_and_registered():
    assert "simulated" in backend_names()
    assert isinstance(create_backend("simulated"), ExecutorBackend)


def test_an_unknown_backend_lists_those_that_exist():
    with pytest.raises(BackendConfigError, match=r"backend: 'no-such' is not allowed; allowed: .*simulated.*torch"):
        create_backend("no-such")


def test_tokens_are_a_function_of_the_history():
    driver = Driver()
    first = driver.run(request(0, PROMPT, range(8)), scheduled=[(0, 10)]).sampled_token_ids.tolist()
    tokens = first + generate(driver, 0, 9)
    assert tokens == driver.backend.token_hash.continuation(PROMPT, 10, GREEDY)
    assert len(set(tokens)) > 8
    assert all(0 <= token < driver.info.vocab_size for token in tokens)


def test_chunks_and_resumption_do_not_change_the_tokens():
    driver = Driver()
    driver.run(request(0, PROMPT, range(8)), scheduled=[(0, 3)])
    driver.run(scheduled=[(0, 6)])
    tokens = generate(driver, 0, 4)
    resumed = Driver()
    history = PROMPT + tokens
    resumed.run(request(5, history, range(20, 28), num_prompt=10), scheduled=[(5, len(history))])
    later = [int(resumed.run().sampled_token_ids[0]) for _ in range(3)]
    expected = driver.backend.token_hash.continuation(PROMPT, 8, GREEDY)
    assert tokens == expected[:4]
    assert later == expected[5:8]


@pytest.mark.parametrize("change", ["swap", "shift", "token", "model"])
def test_any_error_in_the_history_changes_the_next_token(change):
    history = list(PROMPT)
    seed = 0
    if change == "swap":
        history[3], history[4] = history[4], history[3]
    elif change == "shift":
        history = history[1:]
    elif change == "token":
        history[0] += 1
    else:
        seed = 1
    changed = Driver(seed=seed).backend.token_hash.continuation(history, 5, GREEDY)
    assert changed != Driver().backend.token_hash.continuation(PROMPT, 5, GREEDY)


def test_the_request_seed_counts_above_temperature_0_only():
    token_hash = Driver().backend.token_hash

    def tokens(temperature: float, seed: int) -> list[int]:
        return token_hash.continuation(PROMPT, 5, SamplingParams(temperature=temperature, seed=seed))

    assert tokens(0, 1) == tokens(0, 2)
    assert tokens(1, 1) != tokens(1, 2)
    assert tokens(1, 1) == tokens(1, 1)


def test_end_of_sequence_comes_as_often_as_asked():
    prefixes = np.arange(20_000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    salts = np.zeros_like(prefixes)
    never = Driver(vocab_size=10, eos_token_id=3).backend.token_hash.next_tokens(prefixes, salts)
    counts = np.bincount(never, minlength=10)
    assert counts[3] == 0
    assert counts[np.arange(10) != 3].min() > 2000
    often = Driver(vocab_size=10, eos_token_id=3, eos_probability=0.25).backend.token_hash.next_tokens(prefixes, salts)
    assert np.mean(often == 3) == pytest.approx(0.25, abs=0.02)


def test_min_tokens_holds_back_stop_tokens():
    sampling = SamplingParams(temperature=0, min_tokens=6, stop_token_ids=(1, 2, 3))
    driver = Driver(vocab_size=5, eos_token_id=1, eos_probability=0.5)
    prompt = [0, 1, 2]
    tokens = driver.run(request(0, prompt, range(12), sampling=sampling), scheduled=[(0, 3)]).sampled_token_ids.tolist()
    tokens += generate(driver, 0, 20)
    assert not {1, 2, 3} & set(tokens[:6])
    assert {1, 2, 3} & set(tokens[6:])
    assert tokens == driver.backend.token_hash.continuation(prompt, 21, sampling)


@pytest.mark.parametrize("left", [(), (1,)])
def test_a_row_that_can_draw_nothing_fails_alone(left):
    """Also where what is left is the end of sequence, which is never drawn unless its probability says so."""
    stops = tuple(token for token in range(5) if token not in left)
    sampling = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=stops)
    driver = Driver(vocab_size=5, eos_token_id=1)
    prompt = [0, 1, 2]
    rows = [request(0, prompt, range(8)), request(1, prompt, range(8, 16), sampling=sampling)]
    result = driver.run(*rows, scheduled=[(0, 3), (1, 3)])
    assert result.sampled_token_ids.tolist() == [
        *driver.backend.token_hash.continuation(prompt, 1, GREEDY),
        ERRORED_ROW,
    ]
    assert [(error.row, error.message) for error in result.errors] == [(1, "simulated: every token is excluded")]
    drawn = Driver(vocab_size=5, eos_token_id=1, eos_probability=1).run(rows[1], scheduled=[(1, 3)])
    assert drawn.sampled_token_ids.tolist() == [1 if left else ERRORED_ROW]


def test_logprobs_are_deterministic_and_well_formed():
    def first_step():
        driver = Driver()
        rows = [
            request(0, PROMPT, range(8), sampling=SamplingParams(logprobs=0)),
            request(1, PROMPT, range(8, 16)),
            request(2, PROMPT, range(16, 24), sampling=SamplingParams(logprobs=3)),
        ]
        return driver.run(*rows, scheduled=[(row, 10) for row in range(3)])

    result = first_step()
    assert [(entry.row, len(entry.top_token_ids)) for entry in result.logprobs] == [(0, 0), (2, 3)]
    alternatives = result.logprobs[1]
    assert alternatives.top_token_ids[0] == result.sampled_token_ids[2]
    assert 0 >= alternatives.top_logprobs[0] > alternatives.top_logprobs[1] > alternatives.top_logprobs[2]
    assert first_step().logprobs == result.logprobs


def test_a_shared_prefix_is_accepted():
    driver = Driver()
    driver.run(request(0, PROMPT, [0, 1, 2, 3]), scheduled=[(0, 10)])
    other = request(1, [*PROMPT[:8], 7, 7], [0, 1, 10, 11], computed=8)
    driver.run(other, scheduled=[(1, 2)])
    driver.run()


def test_a_prefix_written_in_the_same_step_is_accepted():
    driver = Driver()
    driver.run(
        request(0, PROMPT, [0, 1, 2, 3]),
        request(1, [*PROMPT[:8], 7, 7], [0, 1, 10, 11], computed=8),
        scheduled=[(0, 10), (1, 2)],
    )


def test_a_wrong_prefix_hit_is_found():
    driver = Driver()
    driver.run(request(0, PROMPT, [0, 1, 2, 3]), scheduled=[(0, 10)])
    other = request(1, [1, *PROMPT[1:8], 7, 7], [0, 1, 10, 11], computed=8)
    with pytest.raises(CacheMismatch, match="row 1: block 0, number 0 of its table, does not hold its tokens 0 to 3"):
        driver.run(other, scheduled=[(1, 2)])


def test_a_hit_on_a_block_never_written_is_found():
    with pytest.raises(CacheMismatch, match="row 0: block 0"):
        Driver().run(request(0, PROMPT, [0, 1, 2, 3], computed=8), scheduled=[(0, 2)])


@pytest.mark.parametrize("stolen", [0, 1, 2])
def test_a_block_that_is_used_again_too_early_is_found(stolen):
    """Block 2 is half full when row 0 goes on; the thief writes a single token to it."""
    driver = Driver()
    driver.run(request(0, PROMPT, [0, 1, 2, 3]), scheduled=[(0, 10)])
    driver.run(request(1, [5], [stolen]), scheduled=[(0, 0), (1, 1)])
    with pytest.raises(CacheMismatch, match=f"row 0: block {stolen}"):
        driver.run(scheduled=[(1, 0)])


def test_verification_can_be_turned_off():
    driver = Driver(verify_kv=False)
    driver.run(request(0, PROMPT, [0, 1, 2, 3], computed=8), scheduled=[(0, 2)])


def test_copied_and_swapped_blocks_keep_their_contents():
    driver = Driver()
    driver.run(request(0, PROMPT, [0, 1, 2, 3]), scheduled=[(0, 10)])
    driver.run(swap_out=[(0, 60), (1, 61), (2, 62)], finish=[0])
    driver.run(request(1, [9] * 12, [0, 1, 2]), scheduled=[(1, 12)])
    history = [*PROMPT, *driver.backend.token_hash.continuation(PROMPT, 1, GREEDY)]
    back = request(2, history, [20, 21, 22], computed=10, num_prompt=10)
    driver.run(back, swap_in=[(60, 30), (61, 21), (62, 22)], block_copies=[(30, 20)], finish=[1])


def test_swapping_in_what_was_never_out_is_found():
    nothing, back = NO_PAIRS, np.array([[5], [1]], dtype=np.int32)
    with pytest.raises(CacheMismatch, match="host block 5"):
        Driver().backend.move_blocks(copies=nothing, swap_out=nothing, swap_in=back)


@pytest.mark.parametrize("wrong", ["overwritten", "exchanged"])
def test_a_host_block_that_holds_something_else_is_found(wrong):
    driver = Driver()
    driver.run(request(0, PROMPT, [0, 1, 2, 3]), scheduled=[(0, 10)])
    driver.run(request(1, [9] * 5, [8, 9]), finish=[0], swap_out=[(0, 5), (1, 6), (2, 7)], scheduled=[(1, 5)])
    if wrong == "overwritten":
        driver.run(swap_out=[(8, 6)])
    order = [6, 5, 7] if wrong == "exchanged" else [5, 6, 7]
    history = [*PROMPT, *driver.backend.token_hash.continuation(PROMPT, 1, GREEDY)]
    with pytest.raises(CacheMismatch, match="row 0: block"):
        driver.run(request(0, history, [0, 1, 2, 3], computed=10), swap_in=list(zip(order, [0, 1, 2], strict=True)))


@pytest.mark.parametrize("steps_before", [1, 2, 6])
def test_a_swapped_request_goes_on_as_if_nothing_had_happened(steps_before):
    """Others take its blocks in the very step that swaps it out, and leave theirs as it comes back."""
    backend = SimulatedBackend()
    info = backend.open(BackendConfig(model="", block_size=4, num_kv_blocks=24, max_model_len=64, max_num_seqs=3))
    driver = BackendDriver(backend, info)
    victim, thief = Request(PROMPT * 2, 16), Request([7] * 30, 16)
    running = driver.step([driver._admit(victim)], [victim], budget=12)
    for _ in range(steps_before - 1):
        running = driver.step(running, [], budget=12)
    for _ in range(2):
        driver.swap_out(victim)
        running = driver.step([driver._admit(thief)], [thief], budget=64)
        running = driver.step(running, [], budget=64)
        driver.swap_out(thief)
        running = driver.step([driver.swap_in(victim)], [victim], budget=12)
        running = driver.step(running, [], budget=12)
        driver.drop(thief)
        thief = Request([8] * 40, 16)
    while running:
        running = driver.step(running, [], budget=12)
    assert victim.output == backend.token_hash.continuation(victim.prompt, 16, GREEDY)


def test_the_time_of_a_swap_is_waited_for_and_reported():
    driver = Driver(swap_us_per_block=2500, step_base_us=100)
    assert driver.info.swap_us_per_block == 2500
    result = driver.run(request(0, PROMPT, [0, 1, 2, 3]), scheduled=[(0, 10)])
    assert (result.device_time_us, result.move_time_us) == (100, 0)
    started = time.perf_counter()
    result = driver.run(swap_out=[(0, 5), (1, 6)], swap_in=[(5, 20)], block_copies=[(1, 30)])
    assert time.perf_counter() - started >= 0.0075
    assert (result.device_time_us, result.move_time_us) == (100, 7500)
    assert driver.run().move_time_us == 0
    virtual = Driver(swap_us_per_block=60_000_000, real_time=False)
    started = time.perf_counter()
    assert virtual.run(swap_out=[(0, 5)]).move_time_us == 60_000_000
    assert time.perf_counter() - started < 30


def test_swap_space_is_as_many_blocks_as_the_pool_has_or_what_was_asked_for():
    assert open_with(num_kv_blocks=300).num_host_blocks == 300
    asked = open_with(swap_space_mib=256, block_size=16)
    assert (asked.num_host_blocks, asked.swap_us_per_block) == (128, pytest.approx(84, abs=1))
    none = open_with(swap_space_mib=0)
    assert (none.num_host_blocks, none.swap_us_per_block) == (0, 0.0)


def test_the_time_model_is_waited_for_and_reported():
    driver = Driver(step_base_us=3000, per_token_us=100, per_seq_us=50, per_context_token_us=1)
    started = time.perf_counter()
    result = driver.run(request(0, PROMPT, range(8)), request(1, PROMPT, range(8, 16)), scheduled=[(0, 10), (1, 5)])
    elapsed = time.perf_counter() - started
    assert result.device_time_us == 3000 + 100 * 15 + 50 * 2 + 15
    assert elapsed >= 0.0046
    started = time.perf_counter()
    driver = Driver(step_base_us=60_000_000, real_time=False)
    assert driver.run(request(0, PROMPT, range(8)), scheduled=[(0, 10)]).device_time_us == 60_000_000
    assert time.perf_counter() - started < 30


def test_injected_nan_fails_one_row():
    driver = Driver(nan_row_token=42)
    result = driver.run(
        request(0, PROMPT, range(8)),
        request(1, [1, 42], range(8, 16)),
        request(2, PROMPT, range(16, 24)),
        scheduled=[(0, 10), (1, 2), (2, 10)],
    )
    assert [error.row for error in result.errors] == [1]
    expected = driver.backend.token_hash.continuation(PROMPT, 1, GREEDY)[0]
    assert result.sampled_token_ids.tolist() == [expected, ERRORED_ROW, expected]


def test_injected_out_of_memory_fails_the_step():
    driver = Driver(oom_over_tokens=9)
    with pytest.raises(StepOutOfMemoryError, match="10 tokens: simulated, over 9"):
        driver.run(request(0, PROMPT, range(8)), scheduled=[(0, 10)])


def open_with(model="", **settings):
    options = settings.pop("options", {})
    return SimulatedBackend().open(BackendConfig(model=model, options=options, **settings))


def write_config(directory, **config):
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def test_a_checkpoint_directory_describes_the_model(tmp_path):
    model = write_config(tmp_path, vocab_size=77, max_position_embeddings=128, eos_token_id=[9, 5], hidden_size=3)
    info = open_with(model)
    assert (info.vocab_size, info.max_model_len, info.eos_token_ids) == (77, 128, (5, 9))
    assert info.model_name == tmp_path.name
    assert open_with(model, max_model_len=64).max_model_len == 64


def test_a_checkpoint_of_several_models_is_its_text(tmp_path):
    text = {"vocab_size": 77, "max_position_embeddings": 128}
    info = open_with(write_config(tmp_path, vocab_size=9, eos_token_id=5, text_config=text))
    assert (info.vocab_size, info.max_model_len, info.eos_token_ids) == (77, 128, (5,))


def test_what_a_file_leaves_out_is_what_the_family_has(tmp_path):
    text = {"model_type": "gemma3_text", "sliding_window": 1024, "hidden_size": 2560}
    model = write_config(tmp_path, architectures=["Gemma3ForConditionalGeneration"], eos_token_id=1, text_config=text)
    info = open_with(model)
    assert (info.vocab_size, info.max_model_len, info.eos_token_ids) == (262_208, 131_072, (1,))
    with pytest.raises(ModelFilesError, match="missing required field `max_position_embeddings`"):
        open_with(write_config(tmp_path, architectures=["OtherForCausalLM"], vocab_size=9))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 5000}, "max_model_len 5000 is not allowed; allowed: 1 to the model's context, 4096, or 0"),
        (
            {"num_kv_blocks": 255},
            "num_kv_blocks 255 is not allowed; one request of max_model_len 4096 takes 256 blocks of 16 tokens, so allowed: 256",
        ),
        ({"options": {"speed": "1"}}, "backend_options: 'speed' is not known; allowed: vocab_size, "),
        ({"options": {"vocab_size": "many"}}, "backend_options: vocab_size='many' is not allowed; "),
        ({"options": {"vocab_size": "1"}}, "backend_options: vocab_size='1' is not allowed; "),
        ({"options": {"step_base_us": "-1"}}, "backend_options: step_base_us='-1' is not allowed; "),
        ({"options": {"swap_us_per_block": "-1"}}, "backend_options: swap_us_per_block='-1' is not allowed; "),
        (
            {"swap_space_mib": 1},
            "swap_space_mib: 1 is not allowed; one block takes 2097152 bytes, so allowed: 0 (no swapping), -1 (automatic), ",
        ),
        ({"options": {"verify_kv": "perhaps"}}, "backend_options: verify_kv='perhaps' is not allowed; "),
        ({"options": {"vocab_size": "9", "eos_token_id": "9"}}, "eos_token_id=9 is not allowed; allowed: 0 to 8"),
        (
            {"max_model_len": -1},
            "max_model_len -1 is not allowed; allowed: 1 to the model's context, 4096, or 0 for all of it",
        ),
        ({"block_size": 0}, "block_size: 0 is not allowed; allowed: 1 or more"),
        ({"max_num_seqs": 0}, "max_num_seqs: 0 is not allowed; allowed: 1 or more"),
    ],
)
def test_settings_that_cannot_be_honoured(settings, message):
    with pytest.raises(BackendConfigError) as refused:
        open_with(**settings)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "content",
    [None, "{", "[]", '{"vocab_size": "big"}', '{"vocab_size": 9, "max_position_embeddings": 9, "eos_token_id": 9}'],
)
def test_model_files_that_cannot_be_used(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelFilesError, match="model: "):
        open_with(str(tmp_path))


def test_a_step_of_256_rows_takes_well_under_a_millisecond():
    driver = Driver(num_rows=4)
    driver.backend = SimulatedBackend()
    rows = 256
    info = driver.backend.open(BackendConfig(model="", block_size=16, num_kv_blocks=16_384, max_num_seqs=rows))
    driver.state = BatchState(info)
    new = [request(row, range(row, row + 512), range(row * 64, row * 64 + 64)) for row in range(rows)]
    driver.run(*new, scheduled=[(row, 512) for row in range(rows)])
    times = []
    for _ in range(20):
        started = time.perf_counter()
        driver.run()
        times.append(time.perf_counter() - started)
    assert min(times) < 0.001
