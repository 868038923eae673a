"""The tokenizer of a GGUF file, as tokenizer.json and tokenizer_config.json of a checkpoint directory.

Owns: the three kinds of tokenizers. Must not know: models, files that are written.

``gpt2`` is byte-level byte pair encoding with merges. ``llama`` is SentencePiece's, whose merges follow from the scores: a
pair of tokens is merged in the order of the score of the token that it makes. ``gemma4`` has the characters of the second
and the merges of the first.
"""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from headway.gguf_import.cuts import CUTS
from headway.gguf_import.file import GgufFile
from headway_proto.wording import shown

_UNKNOWN, _CONTROL, _USER = 2, 3, 4
_SPACE = "▁"
_BEGIN_BY_DEFAULT = ("llama-bpe", "llama3", "llama-v3", "tekken")
_FOR_TOOLS = "tokenizer.chat_template.tool_use"
_ENDS = {
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>"),
    *("<turn|>", "<|tool_response>"),
    *("<|end_of_text|>", "<EOT>", "_<EOT>", "<｜end▁of▁sentence｜>"),  # noqa: RUF001
}
"""Of llama.cpp's (``src/llama-vocab.cpp``), those of the families here."""
_SHOWN_ENDS = {"<|tool_response>"}
"""Gemma 4's, which its files have among the tokens to show."""
_HARMONY = {"<|return|>", "<|call|>", "<|end|>"}
"""gpt-oss, where ``<|end|>`` stands between the messages of one answer."""


def tokenizer_of(file: GgufFile) -> Tokenizer:
    """The tokenizer. Raises ``ConfigurationError``: one of another kind."""
    kind = file.value("tokenizer.ggml.model")
    tokens = _tokens(file)
    kinds = _of_each(file, "token_type", tokens, int)
    if kind == "gpt2":
        made = _byte_level(file, tokens)
        adds_first = file.value("tokenizer.ggml.pre", "") in _BEGIN_BY_DEFAULT
    elif kind == "llama":
        made = _sentence_piece(file, tokens, kinds)
        adds_first = True
    elif kind == "gemma4":
        made = _by_characters(file, tokens, kinds)
        adds_first = True
    else:
        raise file.refuse(f"tokenizer.ggml.model {shown(kind)} is not supported; allowed: gpt2, llama, gemma4")
    special = [token for token, its in zip(tokens, kinds, strict=True) if its == _CONTROL]
    own = [token for token, its in zip(tokens, kinds, strict=True) if its == _USER]
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    made.add_tokens([AddedToken(token, normalized=False, special=False) for token in own])
    # llama.cpp heeds no other word of Gemma 4's first token.
    adds_first = kind == "gemma4" or bool(file.value("tokenizer.ggml.add_bos_token", int(adds_first)))
    first = [_token(file, "bos")] if adds_first else []
    last = [_token(file, "eos")] if file.value("tokenizer.ggml.add_eos_token", 0) else []
    if first or last:
        _enclose(made, first, last)
    return made


