"""Log probabilities of a prompt's own tokens, as columns: how they travel on both ZeroMQ protocols.

Owns: their layout, and cutting off what somebody has already. Must not know: how they are computed, or for whom.

The first token of a prompt has none. Those of ``n`` positions take ``4 * n`` bytes, and ``8 * n`` more for each alternative.
"""

from typing import Self

import msgspec

from headway_proto.columns import FLOAT32, INT32, Float32Array, Int32Array, decode_column, decode_floats


class PromptLogprobColumns(msgspec.Struct, frozen=True, array_like=True):
    """Of the tokens at positions ``first_position`` and following.

    ``logprobs`` is a float32 column with a value for each position. ``top_token_ids`` (int32) and ``top_logprobs`` (float32)
    hold its most likely tokens, best first, position after position, as many for each.
    """

    first_position: int
    logprobs: bytes
    top_token_ids: bytes = b""
    top_logprobs: bytes = b""

    @property
    def num_positions(self) -> int:
        """Of how many tokens these are."""
        return len(self.logprobs) // FLOAT32.itemsize

    @property
    def num_alternatives(self) -> int:
        """The most likely tokens of each position."""
        return len(self.top_token_ids) // len(self.logprobs) if self.logprobs else 0

    @property
    def end(self) -> int:
        """The position behind the last."""
        return self.first_position + self.num_positions

    def problem(self) -> str | None:
        """What is wrong with the lengths of the columns, in one line; None if nothing is."""
        if len(self.logprobs) % FLOAT32.itemsize or len(self.top_token_ids) != len(self.top_logprobs):
            return f"{len(self.logprobs)}, {len(self.top_token_ids)} and {len(self.top_logprobs)} bytes are not the columns"
        if len(self.top_token_ids) != self.num_alternatives * len(self.logprobs):
            return f"{len(self.top_token_ids) // INT32.itemsize} alternatives of {self.num_positions} positions"
        return None

    def values(self) -> tuple[Float32Array, Int32Array, Float32Array]:
        """Log probabilities, shape ``[n]``; alternatives' ids and theirs, shape ``[n, alternatives]``."""
        shape = (self.num_positions, self.num_alternatives)
        ids, tops = decode_column(self.top_token_ids), decode_floats(self.top_logprobs)
        return decode_floats(self.logprobs), ids.reshape(shape), tops.reshape(shape)

    def behind(self, position: int) -> Self:
        """What of this is at ``position`` and following."""
        num_known = min(max(position - self.first_position, 0), self.num_positions)
        if not num_known:
            return self
        width = num_known * self.num_alternatives * INT32.itemsize
        return type(self)(
            self.first_position + num_known,
            self.logprobs[num_known * FLOAT32.itemsize :],
            self.top_token_ids[width:],
            self.top_logprobs[width:],
        )
