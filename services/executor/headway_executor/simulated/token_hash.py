"""The next token of a simulated model: a pure function of the row's whole history and of the seeds.

Owns: the hash of a history. Must not know: rows, steps.

One lost token changes everything that follows. The hash sums mixed (position, token) pairs, so appending is O(1). The
mixer is the finaliser of SplitMix64 (G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014).
"""

from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway_proto.columns import Float32Array, Int32Array, encode_column, encode_floats
from headway_proto.pooling import POOL_CLS, POOL_MEAN
from headway_proto.prompt_logprobs import PromptLogprobColumns
from headway_proto.sampling import SamplingParams

EMBEDDING_SIZE = 16
"""Numbers of a made-up vector."""

Hashes: TypeAlias = NDArray[np.uint64]


class TokenHash(msgspec.Struct, frozen=True, kw_only=True):
    """All ``eos_token_ids`` (ascending) together have ``eos_probability``."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    eos_probability: float
    model_seed: int

    def prefixes(self, token_ids: Int32Array) -> Hashes:
        """The hash of each prefix, from the empty one: ``[n] -> [n + 1]``."""
        sums = np.zeros(len(token_ids) + 1, dtype=np.uint64)
        np.cumsum(mix_tokens(token_ids, np.arange(len(token_ids))), out=sums[1:])
        return sums

    def salt(self, sampling: SamplingParams) -> int:
        """The seed's part of a draw; greedy requests ignore their seed."""
        seeds = [self.model_seed, sampling.seed if sampling.temperature > 0 else 0]
        return int(mix(mix(np.array(seeds[:1], dtype=np.uint64)) + np.array(seeds[1:], dtype=np.uint64))[0])

    def next_tokens(self, prefixes: Hashes, salts: Hashes) -> Int32Array:
        """The token after each prefix; all ``[n]``."""
        draws = mix(prefixes + salts)
        tokens = (draws % np.uint64(self.vocab_size - len(self.eos_token_ids))).astype(np.int32)
        for eos in self.eos_token_ids:
            tokens += tokens >= eos
        if self.eos_probability > 0:
            chances = mix(draws)
            ends = (chances >> np.uint64(11)).astype(np.float64) * 2.0**-53 < self.eos_probability
            which = mix(chances)[ends] % np.uint64(len(self.eos_token_ids))
            tokens[ends] = np.array(self.eos_token_ids, dtype=np.int32)[which.astype(np.intp)]
        return tokens

    def next_token_except(self, prefix: int, salt: int, excluded: frozenset[int]) -> int:
        """Draw until a token is not in ``excluded``.

        Raises:
            ValueError: none is left.
        """
        if not self.leaves_any(excluded):
            raise ValueError("every token is excluded")
        state = np.array([prefix], dtype=np.uint64)
        salts = np.array([salt], dtype=np.uint64)
        while (token := int(self.next_tokens(state, salts)[0])) in excluded:
            state = mix(state + salts)
        return token

    def leaves_any(self, excluded: frozenset[int]) -> bool:
        """Return whether a token outside ``excluded`` can be drawn."""
        ends = frozenset(self.eos_token_ids)
        left = self.vocab_size - len(excluded | ends) if self.eos_probability < 1 else 0
        return left > 0 or (self.eos_probability > 0 and bool(ends - excluded))

    def prompt_logprobs(
        self, token_ids: Int32Array, start: int, end: int, num_alternatives: int
    ) -> PromptLogprobColumns:
        """Made-up values for positions ``start + 1`` to ``end``."""
        num_alternatives = min(num_alternatives, self.vocab_size)
        behind = self.prefixes(token_ids[: end + 1])[start + 2 : end + 2]
        best = ((behind >> np.uint64(32)).astype(np.float64) / -(2.0**32)).astype(np.float32)
        steps = np.arange(num_alternatives)
        top_ids = (token_ids[start + 1 : end + 1, None] + steps) % self.vocab_size
        return PromptLogprobColumns(
            start + 1, encode_floats(best), encode_column(top_ids), encode_floats(best[:, None] - steps)
        )

    def vector(self, token_ids: Int32Array, pooling: int) -> Float32Array:
        """A made-up vector of numbers from -1 to 1, ``[EMBEDDING_SIZE]``: each token's follows from all up to it."""
        behind = self.prefixes(token_ids)[1:]
        kept = {POOL_CLS: behind[:1], POOL_MEAN: behind}.get(pooling, behind[-1:])
        places = np.arange(EMBEDDING_SIZE, dtype=np.uint64)
        numbers = mix(kept[:, None] + places + np.uint64(self.model_seed)) >> np.uint64(11)
        vector: Float32Array = (numbers.astype(np.float64) * 2.0**-52 - 1).mean(0).astype(np.float32)
        return vector

    def continuation(self, token_ids: list[int], num_tokens: int, sampling: SamplingParams) -> list[int]:
        """The oracle of tests. Honours ``min_tokens``; stops at no token."""
        history = np.array(token_ids, dtype=np.int32)
        prefix = self.prefixes(history)[-1:]
        salts = np.array([self.salt(sampling)], dtype=np.uint64)
        excluded = frozenset(sampling.stop_token_ids)
        output: list[int] = []
        for position in range(len(token_ids), len(token_ids) + num_tokens):
            token = int(self.next_tokens(prefix, salts)[0])
            if len(output) < sampling.min_tokens and token in excluded:
                token = self.next_token_except(int(prefix[0]), int(salts[0]), excluded)
            output.append(token)
            prefix = prefix + mix_tokens(np.array([token], dtype=np.int32), np.array([position]))
        return output


def mix_tokens(token_ids: Int32Array, positions: NDArray[np.integer]) -> Hashes:
    """Each (position, token)'s part of a hash; all ``[n]``."""
    return mix((positions.astype(np.uint64) << np.uint64(32)) | token_ids.astype(np.uint32).astype(np.uint64))


def mix(values: Hashes) -> Hashes:
    """SplitMix64: add the golden gamma, then finalise."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: Hashes = mixed ^ (mixed >> np.uint64(31))
    return result
