"""Attention of a layer on a device: queries, keys and values, their rotation, what sees what, the product behind it.

Owns: a layer's attention, the rows and the memory of it that layers share. Must not know: norms before and behind it, graphs, files.

Nothing that runs in a step allocates, waits, or depends on a value of the device.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway_executor.gpu.device_step import DeviceStep
from headway_executor.gpu.key_index import IndexSpace, SpaceSizes
from headway_executor.gpu.linear import DeviceLinear
from headway_executor.gpu.step_columns import ColumnViews
from headway_executor.models.attention_config import AttentionConfig, GateKind
from headway_executor.models.kv_layout import KvPlace
from headway_kernels.gpu.attention.paged import (
    AttentionRows,
    AttentionWorkspace,
    Slopes,
    paged_attention,
    plan_attention,
)
from headway_kernels.gpu.attention.tuning import AttentionTuning, TileSizes, latent_groups, tile_sizes, tokens_per_tile
from headway_kernels.gpu.norm import add_rms_norm
from headway_kernels.gpu.rotary import rotate_and_store


class AttentionSpace:
    """What layers that attend alike share, one after the other.

    ``tuning``: over keys and values as they are stored; ``block_size``: of the pool. ``memory``, of any shape, takes queries, keys,
    values and gates; layers of other sizes share it, and the ``workspace``, which has as many rows as a step.
    ``attended`` ``[max_num_tokens, heads * head_dim]``, of latent attention with the rank in place of ``head_dim``.
    ``num_groups`` of heads read the same keys.
    """

    def __init__(
        self,
        config: AttentionConfig,
        tuning: AttentionTuning,
        block_size: int,
        memory: Tensor,
        workspace: AttentionWorkspace,
        sizes: SpaceSizes,
    ) -> None:
        device, max_num_rows = memory.device, len(workspace.arrived)
        self.tuning = tuning
        num_heads = config.num_heads
        self.num_groups = groups_of(config, tuning)
        self.query_width = num_heads * config.vector_dim
        self.qkv_width = self.query_width + config.num_vectors * config.vector_dim
        self._width = _num_made(config)
        self._memory = memory.view(-1)
        # Padding is never written: zeros keep NaN out of the products.
        self.attended = torch.zeros(sizes.most_tokens, num_heads * config.summed_dim, dtype=memory.dtype, device=device)
        self.workspace = workspace.of(num_heads, config.summed_dim)
        self._block = (config.num_vectors, block_size, config.vector_dim)
        self._plan = torch.zeros((2, max_num_rows), dtype=torch.int32, device=device)
        self._splits_per_item = torch.ones(1, dtype=torch.int32, device=device)
        self._tokens_per_tile = tokens_per_tile(num_heads, self.num_groups, tuning)
        index = None if config.latent is None else config.latent.index
        self.index = None if index is None else IndexSpace(index, sizes, max_num_rows, memory.dtype, device)
        """What tokens see, if it is chosen; then the plan of the step is there."""

    def made(self, num_tokens: int, *, queries_alone: bool = False) -> Tensor:
        """Memory for queries, keys and values side by side, and gates behind them, if there are any."""
        width = self.query_width if queries_alone else self._width
        return self._memory[: num_tokens * width].view(num_tokens, width)

    def layer_of(self, pool: Tensor, place: KvPlace) -> Tensor:
        """A layer's part of a pool: ``[num_blocks, 2 * kv_heads, block_size, head_dim]``, of codes one wider; or of rows."""
        if pool.dim() > 3:
            return pool[place.layer]
        # Layers stand behind each other in each block.
        _, block_size, head_dim = self._block
        stride = pool.stride(1)
        return pool.as_strided(
            (pool.shape[1], *self._block),
            (stride, block_size * head_dim, head_dim, 1),
            place.layer * pool.stride(0) + place.first,
        )

    def begin(
        self,
        columns: ColumnViews,
        block_tables: Tensor,
        positions: Tensor,
        num_rows: int,
        most_tokens: int | None,
    ) -> None:
        """Launch the plan of a step of ``num_rows``, in which chunks of more than ``most_tokens`` are a library's."""
        if self.index is not None:
            self.index.begin(
                columns,
                block_tables,
                positions,
                num_rows,
                groups=self.num_groups,
                tokens_per_tile=self._tokens_per_tile,
            )
            return
        self.rows = AttentionRows(
            rows=columns.rows[:num_rows],
            query_start=columns.query_start[: num_rows + 1],
            kv_length=columns.kv_length[:num_rows],
            block_tables=block_tables,
            split_ends=self._plan[0, :num_rows],
            tile_ends=self._plan[1, :num_rows],
            splits_per_item=self._splits_per_item,
            tokens_per_tile=self._tokens_per_tile,
        )
        plan_attention(self.rows, self.num_groups, most_tokens=most_tokens)


def _num_made(config: AttentionConfig) -> int:
    """Columns of queries, keys, values and gates; of latent attention, of queries alone."""
    if config.latent is not None:
        return config.num_heads * config.vector_dim
    num_gates = 0 if config.gates == "none" else config.num_heads
    return (config.num_heads + 2 * config.num_kv_heads + num_gates) * config.head_dim


def groups_of(config: AttentionConfig, tuning: AttentionTuning) -> int:
    """Of heads that programs attend with: those of a key-value head, or as many as a tile holds."""
    return config.num_kv_heads if config.latent is None else latent_groups(config.num_heads, tuning)


