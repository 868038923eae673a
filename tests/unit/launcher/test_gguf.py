"""``headway gguf``: the checkpoint of a GGUF file stands for the file's model and has its tokenizer."""

import json
import resource

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from checkpoints import tokenizer as byte_level_tokenizer
from decoder_driver import Sequences, Span, compiled_model, eager_model, write_checkpoint
from headway.__main__ import main
from headway.flags.settings import ConfigurationError
from headway.gguf_import.file import GgufFile
from headway.gguf_import.model import config_of, tensors_of
from headway.gguf_import.tokenizer import end_tokens_of, tokenizer_config_of, tokenizer_of
from headway_executor.checkpoint.weights import Checkpoint
from headway_executor.models.families import read_model_config
from headway_executor.models.sentence_pooling import default_pooling
from headway_executor.models.tensor_shapes import check_tensors
from headway_kernels.cpu.coded_weight import CodeForm
from headway_kernels.cpu.library import load_library
from headway_proto.pooling import NO_POOLING, POOL_CLS, POOL_LAST, POOL_MEAN

HEADS, HIDDEN, VOCABULARY = 4, 256, 96
SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 1,
    "max_position_embeddings": 128,
    "rms_norm_eps": 2**-17,
}
PLACES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.0.gate_proj": "ffn_gate_exps",
    "mlp.experts.0.up_proj": "ffn_up_exps",
    "mlp.experts.0.down_proj": "ffn_down_exps",
}
MIXTURE = SIZES | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}
FORMS = {
    Kind.Q4_0: CodeForm.CODES4,
    Kind.Q4_1: CodeForm.CODES4,
    Kind.Q5_0: CodeForm.CODES8,
    Kind.Q5_1: CodeForm.CODES8,
    Kind.Q8_0: CodeForm.CODES8,
    Kind.Q2_K: CodeForm.CODES4,
    Kind.Q3_K: CodeForm.CODES4,
    Kind.Q4_K: CodeForm.CODES4,
    Kind.Q5_K: CodeForm.CODES8,
    Kind.Q6_K: CodeForm.CODES8,
    Kind.IQ4_NL: CodeForm.TABLE4,
    Kind.IQ4_XS: CodeForm.TABLE4,
    Kind.IQ1_S: CodeForm.TABLE4,
    Kind.IQ1_M: CodeForm.TABLE4,
    Kind.IQ2_XXS: CodeForm.TABLE4,
    Kind.IQ2_XS: CodeForm.TABLE4,
    Kind.IQ2_S: CodeForm.TABLE4,
    Kind.IQ3_XXS: CodeForm.TABLE4,
    Kind.IQ3_S: CodeForm.TABLE4,
    Kind.TQ1_0: CodeForm.CODES4,
    Kind.TQ2_0: CodeForm.CODES4,
    Kind.MXFP4: CodeForm.TABLE4,
    Kind.NVFP4: CodeForm.TABLE4,
}
HALVES = {
    Kind.Q4_0: ((0,), 0.05),
    Kind.Q4_1: ((0, 2), 0.05),
    Kind.Q5_0: ((0,), 0.03),
    Kind.Q5_1: ((0, 2), 0.03),
    Kind.Q8_0: ((0,), 0.003),
    Kind.Q2_K: ((80, 82), 0.015),
    Kind.Q3_K: ((108,), 0.003),
    Kind.Q4_K: ((0, 2), 0.0008),
    Kind.Q5_K: ((0, 2), 0.0004),
    Kind.Q6_K: ((208,), 0.00005),
    Kind.IQ4_NL: ((0,), 0.003),
    Kind.IQ4_XS: ((0,), 0.0001),
    Kind.IQ1_S: ((0,), 0.02),
    Kind.IQ2_XXS: ((0,), 0.003),
    Kind.IQ2_XS: ((0,), 0.003),
    Kind.IQ2_S: ((0,), 0.003),
    Kind.IQ3_XXS: ((0,), 0.001),
    Kind.IQ3_S: ((0,), 0.001),
    Kind.TQ1_0: ((52,), 0.2),
    Kind.TQ2_0: ((64,), 0.2),
}
"""Where a block has float16s, and how large they are at most here."""
SCALES = {
    Kind.IQ1_M: ((55,), 0x10, 0x1F),
    Kind.MXFP4: ((0,), 118, 124),
    Kind.NVFP4: ((0, 1, 2, 3), 0, 40),
}
"""Where a block has bytes that its size depends on, and from where to where they go here."""
TEXTS = (
    "the scheduler decides 12345 things",
    " two  spaces\n\nlines",
    "it's déjà vu, 東京!",
    "<|user|>hello<|end|>",
    "",
)


