"""The cost model against numbers worked out by hand, and the published figures that its constants come from."""

import msgspec
import numpy as np
import pytest

from headway_lab.simulate.hardware import ACCELERATORS
from headway_lab.simulate.model_shapes import MODEL_SHAPES
from headway_lab.simulate.roofline import Roofline

AT_PEAK = {
    "gemm_share": 1.0,
    "weights_share": 1.0,
    "memory_share": 1.0,
    "attention_share": 1.0,
    "link_share": 1.0,
    "overlap_exponent": 1000.0,
    "gemm_tile_tokens": 1,
    "attention_tile_queries": 1,
    "num_processors": 1,
    "all_reduce_latency_s": 0.0,
    "kernel_launch_s": 0.0,
    "step_overhead_s": 0.0,
}
"""What a device can do at best: no tiles, no idle processors, reading hidden wholly behind arithmetic."""


def roofline(hardware, model, tensor_parallel=1, pipeline_parallel=1, **changes):
    accelerator = msgspec.structs.replace(ACCELERATORS[hardware], **changes)
    return Roofline(accelerator, MODEL_SHAPES[model], tensor_parallel, pipeline_parallel)


def step_time(model, chunks, num_samples=None):
    """``chunks``: (tokens to run, tokens computed before) of each row."""
    scheduled, computed = np.array(chunks, dtype=np.int32).T
    return model.step_time(scheduled, computed, len(chunks) if num_samples is None else num_samples)


def core_s(time):
    """Of products and attention alone."""
    return time.linear_s + time.attention_s


@pytest.mark.parametrize(
    ("model", "num_parameters"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("llama-3-8b", 8_030_261_248),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-70b", 70_553_706_496),
    ],
)
def test_the_dimensions_give_the_published_number_of_parameters(model, num_parameters):
    assert MODEL_SHAPES[model].num_parameters == num_parameters


@pytest.mark.parametrize(
    ("model", "tensor_parallel", "kv_bytes"),
    [
        ("llama-2-7b", 1, 512 * 1024),
        ("llama-3-8b", 1, 128 * 1024),
        ("llama-3-70b", 4, 80 * 1024),
        ("llama-3-70b", 16, 40 * 1024),  # eight KV heads on sixteen devices: each holds a whole one
    ],
)
def test_kv_bytes_per_token(model, tensor_parallel, kv_bytes):
    assert MODEL_SHAPES[model].kv_bytes_per_token(tensor_parallel) == kv_bytes


def test_one_decode_reads_the_weights_once_and_its_cache():
    time = step_time(roofline("h200", "llama-3-8b", **AT_PEAK), [(1, 1023)])
    # 2 bytes x (32 x 218,103,808 of the layers + 128,256 x 4096 of the head) = 15,009,316,864 bytes.
    assert time.linear_s == pytest.approx(15_009_316_864 / 4.8e12)
    assert time.attention_s == pytest.approx(1024 * 131_072 / 4.8e12)
    assert time.all_reduce_s == time.fixed_s == 0.0
    assert core_s(time) == pytest.approx(3.155e-3, rel=1e-3)


def test_many_decodes_are_bound_by_arithmetic_in_the_products_and_by_memory_in_attention():
    model = roofline("h200", "llama-3-8b", **{**AT_PEAK, "gemm_share": 790 / 989.4})
    time = step_time(model, [(1, 1023)] * 256)
    assert time.linear_s == pytest.approx(256 * 2 * 7_504_658_432 / 790e12)
    assert time.attention_s == pytest.approx(256 * 1024 * 131_072 / 4.8e12)
    assert core_s(time) == pytest.approx(12.0e-3, rel=5e-3)


@pytest.mark.parametrize(("num_tokens", "tokens_per_s"), [(2048, 55e3), (8192, 49e3), (32_768, 35e3)])
def test_the_prefill_ceiling(num_tokens, tokens_per_s):
    share = 790 / 989.4
    model = roofline("h200", "llama-3-8b", **{**AT_PEAK, "gemm_share": share, "attention_share": share})
    assert num_tokens / core_s(step_time(model, [(num_tokens, 0)])) == pytest.approx(tokens_per_s, rel=0.03)


def test_a_chunk_attends_to_what_is_before_it_and_to_half_of_itself():
    model = roofline("h100", "llama-2-7b", **AT_PEAK)
    # 4 operations x 32 heads x 128 x 32 layers per pair; 512 queries over 1536 positions and over 512 x 513 / 2.
    pairs = 512 * 1536 + 512 * 513 / 2
    assert step_time(model, [(512, 1536)]).attention_s == pytest.approx(pairs * 524_288 / 989.4e12)


