"""Every checksum of the store, in one place.

`crc32` is the body CRC of a record: CRC-32 (IEEE, reflected, as zlib) of the stored body. On 1 KiB, isal computes it
about ten times as fast as zlib, so it is used where it is installed; both give the same numbers. RocketMQ keeps 31 of
its bits (`body_crc`). CRC-32C comes from crcmod, whose pure-Python fallback is two hundred times slower than its C
extension: `CRCMOD_IS_COMPILED` says which one this is, and the tools tell.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from typing import TypeAlias

import crcmod

Data: TypeAlias = bytes | bytearray | memoryview

crc32: Callable[[Data], int]

try:
    from isal import isal_zlib
except ImportError:
    crc32 = zlib.crc32
    CRC32_IMPLEMENTATION = "zlib"
else:
    crc32 = isal_zlib.crc32
    CRC32_IMPLEMENTATION = "isal"

CRC_MASK = 0x7FFFFFFF
"""RocketMQ stores the CRC as a non-negative Java int."""

CRCMOD_IS_COMPILED: bool = bool(getattr(sys.modules["crcmod.crcmod"], "_usingExtension", False))

crc32c: Callable[[bytes], int] = crcmod.mkCrcFun(0x11EDC6F41, initCrc=0, xorOut=0xFFFFFFFF)
"""CRC-32C (Castagnoli), for page digests."""


def body_crc(body: Data) -> int:
    """The BODYCRC field of a record; 0 for an empty body."""
    return crc32(body) & CRC_MASK


def describe() -> str:
    """What computes checksums here, for people: a slow crcmod is said, not suffered in silence."""
    if CRCMOD_IS_COMPILED:
        return f"CRC-32 by {CRC32_IMPLEMENTATION}, CRC-32C by crcmod"
    return (
        f"CRC-32 by {CRC32_IMPLEMENTATION}, CRC-32C by crcmod WITHOUT its C extension (about 200 times slower: "
        "install a C compiler and reinstall crcmod)"
    )
