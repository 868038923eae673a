"""Executors of several ranks on the torch backend: the tokens of one rank, and on the kernels its bits."""

import socket
import threading
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import make_checkpoint
from decoder_driver import write_checkpoint
from e2e.running_server import free_port
from group_backend import GroupBackend, InlineGroup, told
from headway_conformance import SCENARIOS, SMALL, check, scenario_named
from headway_conformance import checkpoints as conformance_checkpoints
from headway_executor.backend import BackendConfig, BackendConfigError, NewRow, StepBatch
from headway_executor.backends.simulated import SimulatedBackend
from headway_executor.backends.torch_backend import TorchBackend
from headway_executor.checkpoint.weights import Checkpoint
from headway_executor.models.families import FAMILIES as FAMILIES_BY_NAME
from headway_executor.models.families import read_model_config
from headway_executor.models.families.qwen import read_qwen3
from headway_executor.models.loading import ModelTensors
from headway_executor.models.part import part_of, whole
from headway_executor.rank_place import RankPlace
from headway_executor.ranks import stage_mates
from headway_executor.ranks.group import RankGroup
from headway_kernels.cpu.library import load_library
from headway_proto.pooling import POOL_LAST, POOL_MEAN
from headway_proto.sampling import SamplingParams
from speculative_engine import SpeculativeEngine, write_first_layers

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
BIASES = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": True,
    "mlp_bias": True,
    "intermediate_size": 100,
    "max_position_embeddings": 128,
}
QUICK = (
    "swapped_out_and_in",
    "a_prefix_of_the_same_step",
    "steps_in_flight_4",
    "a_row_changes_hands",
    "parameters_mixed_in_a_batch",
    "prompts_that_are_reported",
    "constrained_rows_among_others",
    "errors_stay_in_their_row",
    "proposals_change_no_token",
    "host_blocks_of_a_new_epoch",
)
needs_kernels = pytest.mark.skipif(load_library() is None, reason="needs the CPU kernels")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


def place_of(rank=0, tensor_parallel=1, pipeline_parallel=1, rendezvous=""):
    return RankPlace(
        rank=rank, tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel, rendezvous=rendezvous
    )


def story(backend, directory, **settings):
    """On the CPU kernels, unless the settings say otherwise."""
    options = {"kernels": "compiled"} | settings.pop("options", {})
    return told(backend, directory, options=options, **settings)


@needs_kernels
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("degrees", [(2, 1), (1, 2), (2, 2)], ids=["TP 2", "PP 2", "TP 2 x PP 2"])
def test_a_group_gives_the_bits_of_one_rank(family, degrees, checkpoints):
    directory = conformance_checkpoints.write_checkpoint(checkpoints, family, SMALL)
    group = InlineGroup(tensor_parallel=degrees[0], pipeline_parallel=degrees[1])
    assert story(group, directory) == story(TorchBackend(), directory)


@needs_kernels
@pytest.mark.parametrize(
    "family",
    [
        "phi3",
        "granite",
        "smollm3",
        "starcoder2",
        "gpt_neox",
        "cohere2",
        "apertus",
        "olmo-clipped",
        "gpt2",
        "bloom",
        "falcon-40b",
        "codegen",
        "xglm",
        "nanochat",
        "bitnet",
        "modernbert_decoder-bias",
    ],
)
def test_so_does_a_group_of_any_description(family, tmp_path):
    make_checkpoint(tmp_path, family)
    group = InlineGroup(tensor_parallel=2, pipeline_parallel=2)
    assert story(group, tmp_path) == story(TorchBackend(), tmp_path)


def test_norms_of_whole_rows_before_projections_have_no_fast_form(tmp_path):
    make_checkpoint(tmp_path, "bitnet")
    alone, options = story(TorchBackend(), tmp_path), {"kernels": "eager", "tensor_parallel_form": "exact"}
    group = story(InlineGroup(tensor_parallel=2), tmp_path, options=options)
    assert [tokens for tokens, _ in group] == [tokens for tokens, _ in alone]
    with pytest.raises(
        BackendConfigError, match="tensor_parallel_form 'fast' is not allowed; the model has norms of whole"
    ):
        story(InlineGroup(tensor_parallel=2), tmp_path, options=options | {"tensor_parallel_form": "fast"})


