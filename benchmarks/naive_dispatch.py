"""Dispatch as a textbook would write it: the reference for bytes, and the yardstick for speed.

For each record of a commit log: decode every field one by one, parse the properties into a dict, write one consume
queue entry, put the unique key and each word of KEYS into an index file. No cache, no numpy, no short cut. The layouts
are RocketMQ's; all numbers are big-endian.

consume queue entry, 20 bytes        index entry, 20 bytes            index header, 40 bytes
0   8  physical offset               0   4  key hash                  0   8  begin timestamp
8   4  record size                   4   8  physical offset           8   8  end timestamp
12  8  tags code                     12  4  seconds since begin       16  8  begin physical offset
                                     16  4  previous entry            24  8  end physical offset
                                                                      32  4  used slots
                                                                      36  4  index count, 1 when empty

What is left out, because it is off by default: multi-dispatch, inner batches, consume queue extension files.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, MutableMapping
from typing import NamedTuple

MESSAGE_MAGIC_V1 = 0xDAA320A7
MESSAGE_MAGIC_V2 = 0xDAA320AB
BLANK_MAGIC = 0xCBD43194

QUEUE_ENTRY_SIZE = 20
INDEX_HEADER_SIZE = 40
INDEX_SLOT_SIZE = 4
INDEX_ENTRY_SIZE = 20

BORN_HOST_IPV6 = 0x10
STORE_HOST_IPV6 = 0x20
TRANSACTION_MASK = 0xC
TRANSACTION_PREPARED = 0x4
TRANSACTION_ROLLBACK = 0xC

SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
DELAY_SECONDS = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)

# Compiled once: looking the format up in each call would slow the loop by a third and teach nothing.
_BYTE = struct.Struct(">b").unpack_from
_SHORT = struct.Struct(">h").unpack_from
_INT = struct.Struct(">i").unpack_from
_UNSIGNED = struct.Struct(">I").unpack_from
_LONG = struct.Struct(">q").unpack_from
_SIZE_AND_MAGIC = struct.Struct(">iI").unpack_from
_QUEUE_ENTRY = struct.Struct(">qiq")
_INDEX_HEADER = struct.Struct(">qqqqii")
_INDEX_SLOT = struct.Struct(">i")
_INDEX_ENTRY = struct.Struct(">iqii")
assert _QUEUE_ENTRY.size == QUEUE_ENTRY_SIZE
assert _INDEX_HEADER.size == INDEX_HEADER_SIZE
assert _INDEX_SLOT.size == INDEX_SLOT_SIZE
assert _INDEX_ENTRY.size == INDEX_ENTRY_SIZE

QueueBuffers = MutableMapping[tuple[str, int], bytearray]


class Record(NamedTuple):
    """All fields of one record, as stored."""

    total_size: int
    magic: int
    body_crc: int
    queue_id: int
    flag: int
    queue_offset: int
    physical_offset: int
    sys_flag: int
    born_timestamp: int
    born_host: bytes
    born_port: int
    store_timestamp: int
    store_host: bytes
    store_port: int
    reconsume_times: int
    prepared_transaction_offset: int
    body: bytes
    topic: str
    properties: dict[str, str]


def naive_dispatch(
    log: memoryview, start: int, end: int, queues: QueueBuffers, index: bytearray, slots: int, entries: int
) -> int:
    """Dispatch the records of `log[start:end]` and return how many there were.

    `start` is the start of a record, `end` the end of one or of a blank. A queue that is missing in `queues` is added;
    a buffer that is too short is extended with zeros up to the entry. `index` is one index file of this many slots and
    entries; BufferError when it is full, ValueError or struct.error for bytes that are no record.
    """
    if len(index) < index_file_size(slots, entries):
        raise ValueError(f"index buffer: {len(index)} bytes, must be {index_file_size(slots, entries)}")
    position = start
    dispatched = 0
    while position < end:
        total_size, magic = _SIZE_AND_MAGIC(log, position)
        if total_size <= 0 or position + total_size > end:
            raise ValueError(f"record at {position}: size {total_size}, {end - position} bytes left")
        if magic != BLANK_MAGIC:
            record = decode_record(log, position)
            put_queue_entry(record, queues)
            put_index_keys(record, index, slots, entries)
            dispatched += 1
        position += total_size
    return dispatched


def index_file_size(slots: int, entries: int) -> int:
    """Bytes of an index file."""
    return INDEX_HEADER_SIZE + INDEX_SLOT_SIZE * slots + INDEX_ENTRY_SIZE * entries


def new_index_file(slots: int, entries: int) -> bytearray:
    """An empty index file whose pages are already there, so that a clock does not see the kernel deliver them."""
    index = bytearray(index_file_size(slots, entries))
    for position in range(0, len(index), 4096):
        index[position] = 0
    return index


def decode_record(log: memoryview, position: int) -> Record:
    """Every field of the record at `position`, one after the other."""
    at = position
    (total_size,) = _INT(log, at)
    at += 4
    (magic,) = _UNSIGNED(log, at)
    at += 4
    if magic not in (MESSAGE_MAGIC_V1, MESSAGE_MAGIC_V2):
        raise ValueError(f"record at {position}: magic {magic:08X} is not that of a message")
    (body_crc,) = _INT(log, at)
    at += 4
    (queue_id,) = _INT(log, at)
    at += 4
    (flag,) = _INT(log, at)
    at += 4
    (queue_offset,) = _LONG(log, at)
    at += 8
    (physical_offset,) = _LONG(log, at)
    at += 8
    (sys_flag,) = _INT(log, at)
    at += 4
    (born_timestamp,) = _LONG(log, at)
    at += 8
    address_size = 16 if sys_flag & BORN_HOST_IPV6 else 4
    born_host = bytes(log[at : at + address_size])
    at += address_size
    (born_port,) = _INT(log, at)
    at += 4
    (store_timestamp,) = _LONG(log, at)
    at += 8
    address_size = 16 if sys_flag & STORE_HOST_IPV6 else 4
    store_host = bytes(log[at : at + address_size])
    at += address_size
    (store_port,) = _INT(log, at)
    at += 4
    (reconsume_times,) = _INT(log, at)
    at += 4
    (prepared_transaction_offset,) = _LONG(log, at)
    at += 8
    (body_length,) = _INT(log, at)
    at += 4
    body = bytes(log[at : at + body_length])
    at += body_length
    # Version 2 exists only for its longer topic length.
    (topic_length,) = (_BYTE if magic == MESSAGE_MAGIC_V1 else _SHORT)(log, at)
    at += 1 if magic == MESSAGE_MAGIC_V1 else 2
    topic = bytes(log[at : at + topic_length]).decode()
    at += topic_length
    (properties_length,) = _SHORT(log, at)
    at += 2
    properties = parse_properties(bytes(log[at : at + properties_length]).decode())
    at += properties_length
    if at != position + total_size:
        raise ValueError(f"record at {position}: fields take {at - position} bytes, its size is {total_size}")
    return Record(
        total_size,
        magic,
        body_crc,
        queue_id,
        flag,
        queue_offset,
        physical_offset,
        sys_flag,
        born_timestamp,
        born_host,
        born_port,
        store_timestamp,
        store_host,
        store_port,
        reconsume_times,
        prepared_transaction_offset,
        body,
        topic,
        properties,
    )


def parse_properties(text: str) -> dict[str, str]:
    """`name 0x01 value 0x02 ...`, with or without the last separator. Empty names and values are dropped."""
    properties = {}
    for item in text.split("\x02"):
        name, _, value = item.partition("\x01")
        if name and value:
            properties[name] = value
    return properties


def java_string_hash(text: str) -> int:
    """Java's String.hashCode: over UTF-16 code units, modulo 2^32, read as a signed number."""
    units: Iterable[int]
    if text.isascii():
        units = text.encode()
    else:
        utf_16 = text.encode("utf-16-be", "surrogatepass")
        units = struct.unpack(f">{len(utf_16) // 2}H", utf_16)
    hashed = 0
    for unit in units:
        hashed = (31 * hashed + unit) & 0xFFFFFFFF
    return hashed - (1 << 32) if hashed & 0x80000000 else hashed


