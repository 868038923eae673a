"""The decoder of all supported families, as kernels and products.

Owns: weights, activations, launches. Must not know: graphs, sampling.

Nothing here allocates, waits, or depends on a value of the device, so a CUDA graph can capture it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headway_executor.gpu.device_rows import DeviceRows
from headway_executor.gpu.linear import DenseLinear, DeviceLinear, QuantizationKind, QuantizedLinear, SplitWorkspace
from headway_executor.gpu.step_columns import ColumnViews
from headway_executor.linear import placed
from headway_executor.models.config import ModelConfig
from headway_executor.models.loading import ModelTensors, TensorSource
from headway_executor.models.rope import rotations
from headway_kernels.gpu.activation import silu_and_multiply
from headway_kernels.gpu.attention import AttentionRows, AttentionWorkspace, paged_attention, plan_attention
from headway_kernels.gpu.attention_tuning import tokens_per_tile
from headway_kernels.gpu.norm import add_rms_norm
from headway_kernels.gpu.rotary import rotate_and_store
from headway_kernels.gpu.rows import expand_rows, gather_rows


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """``qkv`` and ``gate_up`` give their parts side by side.

    ``query_norm`` and ``key_norm`` are ``[head_dim]`` or None. A query sees ``window`` positions; None: all.
    """

    attention_norm: Tensor
    qkv: DeviceLinear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: DeviceLinear
    window: int | None
    mlp_norm: Tensor
    gate_up: DeviceLinear
    down: DeviceLinear


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """``embedding`` ``[vocab, hidden]``; ``cosines`` and ``sines`` float32, ``[context, head_dim/2]``."""

    embedding: Tensor
    cosines: Tensor
    sines: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: DeviceLinear


class _Activations:
    def __init__(
        self, config: ModelConfig, num_tokens: int, num_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        def space(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=kind, device=device)

        query_width = config.num_heads * config.head_dim
        self.token_ids = space(num_tokens, kind=torch.int32)
        self.positions = space(num_tokens, kind=torch.int32)
        self.slots = space(num_tokens, kind=torch.int32)
        self.hidden = space(num_tokens, config.hidden_size)
        self.normed = space(num_tokens, config.hidden_size)
        self.delta = space(num_tokens, config.hidden_size)
        self.qkv = space(num_tokens, query_width + 2 * config.num_kv_heads * config.head_dim)
        # Padding is never written: zeros keep NaN out of the products.
        self.attended = torch.zeros((num_tokens, query_width), dtype=dtype, device=device)
        self.gate_up = space(num_tokens, 2 * config.intermediate_size)
        self.inner = space(num_tokens, config.intermediate_size)
        self.last = space(num_rows, config.hidden_size)
        self.logits = space(num_rows, config.vocab_size)


class Decoder:
    """A loaded model."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        rows: DeviceRows,
        columns: ColumnViews,
        *,
        max_num_tokens: int,
        dtype: torch.dtype,
    ) -> None:
        device = rows.token_store.device
        max_num_rows = rows.token_store.shape[0]
        self._config = config
        self._weights = weights
        self._rows = rows
        self._columns = columns
        self._scale = float(config.head_dim**-0.5)
        self._space = _Activations(config, max_num_tokens, max_num_rows, dtype, device)
        self._attention_space = AttentionWorkspace.allocate(max_num_rows, config.num_heads, config.head_dim, device)
        self._plan = torch.zeros((2, max_num_rows), dtype=torch.int32, device=device)
        self._tokens_per_tile = tokens_per_tile(config.num_heads, config.num_kv_heads, config.head_dim, dtype, device)

    def run(self, pool: Tensor, num_tokens: int, num_rows: int, *, has_decodes: bool, has_chunks: bool) -> None:
        """Run the step in the columns, padded to ``num_tokens`` and ``num_rows``.

        ``pool`` is ``[num_layers, num_blocks, 2 * kv_heads, block_size, head_dim]``.
        """
        config, space, weights = self._config, self._space, self._weights
        rows = self._expand(num_tokens, num_rows)
        hidden, normed, delta = space.hidden[:num_tokens], space.normed[:num_tokens], space.delta[:num_tokens]
        qkv, attended = space.qkv[:num_tokens], space.attended[:num_tokens]
        gate_up, inner = space.gate_up[:num_tokens], space.inner[:num_tokens]
        torch.index_select(weights.embedding, 0, space.token_ids[:num_tokens], out=hidden)
        update: Tensor | None = None
        for layer, layer_pool in zip(weights.layers, pool.unbind(0), strict=True):
            add_rms_norm(hidden, update, layer.attention_norm, normed, eps=config.rms_norm_eps)
            layer.qkv(normed, qkv)
            self._rotate(qkv, layer, layer_pool, num_tokens)
            paged_attention(
                qkv[:, : config.num_heads * config.head_dim],
                layer_pool,
                attended,
                rows,
                self._attention_space,
                num_kv_heads=config.num_kv_heads,
                scale=self._scale,
                window=layer.window,
                has_decodes=has_decodes,
                has_chunks=has_chunks,
            )
            layer.output(attended, delta)
            add_rms_norm(hidden, delta, layer.mlp_norm, normed, eps=config.rms_norm_eps)
            layer.gate_up(normed, gate_up)
            silu_and_multiply(gate_up, inner)
            layer.down(inner, delta)
            update = delta
        add_rms_norm(hidden, update, weights.final_norm, normed, eps=config.rms_norm_eps)

    def logits(self, num_sampled: int) -> Tensor:
        """Logits ``[num_sampled, vocab]``, in memory that the next call reuses."""
        last, logits = self._space.last[:num_sampled], self._space.logits[:num_sampled]
        gather_rows(self._space.normed, self._columns.sampled_token[:num_sampled], last)
        self._weights.head(last, logits)
        return logits

    def logits_of(self, first: int, count: int) -> Tensor:
        """Logits of ``count`` tokens from ``first`` on, at most one per row."""
        logits = self._space.logits[:count]
        self._weights.head(self._space.normed[first : first + count], logits)
        return logits

    def _expand(self, num_tokens: int, num_rows: int) -> AttentionRows:
        space, columns = self._space, self._columns
        expand_rows(
            columns.rows[:num_rows],
            columns.query_start[: num_rows + 1],
            columns.first_position[:num_rows],
            self._rows.token_store,
            self._rows.block_tables,
            space.token_ids[:num_tokens],
            space.positions[:num_tokens],
            space.slots[:num_tokens],
            block_size=self._rows.block_size,
        )
        rows = AttentionRows(
            rows=columns.rows[:num_rows],
            query_start=columns.query_start[: num_rows + 1],
            kv_length=columns.kv_length[:num_rows],
            block_tables=self._rows.block_tables,
            split_ends=self._plan[0, :num_rows],
            tile_ends=self._plan[1, :num_rows],
            tokens_per_tile=self._tokens_per_tile,
        )
        plan_attention(rows)
        return rows

    def _rotate(self, qkv: Tensor, layer: LayerWeights, layer_pool: Tensor, num_tokens: int) -> None:
        config, space = self._config, self._space
        rotate_and_store(
            qkv,
            space.positions[:num_tokens],
            space.slots[:num_tokens],
            self._weights.cosines,
            self._weights.sines,
            layer_pool,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            q_norm=layer.query_norm,
            k_norm=layer.key_norm,
            eps=config.rms_norm_eps,
        )


