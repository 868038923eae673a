"""Stages of a model on the triton backend, each with a device of its own: the bits of one device.

Where there is a device, both stages share it, as threads of one process, which could not record graphs at once.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec
import pytest
import torch
from numpy.testing import assert_allclose

from backend_driver import BackendDriver, Request, load_adapter
from checkpoints import VOCAB_SIZE, make_checkpoint
from decoder_driver import write_checkpoint
from e2e.running_server import free_port
from group_backend import GroupBackend, InlineGroup, told
from headway_conformance import SCENARIOS, check
from headway_executor.backend import BackendConfig, BackendConfigError
from headway_executor.backends.triton_backend import TritonBackend
from headway_executor.gpu import graphs
from headway_executor.gpu.preparation import record_graphs
from headway_executor.gpu.readback import Readback
from headway_executor.gpu.stage_mates import OverNccl
from headway_executor.rank_place import RankPlace
from headway_executor.ranks.gloo import GlooMeeting
from headway_executor.ranks.group import RankGroup
from headway_proto.sampling import SamplingParams
from kept_graphs import KeptGraphs
from lora_files import write_adapter
from quantised_checkpoints import KINDS, quantise
from speculative_engine import SpeculativeEngine, write_first_layers
from unit.executor.test_adapters import FUSED, adapter_of

pytestmark = pytest.mark.usefixtures("triton_interpreter")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SETTINGS = {"device": DEVICE, "dtype": "float32", "max_model_len": 64, "max_num_batched_tokens": 24}
SETTINGS |= {"options": {"graphs": "off"}}
QUICK = (
    "steps_in_flight_2",
    "a_row_changes_hands",
    "prompts_that_are_reported",
    "errors_stay_in_their_row",
    "proposals_change_no_token",
)
ALSO_ON_A_DEVICE = ("test_stages_give_the_bits_of_one_device", "test_stages_conform")
GREEDY = SamplingParams(temperature=0.0)
stages = partial(InlineGroup, kind=TritonBackend)


@pytest.fixture(autouse=True)
def interpreted(request):
    if DEVICE == "cuda" and request.node.originalname not in ALSO_ON_A_DEVICE:
        pytest.skip("it interprets kernels")


class Late(TritonBackend):
    """Its results come on a thread of their own, as on a device."""

    def open(self, config):
        info = super().open(config)
        self._model._readback = self._model._readback or Readback(self._model.parts.runtime)
        return info


class Recorded(Late):
    """Its steps are of sizes that were recorded, behind the largest step of all."""

    def open(self, config):
        info = super().open(config)
        parts = self._model.parts
        parts.target._graphs = kept = KeptGraphs()
        self.launched = kept.launched
        with torch.inference_mode():
            record_graphs(parts)
        return info


def deep(*cases):
    return [pytest.param(case, marks=pytest.mark.deep) for case in cases]


@pytest.mark.parametrize(
    "family",
    [
        "gpt2",
        *deep(
            "laguna",
            "granitehybrid",
            "gemma2",
            "opt-350m",
            "cohere2",
            "llama4",
            "deepseek_v3",
            "falcon-40b",
            "mpt",
            "falcon_mamba",
            "gemma4-experts",
        ),
    ],
)
def test_stages_give_the_bits_of_one_device(family, tmp_path):
    make_checkpoint(tmp_path, family)
    assert told(stages(pipeline_parallel=2), tmp_path, **SETTINGS) == told(TritonBackend(), tmp_path, **SETTINGS)


@pytest.mark.parametrize(
    "settings",
    [
        {"options": {"rank_transport": "gloo"}},
        *deep(
            {"dtype": "bfloat16"},
            {"quantization": "int4"},
            {"kv_cache_dtype": "fp8"},
            {"options": {"rank_transport": "zmq"}},
        ),
    ],
    ids=str,
)
def test_so_they_do_with_other_settings(settings, tmp_path):
    make_checkpoint(tmp_path, "qwen3-bias")
    alone = {name: value for name, value in settings.items() if name != "options"}
    group = stages(pipeline_parallel=2)
    assert told(group, tmp_path, **SETTINGS | settings) == told(TritonBackend(), tmp_path, **SETTINGS | alone)


@pytest.mark.parametrize(
    ("family", "stages_too"),
    [
        ("llama3", True),
        *(
            pytest.param(family, family not in ("gemma4-shared", "qwen2_moe"), marks=pytest.mark.deep)
            for family in (
                "qwen2_moe",
                *("gemma2", "gpt2", "cohere2", "qwen3-bias", "gpt_neox", "falcon-40b", "phi3", "nanochat", "opt-350m"),
                *("apertus", "starcoder2", "smollm3", "granite", "mixtral", "gpt_oss", "llama4", "afmoe", "phimoe"),
                *("deepseek_v3", "deepseek_v32", "laguna", "mimo_v2", "gemma4-shared"),
            )
        ),
    ],
)
def test_devices_that_compute_layers_together_draw_the_tokens_of_one(family, stages_too, tmp_path):
    """A product of fewer outputs is cut into splits otherwise, so the last bits are others."""
    make_checkpoint(tmp_path, family)
    several = stages(tensor_parallel=2, pipeline_parallel=1 + stages_too)
    found, alone = told(several, tmp_path, **SETTINGS), told(TritonBackend(), tmp_path, **SETTINGS)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in alone]
    for (_, these), (_, those) in zip(found, alone, strict=True):
        assert_allclose([line[0] for line in these], [line[0] for line in those], atol=1e-4)


@pytest.mark.parametrize(
    ("family", "names", "kind", "most_recorded", "degrees"),
    [
        ("llama-bias", ("all", "back"), Recorded, 512, (2, 1)),
        *(
            pytest.param(*case, marks=pytest.mark.deep)
            for case in (
                ("llama-bias", ("back", "all"), Recorded, 512, (1, 2)),
                ("llama-bias", ("back", "all"), TritonBackend, 8, (2, 1)),
                ("qwen2_moe", ("stacks", "down"), TritonBackend, 512, (2, 1)),
                ("qwen2_moe", ("apart", "gate_up"), TritonBackend, 8, (2, 2)),
                ("gpt_oss", ("down", "gate_up"), TritonBackend, 8, (2, 1)),
                ("deepseek_v3", ("down", "stacks"), TritonBackend, 512, (1, 2)),
                ("phi3", (FUSED["phi3"], ("o_proj",)), TritonBackend, 512, (2, 1)),
                ("mimo_v2", (FUSED["mimo_v2"], ("v_proj",)), TritonBackend, 512, (2, 1)),
                ("laguna", (FUSED["laguna"], ("g_proj",)), TritonBackend, 512, (2, 1)),
            )
        ),
    ],
)
def test_so_they_do_with_adapters(family, names, kind, most_recorded, degrees, tmp_path, monkeypatch):
    """Beside a row without; adapters come after its first step, and one goes. Steps beyond recorded sizes compute in another way."""
    monkeypatch.setattr(graphs, "MAX_MIXED_TOKENS", most_recorded)
    model = make_checkpoint(tmp_path / "model", family)
    first, second = (
        write_adapter(tmp_path / str(seed), model, seed=seed, **adapter_of(family, name))
        for seed, name in enumerate(names)
    )
    config = BackendConfig(model=str(tmp_path / "model"), num_kv_blocks=40, block_size=8, **SETTINGS)
    config = msgspec.structs.replace(config, max_num_seqs=6)
    outputs, launched = [], set()
    group = InlineGroup(kind=kind, tensor_parallel=degrees[0], pipeline_parallel=degrees[1])
    for backend in (group, TritonBackend()):
        info = backend.open(config)
        assert info.supports_adapters
        driver = BackendDriver(backend, info)
        driver.run([Request([3, 4, 5], 2, GREEDY)], budget=24)
        found = [
            load_adapter(backend, name, str(path)).identity for name, path in (("first", first), ("second", second))
        ]
        identities = ["", *found]
        requests = [Request(list(range(5 + number)), 4, GREEDY, adapter=name) for number, name in enumerate(identities)]
        driver.run(requests, budget=24)
        backend.unload_adapter("second")
        gone = Request([1, 2], 1, adapter=identities[2])
        driver.run([gone], budget=24)
        assert gone.errors[0].message == f"adapter '{identities[2]}' is not loaded on this executor"
        outputs.append([request.output for request in requests])
        for rank in getattr(backend, "_ranks", ()):
            launched |= {size.is_adapted for size in getattr(rank._backend, "launched", ())}
        backend.close()
    assert outputs[0] == outputs[1]
    assert launched == ({True, False} if kind is Recorded else set())
    assert len({str(tokens) for tokens in outputs[0]}) == 3


@pytest.mark.parametrize(
    "degrees",
    [(2, 1), pytest.param((1, 2), marks=pytest.mark.deep), pytest.param((2, 2), marks=pytest.mark.deep)],
    ids=str,
)
def test_so_they_do_with_a_draft_model_on_rank_0(degrees, tmp_path):
    make_checkpoint(tmp_path / "model", "llama3")
    draft = write_first_layers(tmp_path / "model", tmp_path / "draft", 1)
    config = BackendConfig(model=str(tmp_path / "model"), num_kv_blocks=40, block_size=8, max_num_seqs=4, **SETTINGS)
    config = msgspec.structs.replace(config, speculation="draft", draft_model=str(draft), num_speculative_tokens=3)
    group = InlineGroup(tensor_parallel=degrees[0], pipeline_parallel=degrees[1], kind=Late)
    engine = SpeculativeEngine(config, backend=group, clock=lambda: 0.0, always=True)
    prompts = [[3, 4, 5], [7, 8] * 4]
    outputs = [engine.run(prompts, 8, speculates=speculates) for speculates in (True, False)]
    group.close()
    assert outputs[0] == outputs[1]
    counters = engine.counters()
    assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens


@pytest.mark.deep
@pytest.mark.parametrize("kind", KINDS)
def test_so_they_do_with_parts_of_the_codes_of_a_checkpoint(kind, tmp_path):
    directory = write_checkpoint(
        tmp_path,
        hidden_size=64,
        intermediate_size=96,
        head_dim=16,
        vocab_size=VOCAB_SIZE,
        architectures=["LlamaForCausalLM"],
    )
    quantise(directory, kind)
    found, alone = told(stages(tensor_parallel=2), tmp_path, **SETTINGS), told(TritonBackend(), tmp_path, **SETTINGS)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in alone]


@pytest.mark.parametrize("kind", [pytest.param(Late, marks=pytest.mark.deep), Recorded])
def test_so_they_do_as_on_a_device(kind, tmp_path):
    make_checkpoint(tmp_path, "llama3")
    several, one = (InlineGroup(pipeline_parallel=count, kind=kind) for count in (3, 1))
    alone = told(one, tmp_path, **SETTINGS)
    assert told(several, tmp_path, **SETTINGS) == alone
    together = told(InlineGroup(tensor_parallel=2, kind=kind), tmp_path, **SETTINGS)
    assert [tokens for tokens, _ in together] == [tokens for tokens, _ in alone]


class NoNccl:
    """Stands for torch's group of GPUs."""

    Options = object

    def __init__(self, store, rank, size, options):
        self.ranks = (rank, size)


