"""The floor of a step: the time of its bytes and operations alone, phase by phase, at the limits of a device.

Owns: counting, the line of a table. Must not know: how a step is run, or how the limits are measured.

A floor is the sum over a step's phases: products of the layers, experts, states, attention, head. Each layer's phase
needs what the one before it gives, so they cannot share the device. A phase takes at least the larger of its bytes over the
bandwidth and its operations over the rate of large products. Weights and each row's keys and values are read once, of
experts as many as tokens reach that choose at random; operations are two per weight and token, and two per visible position
and channel of a head's key and of its value. In latent attention one row is both, for all heads. The state of a row is read
and written once, with seven operations per number and token: those of the delta rule, in which a state shrinks, answers a
key, takes up a value and answers a query. With fp8 weights, products of many tokens are counted at the rate of 8-bit
floats.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from headway_executor.models.config import ModelConfig
from headway_executor.models.kv_layout import vectors_layout
from headway_executor.models.part import whole
from headway_executor.models.tensor_shapes import expected_tensors
from headway_kernels.gpu.tunings import MOST_FEW_TOKENS

BYTES_OF_CODES = {"int8": 1.0, "fp8": 1.0, "int4": 0.5 + 4 / 32}
"""Of a weight; codes of 4 bits have a scale for 32."""
_OPERATIONS_OF_STATES = 7


@dataclass(frozen=True)
class Limits:
    """The device's limits: bytes per second of a copy (read and written), operations per second of a large product in
    bfloat16 (on a CPU in float32), bytes per second between pinned memory and the device, out and in, and operations per
    second of a large product of 8-bit floats; 0: there is none.
    """

    bandwidth: float
    product_rate: float
    out_bandwidth: float
    in_bandwidth: float
    float8_rate: float = 0.0


@dataclass(frozen=True)
class Phase:
    """A part of a step that nothing else can run beside. ``is_float8``: its products are of 8-bit floats."""

    name: str
    num_bytes: float
    operations: float
    is_float8: bool = False

    def floor_s(self, limits: Limits) -> float:
        """Return the larger of both times."""
        rate = limits.float8_rate if self.is_float8 and limits.float8_rate else limits.product_rate
        return max(self.num_bytes / limits.bandwidth, self.operations / rate)


@dataclass(frozen=True)
class Line:
    """One line of the table: times in milliseconds; ``share`` is floor over measured, to be at least ``asked``.
    ``phases_ms``: the parts of the floor.
    """

    name: str
    measured_ms: float
    floor_ms: float
    asked: float
    phases_ms: dict[str, float] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Floor over measured time."""
        return self.floor_ms / self.measured_ms if self.measured_ms else 0.0


def kv_bytes_of_token(config: ModelConfig, dtype: torch.dtype, kv_cache_dtype: str) -> int:
    """Of keys and values in all layers, as the ``triton`` backend stores them."""
    return vectors_layout(config, whole(config), 1, dtype, kv_cache_dtype).block_bytes


class Floors:
    """Bytes and operations of a model's steps over the limits of a device."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, quantization: str, kv_cache_dtype: str, limits: Limits
    ) -> None:
        self._config = config
        self._element = dtype.itemsize
        self._kv_bytes = kv_bytes_of_token(config, dtype, kv_cache_dtype)
        self._limits = limits
        # The embedding is looked up, not multiplied with; where it is the head too, it is read as that.
        self._num_head = config.vocab_size * config.hidden_size
        num_embeddings = 1 if config.tie_word_embeddings else 2
        sizes = {name: int(np.prod(shape)) for name, shape in expected_tensors(config).items()}
        self._num_in_experts = sum(size for name, size in sizes.items() if ".experts." in name)
        self._num_in_layers = sum(sizes.values()) - num_embeddings * self._num_head - self._num_in_experts
        routings = [layer.feed_forward.experts.routing for layer in config.layers if layer.feed_forward.experts]
        self._chosen = routings[0].num_chosen / routings[0].num_experts if routings else 1.0
        self._num_attending = sum(layer.attends for layer in config.layers)
        self._state_numbers = sum(of.state_numbers for of in config.recurrences(range(config.num_layers)))
        self._rounds_inputs = quantization == "fp8"
        self._bytes_of_weight = BYTES_OF_CODES.get(quantization, self._element)

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one position, all layers."""
        return self._kv_bytes

    def line(
        self, name: str, measured_ms: float, contexts: list[int], chunk: int, asked: float, *, num_more_bytes: int = 0
    ) -> Line:
        """Return a step's line; see ``phases``. ``num_more_bytes`` are read beside them."""
        floors = {phase.name: phase.floor_s(self._limits) * 1e3 for phase in self.phases(contexts, chunk)}
        if num_more_bytes:
            floors["more"] = num_more_bytes / self._limits.bandwidth * 1e3
        return Line(name, measured_ms, sum(floors.values()), asked, floors)

    def phases(self, contexts: list[int], chunk: int = 0) -> list[Phase]:
        """Return those of a step of decodes after ``contexts`` positions each, and one chunk of a new prompt."""
        num_rows, num_tokens = len(contexts) + bool(chunk), len(contexts) + chunk
        attention = self._config.attention
        per_pair = 2 * attention.num_heads * (attention.vector_dim + attention.summed_dim) * self._num_attending
        reached = self._num_in_experts * (1 - (1 - self._chosen) ** num_tokens)
        multiplied = self._num_in_experts * self._chosen
        is_float8 = self._rounds_inputs and num_tokens > MOST_FEW_TOKENS
        is_float8_of_experts = self._rounds_inputs and num_tokens * self._chosen > MOST_FEW_TOKENS
        phases = [
            self._product("products", self._num_in_layers, self._num_in_layers * num_tokens, is_float8=is_float8),
            self._product("experts", reached, multiplied * num_tokens, is_float8=is_float8_of_experts),
            Phase(
                "states",
                2 * torch.float32.itemsize * self._state_numbers * num_rows,
                _OPERATIONS_OF_STATES * self._state_numbers * num_tokens,
            ),
            Phase(
                "attention",
                self.kv_bytes_per_token * (sum(contexts) + num_tokens),
                per_pair * (sum(contexts) + len(contexts) + chunk * (chunk + 1) // 2),
            ),
            Phase("head", self._num_head * self._element, 2 * self._num_head * num_rows),
        ]
        return [phase for phase in phases if phase.num_bytes]

    def _product(self, name: str, num_weights: float, num_multiplied: float, *, is_float8: bool = False) -> Phase:
        return Phase(name, num_weights * self._bytes_of_weight, 2 * num_multiplied, is_float8)
