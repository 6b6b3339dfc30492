"""Scanning agrees with checking record by record, whatever the bytes are; columns agree with decoding."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from brokerlab.storage.config import StoreConfig
from brokerlab.storage.errors import CorruptRecordError
from brokerlab.storage.log_scan import TRUSTED, Scan, Stop, Validity, columns, find_next_record, scan
from brokerlab.storage.message import Message
from brokerlab.storage.record import BLANK_MAGIC, check, decode_record, is_blank, measure
from tests.storage.strategies import FILE_SIZE, a_message, log_of, long_retry_topics, messages, messy_properties, topics

GOLDEN = Path(__file__).parents[1] / "golden/rocketmq-4.x/commitlog/00000000000000000000"
WITH_RECORD_CRC = StoreConfig(mapped_file_size_commit_log=FILE_SIZE, enabled_append_prop_crc=True)

any_messages = st.lists(
    st.one_of(messages(), messages(properties=messy_properties), messages(topic=long_retry_topics)), max_size=6
)
# Equal messages in a row, as most logs have them.
runs_of_messages = st.lists(st.tuples(messages(), st.integers(1, 30)), max_size=3).map(
    lambda runs: [message for message, count in runs for _ in range(count)]
)
validities = st.builds(Validity, crc=st.booleans(), physical_offset=st.booleans())

Damage = tuple[str, int, int]
damages = st.lists(
    st.tuples(st.sampled_from(["flip", "zero", "cut", "number", "move"]), st.integers(0, 1 << 16), st.integers(1, 255)),
    max_size=3,
)


def damaged(data: bytes, damage: list[Damage]) -> bytes:
    changed = bytearray(data)
    for kind, place, amount in damage:
        if not changed:
            break
        at = place % len(changed)
        if kind == "flip":
            changed[at] ^= amount
        elif kind == "zero":
            changed[at : at + amount] = bytes(len(changed[at : at + amount]))
        elif kind == "cut":
            del changed[at:]
        elif kind == "number":
            changed[at : at + 4] = struct.pack(">i", 2**31 - amount)[: len(changed[at : at + 4])]
        else:
            piece = bytes(changed[at : at + amount])
            changed[at // 2 : at // 2 + len(piece)] = piece
    return bytes(changed)


def with_blank(data: bytes, blank: int | None) -> bytes:
    """The log's file is ended by a blank of this size, or not at all."""
    return data if blank is None else data + struct.pack(">ii", blank, BLANK_MAGIC) + bytes(max(blank - 8, 0))


def plain_scan(data: bytes, position: int, limit: int, file_start: int, validity: Validity, most: int) -> Scan:
    """The rule, one record at a time, by `check` alone."""
    view = memoryview(data)
    positions: list[int] = []
    while len(positions) < most:
        if position >= limit:
            return Scan(positions, position, Stop.LIMIT)
        if is_blank(view, position, limit):
            fits = struct.unpack_from(">i", view, position)[0] == limit - position
            return Scan(positions, position, Stop.BLANK if fits else Stop.BAD)
        try:
            found = check(
                view,
                position,
                limit,
                physical_offset=file_start + position if validity.physical_offset else None,
                check_crc=validity.crc,
                require_record_crc=validity.record_crc,
            )
        except CorruptRecordError:
            return Scan(positions, position, Stop.BAD)
        positions.append(position)
        position += found.total_size
    return Scan(positions, position, Stop.ENOUGH)


def assert_scans_agree(data: bytes, limit: int, validity: Validity, most: int | None = None) -> None:
    got = scan(memoryview(data), 0, limit, 0, validity=validity, most=most)
    expected = plain_scan(data, 0, limit, 0, validity, most if most is not None else 1 << 30)
    assert got[:3] == expected[:3]
    assert bool(got.reason) == (got.stop is Stop.BAD)


@settings(deadline=None)
@given(any_messages, damages, validities, st.one_of(st.none(), st.integers(8, 200)), st.integers(0, 300))
def test_a_scan_accepts_what_check_accepts(
    wanted: list[Message], damage: list[Damage], validity: Validity, blank: int | None, cut: int
) -> None:
    data = damaged(with_blank(log_of(wanted)[0], blank), damage)

    assert_scans_agree(data, len(data), validity)
    assert_scans_agree(data, max(len(data) - cut, 0), validity)