def name_in_file(name):
    stem, _, suffix = name.rpartition(".")
    if stem in PLACES:
        return f"{PLACES[stem]}.{suffix}"
    index, _, inside = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{index}.{PLACES[inside]}.{suffix}"


def blocks_of(kind, rows, columns, draw):
    """Blocks of any codes; their float16s are small numbers."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = draw.integers(0, 256, (rows * columns // size, num_bytes), dtype=np.uint8)
    ends, low, high = SCALES.get(kind, ((), 0, 1))
    for at in ends:
        blocks[:, at] = draw.integers(low, high + 1, len(blocks))
    places, top = HALVES.get(kind, ((), 0.0))
    for at in places:
        halves = draw.uniform(top / 4, top, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def turned(rows, heads):
    """As llama.cpp orders rows of Llama's queries and keys: channel i beside channel i + half."""
    by_head = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(by_head.swapaxes(1, 2)).reshape(rows.shape)


def add_experts(writer):
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(256)


def write_file(path, kinds, *, architecture="llama", changes=(), sizes=SIZES):
    """Write a GGUF file, and beside it the float32 checkpoint that it stands for; return that one's directory."""
    reference = write_checkpoint(path.with_name("reference"), **sizes)
    stored = load_file(reference / "model.safetensors")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(256)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(2**-17)
    writer.add_rope_freq_base(10_000.0)
    plain_tokens(writer)
    for change in changes:
        change(writer)
    draw = np.random.default_rng(0)
    for number, name in enumerate(sorted(stored)):
        heads = HEADS if "q_proj" in name else 2 if "k_proj" in name else None
        heads = heads if architecture == "llama" else None
        if stored[name].dim() == 1 or ".mlp.gate." in name:
            writer.add_tensor(name_in_file(name), stored[name].numpy())
            continue
        if ".experts." in name and ".experts.0." not in name:
            continue
        kind = kinds[number % len(kinds)]
        stack = [name.replace(".experts.0.", f".experts.{i}.") for i in range(4 if ".experts." in name else 1)]
        data = np.stack([blocks_of(kind, *stored[one].shape, draw) for one in stack])
        for one, blocks in zip(stack, data, strict=True):
            stored[one] = torch.from_numpy(gguf.quants.dequantize(blocks, kind).astype(np.float32))
        data = data if ".experts." in name else data[0]
        writer.add_tensor(name_in_file(name), turned(data, heads) if heads else data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    rewrite(stored, reference)
    return reference


def rewrite(tensors, directory):
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")


def plain_tokens(writer):
    tokens = [*(f"t{i}" for i in range(VOCABULARY - 3)), "x", "y", "xy"]
    add_tokens(writer, "gpt2", tokens, merges=["x y"], pre="gpt-2")


def add_tokens(writer, model, tokens, *, kinds=None, merges=None, pre=None, scores=None):
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds or [1] * len(tokens))
    writer.add_eos_token_id(0)
    if pre:
        writer.add_tokenizer_pre(pre)
    if merges is not None:
        writer.add_token_merges(merges)
    if scores:
        writer.add_token_scores(scores)


MIXED = [
    [Kind.Q4_K, Kind.Q6_K, Kind.Q8_0],
    [Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K],
    [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q6_K],
    [Kind.IQ4_XS, Kind.IQ4_NL, Kind.Q5_K, Kind.Q6_K],
    [Kind.IQ2_XXS, Kind.IQ3_XXS, Kind.IQ4_XS, Kind.Q2_K, Kind.IQ1_M, Kind.Q5_K],
]
"""As the files Q4_K_M, Q3_K_M, Q2_K, IQ4_XS and UD-IQ2_XXS are."""

EXPERTS = {"architecture": "qwen3moe", "sizes": MIXTURE, "changes": [add_experts]}


