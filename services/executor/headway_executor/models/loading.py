"""From a checkpoint's tensors to a ``Decoder``.

Owns: the tensor names of the supported families, and fusing, permuting and placing weights.
Must not know: files, or how the model runs.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from headway_executor.linear import LinearFactory
from headway_executor.models.config import ModelConfig
from headway_executor.models.decoder import Decoder, DecoderLayer, NormedLinear, RmsNorm
from headway_executor.models.rope import interleaved, rotations
from headway_executor.weights import Checkpoint

_EMBEDDING = "model.embed_tokens.weight"
_FINAL_NORM = "model.norm.weight"
_HEAD = "lm_head.weight"


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this configuration holds."""
    expected: dict[str, tuple[int, ...]] = {
        _EMBEDDING: (config.vocab_size, config.hidden_size),
        _FINAL_NORM: (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        expected[_HEAD] = (config.vocab_size, config.hidden_size)
    for index in range(config.num_layers):
        prefix = _layer_prefix(index)
        expected |= {prefix + name: shape for name, shape in _layer_tensors(config)}
    return expected


def ignored_tensors(config: ModelConfig) -> frozenset[str]:
    """Tensors that a checkpoint may hold and a model does not need.

    Old Llama checkpoints store the rope frequencies; some tied ones store the embedding a second time.
    """
    buffers = {f"{_layer_prefix(index)}self_attn.rotary_emb.inv_freq" for index in range(config.num_layers)}
    return frozenset(buffers | {_HEAD})


def load_decoder(
    config: ModelConfig, checkpoint: Checkpoint, *, max_model_len: int, linear: LinearFactory, dtype: torch.dtype
) -> Decoder:
    """Build the model from a checkpoint that ``Checkpoint.check`` accepted.

    ``linear`` decides device and form of the products, and its device is where everything else goes too.
    """
    return _Loader(config, checkpoint, linear, dtype).decoder(max_model_len)


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


class _Loader:
    """One load; keeps no tensor."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, linear: LinearFactory, dtype: torch.dtype) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._linear = linear
        self._dtype = dtype
        self._interleaved = interleaved(config.head_dim)

    def decoder(self, max_model_len: int) -> Decoder:
        config = self._config
        embedding = self._place(self._checkpoint.read(_EMBEDDING))
        head = embedding if config.tie_word_embeddings else self._checkpoint.read(_HEAD)
        return Decoder(
            embedding=embedding,
            rotations=rotations(config.rope, config.head_dim, max_model_len).to(self._linear.device),
            layers=tuple(self._layer(index) for index in range(config.num_layers)),
            head=self._normed(_FINAL_NORM, head),
        )

    def _layer(self, index: int) -> DecoderLayer:
        config = self._config
        prefix = _layer_prefix(index)
        return DecoderLayer(
            index=index,
            qkv=self._normed(
                prefix + "input_layernorm.weight",
                self._qkv(prefix, "weight"),
                self._qkv(prefix, "bias") if config.qkv_bias else None,
            ),
            num_rotated=config.num_heads + config.num_kv_heads,
            head_dim=config.head_dim,
            qk_norm=self._qk_norm(prefix) if config.qk_norm else None,
            output=self._linear(
                self._read(prefix, "self_attn.o_proj.weight"),
                self._read(prefix, "self_attn.o_proj.bias") if config.output_bias else None,
            ),
            window=config.sliding_windows[index],
            gate_up=self._normed(
                prefix + "post_attention_layernorm.weight",
                self._gate_up(prefix, "weight"),
                self._gate_up(prefix, "bias") if config.mlp_bias else None,
            ),
            down=self._linear(
                self._read(prefix, "mlp.down_proj.weight"),
                self._read(prefix, "mlp.down_proj.bias") if config.mlp_bias else None,
            ),
        )

    def _read(self, prefix: str, name: str) -> Tensor:
        return self._checkpoint.read(prefix + name)

    def _qkv(self, prefix: str, kind: str) -> Tensor:
        queries, keys, values = (self._read(prefix, f"self_attn.{name}_proj.{kind}") for name in "qkv")
        return torch.cat([self._permute(queries), self._permute(keys), values])

    def _permute(self, heads: Tensor) -> Tensor:
        """Reorder the channels of every head: shape ``[heads * head_dim, ...]``, rows are channels."""
        by_head = heads.reshape(-1, self._config.head_dim, *heads.shape[1:])
        return by_head[:, self._interleaved].flatten(0, 1)

    def _qk_norm(self, prefix: str) -> RmsNorm:
        queries, keys = (self._permute(self._read(prefix, f"self_attn.{name}_norm.weight")) for name in "qk")
        config = self._config
        return self._norm(torch.stack([queries] * config.num_heads + [keys] * config.num_kv_heads))

    def _gate_up(self, prefix: str, kind: str) -> Tensor:
        return torch.cat([self._read(prefix, f"mlp.gate_proj.{kind}"), self._read(prefix, f"mlp.up_proj.{kind}")])

    def _normed(self, norm_name: str, weight: Tensor, bias: Tensor | None = None) -> NormedLinear:
        """Norm and product; see ``NormedLinear`` for when the norm's weight is folded in."""
        norm, eps = self._checkpoint.read(norm_name), self._config.rms_norm_eps
        if self._dtype == torch.float32:
            return NormedLinear(self._linear(weight.float() * norm.float(), bias), None, eps)
        return NormedLinear(self._linear(weight, bias), self._norm(norm), eps)

    def _norm(self, weight: Tensor) -> RmsNorm:
        return RmsNorm(self._place(weight), self._config.rms_norm_eps)

    def _place(self, tensor: Tensor) -> Tensor:
        """A tensor of our own on the device, so that the mapped file can go."""
        return torch.empty(tensor.shape, dtype=self._dtype, device=self._linear.device).copy_(tensor)
