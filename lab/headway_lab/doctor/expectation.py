"""A lower bound for the time of a decode step, from memory and arithmetic rates.

A step reads every weight once and the keys and values of every row, and multiplies each row's token by every weight; of
experts, those that tokens choose.
The longer time is the bound (S. Williams et al., "Roofline", CACM 2009). Waiting between kernels and Python add to it.
"""

import msgspec

from headway_lab.simulate.model_shapes import ModelShape

CONTEXT_TOKENS = 1024
BATCHES = (1, 64, 256)

_BFLOAT16_BYTES = 2


class StepDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device: rates per second, memory in bytes."""

    name: str
    bytes_per_s: float
    flops: float
    memory_bytes: int
    weight_bytes: int = _BFLOAT16_BYTES
    cache_bytes: int = _BFLOAT16_BYTES


class ExpectedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A decode step. ``bound`` is "memory" or "arithmetic"; the time is 0 if it does not fit."""

    device: str
    batch: int
    step_ms: float
    tokens_per_s: float
    bound: str
    fits: bool


def expected_step(shape: ModelShape, device: StepDevice, batch: int, context: int = CONTEXT_TOKENS) -> ExpectedStep:
    """Return the bound for rows of ``context`` tokens."""
    head = shape.num_head_parameters
    read, of_token = (shape.num_read_parameters(count) + head for count in (batch, 1))
    rest = shape.num_layer_parameters + head - read
    cache_numbers = batch * context * shape.kv_bytes_per_token() // shape.bytes_per_value
    read_bytes = read * device.weight_bytes + cache_numbers * device.cache_bytes
    attention_flops = 4 * shape.num_layers * shape.num_heads * shape.head_dim * context
    memory_s = read_bytes / device.bytes_per_s
    arithmetic_s = batch * (2 * of_token + attention_flops) / device.flops
    fits = not device.memory_bytes or read_bytes + rest * device.weight_bytes <= device.memory_bytes
    step_s = max(memory_s, arithmetic_s) if fits else 0.0
    return ExpectedStep(
        device=device.name,
        batch=batch,
        step_ms=1e3 * step_s,
        tokens_per_s=batch / step_s if fits else 0.0,
        bound="memory" if memory_s >= arithmetic_s else "arithmetic",
        fits=fits,
    )
