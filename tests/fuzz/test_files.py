"""Files of others: checkpoints, tokenizers, templates, configuration, prompts. Each is read, or refused in one line."""

import json
import shutil
import struct
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import headway
from fuzz.limits import bounded, examples
from headway.commands.generate import jobs_of
from headway.flags.configuration import read_file
from headway.flags.settings import ConfigurationError
from headway.planning.services import SERVICES
from headway_executor.backend import ModelFilesError
from headway_executor.checkpoint.weights import Checkpoint
from headway_executor.models.families import FAMILIES, read_model_config
from headway_gateway.access.credentials import parse_tokens
from headway_gateway.text.conversation import Conversation
from headway_gateway.text.template_process import ChatTemplate, TemplateError
from headway_gateway.text.tokenization import PromptError, TokenizerFilesError, load_text_model

DEMO = Path(headway.__file__).parent / "demo_model"
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "eos_token_id": 2,
}  # fmt: skip
FIELDS = [
    *LLAMA, "head_dim", "hidden_act", "rms_norm_eps", "torch_dtype", "dtype", "tie_word_embeddings", "rope_scaling",
    "rope_parameters", "rope_theta", "partial_rotary_factor", "auto_map", "quantization_config", "layer_types",
    "sliding_window", "use_sliding_window", "max_window_layers", "attention_bias", "mlp_bias",
    "original_max_position_embeddings", "sliding_window_pattern", "rotary_pct", "short_factor", "no_rope_layers",
    "no_rope_layer_interval", "query_pre_attn_scalar", "logits_scaling", "attn_logit_softcapping", "hidden_activation",
]  # fmt: skip
ROPE_FIELDS = [
    "type", "rope_type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "rope_theta",
    "partial_rotary_factor", "short_factor", "sliding_attention", "full_attention",
]  # fmt: skip
ARCHITECTURES = sorted(FAMILIES)

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 40), st.integers(), st.floats(), st.text(max_size=10),
    st.sampled_from(["linear", "dynamic", "yarn", "llama3", "longrope", "default", "silu", "bfloat16", 1e308, 10**400]),
)  # fmt: skip
jsons = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)),
)
ropes = st.dictionaries(st.sampled_from(ROPE_FIELDS), st.one_of(scalars, jsons), max_size=7)


MOST_CHARACTERS = 1_000
"""The longest line names every family."""


def one_line(error: BaseException, most: int = MOST_CHARACTERS) -> None:
    assert "\n" not in str(error)
    assert len(str(error)) < most


