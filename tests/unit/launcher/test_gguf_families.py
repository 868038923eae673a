"""``headway gguf``: the model of a file in llama.cpp's layout has the greedy tokens of transformers, for every family."""

import json
import os
import random
import subprocess
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from backend_driver import BackendDriver, Request
from gguf_files import FURTHER, MODELS, VOCAB_SIZE, make_model, write_file
from headway.__main__ import main
from headway.flags.settings import ConfigurationError
from headway.gguf_import.file import GgufFile
from headway.gguf_import.model import config_of, tensors_of
from headway.gguf_import.tokenizer import end_tokens_of, tokenizer_of
from headway_executor.backend import BackendConfig
from headway_executor.backends.torch_backend import TorchBackend

NUM_OUTPUT = 8
# Beyond the windows, which are of 20 and 24 tokens.
LENGTHS = (1, 9, 60)


def prompts():
    draw = random.Random(1)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


def greedy(model, prompt):
    model.generation_config.eos_token_id = None
    mask = torch.ones(1, len(prompt), dtype=torch.long)
    lengths = {"max_new_tokens": NUM_OUTPUT, "min_new_tokens": NUM_OUTPUT}
    return model.generate(torch.tensor([prompt]), attention_mask=mask, do_sample=False, **lengths)[0, len(prompt) :]


def served(directory, kernels):
    backend = TorchBackend()
    settings = {"dtype": "float32", "max_num_seqs": 8, "num_kv_blocks": 100, "block_size": 8}
    info = backend.open(BackendConfig(model=str(directory), options={"kernels": kernels}, **settings))
    requests = [Request(prompt, NUM_OUTPUT) for prompt in prompts()]
    BackendDriver(backend, info).run(requests, budget=40)
    backend.close()
    return [request.output for request in requests]


OTHERWISE_IN_LLAMA_CPP = {
    "bamba": "its file has channels of whole heads turned, and it rotates half of each",
    "command-r-norms": "only with 64 layers does it read norms of heads",
    "deepseek2": "it scores groups by two experts",
    "deepseek2-lite": "only with 26 or 27 layers are queries not compressed",
    "deepseek2-v3": "it takes the usual bounds for yarn",
    "exaone4": "only with 64 layers does it have windows",
    # With these, and no token whose embedding is zero, it agreed.
    "gemma3n": "it takes the published numbers of states, of sparse layers and of layers with keys of their own",
    "gpt-oss": "it takes the usual bounds for yarn, and cuts them to whole channels",
    "llama-bias": "it takes the usual bounds for yarn",
    "mimo2": "it has no factor on values, and windows without the token itself",
    "mistral3": "it takes the usual bounds for yarn",
    "phi3": "it has no window",
    "qwen2": "the usual bounds for yarn",
}
ON_OPERATORS = ("nemotron_h_moe-latent", "gemma3n")
"""With what the CPU kernels lack."""
CASES = [
    *(
        pytest.param(
            name, Kind.F16, "eager", marks=pytest.mark.deep if name in FURTHER and name not in ON_OPERATORS else ()
        )
        for name in MODELS
    ),
    *((name, Kind.Q8_0, "compiled") for name in MODELS if name not in ON_OPERATORS),
    ("gpt-oss", Kind.MXFP4, "eager"),
    ("gpt-oss", Kind.MXFP4, "compiled"),
]


@pytest.mark.parametrize(("name", "kind", "kernels"), CASES)
def test_the_tokens_are_those_of_transformers(tmp_path, name, kind, kernels):
    model = make_model(tmp_path / "source", name, kind)
    file = write_file(tmp_path / "model.gguf", tmp_path / "source", kind)
    assert main(["gguf", str(file), str(tmp_path / "model")]) == 0
    assert served(tmp_path / "model", kernels) == [greedy(model, prompt).tolist() for prompt in prompts()]