@needs_kernels
def test_gates_behind_the_queries_of_each_head_are_those_apart(tmp_path, monkeypatch):
    """Alone, and in a group with the same bits."""
    make_checkpoint(tmp_path, "qwen3")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    queries = [name for name in tensors if name.endswith("q_proj.weight")]
    gates = {name: torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(1)) for name in queries}
    apart = tensors | {name.replace("q_proj", "gate_proj"): gate for name, gate in gates.items()}
    by_head = tensors | {
        name: torch.stack([tensors[name].unflatten(0, (4, 16)), gate.unflatten(0, (4, 16))], 1).flatten(0, 2)
        for name, gate in gates.items()
    }

    def with_gates(kind, names, fields):
        config = read_qwen3(fields)
        attention = msgspec.structs.replace(config.attention, gates=kind)
        return msgspec.structs.replace(
            config, attention=attention, names=msgspec.structs.replace(config.names, qkv=config.names.qkv + names)
        )

    found = []
    for kind, names, stored in (("apart", ("self_attn.gate_proj",), apart), ("by_head", (), by_head)):
        save_file(stored, path, metadata={"format": "pt"})
        monkeypatch.setitem(FAMILIES_BY_NAME, "Qwen3ForCausalLM", partial(with_gates, kind, names))
        found += [story(backend, tmp_path) for backend in (TorchBackend(), InlineGroup(tensor_parallel=2))]
        for form in ("exact", "fast"):
            options = {"kernels": "eager", "tensor_parallel_form": form}
            eager = story(InlineGroup(tensor_parallel=2), tmp_path, options=options)
            assert [tokens for tokens, _ in eager] == [tokens for tokens, _ in found[0]]
    assert found == [found[0]] * 4
    monkeypatch.undo()
    save_file(tensors, path, metadata={"format": "pt"})
    assert story(TorchBackend(), tmp_path) != found[0]


@needs_kernels
@pytest.mark.parametrize("family", ["gemma2", "gemma4-keys", "muse_glimmer"])
def test_norms_behind_attention_are_for_stages_of_whole_layers(tmp_path, family):
    make_checkpoint(tmp_path, family)
    alone = story(TorchBackend(), tmp_path)
    assert story(InlineGroup(pipeline_parallel=2), tmp_path) == alone
    found = story(InlineGroup(tensor_parallel=2), tmp_path, options={"kernels": "auto"})
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in alone]
    with pytest.raises(BackendConfigError, match=r"kernels 'compiled' is not allowed .* norms behind attention"):
        story(InlineGroup(tensor_parallel=2), tmp_path)


@needs_kernels
@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "deepseek_v3", "cohere2_moe", "phimoe", "dbrx"])
def test_experts_and_latent_attention_in_a_group(family, tmp_path):
    """On the kernels, by messages too, with the bits of one rank; on torch operators with its tokens."""
    make_checkpoint(tmp_path, family)
    alone = story(TorchBackend(), tmp_path)
    assert story(InlineGroup(tensor_parallel=2, pipeline_parallel=2), tmp_path) == alone
    assert story(InlineGroup(tensor_parallel=2), tmp_path, options={"rank_transport": "gloo"}) == alone
    for form in ("exact", "fast"):
        options = {"kernels": "eager", "tensor_parallel_form": form}
        found = story(InlineGroup(tensor_parallel=2), tmp_path, options=options)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in alone]


def test_an_index_of_keys_is_whole_on_each_rank(tmp_path):
    """What layers share that an index chose is of one stage."""
    eager, degrees = {"options": {"kernels": "eager"}}, ((2, 1), (1, 2), (2, 2))
    for family in ("deepseek_v32", "glm_moe_dsa"):
        make_checkpoint(tmp_path / family, family)
        alone = story(TorchBackend(), tmp_path / family, **eager)
        for tensor_parallel, pipeline_parallel in degrees if family == "deepseek_v32" else degrees[:1]:
            group = InlineGroup(tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel)
            found = story(group, tmp_path / family, **eager)
            assert [tokens for tokens, _ in found] == [tokens for tokens, _ in alone]
    with pytest.raises(
        BackendConfigError, match="pipeline_parallel 2 is not allowed; the model's layers share what an"
    ):
        part_of(read_model_config(tmp_path / "glm_moe_dsa"), place_of(0, 1, 2))


@needs_kernels
def test_rows_that_ranks_share_have_room_for_the_widest_layer(tmp_path, monkeypatch):
    make_checkpoint(tmp_path, "gemma4-keys")
    widths, made = set(), stage_mates._wide_rows

    def recorded(memory, sizes):
        widths.add(sizes.attended[1])
        return made(memory, sizes)

    monkeypatch.setattr(stage_mates, "_wide_rows", recorded)
    story(InlineGroup(pipeline_parallel=2), tmp_path)
    heads = {attention.num_heads * attention.head_dim for attention in read_model_config(tmp_path).attentions}
    assert len(heads) == 2
    assert min(widths) >= max(heads)