@settings(deadline=None)
@given(runs_of_messages, damages, validities, st.one_of(st.none(), st.integers(0, 60)))
def test_a_scan_of_equal_records_accepts_what_check_accepts(
    wanted: list[Message], damage: list[Damage], validity: Validity, most: int | None
) -> None:
    data = damaged(log_of(wanted)[0], damage)

    assert_scans_agree(data, len(data), validity, most)


@settings(deadline=None)
@given(any_messages, damages)
def test_a_scan_for_the_record_crc_accepts_what_check_accepts(wanted: list[Message], damage: list[Damage]) -> None:
    whole = log_of(wanted, config=WITH_RECORD_CRC)[0]
    validity = Validity(record_crc=True)

    assert scan(memoryview(whole), 0, len(whole), 0, validity=validity).stop is Stop.LIMIT
    data = damaged(whole, damage)
    assert_scans_agree(data, len(data), validity)


@settings(deadline=None)
@given(st.binary(max_size=400), validities)
@example(bytes(400), Validity())
@example(b"\0\0\0\x5b" * 100, Validity())
@example(b"\x7f\xff\xff\xff" * 100, Validity())
def test_any_bytes_can_be_scanned(data: bytes, validity: Validity) -> None:
    assert_scans_agree(data, len(data), validity)


@settings(deadline=None)
@given(any_messages, st.binary(max_size=300))
def test_nothing_behind_the_limit_is_looked_at(wanted: list[Message], behind: bytes) -> None:
    data = log_of(wanted)[0]
    limit = len(data) - len(data) // 3

    alone = scan(memoryview(data[:limit]), 0, limit, 0, validity=Validity())
    followed = scan(memoryview(data[:limit] + behind), 0, limit, 0, validity=Validity())
    assert alone == followed


def test_a_log_is_found_whole_in_every_shape() -> None:
    wanted = [
        a_message(),
        a_message(born_host=bytes(20), store_host=bytes(20)),
        a_message(topic="%RETRY%" + "g" * 200),
        a_message(body=b"", properties=b"", store_host=bytes(20)),
        a_message(topic="%RETRY%" + "g" * 200, born_host=bytes(20)),
    ] * 20
    data, starts = log_of(wanted)

    found = scan(memoryview(data), 0, len(data), 0, validity=Validity())
    assert (found.positions, found.end, found.stop) == (starts, len(data), Stop.LIMIT)


def test_a_scan_begins_in_the_middle_and_in_a_later_file() -> None:
    data, starts = log_of([a_message()] * 5)
    moved = bytearray(data)
    for start in starts:
        struct.pack_into(">q", moved, start + 28, start + 4096)

    assert scan(memoryview(data), starts[2], len(data), 0, validity=Validity()).positions == starts[2:]
    assert scan(memoryview(bytes(moved)), 0, len(data), 4096, validity=Validity()).positions == starts
    assert scan(memoryview(data), 0, len(data), 4096, validity=Validity()).positions == []


@pytest.mark.parametrize("most", [1, 2, 3, 47, 48])
def test_a_scan_ends_after_as_many_as_were_asked_for(most: int) -> None:
    view = memoryview(GOLDEN.read_bytes())

    found = scan(view, 0, len(view), 0, validity=Validity(), most=most)
    assert len(found.positions) == min(most, 47)
    assert found.stop is (Stop.ENOUGH if most <= 47 else Stop.BLANK)


def test_the_last_blank_is_recognised_when_one_record_is_asked_for() -> None:
    view = memoryview(GOLDEN.read_bytes())

    found = scan(view, 172 * 47, len(view), 0, validity=Validity(), most=1)
    assert (found.positions, found.end, found.stop) == ([], 172 * 47, Stop.BLANK)


@pytest.mark.parametrize(("length", "good"), [(1, True), (127, True), (128, False), (200, False), (255, False)])
def test_the_topic_length_of_version_1_is_a_signed_byte(length: int, good: bool) -> None:
    """The original reads 128 and more as negative. Everything else about these records is right."""
    record = bytearray(log_of([a_message(topic="t", body=b"")])[0])
    record[-4:] = bytes([length]) + b"t" * length + b"\0\0"
    struct.pack_into(">i", record, 0, len(record))
    data = bytes(record)

    assert scan(memoryview(data), 0, len(data), 0, validity=Validity()).positions == ([0] if good else [])
    assert_scans_agree(data, len(data), Validity())