@examples(250)
@given(
    changes=st.dictionaries(st.sampled_from(FIELDS), st.one_of(jsons, ropes, st.just(4)), max_size=5),
    architecture=st.sampled_from(ARCHITECTURES),
    generation=st.one_of(st.none(), jsons, st.fixed_dictionaries({"eos_token_id": jsons})),
)
@example(changes={"architectures": [[]]}, architecture="LlamaForCausalLM", generation=None)
@example(changes={"layer_types": [[], {}]}, architecture="Qwen2ForCausalLM", generation=None)
@example(changes={"torch_dtype": []}, architecture="LlamaForCausalLM", generation=None)
@example(changes={"rope_scaling": {"type": []}}, architecture="LlamaForCausalLM", generation=None)
@example(changes={"rms_norm_eps": 10**400}, architecture="LlamaForCausalLM", generation=None)
@example(changes={"rope_theta": 10**400}, architecture="LlamaForCausalLM", generation=None)
@example(
    changes={"rope_scaling": {"type": "linear", "factor": 1e308}}, architecture="LlamaForCausalLM", generation=None
)
def test_a_model_configuration(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any], architecture: str, generation: Any
) -> None:
    at = shared(tmp_path_factory, "config")
    (at / "config.json").write_text(json.dumps(LLAMA | {"architectures": [architecture]} | changes))
    (at / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (at / "generation_config.json").write_text(json.dumps(generation))
    with bounded():
        try:
            config = read_model_config(at)
        except ModelFilesError as error:
            one_line(error)
            return
    assert 1 <= config.context <= 1 << 24
    assert len(config.layers) == config.num_layers
    assert all(0 <= token < config.vocab_size for token in config.eos_token_ids)


@examples(150)
@given(data=st.one_of(st.binary(max_size=60), st.text(alphabet='{}[]",:0e-9\\u "nultr', max_size=60).map(str.encode)))
@example(data=b"[" * 200_000)
@example(data=b'{"a":' * 100_000)
@example(data=b"\xff\xfe{}")
@example(data=b"1" * 5000)
@example(data=b'{"hidden_size": ' + b"1" * 5000 + b"}")
def test_any_bytes_as_json(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    at = shared(tmp_path_factory, "json")
    shutil.copy(DEMO / "tokenizer.json", at)
    for name, read, error in (
        ("config.json", read_model_config, ModelFilesError),
        ("model.safetensors.index.json", Checkpoint, ModelFilesError),
    ):
        (at / name).write_bytes(data)
        with bounded():
            refused_or_read(lambda read=read: read(at), error)


@examples(60)
@given(data=st.one_of(st.binary(max_size=60), jsons.map(lambda value: json.dumps(value).encode())))
@example(data=b"[" * 200_000)
@example(data=b'{"chat_template": [{"name": [], "template": 1}, 2]}')
@example(data=b'{"chat_template": "\\ud800"}')
@example(data=b'{"bos_token": "\\ud800", "chat_template": "{{ bos_token }}"}')
@example(data=b'{"chat_template": "' + b"(" * 5000 + b'"}')
@example(data=b'{"chat_template": "{{ ' + b"(" * 5000 + b'"}')
@example(data=b'{"chat_template": "{{ ' + b"-" * 50000 + b'1 }}"}')
def test_a_tokenizer_configuration(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    at = shared(tmp_path_factory, "tokenizer-config")
    shutil.copy(DEMO / "tokenizer.json", at)
    (at / "tokenizer_config.json").write_bytes(data)
    refused_or_read(lambda: load_text_model(at), TokenizerFilesError)


TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "post_processor": None, "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
              "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
              "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
}  # fmt: skip


@examples(150)
@given(
    part=st.sampled_from([*TOKENIZER, "model.vocab", "model.merges", "model.type", "model.dropout", "decoder.type"]),
    value=st.one_of(jsons, st.dictionaries(st.text(max_size=3), st.integers(-2, 1 << 33), max_size=4)),
)
@example(part="model.vocab", value={})
@example(part="model.vocab", value={"a": (1 << 32) - 1})
@example(part="decoder", value=None)
@example(part="decoder", value={"type": "Replace", "pattern": {"Regex": "("}, "content": ""})
@example(part="normalizer", value={"type": "Sequence", "normalizers": [{"type": "Nonesuch"}]})
def test_a_tokenizer(tmp_path_factory: pytest.TempPathFactory, part: str, value: Any) -> None:
    at = shared(tmp_path_factory, "tokenizer")
    definition = json.loads(json.dumps(TOKENIZER))
    outer, _, inner = part.partition(".")
    if inner:
        definition[outer][inner] = value
    else:
        definition[outer] = value
    (at / "tokenizer.json").write_text(json.dumps(definition))

    def load_and_use() -> None:
        model = load_text_model(at)
        ids = model.encode("ab\u0000 é")
        model.decode(ids)
        detokenizer = model.new_detokenizer()
        detokenizer.push(ids)
        detokenizer.finish()

    with bounded():
        refused_or_read(load_and_use, TokenizerFilesError)


headers = st.dictionaries(
    st.one_of(st.sampled_from(["a", "b", "__metadata__"]), st.text(max_size=4)),
    st.one_of(
        jsons,
        st.fixed_dictionaries({
            "dtype": st.one_of(st.sampled_from(["F32", "F16", "BF16", "I64", "F4"]), st.text(max_size=3)),
            "shape": st.lists(st.one_of(st.integers(0, 4), st.integers()), max_size=3),
            "data_offsets": st.lists(st.one_of(st.integers(0, 16), st.integers()), max_size=3),
        }),
    ),
    max_size=3,
)  # fmt: skip


@examples(200)
@given(
    header=st.one_of(headers.map(lambda value: json.dumps(value).encode()), st.binary(max_size=40)),
    length=st.one_of(st.none(), st.integers(0, (1 << 64) - 1)),
    data=st.binary(max_size=32),
)
@example(header=b"{}", length=1 << 40, data=b"")
@example(
    header=b'{"a":{"dtype":"F32","shape":[4294967296,4294967296,4294967296],"data_offsets":[0,4]}}',
    length=None,
    data=b"1234",
)
@example(header=b"[" * 100_000, length=None, data=b"")
def test_safetensors(tmp_path_factory: pytest.TempPathFactory, header: bytes, length: int | None, data: bytes) -> None:
    at = shared(tmp_path_factory, "safetensors")
    (at / "config.json").write_text("{}")
    path = at / "model.safetensors"
    path.unlink(missing_ok=True)  # An earlier one may be mapped.
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)

    def read_all() -> None:
        with Checkpoint(at) as checkpoint:
            checkpoint.check({"a": (1,)}, frozenset())
            checkpoint.read("a")
            checkpoint.fingerprint()

    with bounded():
        refused_or_read(read_all, ModelFilesError)


TEMPLATE_PARTS = [
    "{{ messages }}", "{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{% if m %}", "{% endif %}", "{{ m['role'] }}",
    "{% set x = 3 %}", "{{ x ** x ** x }}", "{{ 'a' * 999999999 }}", "{% macro f() %}", "{% endmacro %}", "{{ f() }}", "{{ x.y.z }}",
    "{{ ''.__class__ }}", "{{ range(100000) | list | length }}", "{% include 'x' %}", "{% import 'x' as y %}", "{% extends 'x' %}",
    "{{ raise_exception('no') }}", "{{ strftime_now(messages) }}", "{{ messages | tojson }}", "{{ namespace(a=1) }}", "{% break %}",
    "{{ cycler() }}", "{{ lipsum(n=99) | length }}", "{{ 1 / 0 }}", "{{ '%s' % messages }}", "{{ self }}", "{% raw %}", "{% endraw %}",
    "{{ messages | map(attribute='content') | join }}", "{{ joiner }}", "{{ loop.index }}", "{{ '\\ud800' }}", "{#", "}}", "{%", "\n",
]  # fmt: skip


@examples(30)
@given(
    parts=st.lists(st.sampled_from(TEMPLATE_PARTS), max_size=8),
    messages=st.lists(st.tuples(st.text(max_size=5), st.text(max_size=20)), max_size=3),
)
@example(parts=["{{ '\\ud800' }}"], messages=[])
@example(parts=["{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"], messages=[])
def test_a_chat_template(parts: list[str], messages: list[tuple[str, str]]) -> None:
    try:
        template = ChatTemplate("".join(parts), {"bos_token": "<s>"}, most_render_s=1.0)
        template.render(Conversation(tuple(messages)))
    except TemplateError as error:
        one_line(error)


@examples(200)
@given(lines=st.lists(st.one_of(st.binary(max_size=40), jsons.map(lambda v: json.dumps(v).encode()), st.dictionaries(
    st.sampled_from(["prompt", "max_tokens", "seed", "stop", "priority", "temperature"]), jsons, max_size=4
).map(lambda v: json.dumps(v).encode())), max_size=4))  # fmt: skip
@example(lines=[b"[" * 100_000])
@example(lines=[b'{"prompt": ' + b'{"a":' * 100_000])
@example(lines=[b'{"prompt": "\\ud800"}'])
@example(lines=[b'{"\\n":'])
@example(lines=[b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}"])
def test_prompts_of_a_file(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    path = shared(tmp_path_factory, "prompts") / "p.jsonl"
    path.write_bytes(b"\n".join(lines))
    with bounded():
        refused_or_read(lambda: list(jobs_of(Namespace(prompt=None, file=str(path), chat=False))), ConfigurationError)


@examples(150)
@given(
    text=st.one_of(
        st.binary(max_size=60),
        st.builds(
            lambda section, key, value: f"[{section}]\n{key} = {value}\n".encode(),
            st.sampled_from(["serve", "scheduler", "executor", "gateway", "nobody"]),
            st.sampled_from(["max_num_seqs", "order", "model", "tenant_weights", "aging_s", "shed_late", "x"]),
            st.sampled_from(
                ["1", "-1", "nan", "inf", "'x'", "[1]", "{a = 1}", "{}", "true", "1979-05-27", "0x" + "f" * 99]
            ),
        ),
    )
)
@example(text=b"a = " + b"[" * 50_000)
@example(text=b"a." * 10_000)
@example(text=b"x = " + b"9" * 10_000)
def test_configuration(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    path = shared(tmp_path_factory, "toml") / "c.toml"
    path.write_bytes(text)
    sections = {name: service.settings for name, service in SERVICES.items()}
    with bounded():
        refused_or_read(lambda: read_file(str(path), sections), ConfigurationError)


@examples(250)
@given(text=st.one_of(st.text(max_size=60), st.text(alphabet="ab ,=#\nsha256:generate0", max_size=80)))
@example(text="\ud800 generate x")
def test_tokens(text: str) -> None:
    with bounded():
        refused_or_read(lambda: parse_tokens(text), ValueError)


def refused_or_read(read: Any, error: type[Exception]) -> None:
    try:
        read()
    except PromptError:
        return
    except error as refusal:
        one_line(refusal)


_DIRECTORIES: dict[str, Path] = {}


def shared(factory: pytest.TempPathFactory, name: str) -> Path:
    """One directory for all examples of a test."""
    if name not in _DIRECTORIES:
        _DIRECTORIES[name] = factory.mktemp(name)
    return _DIRECTORIES[name]
