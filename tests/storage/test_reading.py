"""Reading: every answer to a pull with its next index, limits, filters; by message id, by key and time, by time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from brokerlab.storage.consume_queue import PRE_BLANK
from brokerlab.storage.errors import CorruptRecordError
from brokerlab.storage.java_hash import index_hash, tag_hash
from brokerlab.storage.message import SysFlag, encode_message_id, pack_host
from brokerlab.storage.message_store import MessageStore
from brokerlab.storage.reading import Boundary
from brokerlab.storage.results import GetMessageStatus as Status
from tests.storage.store_model import (
    FOREVER,
    HOST,
    NOW,
    Sent,
    a_message,
    files_under,
    open_store,
    overwrite,
    put,
    tiny_config,
)

Open = Callable[..., MessageStore]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens the test's store; opening it again lets go of the former, as a crash would."""
    stores: list[MessageStore] = []

    def open_again(**settings: Any) -> MessageStore:
        for store in stores:
            store.abandon(NOW)
        stores.append(open_store(tmp_path, tiny_config(**settings)))
        return stores[-1]

    yield open_again
    for store in stores:
        store.abandon(NOW)


def fill(store: MessageStore, count: int, *, size: int = 10, step_ms: int = 1, **fields: Any) -> list[Sent]:
    messages = [put(store, a_message(f"{n}:".ljust(size, "x"), **fields), NOW + n * step_ms) for n in range(count)]
    store.dispatch()
    return messages


def pull(store: MessageStore, index: int, most: int = 32, **how: Any) -> tuple[Status, list[int], int]:
    """(status, indexes of what was found, next index)."""
    with store.reader.get_message("orders", 0, index, most, **how) as result:
        assert [record.queue_offset for record in result.decoded()] == result.indexes
        return result.status, list(result.indexes), result.next_index


# Statuses ------------------------------------------------------------------------------------------------------------


def test_a_topic_that_nobody_sent_to_has_no_queue(opened: Open) -> None:
    store = opened()

    assert pull(store, 7) == (Status.NO_MATCHED_LOGIC_QUEUE, [], 0)


def test_a_queue_without_entries_has_no_message(opened: Open) -> None:
    store = opened()
    store.queues.get("orders", 0)

    assert pull(store, 7) == (Status.NO_MESSAGE_IN_QUEUE, [], 0)


def test_a_message_is_found_only_after_dispatch(opened: Open) -> None:
    store = opened()
    put(store, a_message(), NOW)
    before = pull(store, 0)
    store.dispatch()

    assert before == (Status.NO_MATCHED_LOGIC_QUEUE, [], 0)
    assert pull(store, 0) == (Status.FOUND, [0], 1)


def test_the_end_of_the_queue_is_the_place_to_wait(opened: Open) -> None:
    store = opened()
    fill(store, 3)

    assert pull(store, 3) == (Status.OFFSET_OVERFLOW_ONE, [], 3)


def test_an_index_behind_the_end_is_sent_back_to_it(opened: Open) -> None:
    store = opened()
    fill(store, 3)

    assert pull(store, 4) == (Status.OFFSET_OVERFLOW_BADLY, [], 3)
    assert pull(store, 1 << 40) == (Status.OFFSET_OVERFLOW_BADLY, [], 3)


def test_an_index_before_the_beginning_is_sent_forward_to_it(opened: Open) -> None:
    store = opened()
    messages = fill(store, 12, size=900)
    store.delete_expired_files(NOW, force=True, most=1)
    gone = sum(message.physical_offset < 4096 for message in messages)

    assert pull(store, gone - 1) == (Status.OFFSET_TOO_SMALL, [], gone)
    assert pull(store, -1) == (Status.OFFSET_TOO_SMALL, [], gone)
    assert pull(store, gone)[0] is Status.FOUND


def test_a_queue_file_that_cannot_be_read_is_passed_over(opened: Open) -> None:
    store = opened()
    fill(store, 25)
    queue = store.queues.find("orders", 0)
    assert queue is not None
    queue.files.files.pop(1).shutdown(NOW)  # ten entries a file: 10 to 19 are gone

    assert pull(store, 13) == (Status.OFFSET_FOUND_NULL, [], 20)


def test_no_entry_with_the_wanted_tag_is_no_match_and_they_are_passed_over(opened: Open) -> None:
    store = opened()
    fill(store, 3, tags="TagA")

    assert pull(store, 0, tags_codes=frozenset({tag_hash("TagB")})) == (Status.NO_MATCHED_MESSAGE, [], 3)


