"""The shape of an index file found from its bytes, and its chains: for a store whose settings are not known."""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from brokerlab.storage.disk import Region
from brokerlab.storage.index_file import ENTRY_SIZE, HEADER_SIZE, SLOT_SIZE, IndexHeader, read_index_header

BATCH_RECORDS = 8192
DEFAULT_SLOTS, DEFAULT_ENTRIES = 5_000_000, 20_000_000
OPEN_FILES_MAX = 96
KINDS = ("commitlog", "consumequeue", "index", "checkpoint")
_GIVEN, _DEFAULT = "as given", "RocketMQ's default"
_START_MAX = (1 << 62) - 1
_SMALL_NAMES = ("abort", "abort.bak", "lock")


class IndexShape(NamedTuple):
    """How many slots and entries, and how that is known."""

    slots: int
    entries: int
    how: str

    @property
    def is_found(self) -> bool:
        """Derived from the file itself: worth telling."""
        return self.how not in (_GIVEN, _DEFAULT)


def index_shape(region: Region, *, slots: int | None = None, known: IndexShape | None = None) -> IndexShape | None:
    """Slots and entries of this file: as told, RocketMQ's default, or found from its bytes. None: no shape fits.

    `known` is the shape of another file of the same store: files of one store are alike.
    """
    room = region.size - HEADER_SIZE
    if slots is not None:
        left = room - SLOT_SIZE * slots
        return IndexShape(slots, left // ENTRY_SIZE, _GIVEN) if slots > 0 and left >= ENTRY_SIZE else None
    if room == SLOT_SIZE * DEFAULT_SLOTS + ENTRY_SIZE * DEFAULT_ENTRIES:
        return IndexShape(DEFAULT_SLOTS, DEFAULT_ENTRIES, _DEFAULT)
    if known is not None and room == SLOT_SIZE * known.slots + ENTRY_SIZE * known.entries:
        return known
    if room < SLOT_SIZE + ENTRY_SIZE or room % SLOT_SIZE:
        return None
    header = read_index_header(region.buf)
    usual = room // (SLOT_SIZE + 4 * ENTRY_SIZE)
    ratio = IndexShape(usual, 4 * usual, "from its size, with four entries a slot")
    fits_ratio = room % (SLOT_SIZE + 4 * ENTRY_SIZE) == 0
    if header.index_count <= 1:
        return ratio if fits_ratio else IndexShape(usual, (room - SLOT_SIZE * usual) // ENTRY_SIZE, "a guess: no entry")
    if fits_ratio and _shape_fits(region, header, usual):
        return ratio
    found = _search_slots(region, header)
    if found is not None:
        return IndexShape(found, (room - SLOT_SIZE * found) // ENTRY_SIZE, "found from its entries")
    return ratio if fits_ratio else None


def _shape_fits(region: Region, header: IndexHeader, slots: int) -> bool:
    """Does the newest entry stand where this many slots put it, and does its slot lead to it?"""
    number = header.index_count - 1
    at = HEADER_SIZE + SLOT_SIZE * slots + ENTRY_SIZE * number
    if at + ENTRY_SIZE > region.size:
        return False
    entry_hash = int.from_bytes(region.buf[at : at + 4], "big", signed=True)
    offset = int.from_bytes(region.buf[at + 4 : at + 12], "big", signed=True)
    slot_at = HEADER_SIZE + SLOT_SIZE * (entry_hash % slots)
    held = int.from_bytes(region.buf[slot_at : slot_at + 4], "big", signed=True)
    return entry_hash >= 0 and offset == header.end_physical_offset and held == number


def _search_slots(region: Region, header: IndexHeader) -> int | None:
    """Entries fill the file to its end, so their places differ by multiples of an entry between possible shapes."""
    number = header.index_count - 1
    room = region.size - HEADER_SIZE
    least = (room // SLOT_SIZE) % (ENTRY_SIZE // SLOT_SIZE) or ENTRY_SIZE // SLOT_SIZE
    first_at = HEADER_SIZE + SLOT_SIZE * least + ENTRY_SIZE * number + 4
    count = (region.size - first_at - 16) // ENTRY_SIZE + 1
    if count <= 0:
        return None
    offsets = np.ndarray((count,), dtype=">i8", buffer=region.buf, offset=first_at, strides=(ENTRY_SIZE,))
    hits = np.flatnonzero(offsets == header.end_physical_offset)[:100_000].tolist()
    del offsets
    step = ENTRY_SIZE // SLOT_SIZE
    return next((least + step * hit for hit in hits if _shape_fits(region, header, least + step * hit)), None)


class ChainEntry(NamedTuple):
    """One entry of an index file as it is reached from its slot."""

    number: int
    position: int
    hash: int
    physical_offset: int
    time_diff: int
    previous: int


_ENTRY = struct.Struct(">iqii")


def index_chain(region: Region, shape: IndexShape, slot: int, *, most: int = 1_000_000) -> list[ChainEntry]:
    """The entries that a slot leads to, newest first. A link that does not lead back ends it: it is damage."""
    header = read_index_header(region.buf)
    slot_at = HEADER_SIZE + SLOT_SIZE * slot
    number = int.from_bytes(region.buf[slot_at : slot_at + SLOT_SIZE], "big", signed=True)
    found: list[ChainEntry] = []
    if number > header.index_count:
        return found
    while 0 < number < shape.entries and len(found) < most:
        at = HEADER_SIZE + SLOT_SIZE * shape.slots + ENTRY_SIZE * number
        entry = ChainEntry(number, at, *_ENTRY.unpack_from(region.buf, at))
        found.append(entry)
        if entry.previous >= number:
            break
        number = entry.previous
    return found


def longest_chains(region: Region, shape: IndexShape, most: int) -> list[int]:
    """The slots that lead to the most entries, the fullest first."""
    count = min(max(read_index_header(region.buf).index_count, 1), shape.entries)
    hashes = np.ndarray(
        (count,),
        dtype=">i4",
        buffer=region.buf,
        offset=HEADER_SIZE + SLOT_SIZE * shape.slots,
        strides=(ENTRY_SIZE,),
    )[1:].astype(np.int64)
    slots, counts = np.unique(hashes[hashes >= 0] % shape.slots, return_counts=True)
    return [int(slot) for slot in slots[np.argsort(-counts, kind="stable")][:most]]
