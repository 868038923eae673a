"""Where the tokens of a completion begin in its text."""

import pytest

from headway_gateway.openai.completions import LogprobColumns
from headway_gateway.text.tokenization import TextModel
from unit.gateway.test_gateway_detokenization import byte_fallback, metaspace

TOKENS = ("▁▁", "▁gap", "the", "▁", "▁the")


@pytest.mark.parametrize("make", [byte_fallback, metaspace])
@pytest.mark.parametrize("first", range(len(TOKENS)))
def test_spaces_behind_a_prompt_count(make, first):
    """Decoders drop some of them where a text begins."""
    model = TextModel(make(), None)
    ids = [model._tokenizer.token_to_id(token) for token in TOKENS[first:]]
    text = "".join(token.replace("▁", " ") for token in TOKENS[first:])
    columns = LogprobColumns(model.text_of_token, model.new_detokenizer()).of([(one, None) for one in ids], text)
    assert "".join(columns.tokens) == text
    assert columns.text_offset == [len("".join(columns.tokens[:place])) for place in range(len(ids))]