def test_devices_meet_on_one_host_and_with_nccl(monkeypatch):
    place = RankPlace(rank=0, tensor_parallel=2, rendezvous=f"127.0.0.1:{free_port()}")

    def joined(rank):
        own = msgspec.structs.replace(place, rank=rank)
        return RankGroup(own, None)

    with ThreadPoolExecutor(2) as ranks:
        group, other = ranks.map(joined, range(2))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", NoNccl, raising=False)
    assert group.devices_of_stage().ranks == (0, 2)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(
        BackendConfigError, match="tensor_parallel 2 is not allowed with device 'cuda'; this PyTorch is bu"
    ):
        group.devices_of_stage()
    group._on_host = None
    with pytest.raises(
        BackendConfigError, match="with device 'cuda' and rank_transport zmq; allowed: 1, or ranks of one"
    ):
        group.devices_of_stage()
    for each in (group, other):
        each.close()


@pytest.mark.parametrize("cut", [(range(3), range(3, 6)), (range(4), range(4, 6))], ids=["even", "uneven"])
def test_what_devices_give_over_the_collectives_of_torch_is_put_side_by_side(cut):
    """Of gloo here, which has the call of NCCL that is used."""
    rendezvous, whole = f"127.0.0.1:{free_port()}", torch.arange(30.0).view(5, 6)

    def rank(number):
        place = RankPlace(rank=number, tensor_parallel=2, rendezvous=rendezvous)
        ranks = GlooMeeting(place, 60.0).stage()._ranks
        mates, found = OverNccl(ranks, 20, torch.float32, torch.device("cpu")), torch.empty(5, 6)
        mates.gather(whole[:, cut[number].start : cut[number].stop], cut, found)
        drawn = torch.tensor([number, 7 + number], dtype=torch.int32)
        mates.share(drawn)
        assert drawn.tolist() == [0, 7]
        return found

    with ThreadPoolExecutor(2) as ranks:
        assert all(torch.equal(found, whole) for found in ranks.map(rank, range(2)))


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(one, marks=() if one.name in QUICK else pytest.mark.deep) for one in SCENARIOS],
    ids=str,
)
def test_stages_conform(scenario, tmp_path):
    kind = {"device": DEVICE, "dtype": "float32", "options": {"graphs": "off"}}
    check(scenario, lambda: GroupBackend(pipeline_parallel=2, kind=Late), directory=tmp_path, **kind)


