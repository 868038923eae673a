"""Header blocks that were read before mean what they meant, until the connection's table changes."""

import pytest
from hpack import Decoder, Encoder
from hpack.exceptions import HPACKError
from hypothesis import given
from hypothesis import strategies as st

from headway_gateway.grpc_server.header_blocks import HeaderBlocks

MOST_BYTES = 16384
NAMES = st.sampled_from((b"a", b"bb", b":path", b"te"))
VALUES = st.sampled_from((b"", b"1", b"/x/Y", b"v" * 60))
LISTS = st.lists(st.tuples(NAMES, VALUES), min_size=1, max_size=4)
SIZES = st.one_of(st.none(), st.sampled_from((0, 64, 4096)))


@given(st.lists(st.tuples(LISTS, SIZES), min_size=1, max_size=30))
def test_any_order_of_blocks_gives_what_hpack_gives(sent: list[tuple[list[tuple[bytes, bytes]], int | None]]) -> None:
    """A client that indexes: it inserts entries, evicts them, and changes the size of its table."""
    encoder, plain, blocks = Encoder(), Decoder(max_header_list_size=MOST_BYTES), HeaderBlocks(MOST_BYTES)
    for headers, size in sent:
        if size is not None:
            encoder.header_table_size = size
        block = encoder.encode(headers)
        assert blocks.read(block) == plain.decode(block, raw=True) == headers


def test_a_block_that_changes_nothing_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, blocks = Encoder(), HeaderBlocks(MOST_BYTES)
    first, second = (encoder.encode([(b"name", b"value")]) for _ in range(2))
    assert first != second == encoder.encode([(b"name", b"value")])  # an insertion, then the entry's number
    read = [blocks.read(block) for block in (first, second)]
    monkeypatch.setattr(Decoder, "decode", None)
    assert blocks.read(second) == read[0] == read[1]


def test_many_different_blocks_are_not_all_kept() -> None:
    blocks = HeaderBlocks(MOST_BYTES)
    for number in range(1000):
        value = b"%d" % number
        assert blocks.read(b"\0\1a" + bytes((len(value),)) + value) == [(b"a", value)]
    assert len(blocks._known) <= 8


def test_a_block_that_cannot_be_read_is_refused_each_time() -> None:
    blocks = HeaderBlocks(MOST_BYTES)
    for _ in range(2):
        with pytest.raises(HPACKError):
            blocks.read(b"\xff\xff\xff")
