"""What the kernels of ``gpu`` compute, in plain torch, one function for each: slow, obvious, on any device.

Owns: the oracles. Must not know: how a kernel cuts its work.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


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
    """The token of one row with ``logits`` of shape ``[vocab_size]``; -1 where their largest is NaN or infinite.

    ``gpu.sampling`` says the rule. A ``temperature`` of 0 is greedy and a ``top_k`` of 0 none; ``prompt`` and
    ``generated`` are what the penalties look at, ``excluded`` what ``min_tokens`` forbids. Ties rank by lower id.
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
    """``logits`` as float32 under the three penalties."""
    adjusted = logits.float().clone()
    for token_id in {*prompt, *generated}:
        logit = adjusted[token_id].clone()
        adjusted[token_id] = logit / repetition if logit > 0 else logit * repetition
    for token_id in set(generated):
        adjusted[token_id] -= torch.tensor(frequency) * generated.count(token_id)
        adjusted[token_id] -= presence
    return adjusted


def _kept(p: Sequence[float], weights: Sequence[int], top_k: int, top_p: float, min_p: float) -> list[int]:
    """The tokens that top-k, top-p and min-p keep."""
    ranking = sorted(range(len(p)), key=lambda token_id: (-p[token_id], token_id))
    mass = 2**52
    if top_k:
        ranking = ranking[:top_k]
        mass = sum(weights[token_id] for token_id in ranking)
    kept: list[int] = []
    so_far = 0
    for token_id in ranking:
        # A top-p of 1 is none: it must not stop at the nominal mass, which the weights may pass by a rounding.
        if top_p < 1.0 and so_far >= top_p * mass:
            break
        if p[token_id] < min_p * p[ranking[0]]:
            break
        kept.append(token_id)
        so_far += weights[token_id]
    return kept
