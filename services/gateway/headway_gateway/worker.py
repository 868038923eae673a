"""One worker's entry point; standard input has its configuration."""

import sys

import msgspec

from headway_gateway.config import GatewayConfig
from headway_gateway.process import run

if __name__ == "__main__":
    sys.exit(run(msgspec.json.decode(sys.stdin.buffer.read(), type=GatewayConfig)))
