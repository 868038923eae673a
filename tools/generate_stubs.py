"""Generates the protobuf and gRPC stubs beside their ``.proto`` files.

Owns: the protoc command line, and the definition of drift. Must not know: what the messages mean.

    python tools/generate_stubs.py             # write the stubs
    python tools/generate_stubs.py --check     # exit 1 and name every committed stub that differs
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import grpc_tools  # type: ignore[import-untyped]
from grpc_tools import protoc

PROTO_ROOT = Path(__file__).resolve().parents[1] / "proto"
PACKAGE = "headway_proto"
WELL_KNOWN_TYPES = Path(grpc_tools.__file__).parent / "_proto"


def generate(destination: Path) -> list[Path]:
    """Run protoc into ``destination``; return the written files, relative to it.

    Raises:
        RuntimeError: protoc refused a file and said why on stderr.
    """
    sources = sorted((PROTO_ROOT / PACKAGE).glob("*.proto"))
    flags = [f"--{kind}_out={destination}" for kind in ("python", "pyi", "grpc_python")]
    status = protoc.main(["protoc", f"-I{PROTO_ROOT}", f"-I{WELL_KNOWN_TYPES}", *flags, *map(str, sources)])
    if status != 0:
        raise RuntimeError(f"protoc exited with {status}")
    return sorted(path.relative_to(destination) for path in destination.rglob("*_pb2*.py*") if path.is_file())


def drifted() -> list[Path]:
    """The committed stubs that differ from fresh ones; missing and left-over files too."""
    with tempfile.TemporaryDirectory() as scratch:
        fresh_root = Path(scratch)
        fresh = {path: (fresh_root / path).read_bytes() for path in generate(fresh_root)}
    committed_paths = (path for path in (PROTO_ROOT / PACKAGE).glob("*_pb2*.py*"))
    committed = {path.relative_to(PROTO_ROOT): path.read_bytes() for path in committed_paths}
    return sorted(path for path in fresh.keys() | committed.keys() if fresh.get(path) != committed.get(path))


def main(arguments: Sequence[str] | None = None) -> int:
    """Generate, or with ``--check`` compare."""
    parser = argparse.ArgumentParser(description="Generate the stubs of the public API.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a committed stub differs")
    if not parser.parse_args(arguments).check:
        for path in generate(PROTO_ROOT):
            print(f"proto/{path}")
        return 0
    stale = drifted()
    for path in stale:
        print(f"proto/{path} differs from its .proto file; run `make stubs`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
