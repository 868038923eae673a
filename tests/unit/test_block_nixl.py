"""The transport nixl without its package, and without devices; what it does with both is in the conformance suite."""

import numpy as np
import pytest

from headway_executor.backend import BackendConfigError
from headway_executor.block_store import nixl_transport
from headway_executor.block_store.nixl_transport import NixlTransport
from headway_executor.block_store.transport import RECORD, HostMemory, PullError

MEMORY = HostMemory("a-pool", "", np.zeros(1, RECORD), np.zeros((1, 8), np.uint8))


def test_devices_without_the_package_are_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(nixl_transport, "find_spec", lambda _: None)
    with pytest.raises(
        BackendConfigError, match=r"^nixl_devices: 'lo' needs 'nixl', which is not installed; "
    ) as refused:
        NixlTransport("lo")
    assert "\n" not in str(refused.value)


def test_without_devices_nothing_is_offered_or_pulled():
    transport = NixlTransport()
    with pytest.raises(BackendConfigError, match=r"^nixl_devices: '' is not allowed"):
        transport.register(MEMORY)
    with pytest.raises(PullError, match="nixl_devices is empty here"):
        transport.pull("a-pool", "address", np.zeros(1, np.int32), block_bytes=8, timeout_s=1.0)
    transport.release("address")
    transport.close()
    transport.close()
