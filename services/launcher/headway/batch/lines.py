"""The lines of a batch's input.

Owns: their two forms. Must not know: what a body means (the gateway says), or where answers go.

A line is a request in OpenAI's batch format, ``{"custom_id", "method", "url", "body"}``, or a body alone: with
``messages`` it goes to ``/v1/chat/completions``, with ``prompt`` to ``/v1/completions``, with ``input`` to
``/v1/embeddings``, under the name ``line-N``.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from headway.flags.named_files import lines_of_file
from headway.flags.settings import ConfigurationError
from headway_proto.wording import one_line, shown

COMPLETIONS, CHATS, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
URLS = (COMPLETIONS, CHATS, "/v1/responses", EMBEDDINGS)
_URL_OF_FIELD = {"messages": CHATS, "prompt": COMPLETIONS, "input": EMBEDDINGS}
_SEEDED = frozenset({COMPLETIONS, CHATS, "/v1/responses"})

Body = dict[str, msgspec.Raw]


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's form (https://platform.openai.com/docs/guides/batch)."""

    custom_id: str
    url: str
    body: Body
    method: str = "POST"

    def __post_init__(self) -> None:
        """Raises ValueError, for what OpenAI's form has and nobody answers here."""
        for name, value, allowed in (("url", self.url, URLS), ("method", self.method, ("POST",))):
            if value not in allowed:
                raise ValueError(f"{name}: {shown(value)} is not allowed; allowed: {', '.join(allowed)}")


class BatchLine(msgspec.Struct, frozen=True):
    """One request. ``number`` counts from 1; ``body`` is JSON."""

    number: int
    custom_id: str
    url: str
    body: bytes

    @property
    def answer_id(self) -> str:
        """The ``id`` of its answer: its number and a digest, so that a run that goes on knows a request that has changed."""
        return f"batch_req_{self.number}_{_digest(f'{self.url} '.encode() + self.body).hex()}"


def read_lines(path: Path) -> Iterator[BatchLine]:
    """Yield the requests of a file.

    Raises:
        ConfigurationError: the file cannot be read, or a line is wrong; one line with its number.
    """
    for number, content in lines_of_file(str(path), "FILE"):
        if content.strip():
            yield _line(number, content, path)


def check(path: Path) -> int:
    """Read all lines and return their number.

    Raises:
        ConfigurationError: as ``read_lines``; or two lines have one custom_id, or there is none; or the file cannot be read
            again, as a pipe.
    """
    if path.exists() and not path.is_file():
        raise ConfigurationError(
            f"FILE: {shown(path)} is not allowed; allowed: a regular file, which can be read again"
        )
    places: dict[bytes, int] = {}
    for line in read_lines(path):
        # Of millions of lines, a digest takes less room than a name.
        first = places.setdefault(_digest(line.custom_id.encode()), line.number)
        if first != line.number:
            raise _wrong(path, line.number, f"custom_id: {shown(line.custom_id)} is that of line {first} too")
    if not places:
        raise ConfigurationError(f"FILE: {shown(path)} has no line; allowed: one request in each line")
    return len(places)


def _line(number: int, content: bytes, path: Path) -> BatchLine:
    try:
        fields = msgspec.json.decode(content, type=Body)
        if "body" in fields or "url" in fields:
            request = msgspec.json.decode(content, type=_Request)
        else:
            request = _Request(f"line-{number}", _url_of(fields), fields)
        return BatchLine(number, request.custom_id, request.url, _whole_body(request))
    except (ValueError, RecursionError) as error:
        raise _wrong(path, number, one_line(error)) from None


def _url_of(fields: Body) -> Any:
    urls = [url for name, url in _URL_OF_FIELD.items() if name in fields]
    if len(urls) != 1:
        raise ValueError(f"it has {len(urls)} of the fields {', '.join(_URL_OF_FIELD)}; allowed: one")
    return urls[0]


def _whole_body(request: _Request) -> bytes:
    """With a seed that follows from the name: the same file gives the same answers, however often it is interrupted."""
    body = dict(request.body)
    if "stream" in body and bytes(body["stream"]) not in {b"false", b"null"}:
        raise ValueError("stream: true is not allowed; allowed: unset")
    if request.url in _SEEDED and bytes(body.get("seed", b"null")) == b"null":
        seed = int.from_bytes(_digest(request.custom_id.encode())[:4], "big") >> 1
        body["seed"] = msgspec.Raw(b"%d" % seed)
    return msgspec.json.encode(body)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=12).digest()


def _wrong(path: Path, number: int, problem: str) -> ConfigurationError:
    return ConfigurationError(f"line {number} of {shown(path)}: {problem}")
