"""Tiny random checkpoints of every supported family, made with transformers, each with a tokenizer.

``make_checkpoint(directory, name)`` writes one; ``FAMILIES`` lists the names; ``change_head`` makes a tied one's head odd. Weights are drawn with a large standard
deviation, so that the two best logits are rarely close and greedy tokens can be compared exactly.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 320
CONTEXT = 256
EOS_TOKEN = "<|end|>"
SPECIAL_TOKENS = (EOS_TOKEN, "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_CORPUS = (
    "the scheduler decides every step which tokens run",
    "the executor knows rows and tensors, the gateway knows text",
    "a block holds sixteen positions of keys and values",
)


def _sizes(**changes: object) -> dict[str, object]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.25,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    } | changes


def _rope(kind: str, **fields: object) -> dict[str, object]:
    return {"rope_type": kind, "rope_theta": 10_000.0} | fields


def _llama(**changes: object) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**_sizes(**changes)))


def _mistral(**changes: object) -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**_sizes(**changes)))


def _qwen2(**changes: object) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**_sizes(**changes)))


def _qwen3(**changes: object) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**_sizes(**changes)))


_LLAMA3_ROPE = _rope(
    "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
_YARN_ROPE = _rope("yarn", factor=4.0, original_max_position_embeddings=64)

_MAKERS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama2": lambda: _llama(num_key_value_heads=4, num_attention_heads=4),
    "llama3": lambda: _llama(rope_parameters=_LLAMA3_ROPE),
    "llama-tied": lambda: _llama(tie_word_embeddings=True, num_key_value_heads=1, rms_norm_eps=1e-5),
    "llama-linear": lambda: _llama(rope_parameters=_rope("linear", factor=3.0)),
    "llama-dynamic": lambda: _llama(rope_parameters=_rope("dynamic", factor=3.0), max_position_embeddings=80),
    "llama-yarn": lambda: _llama(rope_parameters=_YARN_ROPE),
    "llama-bias": lambda: _llama(attention_bias=True, mlp_bias=True, head_dim=20),
    "mistral": lambda: _mistral(sliding_window=24, head_dim=16),
    "mistral-full": lambda: _mistral(sliding_window=None),
    "qwen2": lambda: _qwen2(rope_parameters=_YARN_ROPE),
    "qwen2-window": lambda: _qwen2(use_sliding_window=True, sliding_window=20, max_window_layers=1),
    "qwen2-tied": lambda: _qwen2(tie_word_embeddings=True),
    "qwen3": lambda: _qwen3(head_dim=16),
    "qwen3-bias": lambda: _qwen3(head_dim=24, attention_bias=True, tie_word_embeddings=True),
}

FAMILIES = tuple(_MAKERS)
"""Names that ``make_checkpoint`` knows."""


def make_model(name: str, *, seed: int = 0) -> PreTrainedModel:
    """The model of one family, float32, in evaluation mode; biases and norms are random too, not their usual 0 and 1."""
    torch.manual_seed(seed)
    model = _MAKERS[name]().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(".bias"):
                parameter.normal_(0.0, 0.3)
            elif "norm" in parameter_name:
                parameter.uniform_(0.6, 1.6)
    return model


def make_checkpoint(directory: Path, name: str, *, seed: int = 0, max_shard_size: str = "5GB") -> PreTrainedModel:
    """Write the checkpoint of one family with its tokenizer into ``directory`` and return the model itself.

    A small ``max_shard_size`` ("50KB") gives several shards and an index.
    """
    model = make_model(name, seed=seed)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    tokenizer().save_pretrained(directory)
    return model


def change_head(directory: Path, kind: str) -> None:
    """Store a head in a tied checkpoint: "other" than the embedding, the "same", or "alone", without an embedding."""
    tensors = load_file(directory / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.flip(0) if kind == "other" else embedding.clone()
    if kind == "alone":
        del tensors["model.embed_tokens.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most ``VOCAB_SIZE`` entries, with a chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        _CORPUS,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=EOS_TOKEN, chat_template=CHAT_TEMPLATE, model_max_length=CONTEXT
    )
