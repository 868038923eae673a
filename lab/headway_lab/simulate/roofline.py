"""The time of a step on a device, and the KV blocks that fit beside the weights. Must not know: schedulers, requests.

A step's time is a sum:

- *Linear*: two operations per parameter for each token, and for each sampling row through the matrix to the logits.
  Weights are read once per step. Tokens run in whole tiles. Reading (time m) and arithmetic (time c) overlap in part:
  ``(m^x + c^x)^(1/x)`` with the device's exponent x.
- *Attention of decodes*: ``4 * heads * head_dim`` operations per layer and position; reading keys and values bounds it.
- *Attention of prompts*: the same operations; a row's cache is read once per step, since tiles of queries run side by
  side, so the chunks C of a prompt N read N^2 / 2C. A processor has one head of one tile at a time (Dao,
  FlashAttention-2, 2023, 3.2): a small chunk leaves most idle.
- *Elementwise*: norms, rotation, activation and the writing of the cache, bound by memory.
- *All-reduce*: what the devices of a stage send each other (``meetings``).
- *Sampling*: some passes over the logits. *Fixed*: starts of kernels, and the time between steps.

Pipeline parallel: p stages have the layers in equal parts, and the last one the logits and the draw too. Each stage is a
process of its own, so each has the time between steps. A step's time is the sum over its stages, and a *send* of the
hidden states from each stage to the next. What steps of several stages may overlap is the device's part (``device``).

Not modelled: attention split along the cache, matrices too small for all processors, falling clocks, communication
behind arithmetic, and the token embedding, which a stage reads a row of.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway_lab.simulate.hardware import Accelerator
from headway_lab.simulate.meetings import all_reduces
from headway_lab.simulate.model_shapes import ModelShape
from headway_proto.columns import Int32Array

KERNELS_PER_LAYER = 10
"""Two norms, three products of attention with rotation and cache write, attention, three of the MLP, activation."""
USABLE_MEMORY_SHARE = 0.90
"""A share of the device's memory, as in vLLM; the rest is for activations and the runtime."""
LOGIT_PASSES = 4
"""How often a row's logits, four bytes each, are read or written until a token is drawn: assumed."""
_LOGIT_BYTES = 4


class StepTime(NamedTuple):
    """The parts of a step's time, in seconds, each summed over the stages of a pipeline.

    ``stages_s``: what each stage takes, without sends, if there are several.
    """

    linear_s: float
    attention_s: float
    elementwise_s: float
    all_reduce_s: float
    sampling_s: float
    fixed_s: float
    send_s: float = 0.0
    stages_s: tuple[float, ...] = ()

    @property
    def total_s(self) -> float:
        """The sum of the parts."""
        return (
            self.linear_s
            + self.attention_s
            + self.elementwise_s
            + self.all_reduce_s
            + self.sampling_s
            + self.fixed_s
            + self.send_s
        )


