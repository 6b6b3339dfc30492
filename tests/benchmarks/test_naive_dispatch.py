"""The reference dispatch against numbers worked out by hand from RocketMQ's format."""

from __future__ import annotations

import struct

import pytest

from benchmarks.naive_dispatch import (
    QueueBuffers,
    decode_record,
    index_file_size,
    index_hash,
    java_string_hash,
    naive_dispatch,
    new_index_file,
    parse_properties,
)
from benchmarks.records import TOPIC, encode_log
from benchmarks.workload import QUEUES, make_messages

# Queue 3, queue offset 7, physical offset 0, body hello, topic TopicTest, TAGS=TagA, KEYS=k1.
VECTOR = bytes.fromhex(
    "0000007B DAA320A7 3610A686 00000003 00000000 0000000000000007 0000000000000000 00000000"
    "0000018BCFE56800 C0A8010A0000D431 0000018BCFE5687B C0A8011400002A9F 00000000 0000000000000000"
    "00000005 68656C6C6F 09 546F70696354657374 0012 544147530154616741024B455953016B3102"
)
STORED_AT = 1_700_000_000_123
SLOTS = 10
ENTRIES = 8


def with_fields(
    *, physical_offset: int = 0, queue_offset: int = 7, sys_flag: int = 0, stored_at: int = STORED_AT
) -> bytes:
    record = bytearray(VECTOR)
    struct.pack_into(">qqi", record, 20, queue_offset, physical_offset, sys_flag)
    struct.pack_into(">q", record, 56, stored_at)
    return bytes(record)


def dispatch(log: bytes, *, slots: int = SLOTS, entries: int = ENTRIES) -> tuple[int, QueueBuffers, bytearray]:
    queues: QueueBuffers = {}
    index = new_index_file(slots, entries)
    done = naive_dispatch(memoryview(log), 0, len(log), queues, index, slots, entries)
    return done, queues, index


def header(index: bytearray) -> tuple[int, ...]:
    return struct.unpack_from(">qqqqii", index, 0)


def entry(index: bytearray, number: int) -> tuple[int, ...]:
    return struct.unpack_from(">iqii", index, 40 + 4 * SLOTS + 20 * number)


def test_every_field_of_the_test_vector_is_decoded() -> None:
    record = decode_record(memoryview(VECTOR), 0)

    assert (record.total_size, record.queue_id, record.queue_offset, record.physical_offset) == (123, 3, 7, 0)
    assert (record.born_timestamp, record.store_timestamp) == (1_700_000_000_000, STORED_AT)
    assert (record.born_host, record.born_port) == (bytes([192, 168, 1, 10]), 54321)
    assert (record.store_host, record.store_port) == (bytes([192, 168, 1, 20]), 10911)
    assert (record.body, record.body_crc, record.topic) == (b"hello", 0x3610A686, "TopicTest")
    assert record.properties == {"TAGS": "TagA", "KEYS": "k1"}


def test_the_queue_entry_of_the_test_vector() -> None:
    done, queues, _ = dispatch(VECTOR)

    assert done == 1
    assert list(queues) == [("TopicTest", 3)]
    queue = queues["TopicTest", 3]
    assert queue[: 20 * 7] == bytes(20 * 7)
    assert queue[20 * 7 :] == bytes.fromhex("0000000000000000 0000007B 000000000027A807")


def test_the_index_entry_of_the_test_vector() -> None:
    _, _, index = dispatch(VECTOR)

    assert index_hash("TopicTest#k1") == 2746024
    assert header(index) == (STORED_AT, STORED_AT, 0, 0, 1, 2)
    assert struct.unpack_from(">i", index, 40 + 4 * (2746024 % SLOTS)) == (1,)
    assert entry(index, 1) == (2746024, 0, 0, 0)
    assert len(index) == index_file_size(SLOTS, ENTRIES) == 40 + 4 * SLOTS + 20 * ENTRIES


