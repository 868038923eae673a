"""A prompt's log probabilities as columns.

Owns: their layout. Must not know: how they are computed.
The first token has none. A position takes 4 bytes, and 8 more per alternative.
"""

from typing import Self

import msgspec

from headway_proto.columns import FLOAT32, INT32, Float32Array, Int32Array, decode_column, decode_floats


class PromptLogprobColumns(msgspec.Struct, frozen=True, array_like=True):
    """``logprobs``: a float32 column, one per position from ``first_position`` on.

    ``top_token_ids`` (int32) and ``top_logprobs`` (float32): the most likely tokens, best first, equally many per
    position.
    """

    first_position: int
    logprobs: bytes
    top_token_ids: bytes = b""
    top_logprobs: bytes = b""

    @property
    def num_positions(self) -> int:
        """Number of tokens."""
        return len(self.logprobs) // FLOAT32.itemsize

    @property
    def num_alternatives(self) -> int:
        """Most likely tokens per position."""
        return len(self.top_token_ids) // len(self.logprobs) if self.logprobs else 0

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.first_position + self.num_positions

    def problem(self) -> str | None:
        """Return the fault in the lengths, in one line, or None."""
        if len(self.logprobs) % FLOAT32.itemsize or len(self.top_token_ids) != len(self.top_logprobs):
            return f"{len(self.logprobs)}, {len(self.top_token_ids)} and {len(self.top_logprobs)} bytes are not the columns of the same positions"
        if len(self.top_token_ids) != self.num_alternatives * len(self.logprobs):
            return f"{len(self.top_token_ids) // INT32.itemsize} alternatives of {self.num_positions} positions"
        return None

    def values(self) -> tuple[Float32Array, Int32Array, Float32Array]:
        """Log probabilities, shape ``[n]``; alternatives' ids and values, shape ``[n, alternatives]``."""
        shape = (self.num_positions, self.num_alternatives)
        ids, tops = decode_column(self.top_token_ids), decode_floats(self.top_logprobs)
        return decode_floats(self.logprobs), ids.reshape(shape), tops.reshape(shape)

    def behind(self, position: int) -> Self:
        """Return the part from ``position`` on."""
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
