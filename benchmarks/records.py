"""A commit log for the CPU cases, written field by field from the format and not by the store under test.

`benchmarks.naive_dispatch.decode_record` reads what is written here. A file that has no room for
the next record and 8 bytes more ends with a blank: its size, then the blank magic.
"""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

from benchmarks.naive_dispatch import BLANK_MAGIC, MESSAGE_MAGIC_V1
from benchmarks.protocol import BenchMessage, LogFixture
from benchmarks.workload import QUEUES

TOPIC = "TopicBench"
TAGS = ("created", "paid", "packed", "sent")
FIRST_STORE_TIMESTAMP_MS = 1_700_000_000_000
RECORDS_PER_MS = 100
SEGMENT_BYTES = 32 << 20
MIN_BLANK_BYTES = 8
# RocketMQ's default: with fewer slots the random writes of the index would fit a cache that they do not fit in life.
INDEX_SLOTS = 5_000_000

_HOST = struct.pack(">4Bi", 127, 0, 0, 1, 10911)


def encode_record(
    message: BenchMessage, *, queue_offset: int, physical_offset: int, store_timestamp: int, tag: str, unique_key: str
) -> bytes:
    """One record, version 1, IPv4, with TAGS, KEYS and UNIQ_KEY."""
    topic = TOPIC.encode()
    properties = f"TAGS\x01{tag}\x02KEYS\x01{message.key}\x02UNIQ_KEY\x01{unique_key}\x02".encode()
    total_size = 91 + len(message.body) + len(topic) + len(properties)
    return b"".join(
        (
            struct.pack(">iIi", total_size, MESSAGE_MAGIC_V1, zlib.crc32(message.body) & 0x7FFFFFFF),
            struct.pack(">iiqqi", message.queue, 0, queue_offset, physical_offset, 0),
            struct.pack(">q", store_timestamp),
            _HOST,
            struct.pack(">q", store_timestamp),
            _HOST,
            struct.pack(">iq", 0, 0),
            struct.pack(">i", len(message.body)),
            message.body,
            struct.pack(">b", len(topic)),
            topic,
            struct.pack(">h", len(properties)),
            properties,
        )
    )


def encode_log(messages: Sequence[BenchMessage], records: int, *, segment_bytes: int = SEGMENT_BYTES) -> bytes:
    """A log of `records` records from physical offset 0; the messages are taken again from the first as needed."""
    parts: list[bytes] = []
    offset = 0
    for i in range(records):
        encode_at = functools.partial(
            encode_record,
            messages[i % len(messages)]._replace(queue=i % QUEUES, key=f"order-{i:08d}"),
            queue_offset=i // QUEUES,
            store_timestamp=FIRST_STORE_TIMESTAMP_MS + i // RECORDS_PER_MS,
            tag=TAGS[i % len(TAGS)],
            unique_key=f"7F000001A1B218B4AAC2{i:012X}",
        )
        record = encode_at(physical_offset=offset)
        room = segment_bytes - offset % segment_bytes
        if len(record) + MIN_BLANK_BYTES > room:
            parts.append(struct.pack(">iI", room, BLANK_MAGIC) + bytes(room - MIN_BLANK_BYTES))
            offset += room
            record = encode_at(physical_offset=offset)
        parts.append(record)
        offset += len(record)
    return b"".join(parts)


def write_log(folder: Path, messages: Sequence[BenchMessage], records: int) -> LogFixture:
    """Write the log to `folder / "commitlog"` as a broker would have left it."""
    data = encode_log(messages, records)
    commit_log = folder / "commitlog"
    commit_log.mkdir(parents=True)
    for start in range(0, len(data), SEGMENT_BYTES):
        segment = data[start : start + SEGMENT_BYTES]
        with (commit_log / f"{start:020d}").open("wb") as file:
            file.write(segment)
            file.truncate(SEGMENT_BYTES)
    return LogFixture(
        folder=folder,
        segment_bytes=SEGMENT_BYTES,
        data=data,
        records=records,
        queues=QUEUES,
        topic=TOPIC,
        index_slots=INDEX_SLOTS,
        index_entries=2 * records + 1,
    )
