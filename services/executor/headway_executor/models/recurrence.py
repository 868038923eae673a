"""Layers with a state instead of keys and values, as torch operators.

Owns: the states of rows, the computation of all kinds. Must not know: blocks, requests, which layers there are.

All kinds begin with a causal convolution. "gated" multiplies its inputs and its results by gates (Liquid AI 2025, LFM2,
arXiv 2511.23404). Others keep a matrix ``[key_dim, value_dim]`` for each head: the state shrinks, gets key times value
added, and the query reads it. "delta" first takes from a value what the state already answers to its key (Gated DeltaNet,
Yang et al. 2024, arXiv 2412.06464), and may have a decay for each channel of a key (Kimi Delta Attention, Kimi Team 2025,
arXiv 2510.26692); "selective" does not (Mamba 2, Dao & Gu 2024, arXiv 2405.21060; with a decay that is always the same
Lightning Attention, Qin et al. 2024, arXiv 2401.04658). Several tokens go together as these papers do it: within a part,
what tokens do to each other is a triangular system.

"scanned" has a step for each channel and a decay for each number of its state (Mamba, Gu & Dao 2023, arXiv 2312.00752), and
"unit" one number for each channel (RG-LRU, De et al. 2024, arXiv 2402.19427): their tokens go one by one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from headway_executor.models.config import GateActivation, RecurrenceConfig
from headway_kernels.states import Convolution, HeadNumbers

_PART, _PART_OF_CHANNELS = 64, 16
"""Tokens that go together, as in both papers' kernels; fewer where each channel has a decay, as there is more for each pair."""

_KEY_EPS = 1e-6
_GATES: Mapping[GateActivation, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"silu": functional.silu, "sigmoid": torch.sigmoid, "gelu_tanh": partial(functional.gelu, approximate="tanh")}
)

_Int64Array = NDArray[np.int64]
_Integers = NDArray[np.integer]


def state_bytes(layers: Sequence[RecurrenceConfig]) -> int:
    """Of a row, in all layers."""
    return 4 * sum(of.state_numbers for of in layers)


class RowStates:
    """What rows know of their tokens so far, in every layer with a state. A row that begins at position 0 begins anew.

    Main memory is not touched before a row needs it.
    """

    def __init__(self, layers: Sequence[RecurrenceConfig], num_rows: int, device: torch.device) -> None:
        self.num_rows = num_rows
        self.past = [torch.zeros(num_rows, of.channels, of.taps - 1, device=device) for of in layers]
        """Of each layer the last inputs of its convolution, float32, ``[rows, channels, taps - 1]``."""
        self.heads = [torch.zeros(num_rows, of.num_heads, of.key_dim, of.value_dim, device=device) for of in layers]
        """Of each layer the matrices of its heads, float32, ``[rows, heads, key_dim, value_dim]``."""
        self._ends = np.zeros(num_rows, dtype=np.int64)
        self.num_bytes = num_rows * state_bytes(layers)

    def advance(self, numbers: _Integers, num_computed: _Integers, num_new: _Integers) -> None:
        """Say which tokens a step adds; all ``[n]``. A row goes on where it has ended, or begins anew."""
        goes_on = num_computed > 0
        assert (self._ends[numbers] == num_computed)[goes_on].all(), "a row with a state went on elsewhere"
        self._ends[numbers] = num_computed + num_new


@dataclass(frozen=True, slots=True)
class StateSpan:
    """Consecutive tokens of a step: ``length`` of each of some rows, ``[n]``; ``is_new`` ``[n]``: a row begins."""

    tokens: slice
    length: int
    rows: Tensor
    is_new: Tensor


def spans_of(
    rows: _Int64Array, num_new: _Int64Array, num_computed: _Int64Array, device: torch.device
) -> list[StateSpan]:
    """Cut a flat batch into spans: neighbours with equally many tokens go together. All int64, ``[n]``."""
    spans, start = [], 0
    edges = np.flatnonzero(np.diff(num_new)) + 1
    for part in np.split(np.arange(len(rows)), edges):
        length, count = int(num_new[part[0]]), len(part)
        numbers = torch.from_numpy(rows[part]).to(device)
        is_new = torch.from_numpy(num_computed[part] == 0).to(device)
        spans.append(StateSpan(slice(start, start + length * count), length, numbers, is_new))
        start += length * count
    return spans


