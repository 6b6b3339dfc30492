"""Appending to and reading from the commit log."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brokerlab.storage import commit_log as commit_log_module
from brokerlab.storage.commit_log import CommitLog
from brokerlab.storage.config import StoreConfig
from brokerlab.storage.errors import DamagedStoreError
from brokerlab.storage.log_scan import Validity
from brokerlab.storage.mapped_file import TransientStorePool
from brokerlab.storage.message import BatchItem, Message, SysFlag
from brokerlab.storage.quirks import Dialect
from brokerlab.storage.real_disk import RealDisk
from brokerlab.storage.record import BLANK_MAGIC, decode_record
from brokerlab.storage.results import PutMessageStatus
from tests.storage.strategies import INT, LONG, NOW, a_message, messages

OK = PutMessageStatus.PUT_OK
ILLEGAL = PutMessageStatus.MESSAGE_ILLEGAL
SIZE = 4096
# a_message() with an empty body has 100 bytes: 91 and a topic of 9.
RECORD = 100


def new_log(directory: Path | str, *, pool: TransientStorePool | None = None, **settings: Any) -> CommitLog:
    settings.setdefault("mapped_file_size_commit_log", SIZE)
    return CommitLog(RealDisk(), str(directory), StoreConfig(**settings), pool=pool)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[CommitLog]:
    made = new_log(tmp_path / "commitlog")
    yield made
    made.files.close(0)


def sized(size: int, **fields: Any) -> Message:
    """A message whose record has this many bytes."""
    return a_message(body=b"b" * (size - RECORD), **fields)


def contents(log: CommitLog) -> bytes:
    return b"".join(bytes(file.view) for file in log.files.files)


# Append


def test_records_follow_each_other_without_a_gap(log: CommitLog) -> None:
    results = [log.append(sized(size), NOW) for size in (100, 101, 150)]

    assert [(result.physical_offset, result.size) for result in results] == [(0, 100), (100, 101), (201, 150)]
    assert [result.queue_offset for result in results] == [0, 1, 2]
    assert [record.physical_offset for record in log.records()] == [0, 100, 201]
    assert log.handed_over == [0, 100, 201]


def test_each_queue_counts_for_itself(log: CommitLog) -> None:
    queues = [("A", 0), ("A", 1), ("B", 0), ("A", 0), ("B", 0), ("A", 0)]

    offsets = [log.append(a_message(topic=topic, queue_id=queue), NOW).queue_offset for topic, queue in queues]
    assert offsets == [0, 0, 0, 1, 1, 2]
    assert log.next_queue_offset == {("A", 0): 3, ("A", 1): 1, ("B", 0): 2}


@pytest.mark.parametrize("flag", [SysFlag.TRANSACTION_PREPARED, SysFlag.TRANSACTION_ROLLBACK])
def test_prepared_and_rolled_back_records_keep_queue_offset_0(log: CommitLog, flag: int) -> None:
    log.append(a_message(), NOW)

    result = log.append(a_message(sys_flag=flag), NOW)
    after = log.append(a_message(sys_flag=SysFlag.TRANSACTION_COMMIT), NOW)
    assert result.queue_offset == 0
    assert [record.queue_offset for record in log.records()] == [0, 0, 1]
    assert after.queue_offset == 1


def test_store_time_never_decreases(log: CommitLog) -> None:
    times = [log.append(a_message(), now).store_timestamp for now in (1_000, 5_000, 4_999, 0, 5_001)]
    batch = log.append_batch(a_message(), [BatchItem(b"x")], 3)

    assert times == [1_000, 5_000, 5_000, 5_000, 5_001]
    assert batch.store_timestamp == 5_001
    assert [record.store_timestamp for record in log.records()] == [*times, 5_001]


@pytest.mark.parametrize("room", range(RECORD + 9))
def test_a_file_ends_with_a_blank_where_record_and_blank_do_not_fit(tmp_path: Path, room: int) -> None:
    """For every room from nothing to one record and a blank: the rule is `length + 8 > room`."""
    log = new_log(tmp_path)
    if room < 8:  # no append leaves less than a blank
        first = SIZE - 8
        log.append(sized(first), NOW)
        assert log.files.files[0].size - log.files.files[0].wrote_position == 8
        room = 8
    else:
        first = SIZE - room
        log.append(sized(first), NOW)

    result = log.append(sized(RECORD), NOW)
    stays = room >= RECORD + 8
    assert result.physical_offset == (first if stays else SIZE)
    if not stays:
        assert struct.unpack_from(">ii", log.files.files[0].view, first) == (room, BLANK_MAGIC)
        assert bytes(log.files.files[0].view[first + 8 :]) == bytes(room - 8)
        assert log.files.files[0].is_full
    assert [record.physical_offset for record in log.records()] == [0, result.physical_offset]
    log.files.close(0)


def test_an_oversized_record_is_refused_and_nothing_is_written(log: CommitLog) -> None:
    log.append(a_message(), NOW)
    before, table = contents(log), dict(log.next_queue_offset)

    result = log.append(sized(SIZE - 7), NOW)
    assert (result.status, result.physical_offset, result.queue_offset) == (ILLEGAL, -1, -1)
    assert "does not fit a log file of 4096" in result.reason
    assert contents(log) == before
    assert log.next_queue_offset == table
    assert log.append(sized(SIZE - 8), NOW).status is OK


@pytest.mark.parametrize(
    "wrong",
    [
        {"flag": 2**31},
        {"sys_flag": 2**32},
        {"born_timestamp": 2**63},
        {"reconsume_times": -(2**31) - 1},
        {"prepared_transaction_offset": 2**63},
        {"queue_id": 2**31},
    ],
)
def test_a_number_that_does_not_fit_its_field_is_refused_and_leaves_no_bytes(
    log: CommitLog, wrong: dict[str, int]
) -> None:
    log.append(a_message(), NOW)
    before = contents(log)

    for _ in range(2):
        assert log.append(a_message(**wrong), NOW).status is ILLEGAL
    assert contents(log) == before
    assert log.append(a_message(), NOW).physical_offset == log.files.files[0].wrote_position - 105


@pytest.mark.parametrize("bits", [SysFlag.BORN_HOST_V6, SysFlag.STORE_HOST_V6, 0x30])
def test_the_hosts_decide_about_the_bits_that_describe_them(log: CommitLog, bits: int) -> None:
    log.append(a_message(sys_flag=bits), NOW)
    log.append(a_message(sys_flag=0, born_host=bytes(20)), NOW)
    log.append_batch(a_message(sys_flag=bits), [BatchItem(b"x")], NOW)

    assert [record.sys_flag for record in log.records()] == [0, SysFlag.BORN_HOST_V6, 0]


@pytest.mark.parametrize(("dialect", "version"), [(Dialect.V5_3, 2), (Dialect.V4_9, None)])
def test_a_long_retry_topic_gives_a_record_v2_in_5_3_only(
    tmp_path: Path, dialect: Dialect, version: int | None
) -> None:
    log = new_log(tmp_path, dialect=dialect)
    topic = "%RETRY%" + "g" * 121

    results = [
        log.append(a_message(topic=topic), NOW),
        log.append_batch(a_message(topic=topic), [BatchItem(b"x")], NOW),
    ]
    records = list(log.records())
    if version:
        assert [(record.version, record.topic) for record in records] == [(2, topic)] * 2
    else:
        assert [result.status for result in results] == [ILLEGAL] * 2
        assert records == []
    log.files.close(0)


_wild = st.builds(
    Message,
    topic=st.one_of(st.text(max_size=5), st.sampled_from(["T", "%RETRY%" + "g" * 200, "t" * 128, "é" * 64])),
    body=st.binary(max_size=50),
    properties=st.one_of(st.binary(max_size=40), st.binary(max_size=3).map(lambda end: bytes(505) + b"x" + end)),
    queue_id=st.integers(-2, 2**32),
    flag=st.one_of(INT, LONG),
    sys_flag=st.one_of(INT, LONG),
    born_timestamp=st.integers(-(2**64), 2**64),
    born_host=st.sampled_from([bytes(8), bytes(20), b"x" * 8, b""]),
    store_host=st.sampled_from([bytes(8), bytes(20), b"x" * 20, b"abc"]),
    reconsume_times=st.one_of(INT, LONG),
    prepared_transaction_offset=st.integers(-(2**64), 2**64),
)


@settings(deadline=None)
@given(st.lists(st.one_of(_wild, messages()), max_size=12))
def test_whatever_is_acknowledged_can_be_read_and_whatever_is_refused_leaves_nothing(wanted: list[Message]) -> None:
    """No poison: a put that is answered with PUT_OK passes the check of the next start."""
    with tempfile.TemporaryDirectory() as directory:
        log = new_log(directory, mapped_file_size_commit_log=1024)
        acknowledged = []
        for message in wanted:
            before = contents(log)
            result = log.append(message, NOW)
            if result.status is OK:
                acknowledged.append((result.physical_offset, message.body))
            elif len(contents(log)) == len(before):
                assert contents(log) == before
        strict = Validity()
        assert [(record.physical_offset, record.body) for record in log.records(validity=strict)] == acknowledged
        log.files.close(0)


# Batches


def test_a_batch_is_one_record_per_item(log: CommitLog) -> None:
    log.append(a_message(queue_id=1), NOW)
    envelope = a_message(
        body=b"ignored", properties=b"TAGS\x01env\x02", queue_id=1, reconsume_times=3, prepared_transaction_offset=9
    )
    items = [BatchItem(b"one", b"TAGS\x01own\x02", 1), BatchItem(b"two", b"KEYS\x01k", 2), BatchItem(b"", b"", 3)]

    result = log.append_batch(envelope, items, NOW)
    records = list(log.records())[1:]
    assert (result.status, result.physical_offset, result.queue_offset, result.messages) == (OK, 105, 1, 3)
    assert result.size == sum(record.total_size for record in records)
    assert [(record.body, record.flag, record.queue_offset) for record in records] == [
        (b"one", 1, 1), (b"two", 2, 2), (b"", 3, 3),
    ]  # fmt: skip
    assert [record.properties for record in records] == [
        b"TAGS\x01own\x02TAGS\x01env\x02", b"KEYS\x01k\x02TAGS\x01env\x02", b"TAGS\x01env\x02",
    ]  # fmt: skip
    assert {(record.queue_id, record.reconsume_times, record.prepared_transaction_offset) for record in records} == {
        (1, 3, 0)
    }
    assert log.handed_over == [0, *[record.physical_offset for record in records]]
    assert log.append(a_message(queue_id=1), NOW).queue_offset == 4


def test_a_batch_moves_to_the_next_file_as_a_whole(log: CommitLog) -> None:
    log.append(sized(SIZE - 400), NOW)

    fits = log.append_batch(a_message(), [BatchItem(b"b" * 96)] * 2, NOW)
    moves = log.append_batch(a_message(), [BatchItem(b"")] * 3, NOW)
    assert (fits.physical_offset, fits.size) == (SIZE - 400, 392)
    assert (moves.physical_offset, moves.queue_offset) == (SIZE, 3)
    assert len(list(log.records())) == 6


def test_a_batch_is_stored_completely_or_not_at_all(log: CommitLog) -> None:
    log.append(a_message(), NOW)
    before, table = contents(log), dict(log.next_queue_offset)

    refused = [
        log.append_batch(a_message(), [BatchItem(b"ok"), BatchItem(b"b" * SIZE)], NOW),
        log.append_batch(a_message(), [BatchItem(b"b" * 900)] * 5, NOW),
        log.append_batch(a_message(), [BatchItem(b"ok"), BatchItem(b"", b"p" * 40_000)], NOW),
        log.append_batch(a_message(sys_flag=4), [BatchItem(b"ok")], NOW),
    ]
    assert all(result.status is not OK and result.reason for result in refused)
    assert contents(log) == before
    assert log.next_queue_offset == table


def test_a_batch_item_with_a_flag_that_does_not_fit_leaves_nothing(log: CommitLog) -> None:
    log.append(a_message(), NOW)
    before = contents(log)

    result = log.append_batch(a_message(), [BatchItem(b"ok"), BatchItem(b"", b"", 2**31)], NOW)
    assert result.status is ILLEGAL
    assert contents(log) == before
    assert log.append(a_message(), NOW).queue_offset == 1


def test_an_empty_batch_is_answered_with_ok_and_nothing(log: CommitLog) -> None:
    result = log.append_batch(a_message(), [], NOW)

    assert (result.status, result.messages, result.size) == (OK, 0, 0)
    assert log.files.files == []


# Handing over


def test_a_full_hand_over_list_sends_the_dispatcher_to_the_log(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_log_module, "HANDED_OVER_MAX", 3)
    for _ in range(3):
        log.append(a_message(), NOW)
    complete = [log.handed_over_complete]

    log.append_batch(a_message(), [BatchItem(b"x")] * 2, NOW)
    complete.append(log.handed_over_complete)
    assert complete == [True, False]
    assert len(log.handed_over) == 3


# Read


def test_a_record_is_read_where_it_starts_and_nowhere_else(log: CommitLog) -> None:
    for body in (b"one", b"two"):
        log.append(a_message(body=body), NOW)
    second = 103

    assert [record.body for offset in (0, second) if (record := log.read(offset))] == [b"one", b"two"]
    assert [log.read(offset) for offset in (-1, 1, second - 1, 2 * second, SIZE, 10 * SIZE)] == [None] * 6
    assert log.store_timestamp_at(second) == NOW
    assert log.store_timestamp_at(1) == -1


def test_a_rotten_body_is_not_read(log: CommitLog) -> None:
    log.append(a_message(), NOW)
    log.files.files[0].region.buf[90] ^= 1

    assert log.read(0) is None
    assert log.read(0, check_crc=False) is not None


def test_found_bytes_are_held_until_released(log: CommitLog) -> None:
    log.append(a_message(), NOW)
    file = log.files.files[0]

    found = log.find(0, 105)
    assert found is not None
    assert decode_record(found.view).body == b"hello"
    assert file.holders == 1
    found.view.release()
    found.file.release()
    assert file.holders == 0
    assert [log.find(offset, size) for offset, size in ((0, 106), (0, 0), (0, -1), (105, 1), (SIZE, 1))] == [None] * 5


def test_bytes_in_the_write_buffer_are_not_read_before_they_are_committed(tmp_path: Path) -> None:
    log = new_log(tmp_path, pool=TransientStorePool(2, SIZE))
    log.append(a_message(), NOW)

    assert log.read(0) is None
    log.files.commit(0)
    record = log.read(0)
    assert record is not None
    assert record.body == b"hello"
    log.files.close(0)


def test_the_log_of_a_pool_has_the_bytes_of_one_without(tmp_path: Path) -> None:
    plain = new_log(tmp_path / "plain")
    pooled = new_log(tmp_path / "pooled", pool=TransientStorePool(1, SIZE))
    for number in range(150):
        for log in (plain, pooled):
            log.append(sized(100 + number % 40), NOW + number)
        if number % 7 == 0:
            pooled.files.commit(0)
    pooled.files.commit_all()

    assert len(plain.files.files) > 3
    assert contents(pooled) == contents(plain)
    for log in (plain, pooled):
        log.files.close(0)


def test_a_gap_between_the_files_is_refused_by_name(tmp_path: Path) -> None:
    for start in (0, SIZE, 3 * SIZE):
        (tmp_path / f"{start:020d}").write_bytes(bytes(SIZE))

    with pytest.raises(DamagedStoreError, match=f"missing between offsets {2 * SIZE} and {3 * SIZE}") as caught:
        new_log(tmp_path).load()
    assert caught.value.path.endswith(f"{3 * SIZE:020d}")


# Scan


def test_columns_go_on_behind_a_blank_and_stop_at_the_end(log: CommitLog) -> None:
    for _ in range(45):
        log.append(sized(100), NOW)

    first = log.columns_between(0, 1 << 40)
    assert first is not None
    rows, after = first
    assert (len(rows), after) == (40, SIZE)
    second = log.columns_between(after, 1 << 40)
    assert second is not None
    assert (second[0].physical_offsets.tolist(), second[1]) == ([SIZE + 100 * n for n in range(5)], SIZE + 500)
    third = log.columns_between(SIZE + 500, 1 << 40)
    assert third is not None
    assert (len(third[0]), third[1]) == (0, SIZE + 500)
    assert log.columns_between(9 * SIZE, 1 << 40) is None


def test_columns_taken_one_by_one_reach_the_end(log: CommitLog) -> None:
    for _ in range(45):
        log.append(sized(100), NOW)

    offset, seen = 0, []
    for _ in range(60):
        found = log.columns_between(offset, 1 << 40, most=1)
        assert found is not None
        seen += found[0].physical_offsets.tolist()
        offset = found[1]
        del found
    assert offset == SIZE + 500
    assert seen == [100 * n for n in range(40)] + [SIZE + 100 * n for n in range(5)]


def test_records_stop_at_damage(log: CommitLog) -> None:
    for _ in range(3):
        log.append(a_message(), NOW)
    log.files.files[0].region.buf[105 + 4] ^= 1

    assert [record.physical_offset for record in log.records()] == [0]
    assert [record.physical_offset for record in log.records(210)] == [210]


def test_lengths_met_before_do_not_hide_ones_that_are_too_long(log: CommitLog) -> None:
    for body in range(3):
        for properties in range(3):
            log.append(a_message(body=b"b" * body, properties=b"p" * properties), NOW)
    before = contents(log)

    for extra in range(3):
        too_long = a_message(body=b"", properties=b"p" * (65536 + extra))
        assert log.append(too_long, NOW).status is PutMessageStatus.PROPERTIES_SIZE_EXCEEDED
    assert log.append(a_message(body=b"", properties=b"\0"), NOW).status is ILLEGAL
    assert log.append(a_message(body=b"", queue_id=-1), NOW).status is ILLEGAL
    assert contents(log) == before


# Many at once


_lengths = st.builds(
    lambda body, properties, queue_id, topic: a_message(
        topic=topic, body=b"b" * body, properties=b"p" * properties, queue_id=queue_id
    ),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(0, 1),
    st.sampled_from(["T", "T", "U", "%RETRY%" + "g" * 121]),
)


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(st.lists(_lengths, max_size=12), st.lists(st.one_of(_lengths, _wild, messages()), max_size=12)),
        max_size=5,
    )
)
def test_many_messages_are_appended_as_if_one_by_one(lots: list[list[Message]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        one_by_one = new_log(f"{directory}/one", mapped_file_size_commit_log=1024)
        at_once = new_log(f"{directory}/many", mapped_file_size_commit_log=1024)
        for number, lot in enumerate(lots):
            singly = [one_by_one.append(message, NOW + number) for message in lot]
            assert at_once.append_many(lot, NOW + number) == singly
        assert contents(at_once) == contents(one_by_one)
        assert at_once.next_queue_offset == one_by_one.next_queue_offset
        assert at_once.handed_over == one_by_one.handed_over
        for log in (one_by_one, at_once):
            log.files.close(0)


def test_lengths_that_add_up_alike_are_not_confused(tmp_path: Path) -> None:
    log = new_log(tmp_path, mapped_file_size_commit_log=1 << 20)
    shapes = [(3, 0), (0, 3), (65536, 0), (1, 0), (65539, 0), (1, 3)]
    lot = [a_message(body=b"b" * body, properties=b"p" * properties) for body, properties in shapes]

    for _ in range(3):
        assert all(result.status is OK for result in log.append_many(lot, NOW))
    found = [(len(record.body), len(record.properties)) for record in log.records(validity=Validity())]
    assert found == shapes * 3
    log.files.close(0)


def test_put_many_writes_what_a_series_of_puts_writes_for_long_retry_topics_too(tmp_path: Path) -> None:
    """The run of a batch must choose the record version as a single put does."""
    wanted = [a_message(topic="%RETRY%" + "g" * 150, body=bytes([n])) for n in range(4)] + [a_message(body=b"x")] * 3
    images = []
    for name in ("one", "many"):
        log = CommitLog(RealDisk(), str(tmp_path / name), StoreConfig(mapped_file_size_commit_log=16384), pool=None)
        log.append(wanted[0], NOW)
        if name == "one":
            for message in wanted:
                log.append(message, NOW)
        else:
            log.append_many(wanted, NOW)
        assert len(list(log.records())) == 1 + len(wanted)
        images.append(bytes(log.files.files[0].view))
        log.files.close(0)

    assert images[0] == images[1]
