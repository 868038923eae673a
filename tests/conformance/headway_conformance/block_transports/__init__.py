"""The definition of "a block transport works": cases that any ``BlockTransport`` must pass.

Owns: the public names. Must not know: any transport under test, pytest.

    from headway_conformance.block_transports import CASES, TransportUnderTest, check_transport

    MINE = TransportUnderTest("mypackage.mine:MyTransport", serving={"port": 0})

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_my_transport(case): check_transport(case, MINE)

Owners are processes of their own, which a case may pause and kill. Pullers are threads of this one, so that a call which
never returns is noticed.
"""

from headway_conformance.block_transports.cases import CASES, TransportCase, case_named, check_transport
from headway_conformance.block_transports.under_test import TransportUnderTest

__all__ = ["CASES", "TransportCase", "TransportUnderTest", "case_named", "check_transport"]
