"""How a token chooses some of many experts, as numbers.

Owns: ``Routing``. Must not know: tensors, who chooses.
"""

from dataclasses import dataclass
from enum import IntEnum

MOST_EXPERTS = 1024
"""What the compiled kernels can choose from."""


class Scoring(IntEnum):
    """From a router's output to a score: by a softmax over all experts, or each by a sigmoid.

    NEAR gives the best expert its share of a softmax over those whose outputs are near its own, the next best the same of
    those that are left, and so on (Liu et al. 2024, arXiv 2409.12136).
    """

    SOFTMAX = 0
    SIGMOID = 1
    NEAR = 2


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Each token goes through ``num_chosen`` of ``num_experts``: those of the best scores.

    With several groups of equal size, a group's score is the sum of its ``scores_per_group`` best, and only the best
    ``num_open_groups`` groups take part. The weight of a chosen expert is its score, with ``is_normalised`` its share of
    the chosen scores, times ``scaling``. It multiplies what the expert gives, or with ``weighs_inputs`` what it gets.
    ``tolerance``, of NEAR: how far outputs may be apart, as a share of the larger one. A correction is of scores, or with
    ``corrects_outputs`` of what the router gives.
    """

    num_experts: int
    num_chosen: int
    scoring: Scoring = Scoring.SOFTMAX
    num_groups: int = 1
    num_open_groups: int = 1
    scores_per_group: int = 1
    is_normalised: bool = False
    scaling: float = 1.0
    weighs_inputs: bool = False
    tolerance: float = 0.0
    corrects_outputs: bool = False
