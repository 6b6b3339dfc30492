"""Walking over the records of one log file: as positions that were checked, and as numpy columns.

`scan` is what recovery, verify and the reader of a log that was not written by us use. Its loop takes the common
record (version 1, IPv4) through a short path; whatever is not plainly good there is judged by `record.check`, which
alone decides. The two agree by a property test.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from brokerlab.storage.checksum import CRC_MASK, crc32
from brokerlab.storage.disk import Offsets
from brokerlab.storage.errors import CorruptRecordError
from brokerlab.storage.message import SysFlag, topic_problem
from brokerlab.storage.record import BLANK, FIXED_SIZE_V1, MAGIC_V1, MAGIC_V2, check, is_blank

_HOT = struct.Struct(">iiii4xqqi44xi")
"""total size, magic, crc, queue id, queue offset, physical offset, sys flag, body length of an IPv4 record."""
assert _HOT.size == FIXED_SIZE_V1 - 3
_I16 = struct.Struct(">h")
_HOSTS_V6 = SysFlag.BORN_HOST_V6 | SysFlag.STORE_HOST_V6

Bytes: TypeAlias = NDArray[np.uint8]


class Stop(Enum):
    """Why a scan ended."""

    LIMIT = "limit"  # everything up to the limit is good
    BLANK = "blank"  # the file ends here as it should; the log goes on in the next one
    BAD = "bad"  # what stands here is no valid record
    ENOUGH = "enough"  # as many records as were asked for


class Scan(NamedTuple):
    """Positions of good records, in order; where the scan ended and why."""

    positions: list[int]
    end: int
    stop: Stop
    reason: str = ""


class Validity(NamedTuple):
    """What makes a record valid: the strict rule, and the parts of it that can be left out."""

    crc: bool = True
    physical_offset: bool = True
    record_crc: bool = False


TRUSTED = Validity(crc=False)
"""Structure and place only: for bytes that were checked before, or that this process has just written."""


def scan(
    view: memoryview,
    position: int,
    limit: int,
    file_start: int,
    *,
    validity: Validity,
    most: int | None = None,
) -> Scan:
    """Check record after record from `position` until something ends it; nothing behind `limit` is read."""
    positions: list[int] = []
    add, unpack, short = positions.append, _HOT.unpack_from, _I16.unpack_from
    check_crc, check_place, record_crc = validity
    hot = not record_crc
    topics: set[bytes] = set()
    left = most if most is not None else -1
    while left and limit - position >= FIXED_SIZE_V1:
        left -= 1
        if hot:
            size, magic, crc, queue_id, queue_offset, physical, sys_flag, body_length = unpack(view, position)
            end, body_at = position + size, position + 88
            topic_at = body_at + body_length + 1
            if (
                magic == MAGIC_V1
                and (physical == position + file_start or not check_place)
                and not sys_flag & _HOSTS_V6
                and body_length >= 0
                and topic_at + 2 <= end <= limit
                and queue_id >= 0
                and queue_offset >= 0
            ):
                properties_at = topic_at + view[topic_at - 1] + 2
                topic = bytes(view[topic_at : properties_at - 2])
                if properties_at <= end and (topic in topics or _remember(topics, topic)):
                    (length,) = short(view, properties_at - 2)
                    if (
                        properties_at + length == end
                        # Text that spans at most two sectors has lost neither if it begins and ends with a byte.
                        and (not length or (0 < length <= 512 and view[properties_at] and view[end - 1]))
                        and (not check_crc or crc32(view[body_at : topic_at - 1]) & CRC_MASK == crc or not body_length)
                    ):
                        add(position)
                        position = end
                        continue
        if is_blank(view, position, limit):
            break
        try:
            found = check(
                view,
                position,
                limit,
                physical_offset=position + file_start if check_place else None,
                check_crc=check_crc,
                require_record_crc=record_crc,
            )
        except CorruptRecordError as error:
            return Scan(positions, position, Stop.BAD, error.reason)
        add(position)
        position += found.total_size
    if not left:
        return Scan(positions, position, Stop.ENOUGH)
    return _ending(view, position, limit, positions)


def _remember(topics: set[bytes], topic: bytes) -> bool:
    if len(topic) > 127 or topic_problem(topic):
        return False
    topics.add(topic)
    return True


def _ending(view: memoryview, position: int, limit: int, positions: list[int]) -> Scan:
    room = limit - position
    if room <= 0:
        return Scan(positions, position, Stop.LIMIT)
    if is_blank(view, position, limit):
        size = BLANK.unpack_from(view, position)[0]
        if size == room:
            return Scan(positions, position, Stop.BLANK)
        return Scan(positions, position, Stop.BAD, f"blank record says {size} bytes, {room} are left")
    return Scan(positions, position, Stop.BAD, f"{room} bytes left hold neither a record nor a blank")


def find_next_record(
    view: memoryview, position: int, limit: int, file_start: int, ranges: list[tuple[int, int]], *, validity: Validity
) -> int | None:
    """The first position at or behind `position` where a valid record says it belongs exactly there."""
    data = np.frombuffer(view, dtype=np.uint8)
    first = np.uint8((MAGIC_V1 >> 24) & 0xFF)
    chunk = 1 << 20
    for range_start, range_end in ranges:
        for start in range(max(range_start, position + 4), min(range_end, limit), chunk):
            # The last byte tells the versions apart, so candidates are found by the three bytes before it.
            end = min(start + chunk, limit - 3, range_end)
            for hit in (np.flatnonzero(data[start:end] == first) + start).tolist():
                magic = int.from_bytes(view[hit : hit + 4], "big", signed=True)
                if magic in (MAGIC_V1, MAGIC_V2) and _is_valid(view, hit - 4, limit, file_start, validity):
                    return int(hit - 4)
    return None


def _is_valid(view: memoryview, position: int, limit: int, file_start: int, validity: Validity) -> bool:
    try:
        check(view, position, limit, physical_offset=position + file_start, check_crc=validity.crc)
    except CorruptRecordError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Columns:
    """Fields of many records of one file, a row each. Starts are positions in `data`, the file's bytes."""

    data: Bytes
    positions: Offsets
    sizes: Offsets
    queue_ids: Offsets
    queue_offsets: Offsets
    physical_offsets: Offsets
    sys_flags: Offsets
    store_timestamps: Offsets
    body_starts: Offsets
    body_lengths: Offsets
    topic_starts: Offsets
    topic_lengths: Offsets
    properties_starts: Offsets
    properties_lengths: Offsets

    def __len__(self) -> int:
        return len(self.positions)