@pytest.mark.skipif("NODE_DIRECTORY" not in os.environ, reason="NODE_DIRECTORY names no folder with node-llama-cpp")
@pytest.mark.parametrize("name", sorted(MODELS.keys() - OTHERWISE_IN_LLAMA_CPP))
def test_llama_cpp_makes_the_same_of_the_file(tmp_path, name):
    """So that the writer of these files and their reader cannot be wrong together. Its products are less exact: it may
    take the second-best of two tokens that are as good as equal.
    """
    model = make_model(tmp_path / "source", name, Kind.F32)
    file = write_file(tmp_path / "model.gguf", tmp_path / "source", Kind.F32)
    command = ["node", str(Path(__file__).parents[2] / "llama_cpp.mjs"), str(file), str(NUM_OUTPUT)]
    done = subprocess.run(command, input=json.dumps(prompts()), capture_output=True, text=True, check=True)
    for prompt, theirs in zip(prompts(), json.loads(done.stdout.strip().rpartition("\n")[2]), strict=True):
        ours = greedy(model, prompt).tolist()
        place = next((place for place in range(NUM_OUTPUT) if ours[place] != theirs[place]), None)
        if place is not None:
            logits = model(torch.tensor([prompt + ours[:place]])).logits[0, -1]
            assert logits[ours[place]] - logits[theirs[place]] < 0.005 * logits.std()


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("qwen2", gguf.MODEL_ARCH.QWEN2VL),
        ("qwen3", gguf.MODEL_ARCH.QWEN3VL),
        ("qwen3moe", gguf.MODEL_ARCH.QWEN3VLMOE),
    ],
)
def test_the_text_of_models_that_see_is_of_the_plain_family(tmp_path, name, architecture):
    """Their positions have sections, and pictures enter several layers (``conversion/qwen3vl.py``)."""
    make_model(tmp_path / "source", name, Kind.F32)
    plain = write_file(tmp_path / "plain.gguf", tmp_path / "source", Kind.F32)

    def change(writer):
        writer.add_rope_dimension_sections([2, 3, 3, 0])
        if architecture != gguf.MODEL_ARCH.QWEN2VL:
            writer.add_num_deepstack_layers(3)

    file = write_file(tmp_path / "model.gguf", tmp_path / "source", Kind.F32, architecture=architecture, change=change)
    ours, theirs = GgufFile(file), GgufFile(plain)
    assert config_of(ours) == config_of(theirs)
    assert [name for name, _ in tensors_of(ours)] == [name for name, _ in tensors_of(theirs)]


def test_the_file_of_pictures_is_refused(tmp_path, capfd):
    writer = gguf.GGUFWriter(tmp_path / "mmproj.gguf", "clip")
    writer.add_type("mmproj")
    writer.add_tensor("v.patch_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert main(["gguf", str(tmp_path / "mmproj.gguf"), str(tmp_path / "model")]) == 2
    said = "it sees or hears for a model (mmproj); allowed: the file of the text, which is served alone\n"
    assert capfd.readouterr().err.endswith(said)


def test_layers_that_predict_further_tokens_are_left(tmp_path):
    """GLM 4.5 has one behind the others, which counts as they do."""

    def add(writer):
        writer.add_block_count(4)
        writer.add_nextn_predict_layers(1)
        for place in ("attn_norm", "nextn.eh_proj"):
            writer.add_tensor(f"blk.3.{place}.weight", np.ones(64, np.float32))

    model = make_model(tmp_path / "source", "glm4moe", Kind.F16)
    file = write_file(tmp_path / "model.gguf", tmp_path / "source", Kind.F16, change=add)
    assert main(["gguf", str(file), str(tmp_path / "model")]) == 0
    assert served(tmp_path / "model", "compiled") == [greedy(model, prompt).tolist() for prompt in prompts()]


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("deepseek2", "0.attn_kv_b"),
        ("qwen3next", "0.ssm_in"),
        ("gemma4-small", "5.attn_k"),
        ("gemma4-experts", "0.ffn_up_exps"),
    ],
)
def test_the_older_forms_of_files(tmp_path, name, tensor):
    """Latent attention as llama.cpp wrote it until April 2025: keys and values in one tensor, and widths of heads that are
    expanded. Qwen3-Next with the inputs of a state in one tensor. Gemma 4 with keys in layers that share those of others,
    and with gates and ups of experts apart.
    """
    model = make_model(tmp_path / "source", name, Kind.Q8_0)
    file = write_file(tmp_path / "model.gguf", tmp_path / "source", Kind.Q8_0, is_absorbed=False)
    assert f"blk.{tensor}.weight" in GgufFile(file).tensor_names
    assert main(["gguf", str(file), str(tmp_path / "model")]) == 0
    assert served(tmp_path / "model", "compiled") == [greedy(model, prompt).tolist() for prompt in prompts()]


def test_a_model_in_several_files_becomes_a_checkpoint_of_several(tmp_path, monkeypatch, capfd):
    model = make_model(tmp_path / "source", "mixtral", Kind.Q8_0)
    write_file(tmp_path / "model.gguf", tmp_path / "source", Kind.Q8_0, most_tensors=20)
    first, *others = sorted(tmp_path.glob("model-*-of-*.gguf"))
    assert len(others) == 1
    assert main(["gguf", str(others[0]), str(tmp_path / "model")]) == 2
    assert "allowed: the one whose name ends with -00001-of-00002.gguf" in capfd.readouterr().err
    monkeypatch.setattr("headway.gguf_import.command.MOST_BYTES", 50_000)
    assert main(["gguf", str(first), str(tmp_path / "model")]) == 0
    assert len(list((tmp_path / "model").glob("model-0*.safetensors"))) > 2
    assert served(tmp_path / "model", "compiled") == [greedy(model, prompt).tolist() for prompt in prompts()]
    second = others[0].read_bytes()
    others[0].write_bytes(first.read_bytes())
    assert main(["gguf", str(first), str(tmp_path / "other")]) == 2
    assert f"{first}: {others[0].name} is not the file 2 of the 2 of this model" in capfd.readouterr().err
    others[0].unlink()
    assert main(["gguf", str(first), str(tmp_path / "other")]) == 2
    assert f"{first}: the model is in 2 files, and {others[0].name} is missing" in capfd.readouterr().err
    first.write_bytes(second)
    assert main(["gguf", str(first), str(tmp_path / "other")]) == 2
    assert f"{first}: not the first of 2 files" in capfd.readouterr().err
    assert not (tmp_path / "other").exists()


