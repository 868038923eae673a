"""The head of a reranker: from the hidden states of a pair of texts to one score.

Owns: its tensors. Must not know: the encoder's layers, steps, pooling.

As ``transformers`` has it for sequence classification with one label, and sentence-transformers what is made of its number.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headway_executor.models.families.bert import EncoderConfig
from headway_executor.models.linear import Linear


@dataclass(frozen=True, slots=True)
class PairHead:
    """``is_logistic``: the score is a probability."""

    dense: Linear
    output: Linear
    is_logistic: bool

    def __call__(self, states: Tensor) -> Tensor:
        """Return the score, float64, ``[1]``, on the CPU. ``states``: of one pair, ``[tokens, hidden]``."""
        score = self.output(torch.tanh(self.dense(states[:1])))[0].to("cpu", torch.float64)
        return torch.sigmoid(score) if self.is_logistic else score


def head_tensors(config: EncoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor; none without a head."""
    if not config.scores_pairs:
        return {}
    hidden = config.hidden_size
    dense, output = _names(config)
    return {
        f"{dense}.weight": (hidden, hidden),
        f"{dense}.bias": (hidden,),
        f"{output}.weight": (1, hidden),
        f"{output}.bias": (1,),
    }


def load_head(config: EncoderConfig, read: Callable[[str], Linear]) -> PairHead | None:
    """Return the head, if there is one. ``read`` gives the layer of a name."""
    if not config.scores_pairs:
        return None
    dense, output = map(read, _names(config))
    return PairHead(dense, output, config.is_logistic)


def _names(config: EncoderConfig) -> tuple[str, str]:
    """BERT's first layer is the encoder's pooler; RoBERTa's belongs to the head."""
    if config.padding_id is None:
        return f"{config.prefix}pooler.dense", "classifier"
    return "classifier.dense", "classifier.out_proj"