def test_entries_whose_records_are_gone_are_passed_over_as_being_removed(opened: Open) -> None:
    """The log lost its first file, and the queue was not told yet."""
    store = opened()
    messages = fill(store, 10, size=900)
    store.commit_log.files.files.pop(0).shutdown(NOW)
    gone = sum(message.physical_offset < 4096 for message in messages)

    assert pull(store, 0, 2) == (Status.MESSAGE_WAS_REMOVING, [], 3)
    assert pull(store, gone, 2) == (Status.FOUND, [gone, gone + 1], gone + 2)


def test_records_behind_removed_ones_are_found_in_the_same_pull(opened: Open) -> None:
    store = opened()
    messages = fill(store, 10, size=900)
    store.commit_log.files.files.pop(0).shutdown(NOW)
    gone = sum(message.physical_offset < 4096 for message in messages)

    assert pull(store, gone - 1) == (Status.FOUND, list(range(gone, 10)), 10)


def test_an_entry_at_offset_0_is_not_served_from_another_file(opened: Open) -> None:
    """Museum row 65: the original answers with whatever the first file that exists begins with."""
    store = opened()
    messages = fill(store, 10, size=900)
    store.commit_log.files.files.pop(0).shutdown(NOW)

    assert messages[0].physical_offset == 0
    assert store.reader.look_message_by_offset(0) is None
    assert store.reader.look_message_by_id(encode_message_id(HOST, 0)) is None
    assert pull(store, 0, 1)[0] is Status.MESSAGE_WAS_REMOVING


def test_a_pre_blank_entry_is_never_served(opened: Open, tmp_path: Path) -> None:
    store = opened()
    fill(store, 5)
    store.flush_queues()
    overwrite(files_under(tmp_path, "consumequeue/orders/0")[0], 20, PRE_BLANK * 2)

    # As in the original: the size that it claims, 2 GiB, fills the answer.
    assert pull(store, 0) == (Status.FOUND, [0], 1)
    assert pull(store, 1, 1) == (Status.MESSAGE_WAS_REMOVING, [], 3)
    assert pull(store, 1) == (Status.FOUND, [3, 4], 5)


# Limits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("most", "found"), [(5, 5), (1, 1), (0, 1), (-1, 1), (-7, 1), (100, 32)])
def test_a_pull_is_limited_by_what_is_asked_and_by_32_in_memory(opened: Open, most: int, found: int) -> None:
    store = opened(mapped_file_size_consume_queue=2000)
    fill(store, 50)

    assert pull(store, 3, most) == (Status.FOUND, list(range(3, 3 + found)), 3 + found)


def test_a_pull_of_old_messages_is_limited_to_8(opened: Open) -> None:
    store = opened(mapped_file_size_consume_queue=2000, access_message_in_memory_max_ratio=0)
    fill(store, 50)

    assert pull(store, 0, 100) == (Status.FOUND, list(range(8)), 8)


def test_the_limit_is_that_of_the_entry_not_of_the_first_one(opened: Open) -> None:
    """Entries from the eighth on are in memory: only the older ones are counted against the lower limit."""
    store = opened(mapped_file_size_consume_queue=2000, physical_memory_bytes=1)
    messages = fill(store, 50)
    far = messages[-1].end - messages[5].physical_offset - 1
    store = opened(
        mapped_file_size_consume_queue=2000, physical_memory_bytes=far, access_message_in_memory_max_ratio=100
    )

    assert pull(store, 0, 100) == (Status.FOUND, list(range(32)), 32)


@pytest.mark.parametrize(("limit_of", "ratio"), [("memory", 40), ("disk", 0)])
def test_a_pull_is_limited_by_bytes(opened: Open, limit_of: str, ratio: int) -> None:
    settings = {f"max_transfer_bytes_on_message_in_{limit_of}": 600}
    store = opened(access_message_in_memory_max_ratio=ratio, **settings)
    messages = fill(store, 8, size=103)
    assert messages[0].size == 200

    assert pull(store, 0) == (Status.FOUND, [0, 1, 2], 3)


def test_the_first_record_is_given_whatever_its_size(opened: Open) -> None:
    store = opened(max_transfer_bytes_on_message_in_memory=1)
    fill(store, 3, size=500)

    assert pull(store, 0) == (Status.FOUND, [0], 1)


