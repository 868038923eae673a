"""What the duration of a step depends on.

Owns: its shape. Must not know: the model of step times.
"""

from typing import NamedTuple


class StepShape(NamedTuple):
    """``num_context_tokens``: positions computed before, over all rows."""

    num_tokens: int = 0
    num_rows: int = 0
    num_context_tokens: int = 0
    num_prefill_pairs: int = 0

    def with_prompt(self, num_tokens: int, num_computed_tokens: int) -> "StepShape":
        """This step and one more row of a prompt."""
        return StepShape(
            self.num_tokens + num_tokens,
            self.num_rows + 1,
            self.num_context_tokens + num_computed_tokens,
            self.num_prefill_pairs + prefill_pairs(num_tokens, num_computed_tokens),
        )


def prefill_pairs(num_tokens: int, num_computed_tokens: int) -> int:
    """Pairs of a query and a key in a chunk: each token attends to itself and all before."""
    return num_tokens * num_computed_tokens + num_tokens * (num_tokens + 1) // 2
