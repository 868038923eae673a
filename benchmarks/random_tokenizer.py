"""A byte-level BPE tokenizer of any width, drawn from a seed, for benchmarks that need a wide vocabulary and no
download.

Owns: its tokens. Must not know: what is measured with it. Every token but the bytes is another token and one character,
drawn by the frequency of English letters, with digits and punctuation as in code.
"""

import json
import random

from tokenizers import pre_tokenizers

END_TOKEN = "<|end|>"  # noqa: S105 (a token of a text)
_LETTERS = "eeeeeeeeeeeetttttttttaaaaaaaaooooooooiiiiiiinnnnnnnssssssrrrrrrhhhhhhddddllllcccuuummmfffppggwwyybbvvkxjqz"
_OTHERS = '0123456789.,:;_-"(){}[]/=<>\n'
_SPACE = "Ġ"
_LONGEST = 12


def random_tokenizer(vocab_size: int, seed: int) -> str:
    """Return a tokenizer.json with ``vocab_size`` tokens, of which the first ends a text."""
    draw = random.Random(seed)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [END_TOKEN, *alphabet]
    known = set(tokens)
    grown = [_SPACE, *dict.fromkeys(_LETTERS)]
    merges = []
    while len(tokens) < vocab_size:
        stem = draw.choice(grown)
        end = draw.choice(_LETTERS if draw.random() < 0.9 else _OTHERS.replace("\n", "Ċ"))
        token = stem + end
        if token not in known and len(token) <= _LONGEST:
            known.add(token)
            tokens.append(token)
            merges.append([stem, end])
            grown.append(token)
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    "id": 0,
                    "content": END_TOKEN,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
            ],
            "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {token: place for place, token in enumerate(tokens)},
                "merges": merges,
            },
        }
    )
