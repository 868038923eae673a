"""Products and norms as plain torch operators, of a model's tensors in their form.

Owns: dtypes and devices, rounded inputs, adapters at their sites, what ranks share of a projection. Must not know: layers.
"""

import torch
from torch import Tensor

from headway_executor.checkpoint.weights import Checkpoint
from headway_executor.models.adapted import AdaptedHeads, AdaptedProduct, StepAdapters
from headway_executor.models.adapters import AdapterSite
from headway_executor.models.coded_tensors import CodedTensors, Projection
from headway_executor.models.config import ModelConfig
from headway_executor.models.decoder import LayerNorm, Product, RmsNorm
from headway_executor.models.latent import HeadProducts, InTurn
from headway_executor.models.linear import GatheredLinear, Linear, RoundingLinear, SummedLinear, placed
from headway_executor.models.loading import ModelTensors, NormTensors
from headway_executor.models.rope import interleaved
from headway_executor.models.stage import Stage
from headway_executor.models.stored_names import TensorSource
from headway_executor.ranks.stage_mates import Alone, ColumnMates, Cut


def mates_of(stage: Stage) -> ColumnMates:
    """Who has the other columns of a stage."""
    return Alone() if stage.group is None else stage.group.columns


class EagerProducts:
    """Those of a stage. ``rounds_inputs``: of dense products, where the checkpoint asks for rounding whole rows."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        stage: Stage,
        dtype: torch.dtype,
        device: torch.device,
        adapters: StepAdapters | None,
        *,
        rounds_inputs: bool,
    ) -> None:
        def tensors_of(source: TensorSource) -> ModelTensors:
            return ModelTensors(config, source, interleaved, part=stage.part)

        self.tensors = tensors_of(checkpoint)
        self.part = stage.part
        self.mates = mates_of(stage)
        self.adapters = adapters
        self.device = device
        self.dtype = dtype
        self._norm = config.norm
        self._rounds_inputs = rounds_inputs
        self._coded = CodedTensors(checkpoint, tensors_of)

    def norm(self, tensors: NormTensors, eps: float | None = None) -> Product:
        """A norm of whole rows, by default with the epsilon of most."""
        config = self._norm
        eps = config.eps if eps is None else eps
        if config.kind == "rms":
            return self.rms_norm(tensors.weight, eps)
        bias = None if tensors.bias is None else self.wide(tensors.bias)
        return LayerNorm(self.wide(tensors.weight), bias, eps)

    def rms_norm(self, weight: Tensor, eps: float | None = None) -> RmsNorm:
        """A norm by the root mean square."""
        norm = self._norm
        rounded = self.placed(weight) if norm.rounds_first else self.wide(weight)
        return RmsNorm(rounded, norm.eps if eps is None else eps)

    def placed(self, tensor: Tensor) -> Tensor:
        """In the model's dtype."""
        return placed(tensor, self.dtype, self.device)

    def wide(self, tensor: Tensor) -> Tensor:
        """In float32."""
        return placed(tensor, torch.float32, self.device)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A product that no adapter changes."""
        return Linear(weight, bias, dtype=self.dtype, device=self.device)

    def dense(self, read: Projection, place: int, site: AdapterSite) -> Product:
        """A dense product of a layer."""
        # Some inputs do not tell how whole rows are rounded.
        coded = None if self.part.is_fast else self._coded.read(read)
        if coded is None:
            return self.adapted(self.linear(*read(self.tensors)), place, site)
        weight, bias = coded
        made = self.linear(weight.float(), bias)
        return self.adapted(RoundingLinear(made) if self._rounds_inputs and weight.is_for_int8 else made, place, site)

    def behind_norm(self, index: int, name: str | None, product: Product) -> Product:
        """A product behind the norm of that ``name`` in a layer, if there is one."""
        norm = self.tensors.norm(index, name)
        return product if norm is None else InTurn((self.norm(norm), product))

    def adapted(self, product: Product, place: int, site: AdapterSite, number: int | None = None) -> Product:
        """With what adapters add at a ``site`` of layer ``place`` of the stage; ``number``: of an expert."""
        return product if self.adapters is None else AdaptedProduct(product, self.adapters, place, site, number)

    def of_heads(self, weight: Tensor, place: int, site: AdapterSite) -> Product:
        """A product of each head of latent attention, ``[heads, in, out]``, with what adapters add."""
        product = HeadProducts(self.placed(weight))
        return product if self.adapters is None else AdaptedHeads(product, self.adapters, place, site)

    def back(self, own: Product, inputs: Cut) -> Product:
        """A projection back to the hidden state."""
        if self.part.is_whole_stage:
            return own
        if self.part.is_fast:
            return SummedLinear(own, self.mates)
        return GatheredLinear(own, self.mates, inputs=inputs, outputs=self.part.hidden)