def end_tokens_of(file: GgufFile) -> list[int]:
    """The tokens that end an answer. Files name one or two of them; the others go by their texts, as in llama.cpp."""
    named = {file.index(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")}
    found = {index for index in named if index is not None}
    tokens = _tokens(file)
    kinds = _of_each(file, "token_type", tokens, int)
    texts = {
        token
        for token, its in zip(tokens, kinds, strict=True)
        if its == _CONTROL or (its == _USER and token in _SHOWN_ENDS)
    }
    ends = _ENDS - {"<|end|>"} if texts >= _HARMONY else _ENDS
    return sorted(found | {index for index, token in enumerate(tokens) if token in ends & texts})


def tokenizer_config_of(file: GgufFile) -> dict[str, object]:
    """The fields of tokenizer_config.json."""
    fields: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for kind in ("bos", "eos"):
        if f"tokenizer.ggml.{kind}_token_id" in file:
            fields[f"{kind}_token"] = _token(file, kind)
    if "tokenizer.chat_template" in file:
        fields["chat_template"] = file.value("tokenizer.chat_template")
    if "tokenizer.chat_template" in file and _FOR_TOOLS in file:
        named = {"default": fields["chat_template"], "tool_use": file.value(_FOR_TOOLS)}
        fields["chat_template"] = [{"name": name, "template": source} for name, source in named.items()]
    return fields


def _tokens(file: GgufFile) -> list[str]:
    return file.each("tokenizer.ggml.tokens", str)


def _of_each(file: GgufFile, kind: str, tokens: list[str], *types: type) -> list[Any]:
    values = file.each(f"tokenizer.ggml.{kind}", *types)
    if len(values) != len(tokens):
        raise file.refuse(f"tokenizer.ggml.{kind} has {len(values)} values; allowed: {len(tokens)}, one for each token")
    return values


def _token(file: GgufFile, kind: str) -> str:
    tokens, key = _tokens(file), f"tokenizer.ggml.{kind}_token_id"
    index = file.index(key)
    if index is None:
        raise file.refuse(f"{key} is missing from the metadata")
    if index >= len(tokens):
        raise file.refuse(f"{key} {shown(index)} is not supported; allowed: 0 to {len(tokens) - 1}")
    return tokens[index]


def _enclose(made: Tokenizer, first: list[str], last: list[str]) -> None:
    one, two = ([*first, text, *last] for text in ("$A", "$B"))
    template = processors.TemplateProcessing(
        single=[f"{piece}:0" for piece in one],
        pair=[*(f"{piece}:0" for piece in one), *(f"{piece}:1" for piece in two)],
        special_tokens=[(token, made.token_to_id(token)) for token in {*first, *last}],
    )
    before: list[Any] = [] if made.post_processor is None else [made.post_processor]
    made.post_processor = processors.Sequence([*before, template])


def _byte_level(file: GgufFile, tokens: list[str]) -> Tokenizer:
    name = file.value("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in CUTS:
        raise file.refuse(f"tokenizer.ggml.pre {shown(name)} is not supported; allowed: {', '.join(CUTS)}")
    cut = CUTS[name]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [_pair(file, merge, vocabulary) for merge in file.each("tokenizer.ggml.merges", str)]
    made = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=cut.merges_late))
    if cut.is_normalised:
        made.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Split(Regex(words), "isolated") for words in cut.words]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.as_gpt_2))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    return made


def _pair(file: GgufFile, merge: str, vocabulary: dict[str, int]) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not all(token in vocabulary for token in (left, right, left + right)):
        raise file.refuse(f"tokenizer.ggml.merges has {shown(merge)}; allowed: two tokens that together are a token")
    return left, right


def _by_characters(file: GgufFile, tokens: list[str], kinds: list[int]) -> Tokenizer:
    """A line is one word, and so are the ends of lines that follow each other."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [_pair(file, merge, vocabulary) for merge in file.each("tokenizer.ggml.merges", str)]
    made = _with_byte_tokens(vocabulary, merges, tokens, kinds)
    made.normalizer = normalizers.Replace(" ", _SPACE)
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    made.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


def _with_byte_tokens(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], tokens: list[str], kinds: list[int]
) -> Tokenizer:
    """A character that is no token is the tokens of its bytes."""
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    return Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))


def _sentence_piece(file: GgufFile, tokens: list[str], kinds: list[int]) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    scores = _of_each(file, "scores", tokens, float, int)
    merges = _merges_of(dict(zip(tokens, scores, strict=True)), vocabulary)
    made = _with_byte_tokens(vocabulary, merges, tokens, kinds)
    steps: list[Any] = [normalizers.Replace(" ", _SPACE)]
    ends: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.value("tokenizer.ggml.add_space_prefix", 1):
        steps.insert(0, normalizers.Prepend(_SPACE))
        ends.append(decoders.Strip(content=" ", left=1, right=0))
    made.normalizer = normalizers.Sequence(steps)
    made.decoder = decoders.Sequence(ends)
    return made


def _merges_of(scores: dict[str, float], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """The best score first; of equal ones, the pair whose parts come first."""
    found = [
        (-score, vocabulary[token[:cut]], vocabulary[token[cut:]], token[:cut], token[cut:])
        for token, score in scores.items()
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    return [(left, right) for *_, left, right in sorted(found)]
