"""From a layer's tensors to its state on a device.

Owns: which tensors a state is made of. Must not know: what else a layer has, how weights become codes.
"""

from functools import cache

import torch

from headway_executor.gpu.loaded_parts import LoadedParts
from headway_executor.gpu.recurrence import DeviceRecurrence, RecurrenceSpace, RecurrenceWeights, widths_of
from headway_executor.models.adapters import AdapterSite
from headway_executor.models.config import RecurrenceConfig
from headway_kernels.states import Convolution


class RecurrenceLoader:
    """Layers that are alike share memory."""

    def __init__(self, parts: LoadedParts) -> None:
        self._parts = parts
        self._space = cache(lambda widths: RecurrenceSpace(widths, parts.max_num_tokens, parts.dtype, parts.device))

    def load(self, index: int, config: RecurrenceConfig) -> DeviceRecurrence:
        """Of the layer with this number, as ``config`` says."""
        tensors = self._parts.tensors.recurrence(index)
        (taps, bias), numbers = tensors.convolution(), tensors.head_numbers()
        further = {
            "selection": (tensors.selection(), AdapterSite.STATE_SELECTION),
            "steps": (tensors.steps(), AdapterSite.STATE_STEPS),
            "gates": (tensors.gates(), AdapterSite.STATE_GATES),
        }
        weights = RecurrenceWeights(
            inputs=self._parts.projection(
                index, AdapterSite.STATE_INPUTS, lambda read: read.recurrence(index).inputs()
            ),
            convolution=Convolution(
                self._parts.wide(taps.t()).contiguous(), None if bias is None else self._parts.wide(bias)
            ),
            numbers=None if numbers is None else numbers.each(lambda part: self._parts.wide(part).contiguous()),
            norm_eps=self._parts.config.norm.eps if config.norm_eps is None else config.norm_eps,
            output=self._parts.projection(
                index, AdapterSite.STATE_OUTPUT, lambda read: read.recurrence(index).output()
            ),
            blocks=None
            if numbers is None or numbers.blocks is None
            else self._parts.weights.here(torch.cat(list(numbers.blocks), 2)),
            # They are small, and decide much: they have no codes.
            **{
                name: self._parts.adapted(self._parts.weights.product(weight, None, is_exact=True), index, site)
                for name, (weight, site) in further.items()
                if weight is not None
            },
        )
        place = len(self._parts.config.recurrences(range(self._parts.part.layers.start, index)))
        return DeviceRecurrence(config, place, weights, self._space(widths_of(config)))
