"""The kernels of ``gpu`` in plain torch, one slow and obvious function each, on any device.

Owns: the oracles. Must not know: how a kernel divides its work.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from headway_kernels import kv_codes

# ---- layers: norm, activation, rotary ---------------------------------------------------------------------------------


def add_rms_norm(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, out: Tensor, *, eps: float, factor: Tensor | None = None
) -> None:
    """``gpu.norm.add_rms_norm``."""
    if delta is not None:
        hidden.add_(delta)
    if factor is not None:
        hidden.mul_(factor)
    out.copy_(_rms_normalised(hidden, weight, eps))


def add_layer_norm(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, out: Tensor, *, eps: float
) -> None:
    """``gpu.norm.add_layer_norm``."""
    if delta is not None:
        hidden.add_(delta)
    wide_bias = None if bias is None else bias.float()
    out.copy_(functional.layer_norm(hidden.float(), weight.shape, weight.float(), wide_bias, eps))


def silu_and_multiply(gate_up: Tensor, out: Tensor) -> None:
    """``gpu.activation.silu_and_multiply``."""
    gate, up = gate_up.chunk(2, dim=1)
    out.copy_(functional.silu(gate.float()).to(gate.dtype) * up)


def gelu_and_multiply(gate_up: Tensor, out: Tensor) -> None:
    """``gpu.activation.gelu_and_multiply``."""
    gate, up = gate_up.chunk(2, dim=1)
    out.copy_(functional.gelu(gate.double(), approximate="tanh").to(gate.dtype) * up)


def clamped_swish_and_multiply(gate_up: Tensor, out: Tensor) -> None:
    """``gpu.activation.clamped_swish_and_multiply``."""
    gate, up = gate_up.float().chunk(2, dim=1)
    gate = gate.clamp(max=7.0)
    out.copy_(gate * (1.702 * gate).sigmoid() * (up.clamp(-7.0, 7.0) + 1))


def rotate_and_store(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    cosines: Tensor,
    sines: Tensor,
    pool_layer: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    head_weights: Tensor | None = None,
    head_biases: Tensor | None = None,
    eps: float = 0.0,
    norms_rotated: bool = False,
    norms_values: bool = False,
    query_factors: Tensor | None = None,
) -> None:
    """``gpu.rotary.rotate_and_store``."""
    num_tokens, block_size = qkv.shape[0], pool_layer.shape[2]
    heads = qkv.view(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    queries, keys, values = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], 1)
    cosine, sine = (table[positions.long(), None] for table in (cosines, sines))

    def placed(heads: Tensor, normed: Callable[[Tensor], Tensor], factors: Tensor | float = 1) -> Tensor:
        heads = normed(_rotated(heads, cosine, sine) if norms_rotated else heads).float() * factors
        return heads if norms_rotated else _rotated(heads, cosine, sine)

    def norm(weight: Tensor | None, own: slice) -> Callable[[Tensor], Tensor]:
        if head_weights is not None:
            biases = None if head_biases is None else head_biases[own]
            return lambda heads: _layer_normalised(heads, head_weights[own], biases, eps)
        return lambda heads: heads if weight is None else _rms_normalised(heads, weight, eps)

    factors = 1 if query_factors is None else query_factors[positions.long(), None, None]
    of_values = _rms_normalised(values, values.new_ones(head_dim), eps) if norms_values else values
    stored = torch.cat([placed(keys, norm(k_norm, slice(num_heads, None))).to(qkv.dtype), of_values], dim=1)
    queries.copy_(placed(queries, norm(q_norm, slice(num_heads)), factors))
    targets: tuple[Tensor, ...] = (pool_layer,)
    sources: tuple[Tensor, ...] = (stored,)
    if kv_codes.is_coded(pool_layer):
        targets, sources = kv_codes.parts(pool_layer), kv_codes.encode(stored)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0 and num_kv_heads:
            for target, source in zip(targets, sources, strict=True):
                target[slot // block_size, :, slot % block_size] = source[token]


def _layer_normalised(heads: Tensor, weights: Tensor, biases: Tensor | None, eps: float) -> Tensor:
    """Each head with weights of its own."""
    normalised = functional.layer_norm(heads.float(), heads.shape[-1:], eps=eps) * weights
    return (normalised if biases is None else normalised + biases).to(heads.dtype)


def _rms_normalised(inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = inputs.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(inputs.dtype) * weight


def _rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Channels i and i + head_dim / 2 are a pair."""
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1).to(heads.dtype)


# ---- rows -------------------------------------------------------------------------------------------------------------


def gather_rows(source: Tensor, index: Tensor, out: Tensor) -> None:
    """``gpu.rows.gather_rows``."""
    for place, chosen in enumerate(index.tolist()):
        if chosen >= 0:
            out[place] = source[chosen]


