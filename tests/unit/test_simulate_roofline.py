"""The cost model against numbers worked out by hand, and the published figures that its constants come from."""

import msgspec
import numpy as np
import pytest

from headway.simulate.hardware import ACCELERATORS
from headway.simulate.model_shapes import MODEL_SHAPES
from headway.simulate.roofline import Roofline

AT_PEAK = {
    "gemm_share": 1.0,
    "memory_share": 1.0,
    "attention_share": 1.0,
    "link_share": 1.0,
    "all_reduce_latency_s": 0.0,
    "kernel_launch_s": 0.0,
}


def roofline(hardware, model, tensor_parallel=1, **changes):
    accelerator = msgspec.structs.replace(ACCELERATORS[hardware], **changes)
    return Roofline(accelerator, MODEL_SHAPES[model], tensor_parallel)


def step_time(model, chunks, num_samples=None):
    """``chunks``: (tokens to run, tokens computed before) of each row."""
    scheduled, computed = np.array(chunks, dtype=np.int32).T
    return model.step_time(scheduled, computed, len(chunks) if num_samples is None else num_samples)


@pytest.mark.parametrize(
    ("model", "num_parameters"),
    [
        ("llama-2-7b", 6_738_415_616),
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
    assert time.all_reduce_s == time.launch_s == 0.0
    assert time.total_s == pytest.approx(3.155e-3, rel=1e-3)


def test_many_decodes_are_bound_by_arithmetic_in_the_products_and_by_memory_in_attention():
    model = roofline("h200", "llama-3-8b", **{**AT_PEAK, "gemm_share": 790 / 989.4})
    time = step_time(model, [(1, 1023)] * 256)
    assert time.linear_s == pytest.approx(256 * 2 * 7_504_658_432 / 790e12)
    assert time.attention_s == pytest.approx(256 * 1024 * 131_072 / 4.8e12)
    assert time.total_s == pytest.approx(12.0e-3, rel=5e-3)


@pytest.mark.parametrize(("num_tokens", "tokens_per_s"), [(2048, 55e3), (8192, 49e3), (32_768, 35e3)])
def test_the_prefill_ceiling(num_tokens, tokens_per_s):
    share = 790 / 989.4
    model = roofline("h200", "llama-3-8b", **{**AT_PEAK, "gemm_share": share, "attention_share": share})
    assert num_tokens / step_time(model, [(num_tokens, 0)]).total_s == pytest.approx(tokens_per_s, rel=0.03)


def test_a_chunk_attends_to_what_is_before_it_and_to_half_of_itself():
    model = roofline("h100", "llama-2-7b", **AT_PEAK)
    # 4 operations x 32 heads x 128 x 32 layers per pair; 512 queries over 1536 positions and over 512 x 513 / 2.
    pairs = 512 * 1536 + 512 * 513 / 2
    assert step_time(model, [(512, 1536)]).attention_s == pytest.approx(pairs * 524_288 / 989.4e12)


def test_the_iterations_of_a_published_cost_table():
    """Llama-2-7B on H100 at 500 TFLOP/s: eight decodes at 1k context, and one new prompt beside them."""
    at_500 = {**AT_PEAK, "gemm_share": 500 / 989.4, "attention_share": 500 / 989.4}
    model = roofline("h100", "llama-2-7b", **at_500)
    for prompt, published_ms in ((0, 6), (1000, 30), (4000, 120), (16_000, 580), (100_000, 8000)):
        chunks = [(1, 1000)] * 8 + [(prompt, 0)] * bool(prompt)
        assert step_time(model, chunks).total_s * 1e3 == pytest.approx(published_ms, rel=0.15), prompt


def test_devices_share_the_work_and_pay_for_adding_up():
    one = step_time(roofline("h100", "llama-3-70b", 1), [(1000, 0)])
    four = step_time(roofline("h100", "llama-3-70b", 4), [(1000, 0)])
    assert four.linear_s == pytest.approx(one.linear_s / 4)
    assert four.attention_s == pytest.approx(one.attention_s / 4)
    assert one.all_reduce_s == 0.0
    # 160 of them: 10 us, and 2 x 3/4 x 1000 x 8192 x 2 bytes at 0.8 x 450 GB/s.
    assert four.all_reduce_s == pytest.approx(160 * (10e-6 + 24_576_000 / 360e9))
    assert four.launch_s == one.launch_s == pytest.approx(80 * 10 * 2e-6)


def test_a_prompt_that_goes_on_draws_no_token():
    model = roofline("h100", "llama-3-8b", **AT_PEAK)
    drawn = step_time(model, [(2048, 0)], 1).linear_s - step_time(model, [(2048, 0)], 0).linear_s
    assert drawn == pytest.approx(2 * 128_256 * 4096 / 989.4e12)


def test_kv_blocks_fill_what_the_weights_leave():
    # 0.9 x 80e9 - 141,107,412,992 / 4 bytes, in blocks of 16 x 81,920 bytes.
    assert roofline("h100", "llama-3-70b", 4).num_blocks(16) == 28_017
    assert roofline("h100", "llama-3-70b", 1).num_blocks(16) < 0
    assert roofline("h200", "llama-3-70b", 4).num_blocks(16) > 28_017
