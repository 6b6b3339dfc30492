"""Java's String.hashCode, which RocketMQ writes into its files: for one string, and for columns of them.

h = 31 * h + c over the UTF-16 code units, modulo 2**32, read as a signed 32-bit number. A consume queue stores it
sign-extended (tags code), the index stores its absolute value, and that of -2**31, which Java cannot negate, as 0.
"""

from __future__ import annotations

from functools import lru_cache
from operator import mul
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from brokerlab.storage.disk import Offsets

Bytes: TypeAlias = NDArray[np.uint8]
Hashes: TypeAlias = NDArray[np.int32]

_POWERS_KEPT = 512
_POWERS = [pow(31, n, 1 << 32) for n in range(_POWERS_KEPT + 1)]
_POWERS_COLUMN = np.array(_POWERS, dtype=np.uint32)


def string_hash(text: str) -> int:
    """String.hashCode of `text`."""
    units: bytes | memoryview[int]
    if text.isascii():
        units = text.encode("ascii")
    else:
        # surrogatepass: a lone surrogate is an ordinary unit to Java
        units = memoryview(text.encode("utf-16-le", "surrogatepass")).cast("H")
    count = len(units)
    if count <= _POWERS_KEPT:
        h = sum(map(mul, units, _POWERS[count - 1 :: -1])) if count else 0
    else:
        h = 0
        for unit in units:
            h = (31 * h + unit) & 0xFFFFFFFF
    h &= 0xFFFFFFFF
    return h - (1 << 32) if h & 0x80000000 else h


@lru_cache(maxsize=4096)
def tag_hash(tag: str) -> int:
    """The tags code of a TAGS value; tags are few, so it is remembered. No tag: 0."""
    return string_hash(tag)


def index_hash(topic: str, key: str) -> int:
    """The hash under which the index keeps `key` of `topic`: never negative."""
    if key.isascii():  # hash(a + b) = hash(a) * 31**len(b) + hash(b), and topics are few
        h = (_prefix_hash(topic) * pow(31, len(key), 1 << 32) + string_hash(key)) & 0xFFFFFFFF
        h = (1 << 32) - h if h & 0x80000000 else h
    else:
        h = abs(string_hash(f"{topic}#{key}"))
    return 0 if h == 1 << 31 else h


@lru_cache(maxsize=4096)
def _prefix_hash(topic: str) -> int:
    return string_hash(topic + "#")


def index_hashes(hashes: Hashes) -> Hashes:
    """String hashes to index hashes, as a column."""
    return np.where(hashes == np.int32(-(2**31)), np.int32(0), np.abs(hashes))


def ascii_hashes(data: Bytes, starts: Offsets, lengths: Offsets, before: Hashes | None = None) -> Hashes:
    """String.hashCode of each ASCII run `data[start : start + length]`; `before` is the hash of text in front of it.

    The runs are laid right-aligned into one matrix: zeros to the left add nothing to the polynomial, so runs of
    different lengths share it. Exact only for bytes below 0x80 (the caller looks) and runs of at most 512 bytes.
    """
    if not len(starts):
        return np.zeros(0, dtype=np.int32)
    width = int(lengths.max())
    assert width <= _POWERS_KEPT
    places = np.arange(-width, 0, dtype=np.int64)
    ends = starts + lengths
    matrix = data[np.maximum(ends[:, None] + places, 0)]
    matrix[places[None, :] < -lengths[:, None]] = 0
    hashes = matrix.astype(np.uint32) @ _POWERS_COLUMN[width - 1 :: -1] if width else np.zeros(len(starts), np.uint32)
    if before is not None:
        hashes = hashes + before.view(np.uint32) * _POWERS_COLUMN[lengths]
    return hashes.view(np.int32)
