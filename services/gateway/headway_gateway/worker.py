"""One worker's entry point: it reads its configuration as JSON from standard input."""

import sys

import msgspec

from headway_gateway.config import GatewayConfig
from headway_gateway.process import run

if __name__ == "__main__":
    sys.exit(run(msgspec.json.decode(sys.stdin.buffer.read(), type=GatewayConfig)))
