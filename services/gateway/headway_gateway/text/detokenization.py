"""Token ids to text, piece by piece; the joined pieces equal the decoding of the whole.

``tokenizers.DecodeStream`` cannot flush an unfinished character, takes a genuine U+FFFD for one, and contradicts
earlier text when a byte-fallback run is invalid.
"""

import codecs
import functools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """One output's state. Grouping tokens does not change the text."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the certain text."""
        ...

    def finish(self) -> str:
        """Return the held text; an unfinished character becomes U+FFFD."""
        ...


class ByteLevelDetokenizer:
    """Joins the bytes of tokens. ``table[id]`` is empty for tokens without text."""

    __slots__ = ("_decode", "_table")

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table
        self._decode = _Utf8Decoder("replace").decode

    def push(self, token_ids: Sequence[int]) -> str:
        """Unknown ids have no text."""
        table = self._table
        try:
            return self._decode(b"".join([table[token_id] for token_id in token_ids]))
        except IndexError:
            width = len(table)
            return self._decode(b"".join([table[token_id] for token_id in token_ids if token_id < width]))

    def finish(self) -> str:
        """See ``Detokenizer``."""
        return self._decode(b"", True)


class WindowDetokenizer:
    """Decodes new tokens together with the *anchor*, the last one sent: alone they would lose a leading space.

    Byte-fallback tokens wait for the end of their run, others while the text ends in U+FFFD.
    """

    __slots__ = ("_anchor", "_anchor_text", "_byte_ids", "_decode", "_visible_ids", "_waiting")

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        visible_ids: frozenset[int],
        byte_ids: frozenset[int],
        behind: Sequence[int] = (),
    ) -> None:
        """``visible_ids`` have a text, ``byte_ids`` among them one byte. ``behind``: see ``DetokenizerFactory``."""
        self._decode = decode
        self._visible_ids = visible_ids
        self._byte_ids = byte_ids
        # Bytes of another text would become one run with those that come.
        self._anchor = [token_id for token_id in behind if token_id in visible_ids and token_id not in byte_ids][-1:]
        self._anchor_text = decode(self._anchor) if self._anchor else ""
        self._waiting: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """See ``Detokenizer``."""
        texts = [self._push_one(token_id) for token_id in token_ids if token_id in self._visible_ids]
        return "".join(texts)

    def finish(self) -> str:
        """See ``Detokenizer``."""
        return self._release() if self._waiting else ""

    def _push_one(self, token_id: int) -> str:
        # One at a time: for some decoders the text depends on where a window begins. It must not depend on chunking.
        self._waiting.append(token_id)
        if token_id in self._byte_ids:
            return ""
        return self._release(wait_for_whole_character=True)

    def _release(self, *, wait_for_whole_character: bool = False) -> str:
        text = self._decode(self._anchor + self._waiting)
        if wait_for_whole_character and text.endswith(REPLACEMENT) and self._waiting[-1] not in self._byte_ids:
            return ""
        new_text = text[len(self._anchor_text) :]
        self._anchor = self._waiting[-1:]
        self._anchor_text = self._decode(self._anchor)
        self._waiting = []
        return new_text


class DetokenizerFactory(Protocol):
    """Makes a detokeniser for one output."""

    def __call__(self, *, keeps_special_tokens: bool = False, behind: Sequence[int] = ()) -> Detokenizer:
        """Special tokens have no text, unless kept.

        The text goes on behind that of ``behind``: a decoder that drops the space before a first word must not do so.
        """
        ...


def detokenizer_factory(tokenizer: Tokenizer) -> DetokenizerFactory:
    """Return the right kind for ``tokenizer``."""
    definition: dict[str, Any] = json.loads(tokenizer.to_str())
    special_ids = frozenset(
        token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
    )
    if _is_byte_level(definition.get("decoder")):
        return _byte_level_factory(tokenizer, special_ids)
    return _window_factory(tokenizer, special_ids)


def _byte_level_factory(tokenizer: Tokenizer, special_ids: frozenset[int]) -> DetokenizerFactory:
    whole_table = _byte_table(tokenizer)
    table = [b"" if token_id in special_ids else content for token_id, content in enumerate(whole_table)]

    def make(*, keeps_special_tokens: bool = False, behind: Sequence[int] = ()) -> Detokenizer:
        del behind  # bytes are the same wherever they stand
        return ByteLevelDetokenizer(whole_table if keeps_special_tokens else table)

    return make


def _window_factory(tokenizer: Tokenizer, special_ids: frozenset[int]) -> DetokenizerFactory:
    vocabulary = tokenizer.get_vocab()
    known_ids = frozenset(vocabulary.values())
    byte_ids = frozenset(token_id for token, token_id in vocabulary.items() if _is_byte_token(token))

    def make(*, keeps_special_tokens: bool = False, behind: Sequence[int] = ()) -> Detokenizer:
        def decode(token_ids: list[int]) -> str:
            return tokenizer.decode(token_ids, skip_special_tokens=not keeps_special_tokens)

        visible_ids = known_ids if keeps_special_tokens else known_ids - special_ids
        return WindowDetokenizer(decode, visible_ids, byte_ids, behind)

    return make


def bytes_of_part(token: str) -> bytes:
    """Return the bytes of a token, as vocabularies write it, whose text by itself is not whole."""
    if _is_byte_token(token):
        return bytes([int(token[3:5], 16)])
    return _bytes_of(token, _byte_of_character())


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        return len(decoder["decoders"]) == 1 and _is_byte_level(decoder["decoders"][0])
    return bool(decoder["type"] == "ByteLevel")


def _is_byte_token(token: str) -> bool:
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return False
    return all(digit in "0123456789ABCDEFabcdef" for digit in token[3:5])


def _byte_table(tokenizer: Tokenizer) -> list[bytes]:
    byte_of_character = _byte_of_character()
    vocabulary = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    width = max(vocabulary, default=-1) + 1
    return [_bytes_of(vocabulary.get(token_id, ""), byte_of_character) for token_id in range(width)]


def _bytes_of(token: str, byte_of_character: dict[str, int]) -> bytes:
    try:
        return bytes([byte_of_character[character] for character in token])
    except KeyError:
        return token.encode()  # an added token is kept as written


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level BPE (Radford et al. 2019): printable bytes stand for themselves, others for U+0100
    on.
    """
    printable: Iterable[int] = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(others)}
