"""CRC32: of frames, of mirrored state, of blocks.

Owns: which library computes it. Must not know: what is checked.
"""

try:
    # The same sums as zlib's, four to thirteen times as fast: a frame of tokens is mostly this.
    from isal.isal_zlib import crc32
except ImportError:  # a host that runs a plain checkout
    from zlib import crc32

__all__ = ["crc32"]
