"""Rotary position embeddings as one table of rotations by position.

Owns: rope scaling, the rotation, the order of channels. Must not know: batches, families.

Sources: rope, Su et al. 2021 (arXiv 2104.09864); linear interpolation, Chen et al. 2023 (arXiv 2306.15595); dynamic NTK
scaling, "Dynamically Scaled RoPE" (u/emozilla, 2023); YaRN, Peng et al. 2023 (arXiv 2309.00071); LongRoPE, Ding et al.
2024 (arXiv 2402.13753); llama3, the model card and code of Llama 3.1; growing queries, the models of Llama 4 and
Ministral 3 in transformers, after Nakanishi 2025 (arXiv 2501.19399).

In the table, a head is pairs of channels. Loading brings a family's channels into the order that its reader needs
(``halves``: channels i and i + d/2; ``halves_in_front``: the same, but of the rotated part of latent attention alone;
``interleaved``: neighbours). Pairs behind the rotated part of a head turn by nothing.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from headway_executor.models.attention_config import AttentionConfig, QueryGrowth, RopeConfig, Rotary


def rotations(rope: RopeConfig, head_dim: int, num_positions: int, rotary_dim: int | None = None) -> Tensor:
    """Rotation of every position: complex64, ``[num_positions, head_dim // 2]``.

    Each is ``m * exp(i * position * frequency)``; ``m`` is the attention factor of YaRN and longrope, else 1. Pairs
    behind ``rotary_dim`` (None: all of a head) have 1.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    frequencies = _frequencies(rope, rotary_dim or head_dim, positions)
    angles = positions[:, None] * frequencies
    turned = torch.polar(torch.full_like(angles, _attention_factor(rope)), angles)
    return functional.pad(turned, (0, head_dim // 2 - turned.shape[1]), value=1.0)


def query_factors(growth: QueryGrowth, num_positions: int) -> Tensor:
    """What queries are multiplied by, by position: float32, ``[num_positions]``."""
    steps = (torch.arange(num_positions) + growth.first) // growth.step
    return 1 + growth.beta * torch.log1p(steps.float())


def table_of(rotary: Rotary, num_positions: int) -> Tensor:
    """See ``rotations``."""
    return rotations(rotary.rope, rotary.head_dim, num_positions, rotary.rotary_dim)


def rotate_(heads: Tensor, rotation: Tensor) -> None:
    """Rotate ``heads`` in place, in float32.

    ``heads`` floating, ``[tokens, heads, head_dim]``, pairs interleaved, any row stride; ``rotation`` complex64, ``[tokens, 1,
    pairs]``. Pairs of heads beyond those of the rotation stay as they are, and the other way round.
    """
    rotation = rotation[..., : heads.shape[-1] // 2]
    heads = heads[..., : 2 * rotation.shape[-1]]
    paired = (*heads.shape[:-1], -1, 2)
    are_pairs = not any(place % 2 for place in (heads.storage_offset(), *heads.stride()[:-1]))
    if heads.dtype == torch.float32 and are_pairs:
        torch.view_as_complex(heads.view(paired)).mul_(rotation)
    else:
        wide = torch.view_as_complex(heads.float().contiguous().view(paired))
        heads.copy_(torch.view_as_real(wide * rotation).flatten(-2))


def interleaved(head_dim: int, attention: AttentionConfig | None = None) -> Tensor:
    """The channels with rotated pairs side by side: int64, ``[head_dim]``. Without ``attention``, whole halves are."""
    return halves(head_dim, attention).view(2, head_dim // 2).t().reshape(-1)


def halves(head_dim: int, attention: AttentionConfig | None = None) -> Tensor:
    """The channels with rotated pairs half a head apart: int64, ``[head_dim]``."""
    channels = torch.arange(head_dim)
    if attention is None:
        return channels
    rotated, rest = channels[: attention.rotary_dim], channels[attention.rotary_dim :].view(2, -1)
    pairs = rotated.view(-1, 2).t() if attention.is_interleaved else rotated.view(2, -1)
    if attention.turns_back:  # As the other channel of each pair turns forward.
        pairs = pairs.flip(0)
    return torch.cat([pairs, rest], 1).reshape(-1)


def halves_in_front(head_dim: int, attention: AttentionConfig | None = None) -> Tensor:
    """As ``halves``; in latent attention all rotated channels come before the others."""
    order = halves(head_dim, attention)
    if attention is None or attention.latent is None:
        return order
    pairs = attention.rotary_dim // 2
    by_half = order.view(2, -1)
    return torch.cat([by_half[:, :pairs].reshape(-1), by_half[:, pairs:].reshape(-1)])


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """A table of positions that is computed (Vaswani et al. 2017, arXiv 1706.03762), sines first: float32, ``[n, width]``."""
    half = width // 2
    frequencies = torch.exp(torch.arange(half).float() * -(math.log(10_000) / (half - 1)))
    angles = positions.float().unsqueeze(1) * frequencies
    return torch.cat([angles.sin(), angles.cos()], 1)


def _frequencies(rope: RopeConfig, head_dim: int, positions: Tensor) -> Tensor:
    """Radians per position, float32, ``[1 or positions, head_dim // 2]``."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    if rope.kind == "dynamic":
        return _dynamic(rope, exponents, head_dim, positions)
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "proportional":
        turning = torch.arange(head_dim // 2) < int(rope.share * head_dim // 2)
        frequencies = torch.where(turning, frequencies / rope.factor, 0.0)
    elif rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "longrope":
        frequencies = 1.0 / (torch.tensor(rope.factors) * rope.theta**exponents)
    elif rope.kind == "yarn":
        frequencies = _yarn(rope, frequencies, head_dim)
    elif rope.kind == "llama3":
        frequencies = _llama3(rope, frequencies)
    return frequencies[None]


def _dynamic(rope: RopeConfig, exponents: Tensor, head_dim: int, positions: Tensor) -> Tensor:
    """Beyond the original context, the base grows with the sequence.

    The sequence ends at the position itself, so that cached keys stay valid; in transformers it ends with the prompt.
    """
    length = (positions + 1).clamp(min=rope.original_context)
    stretch = rope.factor * length / rope.original_context - (rope.factor - 1)
    base = rope.theta * stretch ** (head_dim / (head_dim - 2))
    return 1.0 / base[:, None] ** exponents


def _yarn(rope: RopeConfig, frequencies: Tensor, head_dim: int) -> Tensor:
    """Low frequencies are interpolated, high ones stay, a linear ramp lies between."""

    def channel(num_rotations: float) -> float:
        turns = rope.original_context / (num_rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    interpolated = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies / rope.factor * interpolated + frequencies * (1 - interpolated)


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Wavelengths beyond the original context are stretched."""
    wavelengths = 2 * math.pi / frequencies
    smooth = (rope.original_context / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * frequencies / rope.factor + smooth * frequencies


def _attention_factor(rope: RopeConfig) -> float:
    if rope.kind not in {"yarn", "longrope"}:
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "longrope":
        growth = max(0.0, math.log(rope.factor))
        return math.sqrt(1 + growth / math.log(rope.original_context))

    def scale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
