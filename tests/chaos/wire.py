"""A network between namespaces, in user space: packets wait as long as a wire would take, or are lost.

Owns: one TUN interface per host and the passing of packets between them, with a delay for each pair of hosts.
Must not know: what the hosts run.

``tc netem`` does the same inside the kernel, where the kernel has it; many do not. Run as a process of its own, so that
nobody else's Python delays a packet: ``python wire.py NAME=ADDRESS ...``. It reads orders on stdin, a line each, and
answers each with a line: ``delay A B MILLISECONDS``, ``cut A B``, ``heal A B`` (``*`` is every host). It ends with stdin.
"""

import fcntl
import heapq
import itertools
import os
import select
import socket
import struct
import sys
import time

_TUNSETIFF = 0x400454CA
_IFF_TUN_WITHOUT_HEADER = 0x0001 | 0x1000
_MAX_PACKET_BYTES = 65_536


def open_tun(name: str) -> int:
    """A TUN interface in this namespace; whoever made it may move it to another."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN_WITHOUT_HEADER))
    return device


class Wire:
    """The hosts' interfaces by name, and what lies between each two of them."""

    def __init__(self, hosts: dict[str, tuple[str, str]]) -> None:
        """``hosts``: the interface and the address of each."""
        self._device_of = {name: open_tun(interface) for name, (interface, _) in hosts.items()}
        self._host_of_device = {device: name for name, device in self._device_of.items()}
        self._host_at = {socket.inet_aton(address): name for name, (_, address) in hosts.items()}
        self._delay_s: dict[frozenset[str], float] = {}
        self._cut: set[frozenset[str]] = set()
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._order = itertools.count()

    def run(self) -> None:
        """Until stdin ends."""
        while True:
            ready, _, _ = select.select([0, *self._host_of_device], [], [], self._until_next())
            for source in ready:
                if source != 0:
                    self._receive(source)
                elif not self._obey(sys.stdin.readline()):
                    return
            self._deliver()

    def _until_next(self) -> float | None:
        return max(0.0, self._under_way[0][0] - time.monotonic()) if self._under_way else None

    def _receive(self, source: int) -> None:
        try:
            while True:
                packet = os.read(source, _MAX_PACKET_BYTES)
                target = self._host_at.get(packet[16:20]) if packet[0] >> 4 == 4 else None
                pair = frozenset((self._host_of_device[source], target))
                if target is not None and pair not in self._cut:
                    due = time.monotonic() + self._delay_s.get(pair, 0.0)
                    heapq.heappush(self._under_way, (due, next(self._order), self._device_of[target], packet))
        except BlockingIOError:
            return

    def _deliver(self) -> None:
        while self._under_way and self._under_way[0][0] <= time.monotonic():
            _, _, device, packet = heapq.heappop(self._under_way)
            try:
                os.write(device, packet)
            except OSError:  # the interface is not up, or full: a wire loses packets then
                continue

    def _obey(self, line: str) -> bool:
        words = line.split()
        if not words:
            return False
        order, one, other = words[:3]
        names = list(self._device_of)
        pairs = {frozenset((a, b)) for a in names for b in names if a != b and one in {a, "*"} and other in {b, "*"}}
        if order == "delay":
            self._delay_s.update(dict.fromkeys(pairs, float(words[3]) / 1e3))
        elif order == "cut":
            self._cut |= pairs
        else:
            self._cut -= pairs
        sys.stdout.write("done\n")
        sys.stdout.flush()
        return True


if __name__ == "__main__":
    given = dict(word.split("=") for word in sys.argv[1:])
    wire = Wire({name: tuple(value.split(",")) for name, value in given.items()})
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    wire.run()
