"""What the suite must be told of a transport.

Owns: constructing it by name, in any process. Must not know: the cases.
"""

from importlib import import_module

import msgspec

from headway_executor.block_store.transport import BlockTransport


class TransportUnderTest(msgspec.Struct, frozen=True):
    """``factory``: "module:callable"; keyword arguments of an owner in ``serving``, of a puller in ``pulling``.

    ``serving_again``: arguments by which an owner that starts again has the address that it had; used by one owner at a
    time, and ``serving`` without any. ``outlives_owner``: what an owner that was killed had is still there.
    """

    factory: str
    serving: dict[str, str | int] = {}
    pulling: dict[str, str | int] = {}
    serving_again: dict[str, str | int] = {}
    outlives_owner: bool = False

    def owner_side(self, *, again: bool = False) -> BlockTransport:
        """The transport that registers; ``again``: perhaps not for the first time."""
        return self._create((again and self.serving_again) or self.serving)

    def puller_side(self) -> BlockTransport:
        """A transport that pulls."""
        return self._create(self.pulling)

    def _create(self, arguments: dict[str, str | int]) -> BlockTransport:
        module, _, name = self.factory.partition(":")
        transport: BlockTransport = getattr(import_module(module), name)(**arguments)
        return transport
