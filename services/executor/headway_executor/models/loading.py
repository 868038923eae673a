"""The tensors of a checkpoint in the model's form.

Owns: names, tied and fused tensors. Must not know: files.
"""

from collections.abc import Callable, Container, Iterator
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from headway_executor.models.config import ModelConfig
from headway_executor.weights import Checkpoint

_EMBEDDING = "model.embed_tokens.weight"
_FINAL_NORM = "model.norm.weight"
_HEAD = "lm_head.weight"


def expected_tensors(config: ModelConfig, stored: Container[str] = ()) -> dict[str, tuple[int, ...]]:
    """Names and shapes; only the ``stored`` ones of a tied embedding and head."""
    words = [name for name in (_EMBEDDING, _HEAD) if not config.tie_word_embeddings or name in stored]
    expected: dict[str, tuple[int, ...]] = {_FINAL_NORM: (config.hidden_size,)}
    expected |= dict.fromkeys(words or [_EMBEDDING], (config.vocab_size, config.hidden_size))
    for index in range(config.num_layers):
        prefix = _layer_prefix(index)
        expected |= {prefix + name: shape for name, shape in _layer_tensors(config)}
    return expected


def ignored_tensors(config: ModelConfig) -> frozenset[str]:
    """Old Llama checkpoints store rope frequencies, which nothing reads."""
    return frozenset(f"{_layer_prefix(index)}self_attn.rotary_emb.inv_freq" for index in range(config.num_layers))


def _layer_prefix(index: int) -> str:
    return f"model.layers.{index}."


def _layer_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = (
        ("self_attn.q_proj", (queries, hidden), config.qkv_bias),
        ("self_attn.k_proj", (keys, hidden), config.qkv_bias),
        ("self_attn.v_proj", (keys, hidden), config.qkv_bias),
        ("self_attn.o_proj", (hidden, queries), config.output_bias),
        ("mlp.gate_proj", (inner, hidden), config.mlp_bias),
        ("mlp.up_proj", (inner, hidden), config.mlp_bias),
        ("mlp.down_proj", (hidden, inner), config.mlp_bias),
    )
    for name, shape, has_bias in projections:
        yield f"{name}.weight", shape
        if has_bias:
            yield f"{name}.bias", shape[:1]
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)


class TensorSource(Protocol):
    """The source of a model's tensors."""

    def __contains__(self, name: str) -> bool:
        """Return whether there is such a tensor."""
        ...

    def read(self, name: str) -> Tensor:
        """Return a tensor in its own dtype."""
        ...


def as_stored(config: ModelConfig, source: TensorSource, warn: Callable[[str], None]) -> ModelConfig:
    """Untie embedding and head if the stored tensors differ, as transformers does."""
    if not (config.tie_word_embeddings and _EMBEDDING in source and _HEAD in source):
        return config
    embedding, head = source.read(_EMBEDDING), source.read(_HEAD)
    wide = torch.promote_types(embedding.dtype, head.dtype)
    if torch.equal(embedding.to(wide), head.to(wide)):
        return config
    warn(
        f"tie_word_embeddings is true, but {_HEAD} differs from {_EMBEDDING}; each is used as it is stored, "
        "as transformers does"
    )
    return msgspec.structs.replace(config, tie_word_embeddings=False)


def check_tensors(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Check the tensors. Raises ``ModelFilesError``: the checkpoint has others."""
    checkpoint.check(expected_tensors(config, checkpoint), ignored_tensors(config))


class ModelTensors:
    """Reads the tensors of a checked checkpoint, straight to ``device``, if any.

    A result may be the mapped file: do not write to it or keep it. ``channel_order`` (int64, ``[head_dim]``) orders the
    channels of query and key heads.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: TensorSource,
        channel_order: Tensor,
        device: torch.device | None = None,
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._channel_order = channel_order if device is None else channel_order.to(device)
        self._device = device

    def embedding(self) -> Tensor:
        """``[vocab, hidden]``."""
        return self._read_named(_EMBEDDING if _EMBEDDING in self._checkpoint else _HEAD)

    def head(self) -> Tensor:
        """``[vocab, hidden]``; the embedding if the two are tied."""
        return self.embedding() if self._config.tie_word_embeddings else self._read_named(_HEAD)

    def final_norm(self) -> Tensor:
        """``[hidden]``."""
        return self._read_named(_FINAL_NORM)

    def qkv(self, index: int) -> tuple[Tensor, Tensor | None]:
        """``[(heads + 2 * kv_heads) * head_dim, hidden]``, and bias: queries, keys, values."""
        weight = self._qkv(index, "weight")
        return weight, self._qkv(index, "bias") if self._config.qkv_bias else None

    def output(self, index: int) -> tuple[Tensor, Tensor | None]:
        """``[hidden, heads * head_dim]``, and bias."""
        return self._projection(index, "self_attn.o_proj", has_bias=self._config.output_bias)

    def gate_up(self, index: int) -> tuple[Tensor, Tensor | None]:
        """``[2 * intermediate, hidden]``, and bias: gates, then ups."""
        gate, gate_bias = self._projection(index, "mlp.gate_proj", has_bias=self._config.mlp_bias)
        up, up_bias = self._projection(index, "mlp.up_proj", has_bias=self._config.mlp_bias)
        bias = None if gate_bias is None or up_bias is None else torch.cat([gate_bias, up_bias])
        return torch.cat([gate, up]), bias

    def down(self, index: int) -> tuple[Tensor, Tensor | None]:
        """``[hidden, intermediate]``, and bias."""
        return self._projection(index, "mlp.down_proj", has_bias=self._config.mlp_bias)

    def attention_norm(self, index: int) -> Tensor:
        """``[hidden]``."""
        return self._read(index, "input_layernorm.weight")

    def mlp_norm(self, index: int) -> Tensor:
        """``[hidden]``."""
        return self._read(index, "post_attention_layernorm.weight")

    def qk_norm(self, index: int) -> Tensor | None:
        """``[heads + kv_heads, head_dim]``: queries, then keys; or None."""
        config = self._config
        if not config.qk_norm:
            return None
        queries, keys = (self._reordered(self._read(index, f"self_attn.{name}_norm.weight")) for name in "qk")
        return torch.stack([queries] * config.num_heads + [keys] * config.num_kv_heads)

    def _read(self, index: int, name: str) -> Tensor:
        return self._read_named(_layer_prefix(index) + name)

    def _read_named(self, name: str) -> Tensor:
        tensor = self._checkpoint.read(name)
        return tensor if self._device is None else tensor.to(self._device)

    def _projection(self, index: int, name: str, *, has_bias: bool) -> tuple[Tensor, Tensor | None]:
        return self._read(index, f"{name}.weight"), self._read(index, f"{name}.bias") if has_bias else None

    def _qkv(self, index: int, kind: str) -> Tensor:
        queries, keys, values = (self._read(index, f"self_attn.{name}_proj.{kind}") for name in "qkv")
        return torch.cat([self._reordered(queries), self._reordered(keys), values])

    def _reordered(self, heads: Tensor) -> Tensor:
        """``heads`` is ``[heads * head_dim, ...]``."""
        by_head = heads.reshape(-1, self._config.head_dim, *heads.shape[1:])
        return by_head[:, self._channel_order].flatten(0, 1)