def test_a_blank_that_lies_about_its_length_is_bad() -> None:
    data = bytearray(GOLDEN.read_bytes())
    struct.pack_into(">i", data, 172 * 47, 109)

    found = scan(memoryview(bytes(data)), 0, len(data), 0, validity=TRUSTED)
    assert (len(found.positions), found.stop) == (47, Stop.BAD)
    assert "109 bytes, 108 are left" in found.reason


# Columns


@settings(deadline=None)
@given(any_messages)
def test_columns_hold_what_decoding_gives(wanted: list[Message]) -> None:
    data, starts = log_of(wanted)
    if not data:
        return
    view = memoryview(data)

    found = columns(view, np.array(starts, dtype=np.int64))
    assert len(found) == len(starts)
    for row, start in enumerate(starts):
        layout, record = measure(view, start, len(data)), decode_record(data, start)
        single = {name: int(getattr(found, name)[row]) for name in found.__slots__ if name != "data"}
        assert single == {
            "positions": start,
            "sizes": record.total_size,
            "queue_ids": record.queue_id,
            "queue_offsets": record.queue_offset,
            "physical_offsets": record.physical_offset,
            "sys_flags": record.sys_flag,
            "store_timestamps": record.store_timestamp,
            "body_starts": layout.body_at,
            "body_lengths": layout.body_length,
            "topic_starts": layout.topic_at,
            "topic_lengths": layout.topic_length,
            "properties_starts": layout.properties_at,
            "properties_lengths": layout.properties_length,
        }


def test_no_records_are_no_rows() -> None:
    assert len(columns(memoryview(bytes(100)), np.zeros(0, dtype=np.int64))) == 0


# The next record behind damage


@settings(deadline=None)
@given(st.lists(messages(topic=topics), min_size=1, max_size=6), st.data())
def test_the_next_record_behind_damage_is_found(wanted: list[Message], data: st.DataObject) -> None:
    log, starts = log_of(wanted)
    broken = data.draw(st.integers(0, len(starts) - 1))
    changed = bytearray(log)
    changed[starts[broken] + 4] ^= 0xFF
    view = memoryview(bytes(changed))

    found = find_next_record(view, starts[broken], len(log), 0, [(0, len(log))], validity=Validity())
    assert found == (starts[broken + 1] if broken + 1 < len(starts) else None)


def test_no_record_is_found_where_it_does_not_belong_or_in_a_hole() -> None:
    log, starts = log_of([a_message(), a_message(), a_message()])
    view, everything = memoryview(log), [(0, len(log))]
    validity = Validity()

    assert find_next_record(view, 0, len(log), 0, everything, validity=validity) == 0
    assert find_next_record(view, 1, len(log), 0, everything, validity=validity) == starts[1]
    assert find_next_record(view, 1, len(log), 8192, everything, validity=validity) is None
    assert find_next_record(view, 1, len(log), 0, [(starts[2], len(log))], validity=validity) == starts[2]
    assert find_next_record(view, 1, len(log), 0, [], validity=validity) is None
    assert find_next_record(view, 1, starts[2] + 50, 0, everything, validity=validity) == starts[1]
    assert find_next_record(view, starts[2] + 1, len(log), 0, everything, validity=validity) is None


def test_the_next_record_carries_the_record_crc_where_it_is_asked_for() -> None:
    plain, starts = log_of([a_message(), a_message()])
    view = memoryview(plain)

    wanted = Validity(record_crc=True)
    assert find_next_record(view, 1, len(plain), 0, [(0, len(plain))], validity=wanted) is None
    assert find_next_record(view, 1, len(plain), 0, [(0, len(plain))], validity=Validity()) == starts[1]


def test_a_magic_across_a_chunk_border_is_found() -> None:
    record, _ = log_of([a_message()])
    for shift in range(1, 9):
        start = (1 << 20) - shift
        data = bytearray(start + len(record))
        data[start:] = record
        struct.pack_into(">q", data, start + 28, start)
        view = memoryview(bytes(data))

        found = find_next_record(view, 0, len(data), 0, [(0, len(data))], validity=Validity())
        assert found == start
