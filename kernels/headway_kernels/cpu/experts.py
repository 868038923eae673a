"""Feed-forward by a few of many experts, on the compiled library.

Owns: the C structs of one layer. Must not know: checkpoints, the executor, how the library computes.

The library gets addresses, so every object here keeps its arrays alive.
"""

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from headway_kernels.cpu.coded_weight import CodedWeight
from headway_kernels.cpu.feed_forward import Activation, activates_in_product
from headway_kernels.cpu.library import CpuLibrary, PackedLinear, Team, address, join_panels, made, rounded
from headway_kernels.routing import Routing


class _RoutingStruct(ctypes.Structure):
    _fields_ = (
        ("num_experts", ctypes.c_int64),
        ("num_chosen", ctypes.c_int64),
        ("scoring", ctypes.c_int64),
        ("num_groups", ctypes.c_int64),
        ("num_open_groups", ctypes.c_int64),
        ("scores_per_group", ctypes.c_int64),
        ("is_normalised", ctypes.c_int64),
        ("weighs_inputs", ctypes.c_int64),
        ("scaling", ctypes.c_float),
        ("tolerance", ctypes.c_float),
        ("corrects_outputs", ctypes.c_int64),
        ("correction", ctypes.c_void_p),
    )


class _ExpertLayerStruct(ctypes.Structure):
    _fields_ = (
        ("choose", _RoutingStruct),
        ("has_shared", ctypes.c_int64),
        ("has_gate", ctypes.c_int64),
        ("activation", ctypes.c_int64),
        ("is_gated", ctypes.c_int64),
        ("inner_start", ctypes.c_int64),
        ("shared_start", ctypes.c_int64),
        ("router", ctypes.c_void_p),
        ("gate_up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("norms", ctypes.c_void_p * 6),
        ("limits", ctypes.c_void_p),
    )


class ExpertNorms(NamedTuple):
    """Where router, chosen experts and the shared one normalise by themselves; see ``experts.h``. All float32, contiguous."""

    router: Tensor
    experts: Tensor
    experts_post: Tensor
    shared: Tensor
    shared_post: Tensor
    factors: Tensor


class PackedExperts:
    """The experts of one layer.

    ``router`` has an output for each expert of ``routing``; with ``has_gate`` one more, whose sigmoid weighs the shared
    expert. ``experts``: what ``packed_expert`` gives for each; one more than in ``routing`` is shared by all tokens.
    ``correction`` float32: see ``choose_experts``. A rank of several has the columns of the activations from
    ``inner_start`` on, of the shared expert from ``shared_start`` on. ``limits`` ``[2]``, float32: with LIMITED_SILU, that of
    chosen experts and of the shared one.
    """

    def __init__(
        self,
        library: CpuLibrary,
        routing: Routing,
        router: PackedLinear,
        experts: Sequence[tuple[PackedLinear, PackedLinear]],
        correction: Tensor | None = None,
        *,
        has_gate: bool = False,
        activation: Activation = Activation.SILU,
        is_gated: bool = True,
        inner_start: int = 0,
        shared_start: int = 0,
        norms: ExpertNorms | None = None,
        limits: Tensor | None = None,
    ) -> None:
        self.activation = activation
        self.num_chosen = routing.num_chosen
        self.inner_size = max(experts[0][1].inputs, experts[-1][1].inputs)
        """Columns of the activations of the widest expert."""
        self._library = library
        self._kept = (router, tuple(experts), correction, norms, limits)
        join_panels(library, [product for pair in experts for product in pair])
        self._arrays = [(ctypes.c_void_p * len(experts))(*(pair[i].handle for pair in experts)) for i in range(2)]
        self.struct = _ExpertLayerStruct(
            choose=_routing_struct(routing, correction),
            has_shared=len(experts) - routing.num_experts,
            has_gate=int(has_gate),
            activation=int(activation),
            is_gated=int(is_gated),
            inner_start=inner_start,
            shared_start=shared_start,
            router=router.handle,
            gate_up=ctypes.addressof(self._arrays[0]),
            down=ctypes.addressof(self._arrays[1]),
            norms=(ctypes.c_void_p * 6)(*(() if norms is None else map(address, norms))),
            limits=address(limits),
        )

    def __call__(self, team: Team, hidden: Tensor, norm: Tensor, norm_eps: float) -> Tensor:
        """Return ``hidden`` with what the experts add to it, for tests. Float32, contiguous, ``[rows, hidden]``."""
        stride = rounded(hidden.shape[1], self._library.panel)
        rows = functional.pad(hidden, (0, stride - hidden.shape[1])).contiguous()
        done = self._library.functions.headway_experts_run(
            ctypes.byref(self.struct), team.handle, rows.data_ptr(), stride, len(rows), norm.data_ptr(), norm_eps
        )
        made(done, "experts")
        return rows[:, : hidden.shape[1]]


class Packing(Protocol):
    """Packs a weight, ``[outputs, inputs]``, and a bias."""

    def __call__(  # noqa: D102
        self, weight: Tensor | CodedWeight, bias: Tensor | None, *, gated: bool = False
    ) -> PackedLinear: ...


Projection: TypeAlias = tuple[Tensor | CodedWeight, Tensor | None]
"""A weight, ``[outputs, inputs]``, and a bias."""


def packed_expert(
    panel: int,
    gate_up: Projection,
    down: Projection,
    pack: Packing,
    activation: Activation = Activation.SILU,
    own_columns: int | None = None,
    *,
    is_gated: bool = True,
) -> tuple[PackedLinear, PackedLinear]:
    """Pack both matrices, with as many inner columns as whole panels have; of them, a rank of several computes its own.

    ``gate_up`` has gates first, or is not gated.
    """
    (ups, bias), (downs, down_bias) = gate_up, down
    inner = downs.shape[1]
    width = rounded(inner, panel)
    wide = partial(padded_columns, num_columns=width if own_columns is None else own_columns, is_gated=is_gated)
    return (
        pack(
            ups.with_rows(wide) if isinstance(ups, CodedWeight) else wide(ups),
            None if bias is None else wide(bias),
            gated=activates_in_product(activation, is_gated=is_gated),
        ),
        pack(
            downs.with_inputs(width) if isinstance(downs, CodedWeight) else functional.pad(downs, (0, width - inner)),
            down_bias,
        ),
    )


def padded_columns(rows: Tensor, num_columns: int, *, is_gated: bool) -> Tensor:
    """Gates, then ups, ``[2 * inner, ...]``, or ups alone, each with zeros up to ``num_columns``."""
    count = 2 if is_gated else 1
    parts = rows.reshape(count, len(rows) // count, *rows.shape[1:])
    return functional.pad(parts, (*(0, 0) * (rows.dim() - 1), 0, num_columns - parts.shape[1])).flatten(0, 1)


def _routing_struct(routing: Routing, correction: Tensor | None) -> _RoutingStruct:
    assert correction is None or (correction.dtype == torch.float32 and correction.is_contiguous())
    return _RoutingStruct(
        num_experts=routing.num_experts,
        num_chosen=routing.num_chosen,
        scoring=int(routing.scoring),
        num_groups=routing.num_groups,
        num_open_groups=routing.num_open_groups,
        scores_per_group=routing.scores_per_group,
        is_normalised=int(routing.is_normalised),
        weighs_inputs=int(routing.weighs_inputs),
        scaling=routing.scaling,
        tolerance=routing.tolerance,
        corrects_outputs=int(routing.corrects_outputs),
        correction=address(correction),
    )
