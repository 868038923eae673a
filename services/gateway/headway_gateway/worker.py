"""One worker's entry point; standard input has its configuration."""

import sys

import msgspec

from headway_process.collector import pause_collector
from headway_process.lean_imports import import_structlog, one_blas_thread


def main() -> int:
    """Run the worker; return its exit code."""
    pause_collector()
    import_structlog()
    with one_blas_thread():
        from headway_gateway.config import GatewayConfig
        from headway_gateway.process import run
    return run(msgspec.json.decode(sys.stdin.buffer.read(), type=GatewayConfig))


if __name__ == "__main__":
    sys.exit(main())
