"""Kernels of layers with a state beside the executor's operators, whatever the cuts of a row and its company are."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from headway_executor.gpu.device_step import StepStates
from headway_executor.gpu.recurrence import DeviceRecurrence, RecurrenceSpace, RecurrenceWeights, widths_of
from headway_executor.models.config import RecurrenceConfig
from headway_executor.models.recurrence import Recurrence, RowStates, spans_of
from headway_executor.models.tensor_names import RecurrenceNames
from headway_kernels.gpu.recurrence import bounds as of_bounds
from headway_kernels.gpu.recurrence.bounds import RowBounds
from headway_kernels.states import Convolution, HeadNumbers

NAMES = RecurrenceNames(inputs=("i",), convolution=("c",), output="o")
HEADS = {"num_heads": 2, "num_key_heads": 1, "key_dim": 6, "value_dim": 5}
KINDS = {
    "gated": {"kind": "gated", "taps": 3, "value_dim": 21},
    "gated-wide": {"kind": "gated", "taps": 4, "value_dim": 140},
    "mamba": {"kind": "scanned", "taps": 4, "value_dim": 70, "key_dim": 3, "step_rank": 4},
    "jamba": {"kind": "scanned", "taps": 3, "value_dim": 9, "key_dim": 2, "step_rank": 4, "selection_norm": "weighed"},
    "unit": {"kind": "unit", "taps": 4, "value_dim": 72, "key_dim": 1, "num_blocks": 6, "gate": "gelu_tanh"},
    "delta": {"kind": "delta", "taps": 4, "norm_dim": 5, **HEADS},
    "delta-turns": {
        "kind": "delta",
        "taps": 2,
        **HEADS,
        "num_heads": 4,
        "num_key_heads": 2,
        "keys_take_turns": True,
        "doubles_strengths": True,
    },
    "kimi": {"kind": "delta", "taps": 4, "norm_dim": 5, **HEADS, "decays_channels": True, "gate": "sigmoid"},
    "bounded": {"kind": "delta", "taps": 4, "norm_dim": 5, **HEADS, "decays_channels": True, "decay_bound": -3.0}
    | {"gate_rank": 3, "step_rank": 7},
    "mamba2": {"kind": "selective", "taps": 4, "norm_dim": 5, **HEADS, "num_key_heads": 2},
    "bare": {"kind": "selective", "taps": 4, **HEADS},
    "behind": {"kind": "selective", "taps": 4, "norm_dim": 10, **HEADS, "gates_behind": True},
    "minimax": {"kind": "selective", "taps": 1, "norm_dim": 10, **HEADS, "gates_behind": True, "gate": "sigmoid"}
    | {"slopes": (-0.1, -0.5)},
}
USUAL = ("gated", "delta-turns", "bounded", "mamba2", "minimax", "jamba", "unit")
NUM_ROWS = 3


def product(weight):
    return lambda inputs, out: out.copy_(inputs.float() @ weight.t())


class Layer:
    """One layer's numbers, drawn; its states here and in the oracle."""

    def __init__(self, device, dtype=torch.float32, **fields):
        self.config = config = RecurrenceConfig(names=NAMES, **fields)
        self.device, self.dtype = device, dtype
        self.draw = torch.Generator().manual_seed(5)
        taps = self.drawn(config.channels, config.taps)
        bias = self.drawn(config.channels) if config.taps > 2 else None
        numbers = self.numbers()
        further = {
            name: self.drawn(*shape)
            for name, shape in (
                ("selection", (sum(config.selection), config.inner)),
                ("steps", (config.num_steps, config.step_rank)),
                ("gates", (config.inner, config.gate_rank)),
            )
            if min(shape) and (name != "selection" or config.kind == "scanned")
        }
        self.oracle = Recurrence(
            config,
            0,
            Convolution(taps, bias),
            numbers,
            1e-5,
            **{name: lambda inputs, weight=weight: inputs @ weight.t() for name, weight in further.items()},
        )
        here = lambda tensor: tensor.to(device).contiguous()  # noqa: E731 - of every number
        weights = RecurrenceWeights(
            inputs=lambda inputs, out: out.copy_(inputs),
            convolution=Convolution(here(taps.t()), None if bias is None else here(bias)),
            numbers=None if numbers is None else numbers.each(here),
            norm_eps=1e-5,
            output=lambda results, out: out.copy_(results),
            blocks=None if config.kind != "unit" else here(torch.cat(list(numbers.blocks), 2).to(dtype)),
            **{name: product(here(weight)) for name, weight in further.items()},
        )
        self.kernels = DeviceRecurrence(config, 0, weights, RecurrenceSpace(widths_of(config), 64, dtype, device))
        self.states = RowStates([config], NUM_ROWS, torch.device("cpu"))
        self.device_states = RowStates([config], NUM_ROWS, device)
        for state in (*self.device_states.past, *self.device_states.heads):
            state.fill_(torch.nan)

    def numbers(self):
        config = self.config
        if config.kind == "gated":
            return None
        drawn = {"step_bias": None if config.slopes else self.drawn(config.num_steps), "skip": None, "norm": None}
        if config.kind == "scanned":
            norm = self.drawn(sum(config.selection)) if config.selection_norm == "weighed" else None
            drawn |= {"skip": self.drawn(config.inner), "selection_norm": norm}
            return HeadNumbers(decay=-self.drawn(config.key_dim, config.inner).exp(), **drawn)
        if config.kind == "unit":
            width = config.inner // config.num_blocks
            matrices = {
                "blocks": 0.3 * self.drawn(2, config.num_blocks, width, width),
                "block_bias": self.drawn(2, config.inner),
            }
            return HeadNumbers(
                decay=-1 - self.drawn(config.inner).exp(), step_bias=None, skip=None, norm=None, **matrices
            )
        if config.kind == "selective" and not config.slopes:
            drawn["skip"] = self.drawn(config.num_heads)
        if config.norm_dim:
            drawn["norm"] = self.drawn(config.inner).view(-1, config.norm_dim)
        decay = torch.tensor(config.slopes) if config.slopes else -self.drawn(config.num_heads).exp()
        return HeadNumbers(decay=decay, **drawn)

    def drawn(self, *shape):
        return torch.randn(shape, generator=self.draw)

    def run(self, inputs, spans, padding=(0, 0)):
        """``spans`` are rows, first positions and counts; ``padding`` tokens and rows. Return what tokens give."""
        rows, firsts, counts = (list(column) for column in zip(*spans, strict=True))
        num_tokens, extra = sum(counts), padding[1]
        starts = [0, *np.cumsum(counts).tolist()]
        column = lambda numbers: torch.tensor(numbers, dtype=torch.int32, device=self.device)  # noqa: E731 - of any rows
        bounds = RowBounds(
            column(rows + [0] * extra), column(starts + starts[-1:] * extra), column(firsts + [0] * extra)
        )
        padded = torch.zeros(num_tokens + padding[0], inputs.shape[1], device=self.device, dtype=self.dtype)
        padded[:num_tokens] = inputs
        out = torch.empty(len(padded), self.config.inner, device=self.device, dtype=self.dtype)
        self.kernels(padded, SimpleNamespace(states=StepStates(self.device_states, bounds)), out)
        assert out[num_tokens:].isfinite().all()
        return out[:num_tokens].cpu()

    def expected(self, inputs, spans):
        rows, firsts, counts = (np.array(column, dtype=np.int64) for column in zip(*spans, strict=True))
        return self.oracle(inputs, self.states, spans_of(rows, counts, firsts, torch.device("cpu")))


