"""A model on the CPU kernels, which compute in float32.

Owns: their weights and arguments. Must not know: how they compute.

A row's logits have the same bits in any step and with any chunks, but not with any variant of the kernels.
"""

import torch
from torch import Tensor
from torch.nn import functional

from headway_executor.kv_pool import KvPool
from headway_executor.linear import placed
from headway_executor.models.config import ModelConfig
from headway_executor.models.forward import StepRows
from headway_executor.models.loading import ModelTensors
from headway_executor.models.rope import rotations
from headway_executor.weights import Checkpoint
from headway_kernels.cpu.library import (
    CpuLibrary,
    Decoder,
    DecoderShape,
    LayerWeights,
    PackedLinear,
    Team,
    WeightForm,
    load_library,
)

_ENOUGH_TO_TELL = 1024
"""Values of a matrix to check first: weights in full precision show in a few."""


def library_for(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> CpuLibrary | None:
    """Return the kernels if they can run this model on this processor."""
    if device.type != "cpu" or dtype != torch.float32:
        return None
    library = load_library()
    if library is None or config.head_dim > library.max_head_dim:
        return None
    return library


class CompiledModel:
    """A ``ForwardPass``. ``decoder`` and ``pool`` must fit each other."""

    def __init__(self, decoder: Decoder, pool: KvPool) -> None:
        self._decoder = decoder
        self.pool = pool

    def run(self, rows: StepRows, token_ids: Tensor) -> Tensor:
        """See ``ForwardPass.run``."""
        places, positions = rows.token_places()
        return self._decoder.forward(
            token_ids=token_ids.numpy()[rows.numbers[places], positions],
            num_tokens=rows.num_new,
            first_positions=rows.num_computed,
            tables=rows.tables,
            sampled=rows.wanted,
            pool=self.pool.layers,
        )


def load_compiled(
    config: ModelConfig,
    checkpoint: Checkpoint,
    library: CpuLibrary,
    *,
    quantization: str,
    max_model_len: int,
    block_size: int,
    num_threads: int,
) -> Decoder:
    """Load a checked checkpoint. ``quantization`` is "none" or "int8"."""
    tensors = ModelTensors(config, checkpoint, torch.arange(config.head_dim))
    loader = _Loader(config, tensors, library, quantization)
    table = rotations(config.rope, config.head_dim, max_model_len)
    shape = DecoderShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        norm_eps=config.rms_norm_eps,
        score_scale=config.head_dim**-0.5,
        embedding=_float32(tensors.embedding()),
        cosines=table.real.contiguous(),
        sines=table.imag.contiguous(),
        final_norm=_float32(tensors.final_norm()),
    )
    layers = [loader.layer(index) for index in range(config.num_layers)]
    return Decoder(library, Team(library, num_threads), shape, layers, loader.linear(tensors.head(), None))


class _Loader:
    def __init__(self, config: ModelConfig, tensors: ModelTensors, library: CpuLibrary, quantization: str) -> None:
        self._config = config
        self._tensors = tensors
        self._library = library
        self._quantised = quantization == "int8"
        self._padding = library.padded_head_dim(config.head_dim) - config.head_dim

    def layer(self, index: int) -> LayerWeights:
        tensors = self._tensors
        qkv, qkv_bias = tensors.qkv(index)
        output, output_bias = tensors.output(index)
        qk_norm = tensors.qk_norm(index)
        return LayerWeights(
            qkv=self.linear(self._padded(qkv), None if qkv_bias is None else self._padded(qkv_bias)),
            output=self.linear(self._padded(output.t()).t(), output_bias),
            gate_up=self.linear(*tensors.gate_up(index), gated=True),
            down=self.linear(*tensors.down(index)),
            attention_norm=_float32(tensors.attention_norm(index)),
            mlp_norm=_float32(tensors.mlp_norm(index)),
            qk_norm=None if qk_norm is None else _float32(qk_norm),
            window=self._config.sliding_windows[index],
        )

    def linear(self, weight: Tensor, bias: Tensor | None, *, gated: bool = False) -> PackedLinear:
        if self._quantised:
            form = WeightForm.INT8
        else:
            form = WeightForm.BFLOAT16 if is_exact_in_bfloat16(weight) else WeightForm.FLOAT32
        return PackedLinear(self._library, weight, bias, form, gated=gated)

    def _padded(self, heads: Tensor) -> Tensor:
        """Pad the channels of ``[heads * head_dim, ...]``."""
        if not self._padding:
            return heads
        by_head = heads.reshape(-1, self._config.head_dim, *heads.shape[1:])
        rest = (0, 0) * (by_head.dim() - 2)
        return functional.pad(by_head, (*rest, 0, self._padding)).flatten(0, 1)


def is_exact_in_bfloat16(weight: Tensor) -> bool:
    """Return whether bfloat16 holds every value: then it only saves memory."""
    if weight.dtype == torch.bfloat16:
        return True
    some = weight.reshape(-1)[:_ENOUGH_TO_TELL].float()
    if not torch.equal(some.bfloat16().float(), some):
        return False
    wide = weight.float()
    return torch.equal(wide.bfloat16().float(), wide)


def _float32(tensor: Tensor) -> Tensor:
    return placed(tensor, torch.float32, torch.device("cpu"))