def test_entries_of_one_slot_form_a_chain_with_seconds_since_the_first() -> None:
    second = with_fields(physical_offset=123, queue_offset=8, stored_at=STORED_AT + 2_999)

    _, _, index = dispatch(VECTOR + second)

    assert entry(index, 2) == (2746024, 123, 2, 1)
    assert header(index) == (STORED_AT, STORED_AT + 2_999, 0, 123, 1, 3)


def test_a_blank_is_skipped() -> None:
    blank = struct.pack(">iI", 100, 0xCBD43194) + bytes(92)
    after = with_fields(physical_offset=223, queue_offset=8)

    done, queues, _ = dispatch(VECTOR + blank + after)

    assert done == 2
    assert struct.unpack_from(">qi", queues["TopicTest", 3], 20 * 8) == (223, 123)


def test_a_prepared_message_is_indexed_but_not_queued() -> None:
    _, queues, index = dispatch(with_fields(sys_flag=0x4))

    assert queues == {}
    assert header(index)[5] == 2


def test_a_rolled_back_message_is_neither_queued_nor_indexed() -> None:
    _, queues, index = dispatch(with_fields(sys_flag=0xC))

    assert queues == {}
    assert index == bytes(index_file_size(SLOTS, ENTRIES))


def test_a_record_before_the_end_of_the_index_is_not_indexed_again() -> None:
    second = with_fields(physical_offset=123, queue_offset=8)
    _, queues, index = dispatch(VECTOR + second)
    before = bytes(index)

    naive_dispatch(memoryview(VECTOR), 0, len(VECTOR), queues, index, SLOTS, ENTRIES)

    assert index == before


def test_a_full_index_is_told() -> None:
    with pytest.raises(BufferError, match="full"):
        dispatch(VECTOR, entries=1)


def test_bytes_that_are_no_record_are_told() -> None:
    with pytest.raises(ValueError, match="magic"):
        dispatch(VECTOR[:4] + b"oops" + VECTOR[8:])
    with pytest.raises(ValueError, match="size 123, 122 bytes left"):
        dispatch(VECTOR[:-1])
    with pytest.raises(ValueError, match="size 0"):
        dispatch(bytes(64))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", 0), ("TagA", 2598919), ("refund", -934813832), ("é", 233), ("😀", 0xD83D * 31 + 0xDE00)],
)
def test_java_string_hash(text: str, expected: int) -> None:
    assert java_string_hash(text) == expected


def test_the_hash_without_an_absolute_value_becomes_zero() -> None:
    assert java_string_hash("polygenelubricants") == -(2**31)
    assert index_hash("polygenelubricants") == 0


def test_properties_are_read_with_and_without_the_last_separator() -> None:
    assert parse_properties("a\x011\x02b\x012\x02") == {"a": "1", "b": "2"}
    assert parse_properties("a\x011\x02b\x012") == {"a": "1", "b": "2"}
    assert parse_properties("a\x01\x02\x011\x02x\x02b\x012") == {"b": "2"}
    assert parse_properties("") == {}


def test_a_log_made_for_the_benchmark_is_dispatched_completely() -> None:
    records = 100
    log = encode_log(make_messages(10, seed=1), records, segment_bytes=16 << 10)

    done, queues, index = dispatch(log, slots=1000, entries=2 * records + 1)

    assert done == records
    assert sorted(queues) == [(TOPIC, queue) for queue in range(QUEUES)]
    assert sum(map(len, queues.values())) == 20 * records
    for queue in queues.values():
        for offset, size, _ in struct.iter_unpack(">qiq", queue):
            record = decode_record(memoryview(log), offset)
            assert (record.physical_offset, record.total_size) == (offset, size)
            # A record never spans two files and leaves room for a blank.
            assert offset % (16 << 10) + size + 8 <= 16 << 10
    assert header(index)[5] == 2 * records + 1