def tags_code(record: Record) -> int:
    """What a consumer filters by; for a delayed message the time it is due."""
    delay = record.properties.get("DELAY")
    if record.topic == SCHEDULE_TOPIC and delay is not None and int(delay) > 0:
        level = min(int(delay), len(DELAY_SECONDS))
        return record.store_timestamp + DELAY_SECONDS[level - 1] * 1000
    return java_string_hash(record.properties.get("TAGS", ""))


def put_queue_entry(record: Record, queues: QueueBuffers) -> None:
    """Write the entry at its place. A prepared or rolled back message is not for consumers."""
    if record.sys_flag & TRANSACTION_MASK in (TRANSACTION_PREPARED, TRANSACTION_ROLLBACK):
        return
    queue = queues.setdefault((record.topic, record.queue_id), bytearray())
    position = QUEUE_ENTRY_SIZE * record.queue_offset
    missing = position + QUEUE_ENTRY_SIZE - len(queue)
    if missing > 0:
        queue.extend(bytes(missing))
    _QUEUE_ENTRY.pack_into(queue, position, record.physical_offset, record.total_size, tags_code(record))


def put_index_keys(record: Record, index: bytearray, slots: int, entries: int) -> None:
    """The unique key first, then each word of KEYS."""
    (end_physical_offset,) = _LONG(index, 24)
    if record.physical_offset < end_physical_offset:
        return  # indexed before
    if record.sys_flag & TRANSACTION_MASK == TRANSACTION_ROLLBACK:
        return
    unique_key = record.properties.get("UNIQ_KEY")
    if unique_key is not None:
        put_index_key(f"{record.topic}#{unique_key}", record, index, slots, entries)
    for key in record.properties.get("KEYS", "").split(" "):
        if key:
            put_index_key(f"{record.topic}#{key}", record, index, slots, entries)