@needs_kernels
@pytest.mark.parametrize("family", ["mimo_v2", "laguna"])
def test_layers_that_differ_in_their_heads_in_a_group(family, tmp_path):
    """Of whole layers on the kernels, with the bits of one rank; of parts of them on torch operators, with its tokens."""
    make_checkpoint(tmp_path, family)
    alone = story(TorchBackend(), tmp_path)
    assert story(InlineGroup(pipeline_parallel=2), tmp_path) == alone
    for form in ("exact", "fast"):
        options = {"kernels": "eager", "tensor_parallel_form": form}
        found = story(InlineGroup(tensor_parallel=2), tmp_path, options=options)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in alone]


@pytest.mark.parametrize(
    ("degrees", "reason"),
    [
        ({"tensor_parallel": 2}, "tensor_parallel 2 is not allowed; the model's tokens have several hidden states"),
        ({"pipeline_parallel": 2}, "pipeline_parallel 2 is not allowed; the model's layers share keys"),
    ],
)
def test_several_states_of_a_token_are_of_one_rank(tmp_path, degrees, reason):
    make_checkpoint(tmp_path, "gemma3n")
    with pytest.raises(BackendConfigError, match=reason):
        story(InlineGroup(**degrees), tmp_path, options={"kernels": "eager"})


def vectors_and_token(backend, directory, transport="auto"):
    """Vectors of a prompt in two chunks, beside a row that draws; and the token that this one draws."""
    options = {"kernels": "compiled", "rank_transport": transport}
    config = BackendConfig(model=str(directory), options=options, num_kv_blocks=16, block_size=16, max_num_seqs=4)
    info = backend.open(config)
    prompt, none = np.arange(3, 15, dtype=np.int32), np.empty(0, dtype=np.int32)
    table = np.arange(4, dtype=np.int32)[:, None].repeat(16, 1)
    sampling = SamplingParams(temperature=0.0)
    found = []
    for step, (start, count) in enumerate(((0, 5), (5, 7))):
        pooled = (
            NewRow(row=r, token_ids=prompt, num_prompt_tokens=12, num_computed_tokens=0, sampling=sampling, pooling=p)
            for r, p in ((0, POOL_LAST), (2, POOL_MEAN))
        )
        drawn = NewRow(row=1, token_ids=prompt, num_prompt_tokens=12, num_computed_tokens=0, sampling=sampling)
        batch = StepBatch(
            step=step,
            finished_rows=none,
            new_rows=() if step else tuple(sorted([*pooled, drawn], key=lambda new: new.row)),
            new_blocks=np.empty((2, 0), np.int32),
            rows=np.arange(3, dtype=np.int32),
            num_scheduled_tokens=np.full(3, count, np.int32),
            num_computed_tokens=np.full(3, start, np.int32),
            samples=np.full(3, step, np.int32),
            block_table=table,
        )
        result = backend.execute(batch)
        found.append((result.sampled_token_ids.tolist(), result.vectors, result.errors))
    backend.close()
    return info.embedding_size, found


@needs_kernels
def test_a_group_gives_the_vectors_of_one_rank(tmp_path):
    make_checkpoint(tmp_path, "granite")
    size, alone = vectors_and_token(TorchBackend(), tmp_path)
    assert size == 48
    assert len(alone[1][1]) == 2
    for transport, degrees in (("auto", (2, 1)), ("gloo", (2, 1)), ("auto", (1, 2)), ("gloo", (2, 2))):
        group = InlineGroup(tensor_parallel=degrees[0], pipeline_parallel=degrees[1])
        assert vectors_and_token(group, tmp_path, transport) == (size, alone)


def test_a_norm_over_all_heads_is_for_stages_of_whole_layers(tmp_path):
    make_checkpoint(tmp_path, "olmo2")
    with pytest.raises(BackendConfigError, match="tensor_parallel 2 is not allowed; the model normalises queries over"):
        part_of(read_model_config(tmp_path), place_of(0, 2))
    assert part_of(read_model_config(tmp_path), place_of(0, 1, 2)).heads == range(4)


@needs_kernels
@pytest.mark.parametrize(
    "settings",
    [{"quantization": "int8"}, {"options": {"rank_transport": "gloo"}}, {"options": {"rank_transport": "zmq"}}],
    ids=str,
)
def test_so_it_does_with_other_settings(settings, tmp_path):
    directory = write_checkpoint(tmp_path / "model", num_hidden_layers=3, **BIASES)
    group = InlineGroup(tensor_parallel=2, pipeline_parallel=2)
    alone = {name: value for name, value in settings.items() if name != "options"}
    assert story(group, directory, **settings) == story(TorchBackend(), directory, **alone)


