"""The commit log record, big-endian. An append-only log of these, no padding, no alignment; the body has a checksum.

offset  size   field             meaning
0       4      total_size        whole record, this field included
4       4      magic             MAGIC_V1; MAGIC_V2: two-byte topic length; BLANK_MAGIC: the rest of the file is empty
8       4      body_crc          CRC-32 of the body, 31 bits
12      4      queue_id
16      4      flag              the application's own
20      8      queue_offset      logical index in the queue; 0 for prepared and rolled back records
28      8      physical_offset   where this record starts in the log
36      4      sys_flag          SysFlag bits; 0x10 and 0x20 say which hosts are IPv6
40      8      born_timestamp    ms
48      8/20   born_host         address and port
..      8      store_timestamp   ms
..      8/20   store_host
..      4      reconsume_times
..      8      prepared_transaction_offset
..      4+n    body
..      1+t    topic             v1: one signed byte of length; v2: two bytes
..      2+p    properties

After a power loss any 512-byte sector of a record that was not synced may be zeros. A lost sector is noticed: in the
header by a size, offset or length that does not fit, in the body by the CRC, in topic and properties by its zeros
(`topic_problem`, `_lost_sector`). What no rule here covers is bit rot outside the body; the whole-record CRC (5.2+)
covers that too.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from brokerlab.storage.checksum import CRC_MASK, crc32
from brokerlab.storage.errors import CorruptRecordError
from brokerlab.storage.message import SysFlag, decode_properties, encode_message_id, topic_problem

MAGIC_V1 = -626843481
MAGIC_V2 = -626843477
BLANK_MAGIC = -875286124

BLANK_SIZE_MIN = 8
"""A file must be able to end with a blank record: its length and the blank magic."""
FIXED_SIZE_V1 = 91
FIXED_SIZE_V2 = 92
_HOST_V6_EXTRA = 12
_SECTOR_SIZE = 512

BLANK = struct.Struct(">ii")
_HEAD = struct.Struct(">iiiiiqqiq")
_MIDDLE = struct.Struct(">iqi")
"""reconsume_times, prepared_transaction_offset, body length."""
_I64 = struct.Struct(">q")
_I16 = struct.Struct(">h")
assert _HEAD.size == 48
assert _HEAD.size + 8 + 8 + 8 + _MIDDLE.size + 1 + 2 == FIXED_SIZE_V1

CRC_PROPERTY = b"__CRC32#\x01"
CRC_PROPERTY_SIZE = 20
"""`__CRC32#` 0x01, ten digits, 0x02: always the last 20 bytes of a record that carries it."""


@lru_cache(maxsize=8192)
def record_struct(body: int, topic: int, properties: int, born_host: int, store_host: int) -> struct.Struct:
    """One Struct for a whole record with these lengths: packing it in one call is what makes an append cheap."""
    topic_format = "b" if topic <= 127 else "h"
    return struct.Struct(f">iiiiiqqiq{born_host}sq{store_host}siqi{body}s{topic_format}{topic}sh{properties}s")


def store_timestamp_offset(sys_flag: int) -> int:
    """Where STORETIMESTAMP stands in a record."""
    return 68 if sys_flag & SysFlag.BORN_HOST_V6 else 56


class Layout(NamedTuple):
    """Where the variable parts of a record stand, as positions in the buffer that was measured."""

    total_size: int
    magic: int
    crc: int
    queue_id: int
    flag: int
    queue_offset: int
    physical_offset: int
    sys_flag: int
    born_timestamp: int
    store_timestamp: int
    body_at: int
    body_length: int
    topic_at: int
    topic_length: int
    properties_at: int
    properties_length: int


class Record(NamedTuple):
    """A decoded record. `body` and `properties` are copies; `topic` is text."""

    total_size: int
    version: int
    body_crc: int
    queue_id: int
    flag: int
    queue_offset: int
    physical_offset: int
    sys_flag: int
    born_timestamp: int
    born_host: bytes
    store_timestamp: int
    store_host: bytes
    reconsume_times: int
    prepared_transaction_offset: int
    body: bytes
    topic: str
    properties: bytes

    @property
    def message_id(self) -> str:
        return encode_message_id(self.store_host, self.physical_offset)

    def properties_dict(self) -> dict[str, str]:
        return decode_properties(self.properties)


def is_blank(view: memoryview, position: int, limit: int) -> bool:
    """Does a blank record stand here?"""
    return limit - position >= BLANK_SIZE_MIN and BLANK.unpack_from(view, position)[1] == BLANK_MAGIC


def measure(view: memoryview, position: int, limit: int) -> Layout:
    """Follow the lengths of the record at `position`; nothing behind `limit` is read. Checks structure only."""
    room = limit - position
    if room < BLANK_SIZE_MIN:
        raise CorruptRecordError(f"only {max(room, 0)} bytes left", torn=True)
    total_size, magic = BLANK.unpack_from(view, position)
    if magic == MAGIC_V1:
        fixed, topic_field = FIXED_SIZE_V1, 1
    elif magic == MAGIC_V2:
        fixed, topic_field = FIXED_SIZE_V2, 2
    else:
        raise CorruptRecordError(f"magic {magic & 0xFFFFFFFF:08X} is not a record's")
    if total_size < fixed:
        raise CorruptRecordError(f"total size {total_size} is below the {fixed} bytes of an empty record")
    if total_size > room:
        raise CorruptRecordError(f"total size {total_size} exceeds the {room} bytes left", torn=True)

    _, _, crc, queue_id, flag, queue_offset, physical, sys_flag, born_timestamp = _HEAD.unpack_from(view, position)
    born_size = 20 if sys_flag & SysFlag.BORN_HOST_V6 else 8
    store_size = 20 if sys_flag & SysFlag.STORE_HOST_V6 else 8
    fixed += born_size + store_size - 16
    free = total_size - fixed
    body_at = position + fixed - topic_field - 2
    if free < 0:
        raise CorruptRecordError(f"total size {total_size} is below the {fixed} bytes of its fixed fields")
    (store_timestamp,) = _I64.unpack_from(view, position + 48 + born_size)
    (body_length,) = struct.unpack_from(">i", view, body_at - 4)
    if not 0 <= body_length <= free:
        raise CorruptRecordError(f"body length {body_length} does not fit a record of {total_size} bytes")
    topic_at = body_at + body_length + topic_field
    if topic_field == 1:
        (topic_length,) = struct.unpack_from("b", view, topic_at - 1)
    else:
        (topic_length,) = _I16.unpack_from(view, topic_at - 2)
    if not 0 <= topic_length <= free - body_length:
        raise CorruptRecordError(f"topic length {topic_length} does not fit a record of {total_size} bytes")
    properties_at = topic_at + topic_length + 2
    (properties_length,) = _I16.unpack_from(view, properties_at - 2)
    if properties_length != free - body_length - topic_length:
        raise CorruptRecordError(
            f"lengths add up to {total_size - free + body_length + topic_length + properties_length}, "
            f"total size says {total_size}"
        )
    return Layout(
        total_size, magic, crc, queue_id, flag, queue_offset, physical, sys_flag, born_timestamp, store_timestamp,
        body_at, body_length, topic_at, topic_length, properties_at, properties_length,
    )  # fmt: skip


def check(
    view: memoryview,
    position: int,
    limit: int,
    *,
    physical_offset: int | None = None,
    check_crc: bool = True,
    require_record_crc: bool = False,
) -> Layout:
    """Is the record at `position` whole and where it belongs? The one definition of a valid record.

    `physical_offset` is where this position lies in the log; None leaves the record's own word unchecked.
    `require_record_crc` asks for the whole-record CRC instead of the body's.
    """
    found = measure(view, position, limit)
    if physical_offset is not None and found.physical_offset != physical_offset:
        raise CorruptRecordError(f"record says it belongs at offset {found.physical_offset}, not {physical_offset}")
    if found.queue_id < 0 or found.queue_offset < 0:
        raise CorruptRecordError(f"queue {found.queue_id} or queue offset {found.queue_offset} is negative")
    problem = topic_problem(bytes(view[found.topic_at : found.topic_at + found.topic_length]))
    if problem:
        raise CorruptRecordError(f"topic {problem}")
    if _lost_sector(view, found.properties_at, position + found.total_size):
        raise CorruptRecordError("a whole sector of the properties is zeros")
    if found.properties_length and not view[position + found.total_size - 1]:
        # The last byte of text is never 0 (a put that ends so is refused): the copy of this record was broken off.
        raise CorruptRecordError("properties end with a zero byte", torn=True)
    if require_record_crc:
        _check_record_crc(view, position, found)
    elif check_crc:
        computed = crc32(view[found.body_at : found.body_at + found.body_length]) & CRC_MASK
        if found.body_length and computed != found.crc:
            raise CorruptRecordError(f"body CRC is {computed:08X}, record says {found.crc & 0xFFFFFFFF:08X}")
    return found


def _lost_sector(view: memoryview, start: int, end: int) -> bool:
    """Is the part of [start, end) that lies in any one 512-byte sector all zeros? Text never is."""
    edges = [start, *range(start - start % _SECTOR_SIZE + _SECTOR_SIZE, end, _SECTOR_SIZE), end]
    return start < end and any(not any(view[a:b]) for a, b in pairwise(edges))


def record_crc_property(record_without_it: bytes | memoryview) -> bytes:
    """The 20 bytes of the whole-record CRC over everything before them: digits least significant first."""
    digits = str(crc32(record_without_it) & CRC_MASK)[::-1].ljust(10, "0")
    return CRC_PROPERTY + digits.encode() + b"\x02"


def _check_record_crc(view: memoryview, position: int, found: Layout) -> None:
    end = position + found.total_size
    stored = bytes(view[end - CRC_PROPERTY_SIZE : end])
    if found.properties_length < CRC_PROPERTY_SIZE or not stored.startswith(CRC_PROPERTY):
        raise CorruptRecordError("record carries no whole-record CRC")
    if stored != record_crc_property(view[position : end - CRC_PROPERTY_SIZE]):
        raise CorruptRecordError("whole-record CRC does not match")


def decode_record(data: bytes | memoryview, position: int = 0, *, check_crc: bool = True) -> Record:
    """The record at `position` of these bytes. CorruptRecordError, and nothing else, if there is none."""
    view = memoryview(data)
    found = check(view, position, len(view), check_crc=check_crc)
    return extract(view, position, found)


def extract(view: memoryview, position: int, found: Layout) -> Record:
    """The fields of a record that `check` has measured."""
    born_end = position + (68 if found.sys_flag & SysFlag.BORN_HOST_V6 else 56)
    middle_at = found.body_at - _MIDDLE.size
    reconsume_times, prepared_offset, _ = _MIDDLE.unpack_from(view, middle_at)
    return Record(
        total_size=found.total_size,
        version=1 if found.magic == MAGIC_V1 else 2,
        body_crc=found.crc,
        queue_id=found.queue_id,
        flag=found.flag,
        queue_offset=found.queue_offset,
        physical_offset=found.physical_offset,
        sys_flag=found.sys_flag,
        born_timestamp=found.born_timestamp,
        born_host=bytes(view[position + 48 : born_end]),
        store_timestamp=found.store_timestamp,
        store_host=bytes(view[born_end + 8 : middle_at]),
        reconsume_times=reconsume_times,
        prepared_transaction_offset=prepared_offset,
        body=bytes(view[found.body_at : found.body_at + found.body_length]),
        topic=str(view[found.topic_at : found.topic_at + found.topic_length], "utf-8"),
        properties=bytes(view[found.properties_at : found.properties_at + found.properties_length]),
    )