@pytest.mark.parametrize(
    ("num_tokens", "gigabytes_per_s"),
    [(64, 2668), (128, 2604)],
)
def test_the_published_rate_of_a_product_of_few_tokens(num_tokens, gigabytes_per_s):
    """DeepGEMM's 7168 x 16384 on an H800, which has an H100's memory and matrix units; FP8, so half of bf16's bytes.

    Its figure counts the weights, the inputs, and the outputs in bf16.
    """
    weights = 7168 * 16_384
    moved_bytes = weights + num_tokens * 16_384 + 2 * num_tokens * 7168
    large_tflops = 1358
    shape = msgspec.structs.replace(MODEL_SHAPES["llama-2-7b"], bytes_per_value=1)
    one_matrix = weights / (shape.num_layer_parameters + shape.num_head_parameters)
    model = Roofline(
        msgspec.structs.replace(ACCELERATORS["h100"], peak_flops=2 * 989.4e12, gemm_share=large_tflops / 1978.8),
        shape,
        1,
    )
    seconds = step_time(model, [(1, 0)] * num_tokens).linear_s * one_matrix
    assert moved_bytes / seconds / 1e9 == pytest.approx(gigabytes_per_s, rel=0.02)


def test_reading_and_arithmetic_do_not_wholly_hide_each_other():
    model = roofline("h100", "llama-3-8b")
    perfect = roofline("h100", "llama-3-8b", overlap_exponent=1000.0)
    share_lost = {
        num_tokens: step_time(model, [(1, 0)] * num_tokens).linear_s
        / step_time(perfect, [(1, 0)] * num_tokens).linear_s
        - 1
        for num_tokens in (1, 256, 8192)
    }
    assert share_lost[1] < 0.01
    assert 0.2 < share_lost[256] < 2 ** (1 / 2.5) - 1 + 1e-9
    assert share_lost[8192] < 0.01


def test_a_token_beyond_a_tile_costs_a_tile():
    """Sarathi-Serve, section 4.3: on A100 a chunk of 257 tokens takes about a third longer than one of 256."""
    model = roofline("a100-80g", "llama-3-8b")
    ratio = step_time(model, [(257, 0)], 1).linear_s / step_time(model, [(256, 0)], 1).linear_s
    assert 1.25 < ratio < 1.5
    assert step_time(model, [(300, 0)], 1).linear_s == step_time(model, [(384, 0)], 1).linear_s


def test_a_small_chunk_leaves_processors_idle():
    """16 heads of one tile on 132 processors: attention over as much takes 132 / 16 times as long as it might."""
    model = roofline("h100", "llama-3-70b", 4)
    whole, chunk = (step_time(model, [(size, 4096)], 0).attention_s / size for size in (8192, 128))
    pairs = (4096 + 128) / (4096 + 8193 / 2)
    assert chunk / whole == pytest.approx(132 / 16 * pairs, rel=1e-3)


def test_chunks_read_the_cache_again_and_again():
    """N^2 / 2C positions for a prompt of N in chunks of C, where reading is all there is."""
    model = roofline("h100", "llama-2-7b", **{**AT_PEAK, "peak_flops": 1e30})
    prompt, chunk = 64_000, 1000
    read_s = sum(step_time(model, [(chunk, start)], 0).attention_s for start in range(0, prompt, chunk))
    kv_token_s = 512 * 1024 / 3.35e12
    assert read_s / kv_token_s == pytest.approx(prompt**2 / (2 * chunk), rel=0.02)


def test_other_parts_of_a_step():
    model = roofline("h100", "llama-3-8b", **AT_PEAK)
    time = step_time(model, [(512, 0)], 1)
    # Per layer: 8 x 4096 of the hidden states, 3 x 14336 of the activation, (2 x 32 + 4 x 8) x 128 of the heads.
    assert time.elementwise_s == pytest.approx(512 * 32 * (32_768 + 43_008 + 12_288) * 2 / 3.35e12)
    assert time.sampling_s == pytest.approx(4 * 4 * 128_256 / 3.35e12)
    assert time.total_s == pytest.approx(
        time.linear_s + time.attention_s + time.elementwise_s + time.all_reduce_s + time.sampling_s
    )
    assert roofline("h100", "llama-3-8b").step_time(*[np.ones(1, np.int32)] * 2, 1).fixed_s == pytest.approx(
        320 * 2e-6 + 300e-6
    )


def test_blocks_go_over_a_link_of_each_devices_own():
    one, four = (roofline("h100", "llama-3-70b", count) for count in (1, 4))
    assert one.swap_time(100, 16, 50e9) == pytest.approx(100 * 16 * 327_680 / 50e9)
    assert four.swap_time(100, 16, 50e9) == pytest.approx(one.swap_time(100, 16, 50e9) / 4)