def load_decoder(
    config: ModelConfig,
    checkpoint: TensorSource,
    *,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    quantization: QuantizationKind | None,
    progress: Callable[[int, int], None],
) -> DecoderWeights:
    """Load to ``device``; embedding and head are not quantised."""
    tensors = ModelTensors(config, checkpoint, torch.arange(config.head_dim), device)
    workspace = SplitWorkspace(device)

    def here(tensor: Tensor) -> Tensor:
        return placed(tensor, dtype, device)

    def linear(weight: Tensor, bias: Tensor | None) -> DeviceLinear:
        own_bias = None if bias is None else here(bias)
        if quantization is None:
            return DenseLinear(here(weight), own_bias)
        return QuantizedLinear(weight, own_bias, quantization, dtype=dtype, workspace=workspace)

    def layer(index: int) -> LayerWeights:
        progress(index, config.num_layers)
        return _layer(tensors, index, config.sliding_windows[index], here, linear)

    table = rotations(config.rope, config.head_dim, max_model_len)
    embedding = here(tensors.embedding())
    return DecoderWeights(
        embedding=embedding,
        cosines=table.real.contiguous().to(device),
        sines=table.imag.contiguous().to(device),
        layers=tuple(layer(index) for index in range(config.num_layers)),
        final_norm=here(tensors.final_norm()),
        head=DenseLinear(embedding if config.tie_word_embeddings else here(tensors.head()), None),
    )


def _layer(
    tensors: ModelTensors,
    index: int,
    window: int | None,
    here: Callable[[Tensor], Tensor],
    linear: Callable[[Tensor, Tensor | None], DeviceLinear],
) -> LayerWeights:
    qk_norm = tensors.qk_norm(index)
    return LayerWeights(
        attention_norm=here(tensors.attention_norm(index)),
        qkv=linear(*tensors.qkv(index)),
        query_norm=None if qk_norm is None else here(qk_norm[0]),
        key_norm=None if qk_norm is None else here(qk_norm[-1]),
        output=linear(*tensors.output(index)),
        window=window,
        mlp_norm=here(tensors.mlp_norm(index)),
        gate_up=linear(*tensors.gate_up(index)),
        down=linear(*tensors.down(index)),
    )