def test_files_of_different_models_are_told_by_their_number_of_tensors(tmp_path, capfd):
    for name in ("model", "other"):
        make_model(tmp_path / name, "llama" if name == "model" else "qwen3", Kind.F32)
        write_file(tmp_path / f"{name}.gguf", tmp_path / name, Kind.F32, most_tensors=20)
    first, second = sorted(tmp_path.glob("model-*-of-*.gguf"))
    second.write_bytes((tmp_path / second.name.replace("model", "other")).read_bytes())
    assert main(["gguf", str(first), str(tmp_path / "made")]) == 2
    assert "the 2 files have 36 tensors; split.tensors.count says 30" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [("qwen3", Kind.Q8_0, "float16"), ("qwen3", Kind.BF16, "bfloat16"), ("gemma3", Kind.Q8_0, "bfloat16")],
)
def test_a_gpu_computes_in_a_dtype_that_holds_the_numbers(tmp_path, name, kind, dtype):
    make_model(tmp_path / "source", name, kind)
    assert config_of(GgufFile(write_file(tmp_path / "model.gguf", tmp_path / "source", kind)))["dtype"] == dtype


def changed(tmp_path, name, change):
    make_model(tmp_path / "source", name, Kind.F32)
    return GgufFile(write_file(tmp_path / "model.gguf", tmp_path / "source", Kind.F32, change=change))


@pytest.mark.parametrize(
    ("pattern", "kinds"), [(2, "sfsfsfs"), ([False, False, True, False, False, False, True], "ffsfffs")]
)
def test_a_file_may_say_which_layers_have_the_window(tmp_path, pattern, kinds):
    file = changed(tmp_path, "gemma3", lambda writer: writer.add_sliding_window_pattern(pattern))
    assert "".join(kind[0] for kind in config_of(file)["layer_types"]) == kinds


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("qwen3", lambda w: w.add_sliding_window(64), "qwen3.attention.sliding_window 64 is not supported"),
        ("olmo", lambda w: w.add_clamp_kqv(8.0), "olmo.attention.clamp_kqv 8.0 is not supported"),
        ("granite", lambda w: w.add_rope_scaling_finetuned(False), "granite.rope.scaling.finetuned False"),
        ("deepseek2-v3", lambda w: w.add_nextn_predict_layers(1), "deepseek2.nextn_predict_layers 1"),
        ("qwen2", lambda w: w.add_expert_count(8), "qwen2.expert_count 8 is not supported; allowed: none"),
        (
            "gemma4",
            lambda w: w.add_sliding_window_pattern([True, False, True, True]),
            "[True, False, True, True] is not supported; allowed: a list of 4, the last of which is False",
        ),
        ("gemma4", lambda w: w.add_shared_kv_layers(4), "shared_kv_layers 4 is not supported; allowed: 0 to 3"),
        ("gemma4", lambda w: w.add_rope_dimension_count_swa(8), "rope.dimension_count_swa 8 is not supported"),
        ("gemma4", lambda w: w.add_rope_scaling_factor(2.0), "gemma4.rope.scaling.factor 2.0 is not supported"),
        (
            "gemma4",
            lambda w: w.add_feed_forward_length([96, 192, 96, 96]),
            "allowed: one number, or twice as many in layers that share keys and values",
        ),
        ("gemma4", lambda w: w.add_key_length(32), "rope_freqs.weight is not supported; allowed: 16 factors, 1 and"),
        (
            "gemma4",
            lambda w: w.add_array("tokenizer.ggml.suppress_tokens", [5]),
            "tokenizer.ggml.suppress_tokens is not supported; allowed: none",
        ),
    ],
)
def test_what_changes_a_model_and_is_not_read_is_refused(tmp_path, name, change, said):
    with pytest.raises(ConfigurationError) as refused:
        config_of(changed(tmp_path, name, change))
    assert said in str(refused.value)