@dataclass(frozen=True, slots=True)
class Recurrence:
    """One layer's, between its two products. Tensors are float32 and on the states' device. ``selection``, ``steps`` and
    ``gates`` are products, or None; see ``RecurrenceConfig``.
    """

    config: RecurrenceConfig
    index: int
    convolution: Convolution
    numbers: HeadNumbers | None
    norm_eps: float
    selection: Callable[[Tensor], Tensor] | None = None
    steps: Callable[[Tensor], Tensor] | None = None
    gates: Callable[[Tensor], Tensor] | None = None

    def __call__(self, inputs: Tensor, states: RowStates, spans: Sequence[StateSpan]) -> Tensor:
        """``[tokens, num_inputs] -> [tokens, inner]``; the states of the spans' rows go on."""
        if self.config.kind == "scanned":
            return self._scanned(inputs, states, spans)
        made = self._made(inputs).float()
        done = [self._run(made[span.tokens], states, span) for span in spans]
        return torch.cat(done).to(inputs.dtype)

    def _made(self, inputs: Tensor) -> Tensor:
        """The same, with what products make of some of them in their place."""
        config = self.config
        if self.gates is None and self.steps is None:
            return inputs
        sizes = [config.channels, config.gate_rank or config.inner, config.num_heads]
        channels, gates, strengths, steps = torch.split(inputs, [*sizes, config.num_inputs - sum(sizes)], 1)
        gates = gates if self.gates is None else self.gates(gates)
        return torch.cat([channels, gates, strengths, steps if self.steps is None else self.steps(steps)], 1)

    def _run(self, inputs: Tensor, states: RowStates, span: StateSpan) -> Tensor:
        config = self.config
        by_row = inputs.view(-1, span.length, inputs.shape[1])
        channels, rest = torch.split(by_row, [config.channels, inputs.shape[1] - config.channels], -1)
        if self.numbers is None:
            before, behind = rest.chunk(2, -1)
            return self._convolved(channels * before, states, span).mul_(behind).flatten(0, 1)
        convolved = self._convolved(channels, states, span)
        if config.kind == "unit":
            state = _begun(states.heads[self.index], span)[:, 0, 0]
            results, after = scan_unit(self.numbers, convolved, state, span.is_new)
            states.heads[self.index][span.rows] = after[:, None, None]
            return self._with_gates(self.numbers, results.flatten(0, 1), rest.flatten(0, 1))
        convolved = functional.silu(convolved)
        gates, of_heads = torch.split(rest, [config.inner, rest.shape[-1] - config.inner], -1)
        state = _begun(states.heads[self.index], span)
        results, after = self._through_heads(self.numbers, convolved, of_heads, state)
        states.heads[self.index][span.rows] = after
        return self._with_gates(self.numbers, results.flatten(0, 1).flatten(1), gates.flatten(0, 1))

    def _scanned(self, inputs: Tensor, states: RowStates, spans: Sequence[StateSpan]) -> Tensor:
        """The same; products take all tokens at once."""
        numbers, dtype = self.numbers, inputs.dtype
        assert numbers is not None
        assert numbers.step_bias is not None
        assert numbers.skip is not None
        assert self.selection is not None
        assert self.steps is not None
        channels, gates = inputs.float().chunk(2, -1)
        convolved = [
            self._convolved(channels[span.tokens].view(-1, span.length, channels.shape[1]), states, span).flatten(0, 1)
            for span in spans
        ]
        values = functional.silu(torch.cat(convolved))
        selected = self._selected(numbers, self.selection(values.to(dtype)).float())
        low, keys, queries = torch.split(selected, self.config.selection, -1)
        steps = functional.softplus(self.steps(low.to(dtype)).float() + numbers.step_bias)
        written = values * steps
        results = []
        for span in spans:
            parts = (steps, written, keys, queries)
            by_row = [part[span.tokens].view(-1, span.length, part.shape[1]) for part in parts]
            result, state = scan_channels(numbers.decay, by_row, _begun(states.heads[self.index], span)[:, 0])
            states.heads[self.index][span.rows] = state[:, None]
            results.append(result.flatten(0, 1))
        behind = torch.cat(results).add_(values * numbers.skip)
        return behind.mul_(functional.silu(gates)).to(dtype)

    def _selected(self, numbers: HeadNumbers, selected: Tensor) -> Tensor:
        """``[tokens, step_rank + 2 * key_dim]``, the same, normalised if they are."""
        if numbers.selection_norm is None:
            return selected
        sizes = self.config.selection
        parts = torch.split(selected, sizes, -1), torch.split(numbers.selection_norm, sizes)
        return torch.cat([_normed(part, self.norm_eps) * weight for part, weight in zip(*parts, strict=True)], -1)

    def _convolved(self, channels: Tensor, states: RowStates, span: StateSpan) -> Tensor:
        """``[rows, length, channels]``, the same."""
        seen = torch.cat([_begun(states.past[self.index], span), channels.transpose(1, 2)], -1)
        states.past[self.index][span.rows] = seen[..., span.length :]
        taps, bias = self.convolution
        return functional.conv1d(seen, taps[:, None], bias, groups=len(taps)).transpose(1, 2)

    def _through_heads(
        self, numbers: HeadNumbers, convolved: Tensor, of_heads: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Results, ``[rows, length, heads, value_dim]``, and the state behind them."""
        config = self.config
        keys = config.num_key_heads * config.key_dim
        queries, keys_, values = torch.split(convolved, [keys, keys, config.inner], -1)
        queries, keys_ = (self._of_all_heads(part) for part in (queries, keys_))
        values = values.reshape(*values.shape[:-1], config.num_heads, config.value_dim)
        if numbers.step_bias is None:
            decays = numbers.decay[:, None].expand(len(values), -1, values.shape[1])
            results, state = scan(queries, keys_, values.transpose(1, 2), decays, None, state)
            return results.transpose(1, 2), state
        biased = of_heads[..., -config.num_steps :] + numbers.step_bias
        if config.kind == "selective":
            assert numbers.skip is not None
            steps = functional.softplus(biased)
            decays = (steps * numbers.decay).transpose(1, 2)
            written = (values * steps[..., None]).transpose(1, 2)
            results, state = scan(queries, keys_, written, decays, None, state)
            return results.transpose(1, 2) + values * numbers.skip[:, None], state
        queries, keys_ = _unit(queries), _unit(keys_)
        strengths = of_heads[..., : config.num_heads].sigmoid().transpose(1, 2)
        if config.doubles_strengths:
            strengths = strengths * 2
        decays = self._decays(numbers.decay, biased.view(*biased.shape[:-1], config.num_heads, -1)).transpose(1, 2)
        results, state = scan(queries * config.key_dim**-0.5, keys_, values.transpose(1, 2), decays, strengths, state)
        return results.transpose(1, 2), state

    def _decays(self, decay: Tensor, steps: Tensor) -> Tensor:
        """Logarithms, ``[rows, length, heads, key_dim]``, or without the last dimension, of steps ``[..., key_dim or 1]``."""
        if self.config.decay_bound is None:
            decays = functional.softplus(steps) * decay[:, None]
        else:
            decays = torch.sigmoid(-decay[:, None] * steps) * self.config.decay_bound
        return decays if self.config.decays_channels else decays.squeeze(-1)

    def _of_all_heads(self, part: Tensor) -> Tensor:
        """Each key head serves several heads: ``[rows, heads, length, key_dim]``."""
        config = self.config
        by_head = part.reshape(*part.shape[:-1], config.num_key_heads, config.key_dim).transpose(1, 2)
        ratio = config.num_heads // config.num_key_heads
        return by_head.repeat(1, ratio, 1, 1) if config.keys_take_turns else by_head.repeat_interleave(ratio, 1)

    def _with_gates(self, numbers: HeadNumbers, results: Tensor, gates: Tensor) -> Tensor:
        """``[tokens, inner]``, the same. "selective" has its gates before the norm, if not told otherwise."""
        gates = _GATES[self.config.gate](gates)
        is_gated_first = self.config.kind == "selective" and not self.config.gates_behind
        if is_gated_first:
            results = results * gates
        if numbers.norm is not None:
            by_norm = results.view(-1, *numbers.norm.shape)
            results = (_normed(by_norm, self.norm_eps) * numbers.norm).flatten(1)
        return results if is_gated_first else results * gates


def scan(
    queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, strengths: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run tokens through a state; return results, ``[n, heads, length, value_dim]``, and the state behind them.

    ``queries`` and ``keys`` ``[n, heads, length, key_dim]``, ``values`` ``[n, heads, length, value_dim]``, ``decays`` (at most
    0: logarithms) ``[n, heads, length]`` or ``[n, heads, length, key_dim]``, ``strengths`` ``[n, heads, length]``, ``state``
    ``[n, heads, key_dim, value_dim]``. With ``strengths``, the delta rule.
    """
    results = []
    by_channel = decays.dim() == queries.dim()
    length = _PART_OF_CHANNELS if by_channel else _PART
    for start in range(0, queries.shape[2], length):
        part = slice(start, start + length)
        query, key, value = queries[:, :, part], keys[:, :, part], values[:, :, part]
        kept = decays[:, :, part].cumsum(2)
        pairs = _Pairs.of_channels(kept) if by_channel else _Pairs.of_heads(kept)
        from_start, to_end = (
            part if by_channel else part[..., None] for part in (kept.exp(), (kept[:, :, -1:] - kept).exp())
        )
        if strengths is not None:
            strength = strengths[:, :, part, None]
            answered = pairs(key * strength, key)
            wanted = torch.cat([value, key * from_start], -1) * strength
            solved = torch.linalg.solve_triangular(answered, wanted, upper=False, unitriangular=True)
            value = solved[..., : value.shape[-1]] - solved[..., value.shape[-1] :] @ state
        results.append(query * from_start @ state + pairs(query, key) @ value)
        state = state * from_start[:, :, -1, :, None] + (key * to_end).transpose(-1, -2) @ value
    return torch.cat(results, 2), state


@dataclass(frozen=True, slots=True)
class _Pairs:
    """How much of a token is left at each that follows, ``[n, heads, length, length]``, and for each channel of a key with one
    more dimension.
    """

    left: Tensor

    @classmethod
    def of_heads(cls, kept: Tensor) -> "_Pairs":
        """``kept``: logarithms, from the start of the part on."""
        return cls((kept[..., :, None] - kept[..., None, :]).tril().exp().tril())

    @classmethod
    def of_channels(cls, kept: Tensor) -> "_Pairs":
        """The same, of channels."""
        by_channel = kept.transpose(-1, -2)
        return cls((by_channel[..., :, None] - by_channel[..., None, :]).tril().exp().tril().movedim(-3, -1))

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        """What each query finds of each key."""
        if self.left.dim() == queries.dim():
            return queries @ keys.transpose(-1, -2) * self.left
        return (queries[..., :, None, :] * keys[..., None, :, :] * self.left).sum(-1)


def scan_channels(decay: Tensor, tokens: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """Run tokens through a state, each channel with steps of its own; return results, ``[n, length, channels]``, and the state
    behind them.

    ``decay`` ``[key_dim, channels]``; ``tokens``: steps and what is written, ``[n, length, channels]``, keys and queries,
    ``[n, length, key_dim]``; ``state`` ``[n, key_dim, channels]``.
    """
    steps, written, keys, queries = tokens
    results = []
    for token in range(steps.shape[1]):
        kept = (steps[:, token, None] * decay).exp()
        state = state * kept + keys[:, token, :, None] * written[:, token, None]
        results.append((queries[:, token, None] @ state).squeeze(1))
    return torch.stack(results, 1), state


def scan_unit(numbers: HeadNumbers, values: Tensor, state: Tensor, is_new: Tensor) -> tuple[Tensor, Tensor]:
    """Run tokens through one number for each channel; return results, ``[n, length, channels]``, and the state behind them.

    ``values`` ``[n, length, channels]``, ``state`` ``[n, channels]``, ``is_new`` bool, ``[n]``: a first token is taken whole.
    """
    assert numbers.blocks is not None
    assert numbers.block_bias is not None
    by_block = values.view(*values.shape[:2], numbers.blocks.shape[1], -1)
    made = torch.einsum("nlbi,gbio->gnlbo", by_block, numbers.blocks).flatten(3) + numbers.block_bias[:, None, None]
    taken, staying = made.sigmoid().unbind(0)
    decays = staying * numbers.decay
    written = (1 - (2 * decays).exp()).sqrt()
    written[:, 0].masked_fill_(is_new[:, None], 1.0)
    written, kept, results = written * values * taken, decays.exp(), []
    for token in range(values.shape[1]):
        state = state * kept[:, token] + written[:, token]
        results.append(state)
    return torch.stack(results, 1), state


def _begun(states: Tensor, span: StateSpan) -> Tensor:
    """The states of a span's rows; zeros of those that begin."""
    of_rows = states[span.rows]
    return of_rows.masked_fill(span.is_new.view(-1, *(1 for _ in of_rows.shape[1:])), 0.0)


def _normed(vectors: Tensor, eps: float) -> Tensor:
    return vectors * torch.rsqrt(vectors.square().mean(-1, keepdim=True) + eps)


def _unit(vectors: Tensor) -> Tensor:
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + _KEY_EPS)