def test_devices_share_the_work_and_pay_for_adding_up():
    one = step_time(roofline("h100", "llama-3-70b", 1), [(1000, 7000)])
    four = step_time(roofline("h100", "llama-3-70b", 4), [(1000, 7000)])
    assert four.linear_s == pytest.approx(one.linear_s / 4)
    assert four.attention_s == pytest.approx(one.attention_s / 4, rel=0.15)  # fewer heads leave processors idle
    assert one.all_reduce_s == 0.0
    # 160 of them: 10 us, and 2 x 3/4 x 1000 x 8192 x 2 bytes at 0.8 x 450 GB/s.
    assert four.all_reduce_s == pytest.approx(160 * (10e-6 + 24_576_000 / 360e9))
    assert four.fixed_s == one.fixed_s == pytest.approx(80 * 10 * 2e-6 + 300e-6)


def test_a_prompt_that_goes_on_draws_no_token():
    model = roofline("h100", "llama-3-8b", **AT_PEAK)
    drawn = step_time(model, [(2048, 0)], 1).linear_s - step_time(model, [(2048, 0)], 0).linear_s
    assert drawn == pytest.approx(2 * 128_256 * 4096 / 989.4e12)


def test_kv_blocks_fill_what_the_weights_leave():
    # 0.9 x 80e9 - 141,107,412,992 / 4 bytes, in blocks of 16 x 81,920 bytes.
    assert roofline("h100", "llama-3-70b", 4).num_blocks(16) == 28_017
    assert roofline("h100", "llama-3-70b", 1).num_blocks(16) < 0
    assert roofline("h200", "llama-3-70b", 4).num_blocks(16) > 28_017


def test_stages_have_equal_parts_of_the_layers_and_the_last_one_the_logits():
    one, four = (roofline("h100", "llama-3-70b", 1, stages, **AT_PEAK) for stages in (1, 4))
    whole, parts = step_time(one, [(1, 1023)]), step_time(four, [(1, 1023)])
    # Weights are read at 3.35 TB/s: a quarter of 80 layers on each stage, and 128,256 x 8192 on the last.
    layers_s = 2 * MODEL_SHAPES["llama-3-70b"].num_layer_parameters / 3.35e12
    head_s = 2 * 128_256 * 8192 / 3.35e12
    *others, last = parts.stages_s
    assert len(parts.stages_s) == 4
    rest_s = (whole.attention_s + whole.elementwise_s) / 4
    assert others == pytest.approx([layers_s / 4 + rest_s] * 3)
    assert last == pytest.approx(layers_s / 4 + rest_s + head_s + whole.sampling_s)
    assert sum(parts.stages_s) + parts.send_s == pytest.approx(parts.total_s)
    assert sum(parts.stages_s) == pytest.approx(whole.total_s)
    assert whole.stages_s == ()


def test_a_step_sends_its_hidden_states_from_stage_to_stage():
    time = step_time(roofline("h100", "llama-3-70b", 1, 4), [(1000, 0)])
    # Three times 10 us, and 1000 x 8192 x 2 bytes at 0.8 x 450 GB/s.
    assert time.send_s == pytest.approx(3 * (10e-6 + 16_384_000 / 360e9))
    slower = Roofline(ACCELERATORS["h100"], MODEL_SHAPES["llama-3-70b"], 1, 4, stage_bandwidth=50e9)
    assert step_time(slower, [(1000, 0)]).send_s == pytest.approx(3 * (10e-6 + 16_384_000 / 50e9))
    # Each stage is a process with its own time between steps.
    assert time.fixed_s == pytest.approx(80 * 10 * 2e-6 + 4 * 300e-6)


def test_stages_share_weights_and_cache():
    # 0.9 x 80e9 - 2 x (68,452,352,000 / 4 of the layers, 1,050,673,152 and 1,318,912 beside them), in blocks of
    # 16 x 81,920 bytes.
    four = roofline("h100", "llama-3-70b", 1, 4)
    shape = four.shape
    norms = (2 * 80 + 1) * 8192
    weights = 2 * (shape.num_layer_parameters // 4 + shape.num_head_parameters + norms)
    assert four.num_blocks(16) == (72_000_000_000 - weights) // (16 * 81_920)
    assert four.kv_bytes_per_token == 81_920
    assert four.num_devices == 4
    assert four.swap_time(100, 16, 50e9) == pytest.approx(100 * 16 * 81_920 / 50e9)
