"""The transport nixl without its package, and without devices; what it does with both is in the conformance suite."""

import pytest

from headway_executor.backend import BackendConfigError
from headway_executor.block_store import nixl_transport
from headway_executor.block_store.nixl_transport import NixlTransport


def test_without_the_package_it_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(nixl_transport, "find_spec", lambda _: None)
    with pytest.raises(
        BackendConfigError, match=r"^block_transports: 'nixl' needs 'nixl', which is not inst"
    ) as refused:
        NixlTransport()
    assert "\n" not in str(refused.value)


def test_without_devices_it_is_refused():
    with pytest.raises(
        BackendConfigError, match=r"^nixl_devices: '' is not allowed; allowed: names of network devices"
    ):
        NixlTransport("")


@pytest.mark.skipif(nixl_transport.find_spec("nixl") is None, reason="needs the package nixl")
def test_unknown_devices_are_refused():
    with pytest.raises(
        BackendConfigError, match=r"^nixl_devices: 'no-such-device' is not allowed; NIXL cannot use it: "
    ):
        NixlTransport("no-such-device")