def put_index_key(key: str, record: Record, index: bytearray, slots: int, entries: int) -> None:
    """Hang a new entry in front of the chain of its slot."""
    begin_time, _, begin_offset, _, used_slots, count = _INDEX_HEADER.unpack_from(index, 0)
    if count <= 0:
        count = 1  # entry 0 is never used: a slot of 0 means empty
    if count >= entries:
        raise BufferError(f"the index file is full: {entries} entries")

    key_hash = index_hash(key)
    slot_position = INDEX_HEADER_SIZE + INDEX_SLOT_SIZE * (key_hash % slots)
    (previous,) = _INDEX_SLOT.unpack_from(index, slot_position)
    if previous <= 0 or previous > count:
        previous = 0
    seconds = 0
    if begin_time > 0:
        # Java divides towards zero; a negative difference becomes 0 anyway.
        seconds = min(max((record.store_timestamp - begin_time) // 1000, 0), 0x7FFFFFFF)

    entry_position = INDEX_HEADER_SIZE + INDEX_SLOT_SIZE * slots + INDEX_ENTRY_SIZE * count
    _INDEX_ENTRY.pack_into(index, entry_position, key_hash, record.physical_offset, seconds, previous)
    _INDEX_SLOT.pack_into(index, slot_position, count)

    if count == 1:
        begin_time, begin_offset = record.store_timestamp, record.physical_offset
    if previous == 0:
        used_slots += 1
    end_time, end_offset = record.store_timestamp, record.physical_offset
    _INDEX_HEADER.pack_into(index, 0, begin_time, end_time, begin_offset, end_offset, used_slots, count + 1)


def index_hash(key: str) -> int:
    """The absolute value of the hash; the one that has none in 32 bits becomes 0."""
    hashed = abs(java_string_hash(key))
    return 0 if hashed == 1 << 31 else hashed