TEXT = "it's 12345 déjà\r\n\n  camelCase,foo 東京 //\t"
CUT = {
    "gpt-2": ["it", "'s", " 12345", " déjà", "\r\n\n ", " camelCase", ",", "foo", " 東京", " //", "\t"],
    "mpt": ["it", "'s", " 12345", " déjà", "\r\n\n ", " camelCase", ",", "foo", " 東京", " //", "\t"],
    "falcon": [
        "it",
        "'",
        "s",
        " ",
        "123",
        "45",
        " déjà",
        "\r\n\n ",
        " camelCase",
        ",",
        "foo",
        " 東京",
        " ",
        "//",
        "\t",
    ],
    "bloom": ["it's", " 12345", " déjà", "\r\n\n ", " camelCase", ",", "foo", " 東京", " //", "\t"],
    "starcoder": ["it", "'s", " ", *"12345", " déjà", "\r\n\n ", " camelCase", ",", "foo", " 東京", " //", "\t"],
    "llama-bpe": ["it", "'s", " ", "123", "45", " déjà", "\r\n\n", " ", " camelCase", ",foo", " 東京", " //", "\t"],
    "qwen35": ["it", "'s", " ", *"12345", " déjà", "\r\n\n", " ", " camelCase", ",foo", " 東京", " //", "\t"],
    "qwen2": ["it", "'s", " ", *"12345", " déjà", "\r\n\n", " ", " camelCase", ",foo", " 東京", " //", "\t"],
    "gpt-4o": ["it's", " ", "123", "45", " déjà", "\r\n\n", " ", " camel", "Case", ",foo", " 東京", " //", "\t"],
    "kimi-k2": ["it's", " ", "123", "45", " déjà", "\r\n\n", " ", " camel", "Case", ",foo", " ", "東京", " //", "\t"],
    "tekken": ["it", "'s", " ", *"12345", " déjà", "\r\n\n", " ", " camel", "Case", ",foo", " 東京", " //", "\t"],
    "deepseek-llm": [
        "it",
        "'",
        "s",
        " ",
        "12345",
        " d",
        "é",
        "j",
        "à",
        "\r",
        "\n",
        "\n",
        " ",
        " camelCase",
        ",",
        "foo",
    ],
    "deepseek-v3": [
        "it",
        "'s",
        " ",
        "123",
        "45",
        " déjà",
        "\r\n\n",
        " ",
        " camelCase",
        ",foo",
        " ",
        "東京",
        " //",
        "\t",
    ],
}
"""As llama.cpp's own tokenizer cuts the text (``src/llama-vocab.cpp``)."""


@pytest.mark.parametrize("cut", CUT)
def test_text_is_cut_as_llama_cpp_cuts_it(tmp_path, cut):
    writer = gguf.GGUFWriter(tmp_path / "tokens.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cut)
    writer.add_token_list(["a", "b", "ab"])
    writer.add_token_types([gguf.TokenType.NORMAL] * 3)
    writer.add_token_merges(["a b"])
    writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    pieces = tokenizer_of(GgufFile(tmp_path / "tokens.gguf")).pre_tokenizer.pre_tokenize_str(TEXT)
    found = [TEXT[start:end] for _, (start, end) in pieces]
    assert found[: len(CUT[cut])] == CUT[cut]


WORDS_OF_GEMMA_4 = {
    "hello hello": [278, 279],
    "  hello\n\n\nab é": [265, 279, 274, 283, 265, 203, 177],
    "a    b\n\n\n\nhello a": [266, 281, 267, 273, 273, 278, 282],
    "hello<|channel>hello <turn|>\nab": [278, 7, 278, 265, 5, 264, 283],
    "ab\t\nhello\r\n\n ab": [283, 17, 264, 278, 21, 273, 282, 267],
}


def test_gemma_4_cuts_lines_into_characters_and_merges_them(tmp_path):
    """The numbers are those of llama.cpp, which ends answers at the same tokens."""
    merges = ["\n \n", "\n\n \n", "l l", "h e", "he ll", "hell o", "▁ hello", "▁ ▁", "▁▁ ▁▁", "▁ a", "a b", "o ▁a"]
    words = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", "<|tool_response>", "<|channel>"]
    kinds = [gguf.TokenType.CONTROL] * 6 + [gguf.TokenType.USER_DEFINED] * 2
    kinds[3] = gguf.TokenType.UNKNOWN
    tokens = [*words, *(f"<0x{byte:02X}>" for byte in range(256)), *"\n▁abchelo"]
    kinds += [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * (9 + len(merges))
    writer = gguf.GGUFWriter(tmp_path / "tokens.gguf", "gemma4")
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list([*tokens, *(merge.replace(" ", "") for merge in merges)])
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "tokens.gguf")
    made = tokenizer_of(file)
    for text, numbers in WORDS_OF_GEMMA_4.items():
        assert made.encode(text).ids == [2, *numbers]
        assert made.decode([2, *numbers], skip_special_tokens=False) == f"<bos>{text}"
    assert end_tokens_of(file) == [1, 5, 6]