@needs_kernels
@pytest.mark.parametrize(
    ("degrees", "transport"),
    [((2, 1), "auto"), ((1, 2), "zmq"), pytest.param((2, 2), "gloo", marks=pytest.mark.deep)],
    ids=str,
)
def test_rank_0_alone_has_a_draft_model_and_proposals_change_no_token(degrees, transport, tmp_path):
    directory = write_checkpoint(tmp_path / "model", num_hidden_layers=3, **BIASES)
    draft = write_first_layers(directory, tmp_path / "draft", 2)
    config = BackendConfig(model=str(directory), num_kv_blocks=64, num_threads=1, max_model_len=64, max_num_seqs=4)
    config = msgspec.structs.replace(config, speculation="draft", draft_model=str(draft), num_speculative_tokens=3)
    config = msgspec.structs.replace(config, options={"kernels": "compiled", "rank_transport": transport})
    group = InlineGroup(tensor_parallel=degrees[0], pipeline_parallel=degrees[1])
    engine = SpeculativeEngine(config, backend=group, clock=lambda: 0.0, always=True)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6] * 4, [5]]
    samplings = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, seed=3)]

    def outputs(*, speculates):
        return engine.run(prompts, 24, speculates=speculates, sampling=lambda place: samplings[place % 2])

    assert outputs(speculates=True) == outputs(speculates=False)
    group.close()
    counters = engine.counters()
    assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens


@pytest.mark.parametrize("form", ["exact", "fast"])
@pytest.mark.parametrize("transport", ["auto", "gloo", "zmq"])
def test_torch_operators_give_the_tokens_of_one_rank(form, transport, tmp_path):
    """Torch's products of fewer outputs round otherwise, so only stages of whole layers give the same bits."""
    directory = write_checkpoint(tmp_path / "model", **BIASES)
    eager = {"kernels": "eager"}
    alone = story(TorchBackend(), directory, options=eager)
    options = eager | {"tensor_parallel_form": form, "rank_transport": transport}
    found = story(InlineGroup(tensor_parallel=2), directory, options=options)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in alone]
    for (_, one), (_, several) in zip(alone, found, strict=True):
        np.testing.assert_allclose([line[0] for line in several], [line[0] for line in one], atol=1e-4)
    assert story(InlineGroup(pipeline_parallel=2), directory, options=eager) == alone


@needs_kernels
@pytest.mark.parametrize("name", QUICK)
def test_a_group_conforms(name, checkpoints):
    scenario = scenario_named(name)
    check(scenario, lambda: GroupBackend(tensor_parallel=2, pipeline_parallel=2), directory=checkpoints)


@pytest.mark.deep
@pytest.mark.parametrize("kernels", ["compiled", "eager"])
@pytest.mark.parametrize("degrees", [(2, 1), (1, 2)])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_a_group_conforms_in_all(scenario, degrees, kernels, checkpoints):
    def group():
        return GroupBackend(tensor_parallel=degrees[0], pipeline_parallel=degrees[1])

    check(scenario, group, directory=checkpoints, options={"kernels": kernels})


class CountingCheckpoint:
    """Counts what is read."""

    def __init__(self, checkpoint):
        self._checkpoint = checkpoint
        self.count = 0

    def __contains__(self, name):
        return name in self._checkpoint

    def read(self, name, rows=None, columns=None):
        tensor = self._checkpoint.read(name, rows, columns)
        self.count += tensor.numel()
        return tensor


def test_a_rank_reads_only_its_part(tmp_path):
    directory = write_checkpoint(tmp_path / "model", hidden_size=64, intermediate_size=128, vocab_size=128)
    config = read_model_config(directory)

    def numbers_read(part):
        with Checkpoint(directory) as checkpoint:
            counting = CountingCheckpoint(checkpoint)
            tensors = ModelTensors(config, counting, lambda head_dim, _: torch.arange(head_dim), part=part)
            tensors.embedding(), tensors.head()
            for index in part.layers:
                tensors.qkv(index), tensors.output(index), tensors.gate_up(index), tensors.down(index)
        return counting.count

    everything = numbers_read(whole(config))
    parts = [numbers_read(part_of(config, place_of(rank, 2), unit=16, head_unit=8)) for rank in range(2)]
    assert parts == [everything / 2] * 2


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ((3, 1), "tensor_parallel 3 is not allowed; the model has 4 heads and 2 key-value heads, which go into equal "),
        ((8, 1), r"so allowed: 1, 2, 4$"),
        ((1, 3), "pipeline_parallel 3 is not allowed; the model has 2 layers, so allowed: 1 to 2"),
    ],
)
def test_degrees_that_a_model_does_not_allow(degrees, message, tmp_path):
    config = read_model_config(write_checkpoint(tmp_path / "model"))
    with pytest.raises(BackendConfigError, match=message):
        part_of(config, place_of(0, *degrees))


