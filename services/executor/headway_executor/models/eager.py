"""A model as plain torch operators: any device, any floating dtype.

Owns: building the decoder. Must not know: files, how it computes.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway_executor.kv_pool import KvPool
from headway_executor.linear import Linear, placed
from headway_executor.models.attention import AttentionPlan, AttentionShape, OrderedRows
from headway_executor.models.config import ModelConfig
from headway_executor.models.decoder import Decoder, DecoderLayer, RmsNorm
from headway_executor.models.forward import StepRows
from headway_executor.models.loading import ModelTensors
from headway_executor.models.rope import interleaved, rotations
from headway_executor.weights import Checkpoint


class EagerModel:
    """A ``ForwardPass``."""

    def __init__(self, config: ModelConfig, decoder: Decoder, pool: KvPool) -> None:
        self._shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim)
        self._decoder = decoder
        self.pool = pool

    def run(self, rows: StepRows, token_ids: Tensor) -> Tensor:
        """See ``ForwardPass.run``."""
        ordered = OrderedRows(rows.num_new, rows.num_computed, rows.tables)
        token_rows = ordered.token_rows()
        positions = ordered.positions(token_rows)
        block_size = self.pool.block_size
        slots = ordered.tables[token_rows, positions // block_size].astype(np.int64) * block_size
        slots += positions % block_size
        device = token_ids.device
        columns = np.stack([rows.numbers[ordered.order][token_rows], positions])
        store_rows, store_positions = torch.from_numpy(columns).to(device).unbind(0)
        plan = AttentionPlan(self._shape, self.pool, ordered, slots)
        wanted = torch.from_numpy(_places_in_order(rows, ordered)[rows.wanted]).to(device)
        return self._decoder.forward(token_ids[store_rows, store_positions], store_positions, plan, wanted)


def _places_in_order(rows: StepRows, ordered: OrderedRows) -> NDArray[np.int64]:
    starts = np.empty_like(ordered.starts)
    starts[ordered.order] = ordered.starts
    places, positions = rows.token_places()
    return starts[places] + positions - rows.num_computed[places]


def load_eager(
    config: ModelConfig, checkpoint: Checkpoint, *, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> Decoder:
    """Load a checked checkpoint."""
    tensors = ModelTensors(config, checkpoint, interleaved(config.head_dim))

    def linear(weight: Tensor, bias: Tensor | None) -> Linear:
        return Linear(weight, bias, dtype=dtype, device=device)

    def norm(weight: Tensor) -> RmsNorm:
        return RmsNorm(placed(weight, dtype, device), config.rms_norm_eps)

    def layer(index: int) -> DecoderLayer:
        qk_norm = tensors.qk_norm(index)
        return DecoderLayer(
            index=index,
            attention_norm=norm(tensors.attention_norm(index)),
            qkv=linear(*tensors.qkv(index)),
            num_rotated=config.num_heads + config.num_kv_heads,
            head_dim=config.head_dim,
            qk_norm=None if qk_norm is None else norm(qk_norm),
            output=linear(*tensors.output(index)),
            window=config.sliding_windows[index],
            mlp_norm=norm(tensors.mlp_norm(index)),
            gate_up=linear(*tensors.gate_up(index)),
            down=linear(*tensors.down(index)),
        )

    return Decoder(
        embedding=placed(tensors.embedding(), dtype, device),
        rotations=rotations(config.rope, config.head_dim, max_model_len).to(device),
        layers=tuple(layer(index) for index in range(config.num_layers)),
        final_norm=norm(tensors.final_norm()),
        head=linear(tensors.head(), None),
    )
