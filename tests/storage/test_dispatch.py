"""Dispatch by columns says what `describe` says of each record, and writes the bytes of a naive loop."""

from __future__ import annotations

import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.naive_dispatch import QueueBuffers, index_file_size, naive_dispatch, new_index_file
from brokerlab.storage.config import StoreConfig
from brokerlab.storage.consume_queue import UNIT_SIZE, encode_units
from brokerlab.storage.dispatch import Dispatch, describe, dispatch_of, is_queued
from brokerlab.storage.index_file import IndexFile
from brokerlab.storage.java_hash import index_hash, string_hash
from brokerlab.storage.log_scan import columns
from brokerlab.storage.mapped_file import MappedFile
from brokerlab.storage.message import SCHEDULE_TOPIC, Message, SysFlag, encode_properties
from brokerlab.storage.real_disk import RealDisk
from brokerlab.storage.record import decode_record
from tests.storage.strategies import (
    NOW,
    a_message,
    log_of,
    long_retry_topics,
    messages,
    messy_properties,
    topics,
    wire_properties,
)

DELAYS = StoreConfig().delay_levels_ms
VECTOR_LEAST = 24
SLOTS, ENTRIES = 13, 1000

# A handful of different messages, repeated until the columns are used.
_texts = st.sampled_from(
    [b"a", b"refund", b"k1 k2", b"  k1   k2 ", " é ключ 😀".encode(), b"q" * 511, b"q" * 512, b"q" * 513]
)
_long = st.builds(
    lambda name, value: name + b"\x01" + value + b"\x02", st.sampled_from([b"KEYS", b"TAGS", b"UNIQ_KEY"]), _texts
)
_any_properties = st.one_of(wire_properties, messy_properties, st.lists(_long, max_size=3).map(b"".join))
_any_message = messages(
    properties=_any_properties, topic=st.one_of(st.sampled_from(["A", "B", "AaAa", "BBBB"]), topics, long_retry_topics)
)
batches = st.lists(_any_message, min_size=1, max_size=8).map(
    lambda some: (some * VECTOR_LEAST)[: VECTOR_LEAST + len(some)]
)


def dispatched(data: bytes, starts: list[int]) -> Dispatch:
    return dispatch_of(columns(memoryview(data), np.array(starts, dtype=np.int64)), DELAYS)


