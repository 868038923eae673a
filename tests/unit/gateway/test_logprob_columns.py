"""Where the tokens of a completion begin in its text."""

import pytest

from headway_gateway.openai.completions import LogprobColumns
from headway_gateway.text.tokenization import TextModel, load_text_model
from model_core import demo_model
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


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<|im_start|>user\nhi<|im_end|>\n", "<|im_start|>user\nhi<|im_end|>\n"),
        ("<|im_start|>user\nhi<|im_end|>\n", "user\nhi\n"),
        ("<|im_start|><|im_start|>hi", "<|im_start|>hi"),
    ],
    ids=["given", "left out", "one put before it"],
)
def test_special_tokens_of_a_prompt_count_where_its_text_has_them(keeps, text, shown):
    model = load_text_model(demo_model())
    ids = model.encode(text)
    detokenizer = model.new_detokenizer(keeps_special_tokens=keeps)
    columns = LogprobColumns(model.text_of_token, detokenizer, model.special_tokens)
    told = columns.of([(one, None) for one in ids], shown)
    assert {"<|im_start|>"} < set(told.tokens)
    for token, offset in zip(told.tokens, told.text_offset, strict=True):
        assert shown.startswith(token, offset) or token in model.special_tokens
    assert sum(len(token) for token in told.tokens if token not in model.special_tokens) <= len(shown)
    later = columns.of([(ids[1], None)], "")
    assert later.text_offset == [len(shown)]