@pytest.mark.parametrize("settings", [pytest.param({}, id="dense"), pytest.param(EXPERTS, id="experts")])
@pytest.mark.parametrize("kinds", [[kind] for kind in FORMS] + MIXED, ids=str)
def test_the_checkpoint_stands_for_the_files_model(tmp_path, capfd, kinds, settings):
    reference = write_file(tmp_path / "model.gguf", kinds, **settings)
    directory = tmp_path / "model"
    assert main(["gguf", str(tmp_path / "model.gguf"), str(directory)]) == 0
    config = read_model_config(directory)
    described = {field: getattr(read_model_config(reference), field) for field in config.__struct_fields__}
    assert {field: getattr(config, field) for field in described} == described | {
        "dtype": "float16",
        "eos_token_ids": (0,),
    }
    exact = load_file(reference / "model.safetensors")
    with Checkpoint(directory) as checkpoint:
        check_tensors(config, checkpoint)
        for name, wide in exact.items():
            assert torch.equal(checkpoint.read(name), wide), name
        if len(kinds) == 1:
            assert checkpoint.read_codes("lm_head.weight").form is FORMS[kinds[0]]
    sequences = Sequences(num_rows=1, length=20, vocab_size=VOCABULARY, block_size=8)
    logits = sequences.logits_of_all_tokens(eager_model(reference, sequences), [Span(0, 0, 20)])
    models = [eager_model(directory, sequences)]
    if load_library() is not None:
        models.append(compiled_model(directory, load_library(), sequences))
    for model in models:
        found = sequences.logits_of_all_tokens(model, [Span(0, 0, 20)])
        torch.testing.assert_close(found, logits, rtol=1e-3, atol=1e-3)
        assert torch.equal(found.argmax(-1), logits.argmax(-1))