def expected_entries(data: bytes, starts: list[int]) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Tags codes and index entries, record by record."""
    codes, entries = [], []
    for start in starts:
        record = decode_record(data, start)
        said = describe(record.topic, record.properties, record.store_timestamp, DELAYS)
        codes.append(said.tags_code)
        if record.sys_flag & SysFlag.TRANSACTION_MASK != SysFlag.TRANSACTION_ROLLBACK:
            entries += [(index_hash(record.topic, key), start, record.store_timestamp) for key in said.keys]
    return codes, entries


def assert_as_described(data: bytes, starts: list[int]) -> None:
    got = dispatched(data, starts)
    codes, entries = expected_entries(data, starts)
    assert got.tags_codes.tolist() == codes
    assert list(zip(*(column.tolist() for column in got.index), strict=True)) == entries
    runs: dict[tuple[str, int], list[int]] = {}
    for row, start in enumerate(starts):
        record = decode_record(data, start)
        runs.setdefault((record.topic, record.queue_id), []).append(row)
    assert [((run.topic, run.queue_id), run.rows.tolist()) for run in got.runs] == list(runs.items())


@given(batches)
@settings(deadline=None)
def test_columns_say_what_each_record_says(wanted: list[Message]) -> None:
    data, starts = log_of(wanted, size=1 << 20)

    assert_as_described(data, starts)


@given(st.lists(_any_message, max_size=VECTOR_LEAST - 1))
@settings(deadline=None)
def test_the_short_loop_says_what_each_record_says(wanted: list[Message]) -> None:
    data, starts = log_of(wanted, size=1 << 20)

    if starts:
        assert_as_described(data, starts)


@given(
    st.lists(
        messages(
            properties=st.one_of(messy_properties, st.sampled_from([b"DELAY\x013", b"DELAY\x01x", b"DELAY\x01-1"]))
        ),
        min_size=30,
        max_size=40,
    )
)
@settings(deadline=None, max_examples=25)
def test_a_batch_with_delayed_messages_says_what_each_record_says(wanted: list[Message]) -> None:
    data, starts = log_of([*wanted, a_message(topic=SCHEDULE_TOPIC, properties=b"DELAY\x014")], size=1 << 20)

    assert_as_described(data, starts)


@given(batches)
@settings(deadline=None, max_examples=50)
def test_queue_entries_and_index_are_those_of_a_naive_loop(wanted: list[Message]) -> None:
    """Byte for byte; the naive loop knows valid text only."""
    for message in wanted:
        message.properties = message.properties.replace(b"\xff", b"?").decode("utf-8", "ignore").encode()
        message.queue_id %= 5
    data, starts = log_of(wanted, size=1 << 20)
    queues: QueueBuffers = {}
    index = new_index_file(SLOTS, ENTRIES)
    naive_dispatch(memoryview(data), 0, len(data), queues, index, SLOTS, ENTRIES)

    got = dispatched(data, starts)
    queued = is_queued(got.columns.sys_flags)
    ours = {}
    for run in got.runs:
        rows = run.rows[queued[run.rows]]
        if len(rows):
            offsets = got.columns.queue_offsets[rows]
            assert offsets.tolist() == list(range(len(rows)))
            ours[run.topic, run.queue_id] = encode_units(
                got.columns.physical_offsets[rows], got.columns.sizes[rows], got.tags_codes[rows]
            )
    assert ours == queues
    assert index_bytes(got) == index


def index_bytes(got: Dispatch) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        disk = RealDisk()
        region = disk.create(f"{directory}/index", index_file_size(SLOTS, ENTRIES), reserve=True)
        file = MappedFile(disk, region, start=0)
        put = IndexFile.start(file, SLOTS, ENTRIES).put_many(*got.index)
        assert put == len(got.index.hashes)
        data = bytes(file.view)
        file.shutdown(0)
    return data


# What describe says


def test_the_unique_key_comes_first_and_empty_words_vanish() -> None:
    wire = encode_properties({"KEYS": " k1  k2 ", "UNIQ_KEY": "u 1", "TAGS": "TagA"})

    assert describe("T", wire, NOW, DELAYS) == (2598919, ["u 1", "k1", "k2"], "")


@pytest.mark.parametrize(
    ("level", "due"), [("1", 1_000), ("3", 10_000), ("18", 7_200_000), ("19", 7_200_000), ("2147483647", 7_200_000)]
)
def test_a_delayed_message_has_its_due_time_for_a_code(level: str, due: int) -> None:
    wire = encode_properties({"DELAY": level, "TAGS": "TagA"})

    assert describe(SCHEDULE_TOPIC, wire, NOW, DELAYS).tags_code == NOW + due
    assert describe("T", wire, NOW, DELAYS).tags_code == string_hash("TagA")


def test_a_level_that_is_no_level_has_the_code_of_its_tag() -> None:
    for level in ("0", "-1"):
        wire = encode_properties({"DELAY": level, "TAGS": "TagA"})
        assert describe(SCHEDULE_TOPIC, wire, NOW, DELAYS) == (string_hash("TagA"), [], "")
    broken = describe(SCHEDULE_TOPIC, encode_properties({"DELAY": "soon", "KEYS": "k"}), NOW, DELAYS)
    assert (broken.tags_code, broken.keys) == (0, ["k"])
    assert "DELAY is b'soon', not a number" in broken.note
    assert describe(SCHEDULE_TOPIC, encode_properties({"DELAY": "4"}), NOW, ()).tags_code == NOW + 1_000


def test_a_delay_that_is_no_number_is_noted_with_its_offset() -> None:
    data, starts = log_of([a_message(), a_message(topic="SCHEDULE_TOPIC_XXXY", properties=b"DELAY\x01x\x02")])
    data = data.replace(b"SCHEDULE_TOPIC_XXXY", SCHEDULE_TOPIC.encode())

    assert dispatched(data, starts).notes == [f"record at {starts[1]}: DELAY is b'x', not a number: served with code 0"]


def test_prepared_records_are_indexed_but_not_queued_and_rolled_back_ones_neither() -> None:
    flags = [
        SysFlag.TRANSACTION_NOT,
        SysFlag.TRANSACTION_PREPARED,
        SysFlag.TRANSACTION_COMMIT,
        SysFlag.TRANSACTION_ROLLBACK,
    ]
    wanted = [a_message(sys_flag=flag, properties=b"KEYS\x01k") for flag in flags] * 8
    data, starts = log_of(wanted)

    got = dispatched(data, starts)
    assert is_queued(got.columns.sys_flags).tolist() == [True, False, True, False] * 8
    indexed = [start for number, start in enumerate(starts) if number % 4 != 3]
    assert got.index.physical_offsets.tolist() == indexed


def test_two_topics_with_one_hash_stay_apart() -> None:
    assert string_hash("AaAa") == string_hash("BBBB")
    wanted = [a_message(topic=topic) for topic in ("AaAa", "BBBB", "AaBB")] * 10
    data, starts = log_of(wanted)

    got = dispatched(data, starts)
    assert [(run.topic, run.rows.tolist()) for run in got.runs] == [
        (topic, list(range(first, 30, 3))) for first, topic in enumerate(("AaAa", "BBBB", "AaBB"))
    ]


def test_only_the_wanted_rows_are_kept() -> None:
    data, starts = log_of([a_message(queue_id=n % 2, properties=b"KEYS\x01a b") for n in range(30)])
    wanted = np.arange(30) == 4

    kept = dispatched(data, starts).only(wanted)
    assert [(run.queue_id, run.rows.tolist()) for run in kept.runs] == [(0, [4])]
    assert kept.index.physical_offsets.tolist() == [starts[4]] * 2


def test_no_records_are_no_work() -> None:
    got = dispatch_of(columns(memoryview(bytes(100)), np.zeros(0, dtype=np.int64)), DELAYS)

    assert (got.runs, got.tags_codes.tolist(), got.index.hashes.tolist(), got.notes) == ([], [], [], [])
    assert UNIT_SIZE == 20