@pytest.mark.deep
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_devices_that_compute_layers_together_conform(scenario, tmp_path):
    check(scenario, lambda: GroupBackend(tensor_parallel=2, kind=Late), directory=tmp_path, dtype="float32")


@pytest.mark.parametrize(
    ("degrees", "settings", "message"),
    [
        (
            (2, 1),
            {"options": {"chunk_attention": "flash"}},
            "chunk_attention 'flash' is not allowed with tensor_parallel 2",
        ),
        ((1, 9), {}, "pipeline_parallel 9 is not allowed; the model has . layers, so allowed: 1 to ."),
    ],
)
def test_what_stages_cannot_have_is_refused_in_one_line(degrees, settings, message, tmp_path):
    make_checkpoint(tmp_path, "llama3")
    place = RankPlace(tensor_parallel=degrees[0], pipeline_parallel=degrees[1], rendezvous=f"127.0.0.1:{free_port()}")
    with pytest.raises(BackendConfigError, match=message):
        TritonBackend().open(BackendConfig(model=str(tmp_path), place=place, **SETTINGS | settings))


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (
            "mpt",
            "tensor_parallel 2 is not allowed with backend 'triton' and MptForCausalLM, which has scores that fall with",
        ),
        (
            "bitnet",
            "which has norms before the projections behind attention and within the feed-forward; allowed: 1, or back",
        ),
        ("olmo2", "which has a norm over all heads; allowed: 1, or backend torch"),
    ],
)
def test_layers_that_devices_cannot_compute_together_are_refused_by_what_they_have(family, message, tmp_path):
    make_checkpoint(tmp_path, family)
    place = RankPlace(tensor_parallel=2, rendezvous=f"127.0.0.1:{free_port()}")
    with pytest.raises(BackendConfigError, match=message):
        TritonBackend().open(BackendConfig(model=str(tmp_path), place=place, **SETTINGS))
