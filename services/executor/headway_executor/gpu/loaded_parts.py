"""What all parts of a layer are loaded with: products, norms and numbers on the device.

Owns: which of them an adapter may change, how a norm is stored. Must not know: what a layer consists of.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headway_executor.gpu.device_adapters import DeviceAdapters
from headway_executor.gpu.device_weights import DeviceWeights
from headway_executor.gpu.linear import AdaptedExperts, AdaptedLinear, DeviceExperts, DeviceLinear
from headway_executor.gpu.norm import DeviceNorm, NormedLinear
from headway_executor.gpu.stage_mates import BackToHidden
from headway_executor.models.adapters import AdapterSite
from headway_executor.models.coded_tensors import Projection
from headway_executor.models.config import ModelConfig
from headway_executor.models.linear import placed
from headway_executor.models.loading import ModelTensors, NormTensors
from headway_executor.models.part import ModelPart
from headway_executor.ranks.stage_mates import Cut


@dataclass(frozen=True, slots=True)
class LoadedParts:
    """Of a model's ``part``, for steps of ``max_num_tokens``, whose numbers between kernels have the ``dtype``. ``adapters`` are
    of the steps that will run; None: there can be none. ``to_hidden``: see there; None: the layers are whole.
    """

    config: ModelConfig
    part: ModelPart
    to_hidden: BackToHidden | None
    weights: DeviceWeights
    adapters: DeviceAdapters | None
    max_num_tokens: int
    dtype: torch.dtype
    device: torch.device

    @property
    def tensors(self) -> ModelTensors:
        """As they are stored."""
        return self.weights.tensors

    def space(self, *widths: int) -> Tensor:
        """Memory for a step's tokens, ``[max_num_tokens, *widths]``."""
        return torch.empty(self.max_num_tokens, *widths, dtype=self.dtype, device=self.device)

    def norm(self, stored: NormTensors, eps: float | None = None) -> DeviceNorm:
        """A norm of whole rows, by default with the epsilon of most."""
        config = self.config.norm
        return DeviceNorm(
            weight=self.norm_weight(stored.weight),
            bias=None if stored.bias is None else self.norm_weight(stored.bias),
            eps=config.eps if eps is None else eps,
            is_centred=config.kind == "layer",
        )

    def behind(self, index: int, name: str | None, product: DeviceLinear) -> DeviceLinear:
        """A product behind the norm of that ``name`` in a layer, if there is one."""
        norm = self.tensors.norm(index, name)
        return product if norm is None else NormedLinear(self.norm(norm), product)

    def norm_weight(self, weight: Tensor) -> Tensor:
        """A norm's weight or bias, in the dtype in which it multiplies."""
        return self.weights.here(weight) if self.config.norm.rounds_first else self.wide(weight)

    def wide(self, tensor: Tensor) -> Tensor:
        """In float32, on the device."""
        return placed(tensor, torch.float32, self.device)

    def projection(self, index: int, site: AdapterSite, read: Projection) -> DeviceLinear:
        """The product of a site, which an adapter may change."""
        return self.adapted(self.weights.linear(read), index, site)

    def back(self, index: int, site: AdapterSite, read: Projection, inputs: Cut) -> DeviceLinear:
        """The product of a site back to the hidden state; of its ``inputs``, each rank has some."""
        own = self.projection(index, site, read)
        return own if self.to_hidden is None else self.to_hidden.product(own, inputs)

    def adapted(
        self,
        product: DeviceLinear,
        index: int,
        site: AdapterSite,
        columns: slice = slice(None),
    ) -> DeviceLinear:
        """The same product, with what adapters add to these of its columns."""
        if self.adapters is None:
            return product
        return AdaptedLinear(product, self.adapters, self.part.layers.index(index), site, columns)

    def adapted_experts(self, product: DeviceExperts, index: int, site: AdapterSite) -> DeviceExperts:
        """The same of experts."""
        if self.adapters is None:
            return product
        return AdaptedExperts(product, self.adapters, self.part.layers.index(index), site)
