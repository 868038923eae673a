"""The tokenizer's and template's files as one archive."""

import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
from smg_grpc_proto.generated import common_pb2

_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
)
_CHUNK_BYTES = 64 * 1024
# Every replica of a model gives the same archive, byte for byte, so its digest tells tokenizers apart.
_MADE_AT = (1980, 1, 1, 0, 0, 0)


class TokenizerArchive(msgspec.Struct, frozen=True):
    """A zip archive, with its SHA-256."""

    data: bytes
    sha256: str

    def chunks(self) -> Iterator[common_pb2.GetTokenizerChunk]:
        """Yield pieces; the last carries the digest."""
        size = len(self.data)
        for start in range(0, size, _CHUNK_BYTES):
            end = min(start + _CHUNK_BYTES, size)
            yield common_pb2.GetTokenizerChunk(data=self.data[start:end], sha256=self.sha256 if end == size else "")


def tokenizer_archive(directory: Path) -> TokenizerArchive:
    """Pack the files. This is slow.

    Raises:
        OSError: a file is unreadable.
    """
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in _NAMES:
            if (directory / name).is_file():
                entry = zipfile.ZipInfo(name, _MADE_AT)
                archive.writestr(entry, (directory / name).read_bytes(), zipfile.ZIP_DEFLATED)
    data = content.getvalue()
    return TokenizerArchive(data, hashlib.sha256(data).hexdigest())