STEPS = (
    [(0, 0, 18), (2, 0, 1)],
    [(2, 1, 1), (0, 18, 1)],
    [(1, 0, 2), (2, 2, 5), (0, 19, 2)],
    [(0, 0, 3), (1, 2, 1)],
)
"""Rows that begin, go on by chunks shorter and longer than taps, and begin again."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in USUAL else pytest.mark.deep) for kind in KINDS]
)
def test_equals_the_operators(kernel_device, kind, monkeypatch):
    """Also if a program goes through several rows."""
    monkeypatch.setattr(of_bounds, "_PROGRAMS", 4)
    layer = Layer(kernel_device, **KINDS[kind])
    for spans in STEPS:
        inputs = layer.drawn(sum(span[2] for span in spans), layer.config.num_inputs)
        found, expected = layer.run(inputs, spans, padding=(3, 2)), layer.expected(inputs, spans)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "kind", ["delta", *(pytest.param(kind, marks=pytest.mark.deep) for kind in ("gated", "mamba2", "mamba"))]
)
def test_a_token_has_the_same_bits_in_any_chunks_and_company(kernel_device, kind):
    layer = Layer(kernel_device, torch.bfloat16, **KINDS[kind])
    inputs = layer.drawn(19, layer.config.num_inputs)
    whole = layer.run(inputs, [(1, 0, 19)])
    other = layer.drawn(4, layer.config.num_inputs)
    parts, done = [], 0
    for count in (1, 5, 1, 12):
        beside = [(0, 0, 4)] if count > 1 else []
        given = torch.cat([other[: 4 * len(beside)], inputs[done : done + count]])
        parts.append(layer.run(given, [*beside, (1, done, count)], padding=(1, 1))[4 * len(beside) :])
        done += count
    assert torch.equal(torch.cat(parts), whole)
