"""Walking over the records of one log file: as positions that were checked, and as numpy columns.

`scan` is what recovery, verify, and dispatch of what was not handed over use. It follows the sizes for a stretch of
records, then checks the whole stretch by columns; whatever is not plainly good there is judged by `record.check`, which
alone decides. The two agree by a property test.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from brokerlab.storage import checksum
from brokerlab.storage.checksum import CRC_MASK
from brokerlab.storage.disk import Offsets
from brokerlab.storage.errors import CorruptRecordError
from brokerlab.storage.message import SysFlag, topic_problem
from brokerlab.storage.record import BLANK, FIXED_SIZE_V1, MAGIC_V1, MAGIC_V2, check, is_blank

_SIZE = struct.Struct(">i")
_STRETCH_MAX = 1024
_STRETCH_MIN = 16
_STRETCH_BYTES = 1 << 20

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
    left = most if most is not None else 1 << 62
    stretch = _STRETCH_MIN if validity.record_crc else _STRETCH_MAX
    while left > 0:
        found, end = _chase(view, position, limit, min(stretch, left))
        good = 0
        if found and not validity.record_crc:
            begins = np.array(found, dtype=np.int64)
            expected = begins + file_start if validity.physical_offset else None
            good = plainly_good(view, begins, np.append(begins[1:], end), expected, check_crc=validity.crc)
        positions += found[:good]
        left -= good
        position = end if good == len(found) else found[good]
        if good and good == len(found):
            stretch = min(2 * stretch, _STRETCH_MAX)
            continue
        if left <= 0:
            break
        if limit - position < FIXED_SIZE_V1 or is_blank(view, position, limit):
            return _ending(view, position, limit, positions)
        try:
            judged = check(
                view,
                position,
                limit,
                physical_offset=position + file_start if validity.physical_offset else None,
                check_crc=validity.crc,
                require_record_crc=validity.record_crc,
            )
        except CorruptRecordError as error:
            return Scan(positions, position, Stop.BAD, error.reason)
        positions.append(position)
        left -= 1
        position += judged.total_size
        stretch = _STRETCH_MIN  # more of its kind may follow, and each would end a long stretch early
    return Scan(positions, position, Stop.ENOUGH)


def _chase(view: memoryview, position: int, limit: int, most: int) -> tuple[list[int], int]:
    """Follow the size fields: where up to `most` records would start, and where the last one would end."""
    positions: list[int] = []
    last_start = limit - FIXED_SIZE_V1
    if position > last_start:
        return positions, position
    unpack, add = _SIZE.unpack_from, positions.append
    (size,) = unpack(view, position)
    if size >= FIXED_SIZE_V1:
        # Messages of one kind have one size: look how many of it follow, without a step for each.
        ahead = min(most, (limit - position) // size)
        same = np.ndarray((ahead,), dtype=">i4", buffer=view, offset=position, strides=(size,)) == size
        run = ahead if same.all() else int(same.argmin())
        positions += range(position, position + run * size, size)
        position += run * size
    stop = position + _STRETCH_BYTES
    last_start = min(last_start, stop)
    while position <= last_start:
        (size,) = unpack(view, position)
        if size < FIXED_SIZE_V1:
            break
        add(position)
        position += size
    if position > limit or len(positions) > most:
        if position > limit:
            position = positions.pop()
        if len(positions) > most:
            position = positions[most]
            del positions[most:]
    return positions, position


def plainly_good(
    view: memoryview, begins: Offsets, ends: Offsets, physical_offsets: Offsets | None, *, check_crc: bool = True
) -> int:
    """How many of these records, from the first on, are good by rules that are quick to test for all at once.

    Nothing is known of them but that [begin, end) lies in the view and holds 91 bytes or more. A field that leads
    outside its record ends the count before anything is read through it.
    """
    numbers = _Numbers(view)
    sys_flags = numbers.at(begins + 36, ">i4")
    magic = numbers.at(begins + 4, ">i4")
    version_2 = magic == MAGIC_V2
    fixed = FIXED_SIZE_V1 + version_2 + _host_extra(sys_flags)
    good = (magic == MAGIC_V1) | version_2
    good &= ends - begins >= fixed
    good &= (numbers.at(begins + 12, ">i4") >= 0) & (numbers.at(begins + 20, ">i8") >= 0)
    good &= numbers.at(begins, ">i4") == ends - begins
    if physical_offsets is not None:
        good &= numbers.at(begins + 28, ">i8") == physical_offsets
    body_at = np.where(good, begins + fixed - 3 - version_2, begins + 88)
    body_length = numbers.at(body_at - 4, ">i4")
    good &= (body_length >= 0) & (body_length <= ends - begins - fixed)
    body_length[~good] = 0
    topic_at = body_at + body_length + 1 + version_2
    topic_length = numbers.at(topic_at - 1, ">u1")  # of version 2 the low byte: 255 is the most allowed
    properties_at = topic_at + topic_length + 2
    good &= (topic_length > 0) & (properties_at <= ends) & ((topic_length <= 127) | version_2)
    if version_2.any():
        good &= ~version_2 | (numbers.at(topic_at - 2, ">u1") == 0)
    properties_at[~good] = ends[~good]
    properties_length = numbers.at(properties_at - 2, ">i2")
    good &= properties_at + properties_length == ends
    # Text that spans at most two sectors has lost neither if it begins and ends with a byte.
    first, last = numbers.at(np.minimum(properties_at, ends - 1), ">u1"), numbers.at(ends - 1, ">u1")
    good &= (properties_length == 0) | ((properties_length <= 512) & (first != 0) & (last != 0))
    count = _count_leading(good)
    count = _topics_usable(view, topic_at[:count], topic_length[:count])
    if check_crc and count:
        starts = body_at[:count].tolist()
        stops = (body_at[:count] + body_length[:count]).tolist()
        computed = np.fromiter(map(checksum.crc32, map(view.__getitem__, map(slice, starts, stops))), np.int64, count)
        same = (computed & CRC_MASK) == numbers.at(begins[:count] + 8, ">i4")
        count = _count_leading(same | (body_length[:count] == 0))
    return count


def _count_leading(good: NDArray[np.bool_]) -> int:
    return len(good) if good.all() else int(good.argmin())


def _topics_usable(view: memoryview, starts: Offsets, lengths: Offsets) -> int:
    """How many of these topics, from the first on, can be topics. Each different one is looked at once."""
    if not len(starts):
        return 0
    topic = same_text(np.frombuffer(view, dtype=np.uint8), starts, lengths)
    if topic is not None:
        return 0 if topic_problem(topic) else len(starts)
    judged: dict[bytes, bool] = {}
    slices = map(slice, starts.tolist(), (starts + lengths).tolist())
    for number, topic in enumerate(map(bytes, map(view.__getitem__, slices))):
        usable = judged.get(topic)
        if usable is None:
            usable = judged[topic] = not topic_problem(topic)
        if not usable:
            return number
    return len(starts)


def same_text(data: Bytes, starts: Offsets, lengths: Offsets) -> bytes | None:
    """The one text that all these runs hold, or None if they differ."""
    length = int(lengths[0])
    if not (lengths == length).all():
        return None
    matrix = data[starts[:, None] + np.arange(length)]
    return matrix[0].tobytes() if (matrix == matrix[0]).all() else None


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
        check(
            view,
            position,
            limit,
            physical_offset=position + file_start,
            check_crc=validity.crc,
            require_record_crc=validity.record_crc,
        )
    except CorruptRecordError:
        return False
    return True


class _Numbers:
    """Big-endian numbers at any byte of a buffer, many at once."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def at(self, places: Offsets, kind: str) -> Offsets:
        # An array that overlaps itself byte by byte: element i is the number at byte i.
        width = np.dtype(kind).itemsize
        numbers = np.ndarray((len(self._view) - width + 1,), dtype=kind, buffer=self._view, strides=(1,))
        return numbers[places].astype(np.int64)


def _host_extra(sys_flags: Offsets) -> Offsets:
    """How much longer a record is for its IPv6 hosts."""
    return 12 * ((sys_flags & SysFlag.BORN_HOST_V6) >> 4) + 12 * ((sys_flags & SysFlag.STORE_HOST_V6) >> 5)


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

    at = _Numbers(view).at
    sys_flags = at(positions + 36, ">i4")
    magic = at(positions + 4, ">i4")
    topic_field = np.where(magic == MAGIC_V2, 2, 1)
    born_extra = np.where(sys_flags & SysFlag.BORN_HOST_V6, 12, 0)
    body_starts = positions + 88 + _host_extra(sys_flags)
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
