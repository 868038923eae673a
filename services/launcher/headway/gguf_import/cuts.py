"""The ways in which byte-level tokenizers cut text before they merge.

Owns: their regular expressions, by llama.cpp's names. Must not know: files, tokens.
"""

from typing import NamedTuple

_LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN_3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_SEED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BY_CASE = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+ENDING|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*ENDING"
    r"|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_HAN = r"\p{Han}"
_KIMI = rf"[{_HAN}]+|" + _BY_CASE.replace("[\\r\\n/]", "[\\r\\n]").replace("ENDING", _ENDING).replace(
    "DIGITS", "{1,3}"
).replace(_UPPER, f"{_UPPER[:-1]}&&[^{_HAN}]]").replace(_LOWER, f"{_LOWER[:-1]}&&[^{_HAN}]]")
_DEEPSEEK_LETTERS = (
    "µÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼι"
    "ῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀"  # noqa: RUF001
    "-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_2 = (
    r"[\r\n]",
    rf"\s?[A-Za-z{_DEEPSEEK_LETTERS}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",  # noqa: RUF001
    r"\s+$",
    r"[一-龥ࠀ-一가-퟿]+",
    r"\p{N}+",
)
_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",  # noqa: RUF001
    (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
)


_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class Cut(NamedTuple):
    """How text is cut before merging: by each of ``words`` in turn, and then perhaps as GPT-2 does.

    ``is_normalised``: NFC before. ``merges_late``: a word that is a token is taken whole, whatever the merges.
    """

    words: tuple[str, ...]
    as_gpt_2: bool = False
    is_normalised: bool = False
    merges_late: bool = False


CUTS = {
    "gpt-2": Cut((), as_gpt_2=True),
    **dict.fromkeys(("olmo", "mpt"), Cut((), as_gpt_2=True, is_normalised=True)),
    "bloom": Cut((r" ?[^(\s|.,!?…。，、।۔،)]+",)),  # noqa: RUF001
    "falcon": Cut((r"[\p{P}\$\+<=>\^~\|`]+", _GPT_2, r"[0-9][0-9][0-9]")),
    "starcoder": Cut((r"\p{N}",), as_gpt_2=True),
    "refact": Cut((r"\p{N}",), as_gpt_2=True),
    "smollm": Cut((r"\p{N}",), as_gpt_2=True),
    "command-r": Cut((r"\p{N}",), as_gpt_2=True, is_normalised=True),
    "exaone": Cut((r"\p{N}",), as_gpt_2=True),
    "exaone4": Cut((), as_gpt_2=True),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "lfm2", "pixtral", "falcon-h1"), Cut((_LLAMA_3,), merges_late=True)
    ),
    "dbrx": Cut((_LLAMA_3,)),
    "smaug-bpe": Cut((_LLAMA_3,)),
    **dict.fromkeys(("glm4", "chatglm-bpe"), Cut((_LLAMA_3,))),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open"), Cut((_LLAMA_3.replace("{1,3}", ""),))),
    "seed-coder": Cut((_SEED,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), Cut((_LLAMA_3.replace("{1,3}", ""),), is_normalised=True)),
    "qwen35": Cut((_QWEN_3_5,), is_normalised=True),
    **dict.fromkeys(
        ("gpt-4o", "llama4", "minimax-m2"),
        Cut((_BY_CASE.replace("ENDING", _ENDING).replace("DIGITS", "{1,3}"),)),
    ),
    "kimi-k2": Cut((_KIMI,)),
    "tekken": Cut((_BY_CASE.replace("ENDING", "").replace("DIGITS", ""),), merges_late=True),
    "deepseek-llm": Cut(_DEEPSEEK_2),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), Cut(_DEEPSEEK_3)),
}
"""By llama.cpp's names (``src/llama-vocab.cpp`` of ggml-org/llama.cpp, which says where each comes from)."""
