"""Measured tiles: how they are found, the file, and who gets them. Only the times are not a device's."""

import itertools
import json
from dataclasses import dataclass, replace

import pytest
import torch

import gpu_tune
from checkpoints import make_checkpoint
from gpu_tune import Contest, Load, WrongResult, climb, merged
from headway_executor.backend import BackendConfig, BackendConfigError
from headway_executor.backends.triton_backend import TritonBackend
from headway_executor.gpu import tuning_file
from headway_executor.gpu.tuning_file import AttentionTiles, KernelTiles, ProductTiles, TuningFile, tunings_of
from headway_kernels.gpu.attention.tuning import _TUNING, TileSizes, attention_tuning, tile_sizes, tuning_for
from headway_kernels.gpu.linear.quantized import FLOAT32_TILINGS, TILINGS
from headway_kernels.gpu.tunings import Tunings, shipped_pair_tiling

pytestmark = [
    pytest.mark.usefixtures("triton_interpreter"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a clock of its own"),
]
CPU = torch.device("cpu")
TILES = KernelTiles(16, 32, 4, 3, 2)
PRODUCT = ProductTiles(2, None, 64, 64, 64, 4, 3)


@dataclass(frozen=True)
class Pair:
    tokens: int
    outputs: int


def test_the_search_goes_where_it_is_faster_until_it_is_not():
    """From the slow corner over the fast valley; a neighbour that cannot be launched is passed over."""
    asked = []

    def time(pair):
        return abs(pair.tokens - 128) + abs(pair.outputs - 128) + 100

    def ratio(pair, other):
        asked.append(pair)
        return None if pair == Pair(32, 64) else time(pair) / time(other)

    names = ("tokens", "outputs")
    assert climb(Pair(32, 32), names, ratio, margin=0.02, most=60) == Pair(128, 128)
    assert len(asked) == len({*asked})
    assert climb(Pair(32, 32), names, ratio, margin=0.02, most=1) == Pair(64, 32)
    assert climb(Pair(32, 32), names, ratio, margin=0.9, most=60) == Pair(32, 32)
    assert climb(Pair(128, 128), names, ratio, margin=0.02, most=60) == Pair(128, 128)


def test_two_tilings_take_turns_and_their_results_are_compared():
    out, clock = torch.zeros(3), []

    def launching(tiles):
        def launch():
            if tiles == "too large":
                raise RuntimeError("out of resource: shared memory")
            out.fill_(2.0 if tiles == "wrong" else 1.0)

        launch.tiles = tiles
        return launch

    def seconds(work):
        clock.append(work.tiles)
        return {"slow": 3.0, "fast": 1.5, "shipped": 2.0}[work.tiles]

    contest = Contest([Load("a load", launching, out)] * 2, "shipped", seconds, 2, lambda _: None)
    assert contest.ratio("fast", "slow") == pytest.approx(0.5)
    assert clock == ["fast", "slow"] * 4
    assert contest.ratio("slow", "shipped") == pytest.approx(1.5)
    assert contest.ratio("too large", "shipped") is None
    with pytest.raises(WrongResult, match="a load with wrong gives another result"):
        contest.ratio("wrong", "shipped")


def test_what_is_measured_is_what_a_model_gets(tmp_path, monkeypatch):
    """Every tile that is tried is faster, by this clock, so that each kernel gets others than ship."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gpu_tune, "say", lambda _: None)
    times = iter(range(10**6, 0, -1))
    words = ("--shape", "tiny-mixture", "--device", "cpu", "--most", "1", "--rounds", "1", "--margin", "0")
    arguments = gpu_tune.parse_arguments([*words, "--lines", str(tmp_path / "lines")])
    assert gpu_tune.place_of_file(arguments, CPU) == tmp_path / "cpu.json"
    arguments.lines = None
    path = gpu_tune.tune(arguments, lambda work: 1.0 + 1e-9 * -next(times))
    assert path == tmp_path / "headway" / "tunings" / "cpu.json"
    tunings, shipped = tunings_of("auto", CPU), Tunings(CPU)
    found = tunings.of_attention(tile_sizes(8, torch.float32))
    assert found.chunk != shipped.of_attention(tile_sizes(8, torch.float32)).chunk
    assert tunings.of_products(torch.float32)[:1] == shipped.of_products(torch.float32)[:1]
    assert tunings.of_pairs(torch.float32) != shipped.of_pairs(torch.float32)

    make_checkpoint(tmp_path / "model", "llama3")
    backend = TritonBackend()
    settings = {"max_model_len": 32, "num_kv_blocks": 4, "max_num_seqs": 2, "quantization": "int8"}
    backend.open(BackendConfig(model=str(tmp_path / "model"), **settings))
    attention = backend._model.parts.target.decoder._weights.layers[0].mixing
    assert attention.space.tuning == found
    assert attention.space._tokens_per_tile == found.chunk.query_tile // 2
    assert attention.output._product._tilings == tunings.of_products(torch.float32)


def test_tiles_of_latent_attention_are_measured_and_used(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_tune, "say", lambda _: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    times = iter(range(10**6, 0, -1))
    words = ("--shape", "tiny-latent", "--device", "cpu", "--sections", "attention", "--most", "1", "--rounds", "1")
    gpu_tune.tune(gpu_tune.parse_arguments([*words, "--margin", "0"]), lambda work: 1.0 + 1e-9 * -next(times))
    make_checkpoint(tmp_path / "model", "deepseek_v2-lite")
    backend = TritonBackend()
    backend.open(BackendConfig(model=str(tmp_path / "model"), max_model_len=32, num_kv_blocks=4, max_num_seqs=2))
    tuning = backend._model.parts.target.decoder._weights.layers[0].mixing.space.tuning
    assert tuning == tunings_of("auto", CPU).of_attention(tile_sizes(16, torch.float32, is_latent=True))
    assert tuning != Tunings(CPU).of_attention(tile_sizes(16, torch.float32, is_latent=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "format 2 is not 1"),
        ({"device": "NVIDIA H100"}, "it is of 'NVIDIA H100', and this device is 'cpu'"),
        ({"colour": 1}, "Object contains unknown field `colour`"),
        ({"attention": [{"head_dim": 96, "stored_bytes": 2}]}, "Object missing required field"),
        ({"products": [{"tokens": 48}]}, "products: tokens 48; allowed: 16, 32, 64, 128, 256"),
        ({"products": [{"num_warps": 3}]}, "products: num_warps 3; allowed: 1, 2, 4, 8, 16"),
        ({"products": [{"max_tokens": 64}]}, "products of max_tokens 64 or less; those keep the tiles that ship"),
        ({"products": [{"element_bytes": 1, "inputs": 64}]}, "products of element_bytes 1: allowed: inputs 128"),
        (
            {"pairs": [{"element_bytes": 1, "inputs": 128, "outputs": 256}]},
            "pairs of element_bytes 1: allowed: outputs up to 128, which share a scale",
        ),
        ({"products": [{"max_tokens": 256}]}, "products have no tiles without max_tokens"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_one_line(changes, message, tmp_path):
    whole = {"format": 1, "device": "cpu"}
    product = json.loads(gpu_tune.msgspec.json.encode(PRODUCT))
    for kind in {"products", "pairs"} & changes.keys():
        changes = {kind: [product | changes[kind][0]]}
    path = tmp_path / "tiles.json"
    path.write_text(json.dumps(whole | changes))
    with pytest.raises(BackendConfigError) as caught:
        tunings_of(str(path), CPU)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_named_must_be_there_and_one_that_is_looked_for_need_not(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tunings_of("auto", CPU) == tunings_of("shipped", CPU) == Tunings(CPU)
    with pytest.raises(
        BackendConfigError, match=r"tuning '.*none.json' is not allowed; No such file or directory; allowed"
    ):
        tunings_of(str(tmp_path / "none.json"), CPU)
    tuning_file.file_of("cpu").parent.mkdir(parents=True)
    tuning_file.file_of("cpu").write_text("{")
    with pytest.raises(BackendConfigError, match="backend_options tuning"):
        tunings_of("auto", CPU)
    assert tuning_file.file_of("NVIDIA H100 80GB HBM3").name == "nvidia-h100-80gb-hbm3.json"


def test_sections_that_are_not_tuned_keep_what_the_file_has():
    old = TuningFile(device="d", attention=(AttentionTiles(128, 2, TILES, TILES),), pairs=(PRODUCT,), said=("then",))
    other = replace_product(max_tokens=256)
    new = TuningFile(device="d", products=(PRODUCT, other), pairs=(replace_product(tokens=32),), said=("now",))
    whole = merged(old, new)
    assert whole.attention == old.attention
    assert whole.products == (PRODUCT, other)
    assert whole.pairs == new.pairs
    assert whole.said == ("then", "now")
    assert merged(TuningFile(device="other", pairs=(PRODUCT,)), new) == merged(None, new) == new


def replace_product(**changes):
    return gpu_tune.msgspec.structs.replace(PRODUCT, **changes)


def test_products_of_few_tokens_have_the_tiles_that_ship():
    """In float32; those of 16 bits have a kernel of their own."""
    many = tuple(replace(tiling, outputs=64) for tiling in TILINGS)
    tunings = Tunings(CPU, products={2: many, 4: many[1:]})
    assert tunings.of_products(torch.bfloat16) == many
    assert tunings.of_products(torch.float32) == (FLOAT32_TILINGS[0], many[1])
    assert tunings.of_products(torch.float16) == tunings.of_products(torch.bfloat16)
    assert tunings.of_pairs(torch.bfloat16) == shipped_pair_tiling(torch.bfloat16)


def test_there_are_tiles_for_every_processor_head_and_dtype():
    for major in (8, 9, 10, 12):
        for head_dim in (8, 64, 80, 128, 256, 512):
            for dtype, *kind in itertools.product((torch.bfloat16, torch.float32), (False, True), (False, True)):
                sizes = tile_sizes(head_dim, dtype, is_coded=kind[0], is_latent=kind[1])
                assert tuning_for(major, sizes).decode.key_tile <= 256
    assert tuning_for(10, TileSizes(256, 2)) != tuning_for(9, TileSizes(256, 2))
    assert tuning_for(10, TileSizes(128, 2)) == tuning_for(9, TileSizes(128, 2))
    assert attention_tuning(CPU, tile_sizes(128, torch.float32)).decode.num_stages == 1
    assert {entry[2] for entry in _TUNING} == {1, 2, 4}