def test_the_experts_of_a_layer_in_one_stack_share_a_book(tmp_path):
    """As gpt-oss has them."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    sizes = {"num_local_experts": 3, "num_experts_per_tok": 2, "hidden_act": "silu", "rope_parameters": rope}
    write_checkpoint(tmp_path, **SIZES | sizes | {"architectures": ["GptOssForCausalLM"], "sliding_window": 20})
    tensors = load_file(tmp_path / "model.safetensors")
    draw, exact = np.random.default_rng(0), {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, inputs, outputs = tensors.pop(name).shape
        blocks = np.stack([blocks_of(Kind.IQ3_S, outputs, inputs, draw) for _ in range(count)])
        tensors[f"{name}.iq3_s"] = torch.from_numpy(blocks)
        exact[name] = torch.from_numpy(gguf.quants.dequantize(blocks, Kind.IQ3_S)).transpose(1, 2)
    gguf.quants.IQ3_S.init_grid()
    tensors["gguf.iq3_s"] = torch.from_numpy((gguf.quants.IQ3_S.grid[0, 0] // 2).astype(np.uint8))
    rewrite(tensors, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gguf"}}))
    with Checkpoint(tmp_path) as checkpoint:
        check_tensors(read_model_config(tmp_path), checkpoint)
        for name, wide in exact.items():
            assert torch.equal(checkpoint.read(name, range(3)), wide)


def imported(tmp_path, add):
    """The tokenizer of a file with the tokens that ``add`` writes."""
    writer = gguf.GGUFWriter(tmp_path / "tokens.gguf", "llama")
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "tokens.gguf")
    return tokenizer_of(file), tokenizer_config_of(file)


def merges_of(made):
    return [tuple(merge) for merge in json.loads(made.to_str())["model"]["merges"]]


def test_a_byte_level_tokenizer_stays_what_it_is(tmp_path):
    made = byte_level_tokenizer().backend_tokenizer
    tokens = [token for token, _ in sorted(made.get_vocab().items(), key=lambda item: item[1])]

    def add(writer):
        kinds = [3 if token.startswith("<|") else 1 for token in tokens]
        add_tokens(
            writer, "gpt2", tokens, kinds=kinds, merges=[" ".join(pair) for pair in merges_of(made)], pre="gpt-2"
        )
        writer.add_chat_template("{{ messages }}")

    again, fields = imported(tmp_path, add)
    for text in TEXTS:
        assert again.encode(text).ids == made.encode(text).ids
        assert again.decode(again.encode(text).ids) == made.decode(made.encode(text).ids)
    assert fields["eos_token"] == tokens[0]
    assert fields["chat_template"] == "{{ messages }}"


@pytest.mark.parametrize("name", ["deepseek-r1-qwen", "llama3", "glm4", "hunyuan", "minimax-m2", "exaone4"])
def test_other_names_of_a_cut_are_known(tmp_path, name):
    def add(writer):
        add_tokens(writer, "gpt2", ["a", "b", "ab"], merges=["a b"], pre=name)
        writer.add_bos_token_id(1)

    made, _ = imported(tmp_path, add)
    assert made.encode("ab", add_special_tokens=False).ids == [2]


def test_seed_cuts_lines_from_marks(tmp_path):
    def add(writer):
        add_tokens(writer, "gpt2", ["!", "Ċ", "!Ċ", "1", "2", "12"], merges=["! Ċ", "1 2"], pre="seed-coder")

    made, _ = imported(tmp_path, add)
    assert made.encode("!\n12").ids == [0, 1, 3, 4]


def test_the_end_token_stands_behind_a_text_if_the_file_says_so(tmp_path):
    """As in files of Qwen3-Embedding, whose vectors are of that token."""

    def add(writer):
        add_tokens(writer, "gpt2", ["<e>", "<b>", "a", "b", "ab"], kinds=[3, 3, 1, 1, 1], merges=["a b"], pre="qwen2")
        writer.add_bos_token_id(1)
        writer.add_add_eos_token(True)

    made, _ = imported(tmp_path, add)
    assert made.encode("ab").ids == [4, 0]
    assert made.encode("ab", "a").ids == [4, 0, 2, 0]
    assert made.encode("ab", add_special_tokens=False).ids == [4]
    both, _ = imported(tmp_path, lambda writer: (add(writer), writer.add_add_bos_token(True)))
    assert both.encode("ab").ids == [1, 4, 0]


@pytest.mark.parametrize(
    ("tokens", "kinds", "ends"),
    [
        (["<eos>", "<end_of_turn>", "a"], [3, 3, 1], [0, 1]),
        (["<|endoftext|>", "<|end|>", "<|user|>"], [3, 3, 3], [0, 1]),
        (["<eos>", "<|im_end|>", "<|end|>"], [3, 1, 4], [0]),
        (["<|return|>", "<|end|>", "<|call|>", "<|endoftext|>"], [3, 3, 3, 3], [0, 2, 3]),
    ],
)
def test_answers_end_where_llama_cpp_ends_them(tmp_path, tokens, kinds, ends):
    """Files name one end token, and the generation_config.json of the published models several."""

    def add(writer):
        add_tokens(writer, "llama", tokens, kinds=kinds, scores=[0.0] * len(tokens))
        writer.add_add_bos_token(False)

    imported(tmp_path, add)
    assert end_tokens_of(GgufFile(tmp_path / "tokens.gguf")) == ends


def test_the_template_for_tools_is_kept(tmp_path):
    def add(writer):
        plain_tokens(writer)
        writer.add_chat_template([{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}])

    _, fields = imported(tmp_path, add)
    assert fields["chat_template"] == [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]


def test_a_sentence_piece_tokenizer_merges_by_score(tmp_path):
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False)
    made.train_from_iterator([text for text in TEXTS if "<" not in text] * 3, trainer)
    made.pre_tokenizer = None
    tokens = [token for token, _ in sorted(made.get_vocab().items(), key=lambda item: item[1])]
    made_by = {"".join(pair): rank for rank, pair in reversed(list(enumerate(merges_of(made))))}

    def add(writer):
        kinds = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
        scores = [float(-made_by.get(token, 10_000)) for token in tokens]
        add_tokens(writer, "llama", tokens, kinds=kinds, scores=scores)
        writer.add_bos_token_id(1)

    again, fields = imported(tmp_path, add)
    for text in TEXTS[:3]:
        assert again.encode(text, add_special_tokens=False).ids == made.encode(text, add_special_tokens=False).ids
        assert again.encode(text).ids[0] == 1
        assert again.decode(again.encode(text).ids) == text
    assert fields["bos_token"] == "<s>"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.add_sliding_window(64), "llama.attention.sliding_window 64 is not supported; allowed: none"),
        (lambda w: w.add_expert_count(8), "llama.expert_used_count is missing"),
        (lambda w: w.add_logit_scale(0.5), "llama.logit_scale 0.5 is not supported; allowed: none"),
        (lambda w: w.add_rope_dimension_count(32), "llama.rope.dimension_count 32"),
        (
            lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
            "llama.rope.scaling.type 'longrope' is not supported; allowed: none, linear, yarn",
        ),
        (lambda w: w.add_rope_scaling_attn_factors(1.5), "llama.rope.scaling.attn_factor 1.5 is not supported"),
        (lambda w: w.add_rope_scaling_yarn_ext_factor(0.5), "llama.rope.scaling.yarn_ext_factor 0.5 is not supported"),
        (lambda w: w.add_rope_scaling_yarn_log_mul(0.1), "llama.rope.scaling.yarn_log_multiplier 0.1"),
        (lambda w: w.add_float32("llama.rope.freq_base_swa", 5.0), "llama.rope.freq_base_swa 5.0 is not supported"),
        (lambda w: w.add_tensor("rope_freqs.weight", np.full(32, 2, np.float32)), "rope_freqs.weight is not supported"),
        (lambda w: w.add_block_count(10_000), "llama.block_count 10000 is not supported; allowed: 1 to 9999"),
        (lambda w: w.add_head_count(3), "a shape does not fit the metadata: blk.0.attn_q.weight [256, 256]"),
        (
            lambda w: w.add_tensor("blk.0.odd.weight", np.zeros(32, np.float32)),
            "tensor blk.0.odd.weight is not supported",
        ),
        (
            lambda w: w.add_tensor("blk.0.ffn_up.bias", np.zeros((1, 40), np.uint8), raw_dtype=Kind.Q8_1),
            "tensor blk.0.ffn_up.bias is of kind q8_1; allowed: f32, f16, bf16, q4_0",
        ),
        (
            lambda w: w.add_pooling_type(gguf.PoolingType.RANK),
            "llama.pooling_type 4 is not supported; allowed: 0 (none)",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(tmp_path, capfd, change, said):
    write_file(tmp_path / "model.gguf", [Kind.Q8_0], changes=[change])
    assert main(["gguf", str(tmp_path / "model.gguf"), str(tmp_path / "model")]) == 2
    assert said in capfd.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"model.gguf", "reference"}


@pytest.mark.parametrize("most_bytes", [2000, 20_000])
def test_a_full_disk_is_told_in_one_line_and_leaves_nothing(tmp_path, capfd, most_bytes):
    write_file(tmp_path / "model.gguf", [Kind.Q8_0])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        assert main(["gguf", str(tmp_path / "model.gguf"), str(tmp_path / "model")]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capfd.readouterr().err
    assert "File too large" in said
    assert said.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"model.gguf", "reference"}


class Changed(GgufFile):
    """A file with another value in its metadata."""

    def __init__(self, file, key, value):
        self.__dict__.update(file.__dict__)
        self._changed = {key: value}

    def value(self, key, default=None):
        return self._changed[key] if key in self._changed else super().value(key, default)


@pytest.mark.parametrize("kinds", ["gpt2", "llama"])
def test_whatever_stands_in_the_metadata_is_taken_or_refused_in_one_line(tmp_path, kinds):
    def add(writer):
        if kinds == "llama":
            add_tokens(writer, "llama", ["a", "b", "ab"], scores=[0.0, -1.0, -2.0])

    write_file(tmp_path / "model.gguf", list(FORMS), changes=[add])
    file, said = GgufFile(tmp_path / "model.gguf"), []
    values = (0, 1, -1, 2**31 - 1, 2**63, 1.5, float("nan"), float("inf"), "", "x", True, [], [1], ["a"], [1.5] * 3)
    for key in file._reader.fields:
        for value in () if key.startswith("GGUF.") else values:
            changed = Changed(file, key, value)
            try:
                _ = config_of(changed), tokenizer_of(changed), tokenizer_config_of(changed)
                assert dict(tensors_of(changed))
            except ConfigurationError as refusal:
                said.append(str(refusal))
    assert len(said) > 100
    assert not [line for line in said if "\n" in line or len(line) > 600]


@pytest.mark.parametrize("high", [4.0, 1.0])
def test_the_factors_of_llama_3_and_4_are_found(tmp_path, high):
    turns = 8192 / (2 * np.pi * 10_000.0 ** (np.arange(0, 64, 2) / 64))
    share = np.clip((turns - 1) / (high - 1), 0, 1) if high > 1 else turns > 1
    factors = (1 / ((1 - share) / 8 + share)).astype(np.float32)
    write_file(tmp_path / "model.gguf", [Kind.Q8_0], changes=[lambda w: w.add_tensor("rope_freqs.weight", factors)])
    assert main(["gguf", str(tmp_path / "model.gguf"), str(tmp_path / "model")]) == 0
    rope = read_model_config(tmp_path / "model").ropes[0]
    assert (rope.kind, rope.factor, rope.high_freq_factor) == ("llama3", 8.0, high)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "scaling.type 'yarn' is not supported"),
        (lambda w: w.add_rope_scaling_factor(4.0), "rope.scaling.factor 4.0 is not supported"),
    ],
)
def test_a_scaling_beside_the_factors_of_llama_3_is_refused(tmp_path, capfd, change, said):
    """llama.cpp multiplies the two."""
    factors = [lambda w: w.add_tensor("rope_freqs.weight", np.ones(32, np.float32)), change]
    write_file(tmp_path / "model.gguf", [Kind.Q8_0], changes=factors)
    assert main(["gguf", str(tmp_path / "model.gguf"), str(tmp_path / "model")]) == 2
    assert said in capfd.readouterr().err


def test_scores_that_are_too_few_are_refused_by_name(tmp_path):
    def add(writer):
        add_tokens(writer, "llama", ["a", "b", "ab"], scores=[0.0, -1.0])

    with pytest.raises(ConfigurationError, match=r"tokenizer.ggml.scores has 2 values; allowed: 3, one for each token"):
        imported(tmp_path, add)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a file of this kind", b"GGUF\3\0\0\0" + b"\xff" * 40])
def test_a_damaged_file_is_refused_in_one_line(tmp_path, capfd, content):
    (tmp_path / "bad.gguf").write_bytes(content)
    assert main(["gguf", str(tmp_path / "bad.gguf"), str(tmp_path / "model")]) == 2
    said = capfd.readouterr().err
    assert "bad.gguf: not a readable GGUF file" in said
    assert said.count("\n") == 1


def test_a_file_for_big_endian_machines_is_refused(tmp_path, capfd):
    writer = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    plain_tokens(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert main(["gguf", str(tmp_path / "big.gguf"), str(tmp_path / "model")]) == 2
    assert "big.gguf: a file for big-endian machines; allowed: a little-endian file" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("kind", "pooling"),
    [
        (None, NO_POOLING),
        (gguf.PoolingType.NONE, NO_POOLING),
        (gguf.PoolingType.MEAN, POOL_MEAN),
        (gguf.PoolingType.CLS, POOL_CLS),
        (gguf.PoolingType.LAST, POOL_LAST),
    ],
)
def test_vectors_are_pooled_as_the_file_says(tmp_path, capfd, kind, pooling):
    changes = [] if kind is None else [lambda writer: writer.add_pooling_type(kind)]
    write_file(tmp_path / "model.gguf", [Kind.Q8_0], changes=changes)
    assert main(["gguf", str(tmp_path / "model.gguf"), str(tmp_path / "model")]) == 0
    assert default_pooling(tmp_path / "model", NO_POOLING) == pooling


def test_another_architecture_is_refused_by_name(tmp_path, capfd):
    write_file(tmp_path / "model.gguf", [Kind.Q8_0], architecture="rwkv6")
    assert main(["gguf", str(tmp_path / "model.gguf"), str(tmp_path / "model")]) == 2
    said = capfd.readouterr().err
    assert "general.architecture 'rwkv6' is not supported; allowed: one of the" in said
    assert "in the table of docs/models.md, such as " in said


@pytest.mark.parametrize("command", ["serve", "executor"])
def test_a_file_in_the_place_of_a_model_that_is_none_is_refused_in_one_line(tmp_path, capfd, command, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "model.gguf").touch()
    assert main([command, "--model", str(tmp_path / "model.gguf")]) == 3
    assert "model.gguf: not a readable GGUF file" in capfd.readouterr().err
