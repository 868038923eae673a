"""One worker's entry point; standard input has its configuration."""

import sys

import msgspec

from headway_gateway.config import GatewayConfig
from headway_gateway.process import run
from headway_process.collector import pause_collector

if __name__ == "__main__":
    pause_collector()
    sys.exit(run(msgspec.json.decode(sys.stdin.buffer.read(), type=GatewayConfig)))