def test_layers_that_share_keys_and_values_are_of_one_stage(tmp_path):
    make_checkpoint(tmp_path, "gemma4-shared")
    alone, options = story(TorchBackend(), tmp_path), {"kernels": "eager"}
    found = story(InlineGroup(tensor_parallel=2), tmp_path, options=options)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in alone]
    with pytest.raises(BackendConfigError, match="pipeline_parallel 2 is not allowed; the model's layers share keys"):
        part_of(read_model_config(tmp_path), place_of(0, 1, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cuda"}, "device 'cuda' is not allowed"),
        ({"place": place_of(0, 2, rendezvous="10.0.0.1:5000")}, "'10.0.0.1:5000' is not allowed; .* 127.0.0.1:PORT"),
        ({"place": place_of(0, 2, rendezvous="127.0.0.1")}, "'127.0.0.1' is not allowed"),
        (
            {"place": place_of(0, 2, rendezvous="10.0.0.1:5000"), "options": {"rank_transport": "gloo"}},
            "'10.0.0.1:5000' is not allowed; gloo and .* ask nobody for a key, so allowed: 127.0.0.1:PORT, or rank_tra",
        ),
        (
            {"options": {"tensor_parallel_form": "loose"}},
            "tensor_parallel_form 'loose' is not allowed; allowed: exact, fa",
        ),
    ],
)
def test_settings_that_a_group_refuses(changes, message, tmp_path):
    config = BackendConfig(model=str(write_checkpoint(tmp_path / "model")), place=place_of(0, 2, rendezvous="x"))
    with pytest.raises(BackendConfigError, match=message):
        TorchBackend().open(msgspec.structs.replace(config, **changes))


@needs_kernels
def test_the_fast_form_is_not_for_the_kernels(tmp_path):
    fast = {"options": {"tensor_parallel_form": "fast"}}
    directory = write_checkpoint(tmp_path / "model", **BIASES)
    with pytest.raises(
        BackendConfigError, match="'fast' is not allowed with the CPU kernels; allowed: exact, or fast wi"
    ):
        story(InlineGroup(tensor_parallel=2), directory, **fast)
    assert story(InlineGroup(pipeline_parallel=2), directory, **fast) == story(TorchBackend(), directory)


def test_the_simulated_backend_takes_a_group():
    alone = SimulatedBackend().open(BackendConfig(model="m"))
    of_several = SimulatedBackend().open(BackendConfig(model="m", place=place_of(1, 2)))
    assert of_several == alone


@pytest.mark.parametrize("rank", [0, 1])
def test_who_waits_in_vain_says_so(rank):
    place = place_of(rank, 2, rendezvous=f"127.0.0.1:{free_port()}")
    with pytest.raises(BackendConfigError, match=f"rank {rank} did not meet the other 1 within 0.2 s"):
        RankGroup(place, load_library(), join_seconds=0.2)


def listening_addresses():
    """Where this process listens for TCP."""
    sockets = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            sockets.add(str(entry.readlink()))
        except FileNotFoundError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.append(fields[1].rpartition(":")[0])
    return found


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs Linux")
@pytest.mark.parametrize("transport", ["shared", "gloo", "zmq"])
def test_ranks_listen_only_on_loopback_and_agree(transport):
    library = load_library() if transport == "shared" else None
    rendezvous, before = f"127.0.0.1:{free_port()}", listening_addresses()
    groups = {}

    def join(rank):
        group = groups[rank] = RankGroup(
            place_of(rank, 2, rendezvous=rendezvous), library, is_switched=transport == "zmq"
        )
        group.agreed = group.least([7 - rank, rank]), group.most([7 - rank, rank])

    threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [groups[rank].agreed for rank in range(2)] == [([6, 0], [7, 1])] * 2
    opened = listening_addresses()[len(before) :]
    loopback = socket.inet_aton("127.0.0.1")[::-1].hex().upper()
    assert opened
    assert all(address.endswith(loopback) for address in opened)
    for group in groups.values():
        group.close()