class _Stage:
    """One stage's ``tensor_parallel`` devices, with one of ``num_stages`` equal parts of the layers."""

    def __init__(
        self, accelerator: Accelerator, shape: ModelShape, tensor_parallel: int, num_stages: int, *, is_last: bool
    ) -> None:
        self._accelerator = accelerator
        bandwidth = accelerator.memory_bandwidth * accelerator.memory_share
        weights_bandwidth = accelerator.memory_bandwidth * accelerator.weights_share
        gemm_flops = accelerator.peak_flops * accelerator.gemm_share * tensor_parallel
        num_layers = shape.num_layers // num_stages
        num_layer_parameters = shape.num_layer_parameters // num_stages
        num_head_parameters = shape.num_head_parameters if is_last else 0
        read_parameters = num_layer_parameters + num_head_parameters
        self._weights_s = read_parameters * shape.bytes_per_value / tensor_parallel / weights_bandwidth
        self._token_s = 2 * num_layer_parameters / gemm_flops
        self._sample_s = 2 * num_head_parameters / gemm_flops
        pair_flops = 4 * shape.num_heads * shape.head_dim * num_layers
        self._pair_s = pair_flops / (accelerator.peak_flops * accelerator.attention_share * tensor_parallel)
        # How much longer a tile takes alone on its processor than if the whole device could work on it.
        num_heads_here = -(-shape.num_heads // tensor_parallel)
        self._lone_tile_factor = max(accelerator.num_processors / num_heads_here, 1.0)
        self._kv_token_s = shape.kv_bytes_per_token(tensor_parallel) // num_stages / bandwidth
        self._decode_token_s = max(self._pair_s, self._kv_token_s)
        self._elementwise_token_s = shape.elementwise_bytes_per_token(tensor_parallel) / num_stages / bandwidth
        self._draw_s = is_last * LOGIT_PASSES * _LOGIT_BYTES * shape.vocab_size / bandwidth
        launches_s = num_layers * KERNELS_PER_LAYER * accelerator.kernel_launch_s
        self._fixed_s = launches_s + accelerator.step_overhead_s
        self._all_reduces = all_reduces(shape, tensor_parallel, num_layers)

    def step_time(
        self, num_scheduled_tokens: Int32Array, num_computed_tokens: Int32Array, num_samples: int
    ) -> StepTime:
        """See ``Roofline.step_time``."""
        num_tokens = int(num_scheduled_tokens.sum())
        return StepTime(
            linear_s=self._linear_s(num_tokens, num_samples),
            attention_s=self._attention_s(num_scheduled_tokens, num_computed_tokens, num_tokens),
            elementwise_s=num_tokens * self._elementwise_token_s,
            all_reduce_s=self._all_reduces.seconds(
                num_tokens,
                num_samples,
                latency_s=self._accelerator.all_reduce_latency_s,
                bandwidth=self._accelerator.link_bandwidth * self._accelerator.link_share,
            ),
            sampling_s=num_samples * self._draw_s,
            fixed_s=self._fixed_s,
        )

    def _linear_s(self, num_tokens: int, num_samples: int) -> float:
        tile, exponent = self._accelerator.gemm_tile_tokens, self._accelerator.overlap_exponent
        arithmetic_s = -(-num_tokens // tile) * tile * self._token_s + -(-num_samples // tile) * tile * self._sample_s
        # It is computed around the larger of the two, so that no power of a small number is lost.
        longer_s, shorter_s = max(arithmetic_s, self._weights_s), min(arithmetic_s, self._weights_s)
        return float(longer_s * (1.0 + (shorter_s / longer_s) ** exponent) ** (1.0 / exponent))

    def _attention_s(self, scheduled: Int32Array, computed: Int32Array, num_tokens: int) -> float:
        num_rows = len(scheduled)
        if num_tokens == num_rows:
            return float((int(computed.sum()) + num_rows) * self._decode_token_s)
        is_decode = scheduled == 1
        decoded = computed[is_decode]
        decodes_s = (int(decoded.sum()) + len(decoded)) * self._decode_token_s
        chunks: NDArray[np.float64] = scheduled[~is_decode].astype(np.float64)
        before: NDArray[np.float64] = computed[~is_decode].astype(np.float64)
        tile = self._accelerator.attention_tile_queries
        pairs = np.ceil(chunks / tile) * tile * (before + (chunks + 1) / 2)
        longest_tile = tile * float((before + chunks).max())
        arithmetic_s = self._pair_s * max(float(pairs.sum()), longest_tile * self._lone_tile_factor)
        reading_s = float((before + chunks).sum()) * self._kv_token_s
        return float(decodes_s + max(arithmetic_s, reading_s))


class Roofline:
    """A model on ``pipeline_parallel`` stages of ``tensor_parallel`` equal devices each. Rates are per device.

    ``pipeline_parallel`` divides the model's layers. ``stage_bandwidth``: bytes per second from one stage to the next;
    0: the device's own link.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        shape: ModelShape,
        tensor_parallel: int,
        pipeline_parallel: int = 1,
        *,
        stage_bandwidth: float = 0.0,
    ) -> None:
        self.accelerator = accelerator
        self.shape = shape
        self.tensor_parallel = tensor_parallel
        self.pipeline_parallel = pipeline_parallel
        self._last = _Stage(accelerator, shape, tensor_parallel, pipeline_parallel, is_last=True)
        self._other = _Stage(accelerator, shape, tensor_parallel, pipeline_parallel, is_last=False)
        bandwidth = stage_bandwidth or accelerator.link_bandwidth * accelerator.link_share
        self._send_token_s = shape.hidden_size * shape.bytes_per_value / bandwidth
        # A small message takes as long as a small all-reduce: assumed.
        self._send_latency_s = accelerator.all_reduce_latency_s

    @property
    def model_name(self) -> str:
        """The model."""
        return self.shape.name

    @property
    def device_name(self) -> str:
        """The device."""
        return self.accelerator.name

    @property
    def num_devices(self) -> int:
        """The devices of all stages."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values on each device."""
        return self.shape.kv_bytes_per_token(self.tensor_parallel) // self.pipeline_parallel

    def step_time(
        self, num_scheduled_tokens: Int32Array, num_computed_tokens: Int32Array, num_samples: int
    ) -> StepTime:
        """Return the time of a step; row i runs ``num_scheduled_tokens[i]`` tokens after ``num_computed_tokens[i]``."""
        last = self._last.step_time(num_scheduled_tokens, num_computed_tokens, num_samples)
        if self.pipeline_parallel == 1:
            return last
        other = self._other.step_time(num_scheduled_tokens, num_computed_tokens, 0)
        num_others = self.pipeline_parallel - 1
        return StepTime(
            linear_s=num_others * other.linear_s + last.linear_s,
            attention_s=num_others * other.attention_s + last.attention_s,
            elementwise_s=num_others * other.elementwise_s + last.elementwise_s,
            all_reduce_s=num_others * other.all_reduce_s + last.all_reduce_s,
            sampling_s=last.sampling_s,
            fixed_s=num_others * other.fixed_s + last.fixed_s,
            send_s=num_others * (self._send_latency_s + int(num_scheduled_tokens.sum()) * self._send_token_s),
            stages_s=(other.total_s,) * num_others + (last.total_s,),
        )

    def swap_time(self, num_blocks: int, block_size: int, host_bandwidth: float) -> float:
        """Return the seconds to move blocks to or from the host at ``host_bandwidth`` bytes a second per device."""
        return num_blocks * block_size * self.kv_bytes_per_token / host_bandwidth

    def num_blocks(self, block_size: int) -> int:
        """Return the KV blocks that fit on the fullest stage; 0 or less if its weights do not.

        Of several stages, the first has the token embedding and the last the matrix to logits, which is as large.
        """
        shape = self.shape
        elsewhere = 0
        if self.pipeline_parallel > 1:
            num_others = self.pipeline_parallel - 1
            elsewhere = shape.num_layer_parameters // self.pipeline_parallel * num_others + shape.num_head_parameters
        weights = (shape.num_parameters - elsewhere) * shape.bytes_per_value / self.tensor_parallel
        free = self.accelerator.memory_bytes * USABLE_MEMORY_SHARE - weights
        return int(free // (block_size * self.kv_bytes_per_token))
