"""What gRPC puts into a stream of HTTP/2, in both directions."""

import base64
import gzip
import zlib

import grpc
import pytest
from hpack import Decoder

from headway_gateway.grpc_server.wire import (
    MOST_METADATA_BYTES,
    MessageReader,
    RequestHead,
    framed,
    read_head,
    read_metadata,
    read_timeout,
    write_metadata,
    write_status,
)
from headway_gateway.statuses import CallRefusedError
from plain_h2 import framed as framed_by_a_client

HEAD = {b":method": b"POST", b":path": b"/a/B", b"content-type": b"application/grpc", b"te": b"trailers"}
MOST = 1000


def head(**more: bytes) -> RequestHead:
    return read_head((HEAD | {key.replace("_", "-").encode(): value for key, value in more.items()}).items())


def unpacked(block: bytes) -> list[tuple[bytes, bytes]]:
    return Decoder().decode(block, raw=True)


def test_a_head() -> None:
    found = head(grpc_timeout=b"250m", authorization=b"Bearer x", trace_bin=base64.b64encode(b"\0\1\2"))
    assert found.problem is None
    assert (found.path, found.timeout_s, found.encoding) == ("/a/B", 0.25, "identity")
    assert found.metadata == (("authorization", "Bearer x"), ("trace-bin", b"\0\1\2"))


@pytest.mark.parametrize(
    ("more", "http_status", "code", "words"),
    [
        ({":method": b"GET"}, 405, grpc.StatusCode.INTERNAL, "must be POST"),
        ({"content-type": b"application/json"}, 415, grpc.StatusCode.INTERNAL, "must be application/grpc"),
        ({"grpc-timeout": b"fast"}, 200, grpc.StatusCode.INTERNAL, "grpc-timeout"),
        ({"x-bin": b"!!"}, 200, grpc.StatusCode.INTERNAL, "'x-bin' is no base64"),
        ({"x-bin": b"a"}, 200, grpc.StatusCode.INTERNAL, "'x-bin' is no base64"),
        ({"grpc-encoding": b"br"}, 200, grpc.StatusCode.UNIMPLEMENTED, "allowed: identity, gzip, deflate"),
        ({"x": b"y" * MOST_METADATA_BYTES}, 200, grpc.StatusCode.RESOURCE_EXHAUSTED, "allowed: at most 16384 bytes"),
    ],
)
def test_heads_that_are_refused(more: dict[str, bytes], http_status: int, code: grpc.StatusCode, words: str) -> None:
    found = read_head((HEAD | {key.encode(): value for key, value in more.items()}).items())
    assert found.http_status == http_status
    assert found.problem is not None
    assert found.problem.code is code
    assert words in found.problem.message


def test_a_head_that_lacks_everything_is_refused() -> None:
    assert read_head(()).http_status == 405


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(b"1H", 3600), (b"2M", 120), (b"3S", 3), (b"4m", 0.004), (b"5u", 5e-6), (b"6n", 6e-9), (b"99999999S", 99999999)],
)
def test_timeouts(value: bytes, seconds: float) -> None:
    assert read_timeout(value) == pytest.approx(seconds)


@pytest.mark.parametrize("value", [b"", b"1", b"S", b"-1S", b"1s", b"123456789S", b"1S ", b"\xff1S"])
def test_timeouts_of_no_form(value: bytes) -> None:
    with pytest.raises(CallRefusedError):
        read_timeout(value)


def test_metadata_goes_both_ways() -> None:
    metadata = (("key", "value"), ("bytes-bin", b"\xff\0"), ("empty-bin", b""))
    assert read_metadata(unpacked(write_metadata(metadata))) == metadata
    assert read_metadata([(b"two-bin", b"AA, AQ==")]) == (("two-bin", b"\0"), ("two-bin", b"\1"))


@pytest.mark.parametrize("length", [0, 1, 126, 127, 128, 254, 255, 300, 20_000])
def test_values_of_any_length(length: int) -> None:
    assert unpacked(write_metadata((("key", "v" * length),))) == [(b"key", b"v" * length)]


def test_a_status() -> None:
    found = dict(unpacked(write_status(grpc.StatusCode.NOT_FOUND, "100% of “it”\n", (("a", "b"),))))
    assert found == {b"grpc-status": b"5", b"grpc-message": b"100%25 of %E2%80%9Cit%E2%80%9D%0A", b"a": b"b"}
    assert unpacked(write_status(grpc.StatusCode.OK, "", ())) == [(b"grpc-status", b"0")]


@pytest.mark.parametrize("step", [1, 2, 5, 7, 1000])
def test_messages_cut_anywhere(step: int) -> None:
    messages = [b"", b"x", b"y" * 300, b""]
    data = b"".join(map(framed, messages))
    reader = MessageReader("identity", MOST)
    found = []
    for place in range(0, len(data), step):
        found += reader.read(data[place : place + step])
    assert found == messages
    assert not reader.is_inside


@pytest.mark.parametrize(("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_compressed_messages(encoding: str, compress) -> None:
    reader = MessageReader(encoding, MOST)
    whole = b"a" * MOST
    assert reader.read(framed_by_a_client(compress(whole), is_compressed=True)) == [whole]
    assert reader.read(framed(b"not compressed")) == [b"not compressed"]
    for wrong, words in (
        (compress(whole + b"a"), "larger than allowed"),
        (compress(b"a" * 900_000), "larger than allowed"),
        (compress(whole)[:-5], "cut short"),
        (b"nonsense", f"not compressed as {encoding}"),
    ):
        with pytest.raises(CallRefusedError, match=words):
            MessageReader(encoding, MOST).read(framed_by_a_client(wrong, is_compressed=True))


def test_messages_that_cannot_be_read() -> None:
    with pytest.raises(CallRefusedError, match="1001 bytes; allowed: at most 1000") as refusal:
        MessageReader("identity", MOST).read(framed(b"x" * (MOST + 1))[:5])
    assert refusal.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(CallRefusedError, match="names no compression"):
        MessageReader("identity", MOST).read(framed_by_a_client(b"x", is_compressed=True))