def columns(view: memoryview, positions: Offsets) -> Columns:
    """Gather the fields of the records at `positions`. Lengths are followed, not tested: they were checked before."""

    def at(places: Offsets, kind: str) -> Offsets:
        # An array that overlaps itself byte by byte: element i is the big-endian number at byte i.
        width = np.dtype(kind).itemsize
        numbers = np.ndarray((len(view) - width + 1,), dtype=kind, buffer=view, strides=(1,))
        return numbers[places].astype(np.int64)

    sys_flags = at(positions + 36, ">i4")
    magic = at(positions + 4, ">i4")
    topic_field = np.where(magic == MAGIC_V2, 2, 1)
    born_extra = np.where(sys_flags & SysFlag.BORN_HOST_V6, 12, 0)
    store_extra = np.where(sys_flags & SysFlag.STORE_HOST_V6, 12, 0)
    body_starts = positions + 88 + born_extra + store_extra
    body_lengths = at(body_starts - 4, ">i4")
    topic_starts = body_starts + body_lengths + topic_field
    topic_lengths = at(topic_starts - 1, ">u1")
    long_topics = topic_field == 2
    if long_topics.any():
        topic_lengths[long_topics] = at(topic_starts[long_topics] - 2, ">i2")
    properties_starts = topic_starts + topic_lengths + 2
    return Columns(
        data=np.frombuffer(view, dtype=np.uint8),
        positions=positions,
        sizes=at(positions, ">i4"),
        queue_ids=at(positions + 12, ">i4"),
        queue_offsets=at(positions + 20, ">i8"),
        physical_offsets=at(positions + 28, ">i8"),
        sys_flags=sys_flags,
        store_timestamps=at(positions + 56 + born_extra, ">i8"),
        body_starts=body_starts,
        body_lengths=body_lengths,
        topic_starts=topic_starts,
        topic_lengths=topic_lengths,
        properties_starts=properties_starts,
        properties_lengths=at(properties_starts - 2, ">i2"),
    )