def expand_rows(
    rows: Tensor,
    query_start: Tensor,
    first_position: Tensor,
    token_store: Tensor,
    block_tables: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    *,
    block_size: int,
) -> None:
    """``gpu.rows.expand_rows``."""
    token_ids.zero_()
    positions.zero_()
    slots.fill_(-1)
    starts = query_start.tolist()
    for entry, (row, first) in enumerate(zip(rows.tolist(), first_position.tolist(), strict=True)):
        for token in range(starts[entry], starts[entry + 1]):
            position = first + token - starts[entry]
            token_ids[token] = token_store[row, position]
            positions[token] = position
            slots[token] = block_tables[row, position // block_size] * block_size + position % block_size


def apply_edits(
    token_store: Tensor,
    block_tables: Tensor,
    *,
    edit_rows: Tensor,
    edit_places: Tensor,
    edit_blocks: Tensor,
    token_rows: Tensor,
    token_starts: Tensor,
    tokens: Tensor,
) -> None:
    """``gpu.rows.apply_edits``."""
    for row, place, block in zip(edit_rows.tolist(), edit_places.tolist(), edit_blocks.tolist(), strict=True):
        if row >= 0:
            block_tables[row, place] = block
    starts = token_starts.tolist()
    for entry, row in enumerate(token_rows.tolist()):
        if row >= 0:
            token_store[row, : starts[entry + 1] - starts[entry]] = tokens[starts[entry] : starts[entry + 1]]


def store_sampled(sampled: Tensor, rows: Tensor, positions: Tensor, token_store: Tensor) -> None:
    """``gpu.rows.store_sampled``."""
    for token, row, position in zip(sampled.tolist(), rows.tolist(), positions.tolist(), strict=True):
        if row >= 0:
            token_store[row, position] = max(token, 0)


def copy_blocks(layers: Tensor, pairs: Tensor) -> None:
    """``block_moves.copy_blocks``: every read comes before the first write."""
    sources, destinations = pairs.long()
    layers[:, destinations] = layers[:, sources]


def swap_out(layers: Tensor, host: Tensor, pairs: Tensor) -> None:
    """``block_moves.swap_out``."""
    blocks, host_blocks = pairs.long()
    host[host_blocks.to(host.device)] = layers[:, blocks].transpose(0, 1).to(host.device)


def swap_in(layers: Tensor, host: Tensor, pairs: Tensor) -> None:
    """``block_moves.swap_in``."""
    host_blocks, blocks = pairs.long()
    layers[:, blocks] = host[host_blocks.to(host.device)].transpose(0, 1).to(layers.device)


# ---- quantised products -----------------------------------------------------------------------------------------------


def quantized_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """``gpu.quantized_linear.quantized_linear``, with sums in float64; ``weight`` is what the codes stand for.

    Also ``gpu.skinny_linear.skinny_linear`` without a gate.
    """
    results = x.double() @ weight.double().T
    out.copy_(results if bias is None else results + bias.double())


# ---- experts ----------------------------------------------------------------------------------------------------------


def multiply_pairs(x: Tensor, weight: Tensor, bias: Tensor | None, chosen: Tensor) -> Tensor:
    """``gpu.experts.multiply_pairs`` in float64, by numbers of pairs: ``[T, num_chosen, outputs]``.

    ``x`` ``[T, inputs]``, or ``[T, num_chosen, inputs]``; ``weight`` ``[experts, outputs, inputs]``.
    """
    rows = x[:, None].expand(-1, chosen.shape[1], -1) if x.dim() == 2 else x
    results = (weight.double()[chosen.long()] @ rows.double().unsqueeze(-1)).squeeze(-1)
    return results if bias is None else results + bias.double()[chosen.long()]


def add_pairs(given: Tensor, weights: Tensor, *, shared: Tensor | None, gates: Tensor | None) -> Tensor:
    """``gpu.experts.add_pairs`` in float64; ``given`` ``[T, num_chosen, C]``."""
    results = (given.double() * weights.double()[:, :, None]).sum(1)
    if shared is None:
        return results
    return results + shared.double() * (1.0 if gates is None else gates.double().sigmoid()[:, None])


# ---- attention --------------------------------------------------------------------------------------------------------


def paged_attention(
    query: Tensor,
    pool_layer: Tensor,
    *,
    rows: Tensor,
    query_start: Tensor,
    kv_length: Tensor,
    block_tables: Tensor,
    num_kv_heads: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    slopes: tuple[Tensor, bool] | None = None,
    num_shared: int = 0,
) -> Tensor:
    """``gpu.attention.paged_attention`` in float64: ``[query_start[-1], heads * head_dim]``."""
    if kv_codes.is_coded(pool_layer):
        pool_layer = kv_codes.decoded(pool_layer, query.dtype)
    if num_shared:
        pool_layer, num_kv_heads = pool_layer.repeat(1, 2, 1, 1), 1
    _, _, block_size, head_dim = pool_layer.shape
    num_heads = query.shape[1] // head_dim
    starts = query_start.tolist()
    out = query.new_zeros((starts[-1], num_heads, head_dim), dtype=torch.float64)
    for row, length in enumerate(kv_length.tolist()):
        low, high = starts[row], starts[row + 1]
        if low == high:
            continue
        used = block_tables[rows[row], : -(-length // block_size)].long()
        # [2 * kv heads, positions, head_dim]
        stored = pool_layer[used].transpose(0, 1).flatten(1, 2)[:, :length].double()
        keys = stored[:num_kv_heads].repeat_interleave(num_heads // num_kv_heads, dim=0)
        values = stored[num_kv_heads:].repeat_interleave(num_heads // num_kv_heads, dim=0)
        queries = query[low:high].reshape(high - low, num_heads, head_dim).transpose(0, 1).double()
        logits = queries @ keys.transpose(1, 2) * scale
        if soft_cap is not None:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        key_position = torch.arange(length, device=query.device)
        query_position = key_position[length - (high - low) :, None]
        if slopes is not None:
            logits = logits + _score_biases(*slopes, scale, query_position, key_position)
        seen = key_position <= query_position
        if window is not None:
            seen &= key_position > query_position - window
        logits = logits.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            without_value = sinks.double()[:, None, None].expand(-1, high - low, 1)
            logits = torch.cat([logits, without_value], dim=-1)
        weights = logits.softmax(dim=-1)[:, :, :length]
        # Positions that no query of the row sees may hold anything.
        values = values.masked_fill(~seen.any(dim=0)[None, :, None], 0.0)
        out[low:high] = (weights @ values).transpose(0, 1)
    return out[..., num_shared:].flatten(1)


def _score_biases(slopes: Tensor, is_rounded: bool, scale: float, queries: Tensor, keys: Tensor) -> Tensor:
    """``[heads, queries, keys]``; positions are ``[queries, 1]`` and ``[keys]``."""
    by_head = slopes[:, None, None]
    return (by_head.bfloat16() * keys).double() * scale if is_rounded else by_head.double() * (keys - queries)


def sample(
    logits: Tensor,
    uniform: float,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    prompt: Sequence[int] = (),
    generated: Sequence[int] = (),
    bias: Mapping[int, float] | None = None,
    excluded: Sequence[int] = (),
) -> int:
    """The token of one row with ``logits`` ``[vocab_size]``; -1 if their largest is NaN or infinite.

    ``gpu.sampling`` has the rule. A ``temperature`` of 0 is greedy, a ``top_k`` of 0 is none. ``min_tokens`` forbids
    ``excluded``.
    """
    adjusted = _adjusted(logits, repetition, presence, frequency, prompt, generated)
    for token_id, value in (bias or {}).items():
        adjusted[token_id] += value
    adjusted[list(excluded)] = -torch.inf
    best = adjusted.max()
    if not best.isfinite():
        return -1
    if temperature == 0:
        return int((adjusted == best).nonzero()[0])
    p = ((adjusted - best) / temperature).softmax(0).tolist()
    weights = [int(value * 2.0**52) for value in p]
    kept = _kept(p, weights, top_k, top_p, min_p)
    total = sum(weights[token_id] for token_id in kept)
    target = min(int(uniform * total), total - 1)
    passed = 0
    for token_id in sorted(kept):
        passed += weights[token_id]
        if passed > target:
            return token_id
    raise AssertionError("the target lies below the total")


def _adjusted(
    logits: Tensor,
    repetition: float,
    presence: float,
    frequency: float,
    prompt: Sequence[int],
    generated: Sequence[int],
) -> Tensor:
    adjusted = logits.float().clone()
    for token_id in {*prompt, *generated}:
        logit = adjusted[token_id].clone()
        adjusted[token_id] = logit / repetition if logit > 0 else logit * repetition
    for token_id in set(generated):
        adjusted[token_id] -= torch.tensor(frequency) * generated.count(token_id)
        adjusted[token_id] -= presence
    return adjusted


def _kept(p: Sequence[float], weights: Sequence[int], top_k: int, top_p: float, min_p: float) -> list[int]:
    ranking = sorted(range(len(p)), key=lambda token_id: (-p[token_id], token_id))
    mass = 2**52
    if top_k:
        ranking = ranking[:top_k]
        mass = sum(weights[token_id] for token_id in ranking)
    kept: list[int] = []
    so_far = 0
    for token_id in ranking:
        # A top-p of 1 is none: the weights may exceed the nominal mass by a rounding.
        if top_p < 1.0 and so_far >= top_p * mass:
            break
        if p[token_id] < min_p * p[ranking[0]]:
            break
        kept.append(token_id)
        so_far += weights[token_id]
    return kept
