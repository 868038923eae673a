"""The built-in block transports conform, and the suite finds those that do not."""

import importlib.util

import msgspec
import pytest

from broken_transports import BROKEN, WrappedTransport
from e2e.running_server import free_port
from headway_conformance import ConformanceFailure
from headway_conformance.block_transports import CASES, TransportUnderTest, case_named, check_transport

SHM = "headway_executor.block_store.shm_transport:ShmTransport"
TCP = "headway_executor.block_store.tcp_transport:TcpTransport"
NIXL = "headway_executor.block_store.nixl_transport:NixlTransport"


def transport_named(name: str) -> TransportUnderTest:
    if name == "shm":
        return TransportUnderTest(SHM, outlives_owner=True)
    if name == "tcp":
        return TransportUnderTest(
            TCP,
            serving={"block_address": "tcp://127.0.0.1:*"},
            serving_again={"block_address": f"tcp://127.0.0.1:{free_port()}"},
        )
    return TransportUnderTest(NIXL)


NAMES = ["shm", "tcp"]
if importlib.util.find_spec("nixl") is not None:
    NAMES.append("nixl")


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_transport_conforms(name, case):
    check_transport(case, transport_named(name))


def wrapped(transport: type[WrappedTransport]) -> TransportUnderTest:
    return msgspec.structs.replace(transport_named("tcp"), factory=f"broken_transports:{transport.__name__}")


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_transport_is_found(broken):
    for name in broken.found_by:
        with pytest.raises(ConformanceFailure, match=name):
            check_transport(case_named(name), wrapped(broken))


@pytest.mark.deep
def test_the_wrapper_that_broken_transports_derive_from_works():
    for name in sorted({name for broken in BROKEN for name in broken.found_by}):
        check_transport(case_named(name), wrapped(WrappedTransport))


def test_no_case_is_beyond_every_broken_transport():
    assert {case.name for case in CASES} == {name for broken in BROKEN for name in broken.found_by}


def test_every_case_says_what_it_proves():
    assert all(len(case.proves) > 30 and case.proves.endswith(".") for case in CASES)
