"""How long a step takes on a device, and how many KV blocks fit beside the weights.

Owns: the cost model. Must not know: schedulers, requests, or where a step comes from.

A step is a chain of kernels, so its time is a sum; each part is bound by arithmetic or by memory, whichever is slower:

- *Linear*: every token goes through the matrices of all layers, two operations per parameter, and every sampling row
  through the one to the logits. The weights are read once per step, however many tokens share them.
- *Attention*, row by row: a token at position p scores and weighs p + 1 positions, ``4 * heads * head_dim`` operations
  per layer each; the row's keys and values are read once. A decode is bound by the reading, a long chunk by arithmetic.
- *All-reduce*: two per layer if several devices share the model. Each sends ``2 (n - 1) / n`` of the hidden states over
  NVLink (the ring's volume; Patarasuk and Yuan, 2009) and has a latency of its own.
- *Launch*: ten kernels per layer that have to start one after the other.

Not modelled: activations' memory traffic, tiles of a product that are not full, kernels of attention that read a row's
cache once per tile of queries, and sampling.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.simulate.hardware import Accelerator
from headway.simulate.model_shapes import BYTES_PER_VALUE, ModelShape
from headway_proto.columns import Int32Array

KERNELS_PER_LAYER = 10
"""Two norms, three products of attention with rotation and cache write, attention, three of the MLP, activation."""
ALL_REDUCES_PER_LAYER = 2
"""After attention's output product and after the MLP's (Shoeybi et al., Megatron-LM, 2019)."""
USABLE_MEMORY_SHARE = 0.90
"""Of the device's memory; the rest is for activations and the runtime. It is vLLM's default as well."""


class StepTime(NamedTuple):
    """The parts of a step's time, in seconds."""

    linear_s: float
    attention_s: float
    all_reduce_s: float
    launch_s: float

    @property
    def total_s(self) -> float:
        """All of them: they follow each other."""
        return self.linear_s + self.attention_s + self.all_reduce_s + self.launch_s


class Roofline:
    """A model on ``tensor_parallel`` equal devices. Rates are kept per device, for its share of the work."""

    def __init__(self, accelerator: Accelerator, shape: ModelShape, tensor_parallel: int) -> None:
        self.accelerator = accelerator
        self.shape = shape
        self.tensor_parallel = tensor_parallel
        bandwidth = accelerator.memory_bandwidth * accelerator.memory_share
        gemm_flops = accelerator.peak_flops * accelerator.gemm_share * tensor_parallel
        read_parameters = shape.num_layer_parameters + shape.num_head_parameters
        self._weights_s = read_parameters * BYTES_PER_VALUE / tensor_parallel / bandwidth
        self._token_s = 2 * shape.num_layer_parameters / gemm_flops
        self._sample_s = 2 * shape.num_head_parameters / gemm_flops
        pair_flops = 4 * shape.num_heads * shape.head_dim * shape.num_layers
        self._pair_s = pair_flops / (accelerator.peak_flops * accelerator.attention_share * tensor_parallel)
        self._kv_token_s = shape.kv_bytes_per_token(tensor_parallel) / bandwidth
        self._launch_s = shape.num_layers * KERNELS_PER_LAYER * accelerator.kernel_launch_s
        num_all_reduces = ALL_REDUCES_PER_LAYER * shape.num_layers if tensor_parallel > 1 else 0
        self._all_reduce_latency_s = num_all_reduces * accelerator.all_reduce_latency_s
        sent_bytes = 2 * (tensor_parallel - 1) / tensor_parallel * shape.hidden_size * BYTES_PER_VALUE
        self._all_reduce_token_s = num_all_reduces * sent_bytes / (accelerator.link_bandwidth * accelerator.link_share)

    def step_time(
        self, num_scheduled_tokens: Int32Array, num_computed_tokens: Int32Array, num_samples: int
    ) -> StepTime:
        """The time of a step whose row i runs ``num_scheduled_tokens[i]`` tokens behind ``num_computed_tokens[i]``.

        Both of shape ``[rows]``; ``num_samples`` of the rows draw a token.
        """
        chunk: NDArray[np.float64] = num_scheduled_tokens.astype(np.float64)
        before: NDArray[np.float64] = num_computed_tokens.astype(np.float64)
        num_tokens = float(chunk.sum())
        pairs = chunk * (before + (chunk + 1) / 2)
        attention_s = np.maximum(pairs * self._pair_s, (before + chunk) * self._kv_token_s).sum()
        return StepTime(
            linear_s=max(num_tokens * self._token_s + num_samples * self._sample_s, self._weights_s),
            attention_s=float(attention_s),
            all_reduce_s=self._all_reduce_latency_s + num_tokens * self._all_reduce_token_s,
            launch_s=self._launch_s,
        )

    def num_blocks(self, block_size: int) -> int:
        """KV blocks of ``block_size`` tokens that fit beside the weights; 0 or less if not even the weights do."""
        weights = self.shape.num_parameters * BYTES_PER_VALUE / self.tensor_parallel
        free = self.accelerator.memory_bytes * USABLE_MEMORY_SHARE - weights
        return int(free // (block_size * self.shape.kv_bytes_per_token(self.tensor_parallel)))
