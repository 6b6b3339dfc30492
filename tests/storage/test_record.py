"""The commit log record: golden bytes both ways, and what of it is protected against which damage."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from brokerlab.storage.commit_log import CommitLog
from brokerlab.storage.config import StoreConfig
from brokerlab.storage.consume_queue import encode_units
from brokerlab.storage.errors import CorruptRecordError
from brokerlab.storage.java_hash import index_hash, tag_hash
from brokerlab.storage.message import Message, SysFlag, encode_properties, pack_host
from brokerlab.storage.real_disk import RealDisk
from brokerlab.storage.record import (
    BLANK_MAGIC,
    MAGIC_V1,
    MAGIC_V2,
    Record,
    check,
    decode_record,
    is_blank,
    measure,
    record_crc_property,
    store_timestamp_offset,
)
from tests.storage.strategies import FILE_SIZE, NOW, a_message, encoded, layout_of, long_retry_topics, messages

VECTOR = bytes.fromhex(
    "0000007B DAA320A7 3610A686 00000003 00000000 0000000000000007 0000000000000000 00000000"
    "0000018BCFE56800 C0A8010A0000D431 0000018BCFE5687B C0A8011400002A9F 00000000 0000000000000000"
    "00000005 68656C6C6F 09 546F70696354657374 0012 544147530154616741024B455953016B3102"
)
VECTOR_MESSAGE = Message(
    topic="TopicTest",
    body=b"hello",
    properties=encode_properties({"TAGS": "TagA", "KEYS": "k1"}),
    queue_id=3,
    born_timestamp=1_700_000_000_000,
    born_host=pack_host("192.168.1.10", 54321),
    store_host=pack_host("192.168.1.20", 10911),
)
GOLDEN = Path(__file__).parents[1] / "golden/rocketmq-4.x/commitlog/00000000000000000000"

WITH_RECORD_CRC = StoreConfig(
    mapped_file_size_commit_log=FILE_SIZE, enabled_append_prop_crc=True, force_verify_prop_crc=True
)

any_message = st.one_of(messages(), messages(topic=long_retry_topics))


def rejected(record: bytes | bytearray, *, require_record_crc: bool = False) -> bool:
    """Is this, at the beginning of a log, not a record?"""
    view = memoryview(bytes(record))
    try:
        check(view, 0, len(view), physical_offset=0, require_record_crc=require_record_crc)
    except CorruptRecordError:
        return True
    return False


def flipped(record: bytes, place: int, bits: int) -> bytes:
    changed = bytearray(record)
    changed[place] ^= bits
    return bytes(changed)


# Golden bytes


def test_the_test_vector_is_written_byte_for_byte() -> None:
    assert encoded(VECTOR_MESSAGE, queue_offset=7).hex() == VECTOR.hex()


def test_the_test_vector_is_read_field_by_field() -> None:
    assert decode_record(VECTOR) == Record(
        total_size=123,
        version=1,
        body_crc=0x3610A686,
        queue_id=3,
        flag=0,
        queue_offset=7,
        physical_offset=0,
        sys_flag=0,
        born_timestamp=1_700_000_000_000,
        born_host=bytes([192, 168, 1, 10, 0, 0, 0xD4, 0x31]),
        store_timestamp=1_700_000_000_123,
        store_host=bytes([192, 168, 1, 20, 0, 0, 0x2A, 0x9F]),
        reconsume_times=0,
        prepared_transaction_offset=0,
        body=b"hello",
        topic="TopicTest",
        properties=b"TAGS\x01TagA\x02KEYS\x01k1\x02",
    )


def test_what_follows_from_the_test_vector() -> None:
    record = decode_record(VECTOR)

    assert record.message_id == "C0A8011400002A9F0000000000000000"
    assert record.properties_dict() == {"TAGS": "TagA", "KEYS": "k1"}
    unit = encode_units(*(np.array([value]) for value in (0, record.total_size, tag_hash("TagA"))))
    assert unit == bytes.fromhex("0000000000000000 0000007B 000000000027A807")
    assert index_hash("TopicTest", "k1") == 2746024


def test_a_segment_of_the_original_is_read_record_by_record() -> None:
    data = GOLDEN.read_bytes()
    records = [decode_record(data, 172 * number) for number in range(47)]

    assert [record.physical_offset for record in records] == [172 * number for number in range(47)]
    assert [record.queue_offset for record in records] == list(range(47))
    assert {record.topic for record in records} == {"abc"}
    assert {record.body for record in records} == {b"Once, there was a chance for me!"}
    assert records[0].properties_dict() == {"0": "imagoodperson0", "KEYS": "1551613204833", "TAGS": "TAG1"}
    assert is_blank(memoryview(data), 172 * 47, len(data))


def test_a_segment_of_the_original_is_written_again_byte_for_byte(tmp_path: Path) -> None:
    data = GOLDEN.read_bytes()
    log = CommitLog(RealDisk(), str(tmp_path), StoreConfig(mapped_file_size_commit_log=8192), pool=None)

    for number in range(48):  # the 48th does not fit: it ends the file with a blank
        old = decode_record(data, 172 * min(number, 46))
        message = Message(
            topic=old.topic,
            body=old.body,
            properties=old.properties,
            born_timestamp=old.born_timestamp,
            born_host=old.born_host,
            store_host=old.store_host,
        )
        log.append(message, old.store_timestamp)

    assert bytes(log.files.files[0].view) == data
    log.files.close(0)


# Decode after encode


@settings(deadline=None)
@given(any_message)
def test_a_record_comes_back(message: Message) -> None:
    record = decode_record(encoded(message, queue_offset=5))

    hosts_flag = SysFlag.BORN_HOST_V6 * (len(message.born_host) == 20) | SysFlag.STORE_HOST_V6 * (
        len(message.store_host) == 20
    )
    counted = not message.sys_flag & SysFlag.TRANSACTION_PREPARED
    assert record == Record(
        total_size=layout_of(encoded(message)).total_size,
        version=1 if len(message.topic.encode()) <= 127 else 2,
        body_crc=record.body_crc,
        queue_id=message.queue_id,
        flag=message.flag,
        queue_offset=5 if counted else 0,
        physical_offset=0,
        sys_flag=message.sys_flag | hosts_flag,
        born_timestamp=message.born_timestamp,
        born_host=message.born_host,
        store_timestamp=NOW,
        store_host=message.store_host,
        reconsume_times=message.reconsume_times,
        prepared_transaction_offset=message.prepared_transaction_offset,
        body=message.body,
        topic=message.topic,
        properties=message.properties,
    )


@settings(deadline=None)
@given(any_message)
def test_the_fixed_part_has_the_size_of_its_version_and_hosts(message: Message) -> None:
    record = encoded(message)
    topic = len(message.topic.encode())

    fixed = (91 if topic <= 127 else 92) + len(message.born_host) + len(message.store_host) - 16
    assert len(record) == fixed + topic + len(message.body) + len(message.properties)
    assert struct.unpack_from(">i", record, 4)[0] == (MAGIC_V1 if topic <= 127 else MAGIC_V2)
    (stored,) = struct.unpack_from(">q", record, store_timestamp_offset(decode_record(record).sys_flag))
    assert stored == NOW


# Damage


@settings(deadline=None)
@given(any_message)
def test_every_prefix_of_a_record_is_torn(message: Message) -> None:
    record = encoded(message)

    for length in range(len(record)):
        with pytest.raises(CorruptRecordError) as caught:
            decode_record(record[:length])
        assert caught.value.torn


@settings(deadline=None)
@given(any_message, st.integers(1, 255))
def test_a_flipped_byte_of_what_is_protected_is_rejected(message: Message, bits: int) -> None:
    """Protected: total size, magic, physical offset and the three lengths, by the structure; CRC and body, by the CRC.

    Queue, flag, queue offset, sys flag, times, hosts, topic and properties are not: see the next test.
    """
    record = encoded(message)
    found = layout_of(record)
    topic_field = 1 if found.magic == MAGIC_V1 else 2
    places = [*range(8), *range(28, 36), *range(found.topic_at - topic_field, found.topic_at)]
    places += [found.properties_at - 2, found.properties_at - 1]
    if message.body:
        places += [*range(8, 12), *range(found.body_at, found.body_at + found.body_length)]

    assert [place for place in places if not rejected(flipped(record, place, bits))] == []


@settings(deadline=None)
@given(any_message, st.integers(0, 3), st.integers(1, 255))
def test_another_body_length_is_rejected(message: Message, byte: int, bits: int) -> None:
    """Unless it is 0: an empty body has no CRC, in the original neither, and then only the structure speaks."""
    record = encoded(message)
    changed = flipped(record, layout_of(record).body_at - 4 + byte, bits)
    (length,) = struct.unpack_from(">i", changed, layout_of(record).body_at - 4)

    assert length == 0 or rejected(changed)


@pytest.mark.parametrize("place", [16, 40, 48, 56, 64, 72, 76])
def test_bit_rot_outside_the_body_is_not_noticed_without_the_record_crc(place: int) -> None:
    assert not rejected(flipped(encoded(VECTOR_MESSAGE), place, 1))


@settings(deadline=None)
@given(any_message, st.integers(1, 255))
def test_with_the_record_crc_any_flipped_byte_is_rejected(message: Message, bits: int) -> None:
    record = encoded(message, config=WITH_RECORD_CRC)

    assert not rejected(record, require_record_crc=True)
    places = range(len(record))
    assert [place for place in places if not rejected(flipped(record, place, bits), require_record_crc=True)] == []


def test_the_record_crc_is_written_with_its_digits_reversed() -> None:
    record = encoded(VECTOR_MESSAGE, config=WITH_RECORD_CRC)

    covered, said = record[:-20], record[-20:]
    assert said.startswith(b"__CRC32#\x01")
    assert said.endswith(b"\x02")
    assert int(said[9:19][::-1]) == zlib.crc32(covered) & 0x7FFFFFFF
    assert said == record_crc_property(covered)


def test_a_record_without_the_record_crc_is_rejected_where_it_is_asked_for() -> None:
    assert rejected(encoded(VECTOR_MESSAGE), require_record_crc=True)
    assert not rejected(encoded(VECTOR_MESSAGE))


def test_the_record_crc_gets_a_separator_where_the_properties_lack_one() -> None:
    for properties, expected in ((b"a\x011", b"a\x011\x02"), (b"a\x011\x02", b"a\x011\x02"), (b"", b"")):
        record = decode_record(encoded(a_message(properties=properties), config=WITH_RECORD_CRC))

        assert record.properties[:-20] == expected


def test_a_record_that_belongs_elsewhere_is_rejected() -> None:
    view = memoryview(VECTOR)

    with pytest.raises(CorruptRecordError, match="belongs at offset 0, not 123"):
        check(view, 0, len(view), physical_offset=123)
    assert check(view, 0, len(view)).physical_offset == 0


@pytest.mark.parametrize("start", [0, 512, 1000])
@pytest.mark.parametrize("sector", [1, 2, 3])
def test_a_lost_sector_is_noticed_wherever_it_lies(sector: int, start: int) -> None:
    """Zeros in the body fail the CRC, zeros in topic or properties are no text."""
    properties = encode_properties({"a": "x" * 900})
    record = encoded(a_message(body=b"b" * 900, properties=properties))
    placed = bytearray(start) + record
    first = (start // 512 + sector) * 512
    placed[first : first + 512] = bytes(len(placed[first : first + 512]))
    view = memoryview(bytes(placed))

    with pytest.raises(CorruptRecordError):
        check(view, start, len(view))


@pytest.mark.parametrize(("place", "kind"), [(12, ">i"), (20, ">q")])
def test_a_negative_queue_or_queue_offset_is_rejected(place: int, kind: str) -> None:
    record = bytearray(VECTOR)
    struct.pack_into(kind, record, place, -1)

    with pytest.raises(CorruptRecordError, match="negative"):
        decode_record(bytes(record))


@pytest.mark.parametrize("topic", [b"TopicTes\0", b"Topic/est", b"Topic\xffest"])
def test_a_topic_that_cannot_have_a_directory_is_rejected(topic: bytes) -> None:
    with pytest.raises(CorruptRecordError, match="topic"):
        decode_record(VECTOR.replace(b"TopicTest", topic))


# Any bytes


_numbers = st.one_of(
    st.sampled_from([MAGIC_V1, MAGIC_V2, BLANK_MAGIC, 0, 91, 92, 123, 2**31 - 1, -1, 0x10, 0x20, 0x30]),
    st.integers(-300, 300),
)
_noise = st.one_of(
    st.binary(max_size=300),
    st.lists(_numbers.map(lambda n: struct.pack(">i", n)), max_size=60).map(b"".join),
    st.builds(lambda size, magic, rest: struct.pack(">ii", size, magic) + rest,
              st.integers(80, 300), st.sampled_from([MAGIC_V1, MAGIC_V2]), st.binary(min_size=80, max_size=300)),
)  # fmt: skip


@settings(deadline=None)
@given(_noise)
@example(b"")
@example(VECTOR)
def test_any_bytes_are_a_record_or_are_refused(data: bytes) -> None:
    try:
        record = decode_record(data)
    except CorruptRecordError as error:
        assert error.reason
    else:
        assert record.total_size <= len(data)


@settings(deadline=None)
@given(any_message, st.binary(min_size=1, max_size=200), st.integers(0, 60))
def test_nothing_behind_the_limit_is_read(message: Message, behind: bytes, cut: int) -> None:
    record = encoded(message)
    limit = max(len(record) - cut, 0)
    outcomes = set()
    for tail in (behind, b"", record):
        view = memoryview(record[:limit] + tail)
        try:
            outcomes.add(str(measure(view, 0, limit)))
        except CorruptRecordError as error:
            outcomes.add(str(error))

    assert len(outcomes) == 1


@pytest.mark.parametrize("magic", [MAGIC_V1, MAGIC_V2])
@pytest.mark.parametrize("place", [0, 84, 88])
def test_a_huge_length_allocates_nothing(magic: int, place: int) -> None:
    record = bytearray(struct.pack(">ii", 4096, magic) + bytes(4088))
    record[place : place + 4] = struct.pack(">i", 2**31 - 1)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptRecordError):
            decode_record(bytes(record))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@settings(deadline=None)
@given(st.binary(max_size=20), st.integers(0, 20))
def test_a_blank_is_told_by_its_magic_alone(data: bytes, position: int) -> None:
    marked = data[:position].ljust(position, b"x") + struct.pack(">ii", 17, BLANK_MAGIC)

    assert is_blank(memoryview(marked), position, position + 8)
    assert not is_blank(memoryview(marked), position, position + 7)
    assert not is_blank(memoryview(VECTOR), 0, len(VECTOR))
