"""Layers that differ in their heads, or share keys and values, on the triton backend: their pool, its moves, adapters.

That their tokens are those of transformers is in ``test_triton_backend``.
"""

import pytest
import torch

from backend_driver import BackendDriver, Request
from checkpoints import make_checkpoint
from headway_executor.backend import BackendConfig
from headway_executor.backends.triton_backend import TritonBackend
from headway_executor.gpu.attention import attention_spaces
from headway_executor.gpu.key_index import SpaceSizes
from headway_executor.models.attention_config import AttentionConfig
from headway_executor.models.kv_layout import KvPlace
from headway_kernels.gpu.attention.tuning import attention_tuning, tile_sizes
from headway_proto.sampling import SamplingParams
from lora_files import merge_adapter, write_adapter
from unit.executor.test_adapters import identities

pytestmark = [
    pytest.mark.usefixtures("triton_interpreter"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted; on a device, the conformance suite runs"),
]
CPU = torch.device("cpu")
SETTINGS = {"dtype": "float32", "max_num_seqs": 4, "num_kv_blocks": 16, "block_size": 8, "max_model_len": 64}


def open_backend(directory, **settings):
    backend = TritonBackend()
    config = {"model": str(directory), "max_num_batched_tokens": 64} | SETTINGS | settings
    return backend, backend.open(BackendConfig(**config))


def test_a_request_that_was_swapped_out_goes_on(tmp_path):
    make_checkpoint(tmp_path, "gemma4-shared")
    backend, info = open_backend(tmp_path, swap_space_mib=1)
    # Three layers have keys and values of their own, 256 or 384 numbers in a block, and begin at whole vectors of both sizes.
    assert backend._model.parts.target.pool.shape == (1, 16, 3 * 384)
    driver, request = BackendDriver(backend, info), Request(list(range(3, 24)), 3, SamplingParams(temperature=0.0))
    driver.step(driver.step([driver._admit(request)], [request], budget=64), [], budget=64)
    driver.swap_out(request)
    driver.run([Request(list(range(50, 90)), 1) for _ in range(2)], budget=64)
    running = driver.step([driver.swap_in(request)], [request], budget=64)
    while running:
        running = driver.step(running, [], budget=64)
    other = Request(request.prompt, 3, SamplingParams(temperature=0.0))
    BackendDriver(*open_backend(tmp_path)).run([other], budget=9)
    assert request.output == other.output


@pytest.mark.deep
@pytest.mark.parametrize("family", ["gemma4-shared", "mimo_v2"])
def test_adapters_know_the_widths_of_each_layer(family, tmp_path):
    model = make_checkpoint(tmp_path / "model", family)
    adapter = write_adapter(tmp_path / "adapter", model, seed=3, targets=("q_proj", "v_proj", "o_proj"))
    backend, info = open_backend(tmp_path / "model", adapters={"a": str(adapter)})
    request = Request(list(range(3, 12)), 2, SamplingParams(temperature=0.0), adapter=identities(info)["a"])
    BackendDriver(backend, info).run([request], budget=16)
    tokens = torch.tensor([request.prompt])
    merged = merge_adapter(adapter, model).generate(tokens, max_new_tokens=2, do_sample=False, eos_token_id=None)
    assert request.output == merged[0, 9:].tolist()


def test_layers_of_all_sizes_share_what_they_need_one_after_the_other():
    kinds = [
        AttentionConfig(num_heads=heads, num_kv_heads=2, head_dim=head_dim, rotary_dim=head_dim, scale=1.0, gates=gates)
        for heads, head_dim, gates in ((8, 16, "none"), (4, 24, "apart"))
    ]
    spaces = attention_spaces(
        kinds,
        lambda kind: attention_tuning(CPU, tile_sizes(kind.head_dim, torch.float32)),
        block_size=8,
        sizes=SpaceSizes(most_tokens=5, max_model_len=9, hidden_size=7),
        max_num_rows=3,
        dtype=torch.float32,
        device=CPU,
    )
    first, second = (spaces[kind] for kind in kinds)
    assert first.made(5).shape == (5, 12 * 16)
    assert second.made(4).shape == (4, 12 * 24)
    assert second.made(4, queries_alone=True).shape == (4, 4 * 24)
    assert first.made(5).data_ptr() == second.made(4).data_ptr()
    assert second.workspace.partial.shape[2:] == (4, 24)
    assert first.workspace.arrived.data_ptr() == second.workspace.arrived.data_ptr()
    pool = torch.arange(3 * 2048).view(1, 3, 2048)
    layer = second.layer_of(pool, KvPlace(0, 512))
    assert layer.shape == (3, 4, 8, 24)
    assert torch.equal(layer.flatten(1), pool[0, :, 512 : 512 + 4 * 8 * 24])
