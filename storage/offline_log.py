"""Walking over the segments of a store that is not open: records, damage, and what follows it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from brokerlab.storage.disk import Disk, FileInfo, Region
from brokerlab.storage.errors import CorruptRecordError
from brokerlab.storage.log_scan import TRUSTED, Columns, Stop, Validity, columns, find_next_record, scan
from brokerlab.storage.offline import FileCache, start_of, viewed
from brokerlab.storage.record import Record, check, extract

BATCH_RECORDS = 8192
DEFAULT_SLOTS, DEFAULT_ENTRIES = 5_000_000, 20_000_000
OPEN_FILES_MAX = 96
KINDS = ("commitlog", "consumequeue", "index", "checkpoint")
_GIVEN, _DEFAULT = "as given", "RocketMQ's default"
_START_MAX = (1 << 62) - 1
_SMALL_NAMES = ("abort", "abort.bak", "lock")


class LogView:
    """Records of the log by physical offset, wherever they are."""

    def __init__(self, disk: Disk, segments: list[FileInfo]) -> None:
        self._segments = sorted((start_of(info), info) for info in segments if info.size)
        self._starts = [start for start, _ in self._segments]
        self._cache = FileCache(disk, 8)

    def segment_at(self, offset: int) -> tuple[FileInfo, int] | None:
        """The segment that holds this offset, and the position in it."""
        place = bisect_right(self._starts, offset) - 1
        if place < 0:
            return None
        start, info = self._segments[place]
        return (info, offset - start) if offset - start < info.size else None

    def record(self, offset: int, *, check_crc: bool = True) -> Record:
        """The record at this offset; CorruptRecordError says why there is none."""
        found = self.segment_at(offset) if offset >= 0 else None
        if found is None:
            raise CorruptRecordError("no segment holds this offset", offset=offset)
        info, position = found
        region = self._cache.get(info.path)
        if region is None:
            raise CorruptRecordError(f"{info.path} cannot be opened", offset=offset)
        with memoryview(region.buf) as view:
            layout = check(view, position, len(view), physical_offset=offset, check_crc=check_crc)
            return extract(view, position, layout)

    def close(self) -> None:
        self._cache.close()


# Walk over a segment -------------------------------------------------------------------------------------------------


class Damage(NamedTuple):
    """Bytes [start, end) of a segment that are no valid record. `tail`: nothing valid follows in this file."""

    start: int
    end: int
    reason: str
    tail: bool


@dataclass(slots=True)
class Walk:
    """What one pass over a segment found."""

    records: int = 0
    end: int = 0
    """Position behind the last valid record."""
    blank: bool = False
    """The file ends with a blank record, as it should when the log goes on in the next."""
    damage: list[Damage] = field(default_factory=list)
    dirty_at: int = -1
    """First byte behind the end that is not zero; -1 if there is none."""


Visit = Callable[[Columns], None]


def walk_segment(
    region: Region,
    start: int,
    visit: Visit | None = None,
    *,
    validity: Validity = TRUSTED,
    progress: Callable[[int], None] = lambda _position: None,
    position: int = 0,
    most: int | None = None,
) -> Walk:
    """Visit the valid records of a segment in batches of columns; behind damage it goes on at the next valid record.

    `most` ends the walk early. Columns die with the visit: they look into the map.
    """
    walk = Walk(end=position)
    ranges = region.data_ranges()
    with viewed(region) as view:
        while most is None or walk.records < most:
            batch = BATCH_RECORDS if most is None else min(BATCH_RECORDS, most - walk.records)
            found = scan(view, position, region.size, start, validity=validity, most=batch)
            walk.records += len(found.positions)
            if found.positions:
                walk.end = found.end
                if visit is not None:
                    visit(columns(view, np.array(found.positions, dtype=np.int64)))
            progress(found.end)
            position = found.end
            if found.stop in (Stop.LIMIT, Stop.BLANK):
                walk.blank = found.stop is Stop.BLANK
                break
            if found.stop is Stop.ENOUGH:
                continue
            following = _resync(view, position, region.size, start, ranges, validity)
            if following is None:
                walk.damage.append(Damage(position, region.size, found.reason, True))
                walk.dirty_at = first_nonzero(view, ranges, position)
                break
            walk.damage.append(Damage(position, following, found.reason, False))
            position = following
    return walk


def _resync(
    view: memoryview, position: int, size: int, start: int, ranges: list[tuple[int, int]], validity: Validity
) -> int | None:
    # Look nearby first: where every page is damaged, each search would otherwise read a megabyte.
    near = [(max(a, position), min(b, position + 16384)) for a, b in ranges if b > position and a < position + 16384]
    found = find_next_record(view, position, size, start, near, validity=validity)
    if found is None:
        found = find_next_record(view, position, size, start, ranges, validity=validity)
    return found if found is None or found > position else None


def first_nonzero(view: memoryview, ranges: list[tuple[int, int]], position: int) -> int:
    """Position of the first byte at or behind `position` that is not 0; -1 if all are."""
    data = np.frombuffer(view, dtype=np.uint8)
    for start, end in ranges:
        for at in range(max(start, position), end, 1 << 22):
            chunk = data[at : min(at + (1 << 22), end)]
            if chunk.any():
                return at + int(np.argmax(chunk != 0))
    return -1


# The shape of an index file ------------------------------------------------------------------------------------------