def tile_sizes_of(attention: AttentionConfig, dtype: torch.dtype, *, is_coded: bool) -> TileSizes:
    """What the tiles of layers depend on that attend so, of a model in ``dtype``, over a pool of codes or of numbers."""
    return tile_sizes(attention.summed_dim, dtype, is_coded=is_coded, is_latent=attention.latent is not None)


def attention_spaces(
    configs: Sequence[AttentionConfig],
    tuning_of: Callable[[AttentionConfig], AttentionTuning],
    *,
    block_size: int,
    sizes: SpaceSizes,
    max_num_rows: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Mapping[AttentionConfig, AttentionSpace]:
    """Of a model's layers, by how they attend, for steps of such sizes and so many rows; none of a model without attention."""
    if not configs:
        return {}
    memory = torch.empty(sizes.most_tokens, max(map(_num_made, configs)), dtype=dtype, device=device)
    most = (max(config.num_heads for config in configs), max(config.summed_dim for config in configs))
    workspace = AttentionWorkspace.allocate(max_num_rows, *most, device)
    return {
        config: AttentionSpace(config, tuning_of(config), block_size, memory, workspace, sizes) for config in configs
    }


@dataclass(frozen=True, slots=True)
class DeviceAttention:
    """A layer's ``Mixing``. ``place``: of its keys and values, in the pool. ``qkv`` gives its parts side by side, or with
    ``is_reading`` queries alone: keys and values are of a layer before.

    ``query_norm`` and ``key_norm`` are ``[head_dim]``, or as wide as all heads, or None, with ``norm_eps``; ``head_weights`` and
    ``head_biases`` of layer norms of heads, float32 ``[heads + kv_heads, head_dim]``, or None. A query sees
    ``window`` positions; None: all. ``cosines`` and ``sines`` float32, ``[context, head_dim/2]``; ``query_factors``
    float32, ``[context]``, or None. ``sinks`` float32, ``[heads]``, or None; ``slopes`` of all heads, or None.
    """

    config: AttentionConfig
    space: AttentionSpace
    place: KvPlace
    is_reading: bool
    qkv: DeviceLinear
    query_norm: Tensor | None
    key_norm: Tensor | None
    head_weights: Tensor | None
    head_biases: Tensor | None
    norm_eps: float
    cosines: Tensor
    sines: Tensor
    query_factors: Tensor | None
    output: DeviceLinear
    window: int | None
    sinks: Tensor | None
    slopes: Slopes | None

    def __call__(self, inputs: Tensor, step: DeviceStep, out: Tensor) -> None:
        """See ``Mixing``."""
        config, space = self.config, self.space
        qkv = space.made(len(inputs), queries_alone=self.is_reading)
        attended = space.attended[: len(inputs)]
        pool_layer = space.layer_of(step.pool, self.place)
        self.qkv(inputs, qkv)
        self._prepare(qkv)
        self._rotate_and_store(qkv, pool_layer, step)
        query = qkv[:, : space.query_width]
        if step.long_chunks is not None:
            step.long_chunks(query, pool_layer, attended)
        paged_attention(
            query,
            pool_layer,
            attended,
            space.rows,
            space.workspace,
            num_kv_heads=space.num_groups,
            scale=config.scale,
            window=self.window,
            soft_cap=config.softcap,
            sinks=self.sinks,
            slopes=self.slopes,
            has_decodes=step.has_decodes,
            has_chunks=step.has_chunks,
            tuning=space.tuning,
        )
        if config.gates != "none":
            multiply_by_gates(attended, qkv[:, space.qkv_width :], config.gate_kind)
        self.output(attended, out)

    def _prepare(self, qkv: Tensor) -> None:
        """What happens to queries, keys and values before the kernel that rotates, which has norms by head."""
        config = self.config
        if config.clip is not None and not config.clips_normed:
            qkv.clamp_(-config.clip, config.clip)
        if config.qk_norm == "all":
            widths = (self.space.query_width, config.num_kv_heads * config.head_dim)
            norms = (self.query_norm, self.key_norm)
            for part, norm in zip(torch.split(qkv[:, : sum(widths)], list(widths), dim=1), norms, strict=True):
                assert norm is not None
                add_rms_norm(part, None, norm, part, eps=self.norm_eps)
        if config.clip is not None and config.clips_normed:
            qkv.clamp_(-config.clip, config.clip)

    def _rotate_and_store(self, qkv: Tensor, pool_layer: Tensor, step: DeviceStep) -> None:
        config = self.config
        by_head = config.qk_norm != "all"
        rotate_and_store(
            qkv,
            step.positions,
            step.slots,
            self.cosines,
            self.sines,
            pool_layer,
            num_heads=config.num_heads,
            num_kv_heads=0 if self.is_reading else config.num_kv_heads,
            head_dim=config.head_dim,
            q_norm=self.query_norm if by_head else None,
            k_norm=self.key_norm if by_head else None,
            head_weights=self.head_weights,
            head_biases=self.head_biases,
            norms_rotated=config.norms_rotated,
            norms_values=config.norms_values and not self.is_reading,
            eps=self.norm_eps,
            query_factors=self.query_factors,
        )


def multiply_by_gates(attended: Tensor, gates: Tensor, kind: GateKind) -> None:
    """In place, with what is taken of ``gates``, which change."""
    attended.mul_(gates.sigmoid_() if kind == "sigmoid" else torch.ops.aten.softplus.out(gates, out=gates))