def test_a_pull_crosses_log_files_but_never_a_queue_file(opened: Open) -> None:
    store = opened()
    messages = fill(store, 25, size=700)
    assert len({message.physical_offset // 4096 for message in messages[:10]}) > 1

    assert pull(store, 0) == (Status.FOUND, list(range(10)), 10)
    assert pull(store, 10) == (Status.FOUND, list(range(10, 20)), 20)
    assert pull(store, 19) == (Status.FOUND, [19], 20)
    assert pull(store, 20) == (Status.FOUND, list(range(20, 25)), 25)


def test_a_filter_gives_the_wanted_tags_and_steps_over_the_others(opened: Open) -> None:
    store = opened(mapped_file_size_consume_queue=2000)
    for number in range(20):
        put(store, a_message("x", tags=("TagA", "refund", "")[number % 3]), NOW)  # the hash of `refund` is negative
    store.dispatch()

    wanted = frozenset({tag_hash("refund")})
    assert pull(store, 0, 3, tags_codes=wanted) == (Status.FOUND, [1, 4, 7], 8)
    assert pull(store, 8, tags_codes=wanted) == (Status.FOUND, [10, 13, 16, 19], 20)
    assert pull(store, 0, 2, tags_codes=frozenset({0})) == (Status.FOUND, [2, 5], 6)
    assert pull(store, 0, 32, tags_codes=frozenset()) == (Status.NO_MATCHED_MESSAGE, [], 20)


# What is served ------------------------------------------------------------------------------------------------------


def test_a_rotten_body_is_left_out_and_told(opened: Open, tmp_path: Path) -> None:
    """Museum row 52."""
    store = opened()
    messages = fill(store, 4)
    store.flush_log()
    overwrite(files_under(tmp_path, "commitlog")[0], messages[2].physical_offset + 90, b"?")

    with store.reader.get_message("orders", 0, 0) as result:
        assert (result.status, result.indexes, result.next_index) == (Status.FOUND, [0, 1, 3], 4)
        assert [(damage.queue_index, damage.physical_offset) for damage in result.damaged] == [
            (2, messages[2].physical_offset)
        ]
        assert "CRC" in result.damaged[0].reason
    assert store.reader.look_message_by_offset(messages[2].physical_offset) is None


def test_a_rotten_body_among_many_is_left_out_and_told(opened: Open, tmp_path: Path) -> None:
    store = opened(mapped_file_size_consume_queue=2000, mapped_file_size_commit_log=16384)
    messages = fill(store, 30)
    store.flush_log()
    overwrite(files_under(tmp_path, "commitlog")[0], messages[17].physical_offset + 90, b"?")

    with store.reader.get_message("orders", 0, 0) as result:
        assert result.indexes == [number for number in range(30) if number != 17]
        assert [damage.queue_index for damage in result.damaged] == [17]


def test_an_entry_that_points_at_another_queues_record_is_not_served(opened: Open, tmp_path: Path) -> None:
    """Museum row 43."""
    store = opened()
    fill(store, 2)
    other = put(store, a_message("secret", topic="refunds"), NOW)
    store.dispatch()
    store.flush_queues()
    entry = files_under(tmp_path, "consumequeue/refunds/0")[0].read_bytes()[:20]
    overwrite(files_under(tmp_path, "consumequeue/orders/0")[0], 20, entry)

    with store.reader.get_message("orders", 0, 0) as result:
        assert result.indexes == [0]
        assert result.damaged[0].physical_offset == other.physical_offset
        assert "refunds/0/0" in result.damaged[0].reason


def test_a_record_lives_as_long_as_its_pull_is_not_released(opened: Open) -> None:
    store = opened()
    fill(store, 12, size=900)
    result = store.reader.get_message("orders", 0, 0, 1)

    refused = store.delete_expired_files(NOW, force=True)
    body = bytes(result.records[0][88:90])
    result.release()
    deleted = store.delete_expired_files(NOW, force=True)

    assert refused == []
    assert body == b"0:"
    assert len(deleted) == 2


def test_minimum_and_maximum_follow_expiry(opened: Open) -> None:
    store = opened()
    messages = fill(store, 14, size=900)
    early = put(store, a_message("b", topic="refunds"), NOW)  # in the last file: it stays
    store.dispatch()
    store.delete_expired_files(NOW, force=True, most=2)
    gone = sum(message.physical_offset < 2 * 4096 for message in messages)

    with store.reader.get_message("orders", 0, 99) as result:
        assert (result.min_index, result.max_index) == (gone, 14)
    with store.reader.get_message("refunds", 0, 0) as result:
        assert (result.min_index, result.max_index) == (0, 1)
    assert store.reader.earliest_time("orders", 0) == messages[gone].store_timestamp
    assert store.reader.earliest_time("refunds", 0) == early.store_timestamp
    assert store.reader.earliest_time("nobody", 0) == -1


def test_a_queue_whose_records_are_all_gone_is_empty_at_its_end(opened: Open) -> None:
    store = opened()
    for _ in range(3):
        put(store, a_message("x", topic="orders"), NOW)
    for _ in range(9):
        put(store, a_message(b"x" * 900, topic="refunds"), NOW)
    store.dispatch()
    store.delete_expired_files(NOW, force=True)

    assert pull(store, 0) == (Status.OFFSET_TOO_SMALL, [], 3)
    assert pull(store, 3) == (Status.OFFSET_OVERFLOW_ONE, [], 3)
    assert store.reader.earliest_time("orders", 0) == -1


# By message id -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("address", "length"), [("10.1.2.3", 32), ("2001:db8::7", 56)])
@pytest.mark.parametrize("born", ["192.168.0.1", "fe80::1"])
def test_a_message_is_found_by_its_id(opened: Open, address: str, length: int, born: str) -> None:
    store = opened()
    fill(store, 2)
    host = pack_host(address, 10911)
    message = a_message("by id", store_host=host, born_host=pack_host(born, 55555))
    landed = store.put(message, NOW)
    store.dispatch()

    text = encode_message_id(host, landed.physical_offset)
    record = store.reader.look_message_by_id(text)

    assert len(text) == length
    assert record is not None
    assert (record.body, record.message_id, record.store_host) == (b"by id", text, host)
    assert bool(record.sys_flag & SysFlag.STORE_HOST_V6) == (length == 56)
    assert pull(store, 0) == (Status.FOUND, [0, 1, 2], 3)


def test_an_id_of_another_host_or_place_finds_nothing(opened: Open) -> None:
    store = opened()
    message = fill(store, 2)[1]
    look = store.reader.look_message_by_id

    assert look(encode_message_id(HOST, message.physical_offset)) is not None
    assert look(encode_message_id(pack_host("10.0.0.8", 10911), message.physical_offset)) is None
    assert look(encode_message_id(HOST, message.physical_offset + 1)) is None
    assert look(encode_message_id(HOST, message.end)) is None
    assert look(encode_message_id(HOST, -1)) is None


@pytest.mark.parametrize("text", ["", "AB", "Z" * 32, "0" * 31, "0" * 33, "0" * 30 + " 1", "٠" * 32])
def test_what_is_no_id_is_said(opened: Open, text: str) -> None:
    store = opened()

    with pytest.raises(CorruptRecordError):
        store.reader.look_message_by_id(text)


# By key --------------------------------------------------------------------------------------------------------------


def found_by(store: MessageStore, key: str, most: int = 64, begin: int = 0, end: int = FOREVER[1]) -> list[bytes]:
    return [record.body for record in store.reader.query_message("orders", key, most, begin, end)]


def test_a_key_finds_its_messages_oldest_first_and_no_others(opened: Open) -> None:
    store = opened()
    put(store, a_message("1", keys="red green", unique="id-1"), NOW)
    put(store, a_message("2", keys="green", tags="red"), NOW)
    put(store, a_message("3", topic="refunds", keys="green"), NOW)
    put(store, a_message("4", keys="green", sys_flag=SysFlag.TRANSACTION_PREPARED), NOW)
    put(store, a_message("5", keys="green", sys_flag=SysFlag.TRANSACTION_ROLLBACK), NOW)
    store.dispatch()

    assert found_by(store, "green") == [b"1", b"2", b"4"]
    assert found_by(store, "red") == [b"1"]
    assert found_by(store, "id-1") == [b"1"]
    assert found_by(store, "red green") == []
    assert found_by(store, "") == []


def test_keys_of_one_hash_are_told_apart(opened: Open) -> None:
    store = opened()
    assert index_hash("orders", "Aa") == index_hash("orders", "BB")
    for number in range(6):
        put(store, a_message(f"{number}", keys=("Aa", "BB")[number % 2]), NOW + number)
    store.dispatch()

    assert found_by(store, "Aa") == [b"0", b"2", b"4"]
    assert found_by(store, "BB") == [b"1", b"3", b"5"]


def test_many_newer_keys_of_the_same_hash_do_not_hide_a_message(opened: Open) -> None:
    store = opened(max_index_num=200)
    put(store, a_message("hidden?", keys="Aa"), NOW)
    for number in range(100):
        put(store, a_message("x", keys="BB"), NOW + number)
    store.dispatch()

    assert found_by(store, "Aa") == [b"hidden?"]
    assert store.reader.body_by_key("orders", "Aa") == b"hidden?"


def test_a_key_finds_at_most_64_and_these_are_the_newest(opened: Open) -> None:
    store = opened(max_index_num=200)
    for number in range(100):
        put(store, a_message(f"{number}", keys="often"), NOW + number)
    store.dispatch()

    assert found_by(store, "often", most=1000) == [b"%d" % number for number in range(36, 100)]
    assert found_by(store, "often", most=3) == [b"97", b"98", b"99"]
    assert found_by(store, "often", most=0) == []


def test_a_key_that_a_message_has_twice_finds_it_once(opened: Open) -> None:
    store = opened()
    put(store, a_message("1", keys="twice twice", unique="twice"), NOW)
    store.dispatch()

    assert found_by(store, "twice") == [b"1"]


def test_a_time_window_is_exact_to_the_millisecond(opened: Open) -> None:
    store = opened()
    times = [NOW + ms for ms in (0, 1, 999, 1000, 1001, 2500)]
    for time in times:
        put(store, a_message(f"{time - NOW}", keys="k"), time)
    store.dispatch()

    def between(begin: int, end: int) -> list[int]:
        return [int(body) for body in found_by(store, "k", 64, NOW + begin, NOW + end)]

    assert between(0, 2500) == [0, 1, 999, 1000, 1001, 2500]
    assert between(1, 1000) == [1, 999, 1000]
    assert between(1, 999) == [1, 999]
    assert between(999, 999) == [999]
    assert between(1002, 2499) == []
    assert between(2500, 9999) == [2500]
    assert between(2501, 9999) == []


def test_a_narrow_window_finds_the_first_entry_of_a_rolled_index_file(opened: Open) -> None:
    """Its seconds are relative to the end of the file before: taken for its own they put it far too late."""
    store = opened(max_index_num=5)
    times = [NOW + number * 60_000 for number in range(12)]
    for number, time in enumerate(times):
        put(store, a_message(f"{number}", keys="k"), time)
    store.dispatch()
    assert store.index is not None
    assert len(store.index.files) == 3

    for number, time in enumerate(times):
        assert found_by(store, "k", 64, time, time) == [b"%d" % number]


def test_keys_of_expired_messages_find_nothing(opened: Open) -> None:
    store = opened()
    messages = fill(store, 12, size=900, keys="k")
    store.delete_expired_files(NOW, force=True, most=1)
    begin = store.commit_log.files.min_offset

    found = store.reader.query_message("orders", "k", 64, *FOREVER)

    assert [r.physical_offset for r in found] == [m.physical_offset for m in messages if m.physical_offset >= begin]


def test_without_an_index_no_key_is_found(opened: Open, tmp_path: Path) -> None:
    store = opened(message_index_enable=False)
    fill(store, 3, keys="k")

    assert found_by(store, "k") == []
    assert store.reader.body_by_key("orders", "k") is None
    assert not (tmp_path / "index").exists()


# By time -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("time", "lower", "upper", "nearest"),
    [
        (-5, 0, 0, {0}),  # before all
        (0, 0, 0, {0}),
        (5, 1, 0, {0}),  # a tie goes to the older
        (6, 1, 0, {1}),
        (10, 1, 3, {1, 2, 3}),  # three of the same time
        (11, 4, 3, {3}),
        (29, 4, 3, {4}),
        (30, 4, 4, {4}),
        (31, 5, 4, {4}),  # after all
    ],
)
def test_an_index_is_found_by_time(opened: Open, time: int, lower: int, upper: int, nearest: set[int]) -> None:
    store = opened()
    for ms in (0, 10, 10, 10, 30):
        put(store, a_message(), NOW + ms)
    store.dispatch()
    find = store.reader.index_by_time

    assert find("orders", 0, NOW + time) == lower
    assert find("orders", 0, NOW + time, Boundary.LOWER) == lower
    assert find("orders", 0, NOW + time, Boundary.UPPER) == upper
    assert find("orders", 0, NOW + time, Boundary.NEAREST) in nearest


@pytest.mark.parametrize("boundary", Boundary)
def test_a_time_before_what_is_left_finds_the_first_message_left(opened: Open, boundary: Boundary) -> None:
    store = opened()
    messages = fill(store, 14, size=900, step_ms=1000)
    store.delete_expired_files(NOW, force=True, most=2)
    first = next(m for m in messages if m.physical_offset >= store.commit_log.files.min_offset)

    assert store.reader.index_by_time("orders", 0, NOW, boundary) == first.queue_offset
    assert store.reader.index_by_time("orders", 0, first.store_timestamp, boundary) == first.queue_offset


@pytest.mark.parametrize("boundary", Boundary)
def test_a_time_in_an_empty_or_unknown_queue_finds_its_beginning(opened: Open, boundary: Boundary) -> None:
    store = opened()
    store.queues.get("orders", 0)

    assert store.reader.index_by_time("orders", 0, NOW, boundary) == 0
    assert store.reader.index_by_time("nobody", 0, NOW, boundary) == 0
