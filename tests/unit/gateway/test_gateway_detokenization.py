"""Deltas joined equal whole decoding, for a byte-level and for a byte-fallback tokenizer and for the demo model's."""

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import headway
from headway_gateway.text.detokenization import ByteLevelDetokenizer, WindowDetokenizer, detokenizer_factory

DEMO_TOKENIZER = Path(headway.__file__).parent / "demo_model" / "tokenizer.json"

TEXTS = [
    "The gap between two vehicles is a headway; the gap between two tokens is one too.",
    "naïve café, Zürich, Straße, mañana, 你好世界, こんにちは世界, 안녕하세요, 🙂🙃👨‍👩‍👧‍👦",
    "def f(x):\n    return x ** 2  # squares\n",
]


@cache
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("two words", special=False), "日本"])
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """The shape of Llama 2's: SentencePiece words, bytes for what they do not cover, one leading space stripped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁the", "▁gap", "the", "gap", "s", "é", "你", "�", "a", "b", "▁▁"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: place for place, piece in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>"
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@cache
def metaspace() -> Tokenizer:
    pieces = ["<unk>", "▁the", "▁gap", "the", "▁", "s", "é", "你", "▁a", "▁▁"]
    tokenizer = Tokenizer(models.WordLevel({piece: place for place, piece in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


@cache
def demo() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_TOKENIZER))


TOKENIZERS = {"byte level": byte_level, "byte fallback": byte_fallback, "metaspace": metaspace, "demo": demo}


@cache
def factory(name):
    return detokenizer_factory(TOKENIZERS[name]())


def chunks_of(ids: list[int], sizes: list[int]) -> list[list[int]]:
    chunks, start = [], 0
    for size in [*sizes, len(ids)]:
        chunks.append(ids[start : start + size])
        start += size
    return chunks


def test_the_exact_detokenizer_is_chosen_where_it_is_right():
    assert isinstance(factory("byte level")(), ByteLevelDetokenizer)
    assert isinstance(factory("demo")(), ByteLevelDetokenizer)
    assert isinstance(factory("byte fallback")(), WindowDetokenizer)
    assert isinstance(factory("metaspace")(), WindowDetokenizer)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300)
@given(data=st.data())
def test_deltas_joined_equal_whole_decoding_for_any_tokens(name, data):
    tokenizer = TOKENIZERS[name]()
    width = max(tokenizer.get_vocab().values()) + 1
    ids = data.draw(st.lists(st.integers(0, width + 2), max_size=40))
    sizes = data.draw(st.lists(st.integers(0, 7), max_size=10))
    detokenizer, one_by_one = factory(name)(), factory(name)()
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    told = ""
    for chunk in chunks_of(ids, sizes):
        told += detokenizer.push(chunk)
        assert whole.startswith(told)
    singly = "".join(one_by_one.push([token_id]) for token_id in ids)
    assert singly == told, "what is told does not depend on chunking"
    assert told + detokenizer.finish() == whole


@pytest.mark.parametrize("name", ["byte level", "demo"])
@settings(max_examples=300)
@given(text=st.text(max_size=60))
def test_any_text_goes_in_and_comes_out_intact(name, text):
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode(text).ids
    detokenizer = factory(name)()
    pieces = [detokenizer.push([token_id]) for token_id in ids]
    assert "".join(pieces) + detokenizer.finish() == text


def test_no_delta_ends_inside_a_character():
    text = "👨‍👩‍👧‍👦 e\u0301 你好 \U0001f3f4\U000e0067\U000e0062"
    ids = byte_level().encode(text).ids
    detokenizer = factory("byte level")()
    pieces = [detokenizer.push([token_id]) for token_id in ids]
    assert "".join(pieces) == text
    assert all("�" not in piece for piece in pieces)
    assert "" in pieces, "some tokens had to wait for the rest of their character"


@pytest.mark.parametrize("name", ["byte level", "byte fallback", "demo"])
@pytest.mark.parametrize("text", ["the gap the", "é gaps", "gap  the 🙂 gap"])
def test_a_text_goes_on_behind_another(name, text):
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode(text).ids
    whole = tokenizer.decode(ids)
    for place in range(1, len(ids)):
        before = tokenizer.decode(ids[:place])
        if "�" not in before:  # else the place is inside a character
            detokenizer = factory(name)(behind=ids[:place])
            assert before + detokenizer.push(ids[place:]) + detokenizer.finish() == whole


def test_bytes_begin_anew_behind_other_bytes():
    """A run of bytes is one text or none, and a prompt's is over."""
    tokenizer = byte_fallback()
    bytes_of = {text: [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()] for text in "🙂日"}
    detokenizer = factory("byte fallback")(behind=[tokenizer.token_to_id("▁the"), *bytes_of["🙂"]])
    assert detokenizer.push([*bytes_of["日"], tokenizer.token_to_id("▁gap")]) == "日 gap"
    behind_bytes = factory("byte fallback")(behind=[tokenizer.token_to_id("▁the"), *bytes_of["🙂"]])
    assert behind_bytes.push([tokenizer.token_to_id("▁gap")]) == " gap"


def test_nothing_goes_on_behind_a_special_token():
    tokenizer = byte_fallback()
    word = tokenizer.token_to_id("▁the")
    assert factory("byte fallback")(behind=[tokenizer.token_to_id("<s>")]).push([word]) == "the"
    assert factory("byte fallback")(behind=[word]).push([word]) == " the"


def test_an_unfinished_character_is_told_at_the_end():
    ids = byte_level().encode("🙂").ids[:-1]
    detokenizer = factory("byte level")()
    assert detokenizer.push(ids) == ""
    assert detokenizer.finish() == byte_level().decode(ids) == "�"
