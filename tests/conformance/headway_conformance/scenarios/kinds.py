"""Sampling parameters of every kind.

Penalties and masks are strong enough to change a short output.
"""

import msgspec

from headway_conformance.requests import GREEDY
from headway_conformance.sizes import Size
from headway_proto.sampling import SamplingParams

LOGPROBS = msgspec.structs.replace(GREEDY, logprobs=5)
"""Greedy, with the likeliest tokens."""


def kinds(size: Size) -> dict[str, SamplingParams]:
    half = tuple(range(0, size.vocab_size, 2))
    return {
        "greedy": GREEDY,
        "logprobs": LOGPROBS,
        "temperature": SamplingParams(temperature=1.5, seed=1, logprobs=0),
        "top_k": SamplingParams(temperature=2.0, top_k=5, seed=2),
        "top_p": SamplingParams(temperature=1.2, top_p=0.7, seed=(1 << 64) - 1, logprobs=3),
        "min_p": SamplingParams(temperature=1.5, min_p=0.2, seed=1 << 63),
        "repetition_penalty": SamplingParams(temperature=0.0, repetition_penalty=3.0, logprobs=1),
        "presence_and_frequency": SamplingParams(temperature=1.0, presence_penalty=2.0, frequency_penalty=2.0, seed=5),
        "logit_bias": SamplingParams(temperature=0.0, logit_bias=((3, 12.5), (4, -100.0))),
        "min_tokens": SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=half),
        "everything": SamplingParams(
            temperature=1.3,
            top_k=40,
            top_p=0.95,
            min_p=0.01,
            repetition_penalty=1.5,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias=((1, 2.0), (7, -3.0)),
            min_tokens=3,
            stop_token_ids=half,
            logprobs=2,
            seed=8,
        ),
    }
