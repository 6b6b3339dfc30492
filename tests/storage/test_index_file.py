"""The bytes of an index file, what is found in it, and that trim can rebuild everything from the entries alone."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brokerlab.storage.errors import CorruptRecordError, DiskIOError
from brokerlab.storage.index_file import EntryColumns, IndexFile, IndexHeader, read_index_header
from brokerlab.storage.java_hash import index_hash, index_hashes
from brokerlab.storage.mapped_file import MappedFile
from brokerlab.storage.real_disk import RealDisk, RealRegion

SLOTS, ENTRIES = 5, 40
SIZE = 40 + 4 * SLOTS + 20 * ENTRIES
BASE = 40 + 4 * SLOTS
NOON = 1_700_000_000_000
FOREVER = (0, 2**62)

Put = tuple[int, int, int]

# Every example makes files of its own, so sharing the directory between examples is harmless.
with_shelf = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


class Shelf:
    """Makes small index files and opens them again."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._names = count(1)
        self._disk = RealDisk()
        self._open: list[IndexFile] = []

    def new(self, *, end_physical_offset: int = 0, end_timestamp: int = 0, entries: int = ENTRIES) -> IndexFile:
        path = str(self._directory / f"{next(self._names):017}")
        region = self._disk.create(path, 40 + 4 * SLOTS + 20 * entries, reserve=True)
        file = IndexFile.start(
            MappedFile(self._disk, region, start=0),
            SLOTS,
            entries,
            end_physical_offset=end_physical_offset,
            end_timestamp=end_timestamp,
        )
        self._open.append(file)
        return file

    def holding(self, data: bytes) -> IndexFile:
        path = self._directory / f"{next(self._names):017}"
        path.write_bytes(data)
        file = IndexFile(MappedFile(self._disk, self._disk.open(str(path)), start=0), SLOTS, ENTRIES)
        self._open.append(file)
        return file

    def close(self) -> None:
        for file in self._open:
            file.close()


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    shelf = Shelf(tmp_path)
    yield shelf
    shelf.close()


def content(file: IndexFile) -> bytes:
    return Path(file.path).read_bytes()


def put_all(file: IndexFile, puts: list[Put]) -> list[bool]:
    return [file.put(*one) for one in puts]


def put_as_columns(file: IndexFile, puts: list[Put]) -> int:
    hashes, offsets, times = ([put[column] for put in puts] for column in range(3))
    return file.put_many(np.array(hashes, np.int32), np.array(offsets, np.int64), np.array(times, np.int64))


hashes = st.one_of(st.integers(0, 3 * SLOTS), st.integers(0, 2**31 - 1))
times = st.one_of(st.integers(NOON - 5_000, NOON + 100_000), st.integers(-(2**63), 2**63 - 1))
a_put = st.tuples(hashes, st.integers(0, 2**62), times)
any_puts = st.lists(a_put, max_size=ENTRIES + 10)


@st.composite
def dispatched(draw: st.DrawFn) -> list[Put]:
    """Entries as dispatch makes them: offsets grow from record to record, and a record may have several keys."""
    puts: list[Put] = []
    offset, time = draw(st.integers(0, 10_000)), NOON
    for _ in range(draw(st.integers(0, 20))):
        keys = draw(st.lists(st.integers(1, 2**31 - 1) | st.integers(1, 12), min_size=1, max_size=3))
        puts += [(key_hash, offset, time) for key_hash in keys]
        offset += draw(st.integers(100, 300))
        time += draw(st.integers(-500, 4_000))
    return puts[: ENTRIES - 1]


# Bytes


def test_the_bytes_of_two_entries_in_one_slot_are_as_worked_out_by_hand(shelf: Shelf) -> None:
    file = shelf.new()

    file.put(7, 0x1234, NOON)
    file.put(12, 0x5678, NOON + 2_999)

    assert content(file)[:40] == bytes.fromhex(
        "0000018bcfe56800 0000018bcfe573b7 0000000000001234 0000000000005678 00000001 00000003"
    )
    assert content(file)[40:BASE] == bytes.fromhex("00000000 00000000 00000002 00000000 00000000")
    assert content(file)[BASE : BASE + 60] == bytes(20) + bytes.fromhex(
        "00000007 0000000000001234 00000000 00000000" + "0000000c 0000000000005678 00000002 00000001"
    )
    assert not any(content(file)[BASE + 60 :])


def test_a_new_first_file_is_all_zeros_and_counts_from_one(shelf: Shelf) -> None:
    file = shelf.new()

    assert content(file) == bytes(SIZE)
    assert file.index_count == 1
    assert file.is_empty and not file.is_full


@pytest.mark.parametrize("on_disk", [0, -1, -(2**31)])
def test_a_count_of_zero_or_less_on_disk_is_read_as_one(shelf: Shelf, on_disk: int) -> None:
    file = shelf.holding(struct.pack(">qqqqii", 0, 0, 0, 0, 0, on_disk) + bytes(SIZE - 40))

    assert file.index_count == 1


def test_the_first_entry_of_a_rolled_file_is_dated_from_the_end_of_the_former_one(shelf: Shelf) -> None:
    file = shelf.new(end_physical_offset=900, end_timestamp=NOON)
    assert file.header == IndexHeader(NOON, NOON, 900, 900, 0, 1)
    assert content(file)[36:40] == bytes(4)

    file.put(1, 1_000, NOON + 7_000)
    file.put(2, 1_100, NOON + 9_500)

    assert file.entries().time_diffs.tolist() == [7, 2]
    assert file.header == IndexHeader(NOON + 7_000, NOON + 9_500, 1_000, 1_100, 2, 3)


@pytest.mark.parametrize(
    ("begin", "time", "seconds"),
    [
        (NOON, NOON + 999, 0),
        (NOON, NOON + 1_000, 1),
        (NOON, NOON - 50_000, 0),
        (0, NOON, 0),
        (-5, NOON, 0),
        (1, 2**62, 2**31 - 1),
    ],
)
def test_seconds_are_cut_off_and_stay_between_zero_and_the_largest_int(
    shelf: Shelf, begin: int, time: int, seconds: int
) -> None:
    file = shelf.new()
    file.put(1, 0, begin)

    file.put(2, 100, time)

    assert file.entries().time_diffs.tolist() == [0, seconds]


def test_a_slot_counts_once_however_many_entries_it_has(shelf: Shelf) -> None:
    file = shelf.new()

    put_all(file, [(3, 0, NOON), (3 + SLOTS, 100, NOON), (4, 200, NOON)])

    assert file.slot_count == 2
    assert file.slot_values().tolist() == [0, 0, 0, 2, 3]


def test_a_file_holds_one_entry_less_than_its_size_says(shelf: Shelf) -> None:
    file = shelf.new(entries=4)

    taken = put_all(file, [(n, 100 * n, NOON) for n in range(1, 6)])

    assert taken == [True, True, True, False, False]
    assert file.is_full and file.room == 0
    assert file.index_count == 4


def test_the_hash_that_java_cannot_negate_goes_in_and_comes_out_as_zero(shelf: Shelf) -> None:
    assert index_hash("T", "jllgx0D") == 0  # String.hashCode of T#jllgx0D is -2**31
    file = shelf.new()

    file.put_many(index_hashes(np.array([-(2**31)], np.int32)), np.array([500]), np.array([NOON]))

    assert file.lookup(index_hash("T", "jllgx0D"), 10, *FOREVER) == [500]


@given(st.binary(max_size=60))
def test_a_header_is_decoded_or_called_torn(data: bytes) -> None:
    if len(data) < 40:
        with pytest.raises(CorruptRecordError) as error:
            read_index_header(data)
        assert error.value.torn
    else:
        assert struct.pack(">qqqqii", *read_index_header(data)) == data[:40]


# Many at once


@with_shelf
@given(any_puts, any_puts, st.integers(0, 2**40), st.integers(0, NOON))
def test_many_at_once_leave_the_bytes_of_one_after_the_other(
    shelf: Shelf, before: list[Put], puts: list[Put], end_offset: int, end_time: int
) -> None:
    singly = shelf.new(end_physical_offset=end_offset, end_timestamp=end_time)
    at_once = shelf.new(end_physical_offset=end_offset, end_timestamp=end_time)
    put_all(singly, before)
    put_all(at_once, before)

    taken = put_all(singly, puts)
    number = put_as_columns(at_once, puts)

    assert number == taken.count(True)
    assert content(at_once) == content(singly)
    assert at_once.header == singly.header


@with_shelf
@given(
    st.lists(st.integers(-5, ENTRIES), min_size=SLOTS, max_size=SLOTS), st.integers(0, 20), st.lists(a_put, min_size=15)
)
def test_they_agree_on_slots_that_a_crash_left_anyhow(
    shelf: Shelf, slots: list[int], number: int, puts: list[Put]
) -> None:
    damaged = struct.pack(f">qqqqii{SLOTS}i", NOON, NOON, 0, 0, 0, number, *slots) + bytes(20 * ENTRIES)
    singly, at_once = shelf.holding(damaged), shelf.holding(damaged)

    put_all(singly, puts)
    put_as_columns(at_once, puts)

    assert content(at_once) == content(singly)


@pytest.mark.parametrize(
    ("number", "failing", "after"),
    [(1, "wrote", 0), (1, "wrote", 1), (1, "wrote", 2), (20, "wrote", 0), (20, "wrote_scattered", 0), (20, "wrote", 1)],
    ids=["its entry", "its slot", "its header", "many entries", "many slots", "the header of many"],
)
def test_a_put_whose_store_failed_can_be_repeated(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, number: int, failing: str, after: int
) -> None:
    earlier: list[Put] = [(n, 100 * n, NOON) for n in range(8)]
    puts: list[Put] = [(n, 2_000 + 100 * n, NOON + 5_000) for n in range(number)]
    undisturbed, file = shelf.new(), shelf.new()
    put_all(undisturbed, earlier + puts)
    put_all(file, earlier)
    calls = count()

    def refuse(region: RealRegion, *_: object) -> None:
        if next(calls) == after:
            raise DiskIOError("store into", region.path, 5)

    with monkeypatch.context() as patch:
        patch.setattr(RealRegion, failing, refuse)
        with pytest.raises(DiskIOError):
            put_as_columns(file, puts)
    put_as_columns(file, puts)

    assert content(file) == content(undisturbed)


# Lookup


@with_shelf
@given(dispatched(), st.integers(1, 12), st.integers(1, 5))
def test_lookup_finds_what_was_put_newest_first(shelf: Shelf, puts: list[Put], key_hash: int, most: int) -> None:
    file = shelf.new()
    put_as_columns(file, puts)

    wanted = [offset for put_hash, offset, _ in puts if put_hash == key_hash][::-1]

    assert file.lookup(key_hash, ENTRIES, *FOREVER) == wanted
    assert file.lookup(key_hash, most, *FOREVER) == wanted[:most]
    assert file.lookup(key_hash, 0, *FOREVER) == []


def test_lookup_compares_whole_seconds_with_both_ends_of_the_range(shelf: Shelf) -> None:
    file = shelf.new()
    put_all(file, [(1, 0, NOON), (1, 100, NOON + 1_700), (1, 200, NOON + 4_000)])

    assert file.lookup(1, 9, NOON, NOON + 1_000) == [100, 0]
    assert file.lookup(1, 9, NOON + 1_000, NOON + 1_000) == [100]
    assert file.lookup(1, 9, NOON + 1_001, NOON + 1_999) == []  # the record's own time is in it, its seconds are not
    assert file.lookup(1, 9, NOON + 4_000, NOON + 9_000) == [200]


def test_lookup_stops_at_the_first_entry_older_than_the_range(shelf: Shelf) -> None:
    """Also when a clock that was set back makes an older entry look younger again."""
    file = shelf.new()
    put_all(file, [(1, 0, NOON), (1, 100, NOON + 9_000), (1, 200, NOON + 2_000), (1, 300, NOON + 8_000)])

    assert file.lookup(1, 9, NOON + 5_000, NOON + 20_000) == [300]


@pytest.mark.parametrize(
    ("begin", "end", "matches"),
    [(0, 99, False), (0, 100, True), (99, 201, True), (120, 130, True), (200, 300, True), (201, 300, False)],
)
def test_a_file_matches_a_range_that_touches_its_own(shelf: Shelf, begin: int, end: int, matches: bool) -> None:
    file = shelf.new()
    put_all(file, [(1, 0, 100), (1, 100, 200)])

    assert file.matches(begin, end) is matches


def test_a_circle_of_links_ends(shelf: Shelf) -> None:
    circle = [(1, 100, 0, 3), (1, 200, 0, 1), (1, 300, 0, 2)]  # 3 -> 2 -> 1 -> 3
    entries = b"".join(struct.pack(">iqii", *entry) for entry in circle)
    header = struct.pack(">qqqqii5i", NOON, NOON, 100, 300, 1, 4, 0, 3, 0, 0, 0)
    file = shelf.holding((header + bytes(20) + entries).ljust(SIZE, b"\0"))

    assert file.lookup(1, 1_000, *FOREVER) == [300, 200, 100]


@with_shelf
@given(st.binary(min_size=SIZE, max_size=SIZE), st.integers(-3, ENTRIES + 3), hashes)
def test_no_damage_makes_lookup_or_trim_fail(shelf: Shelf, data: bytes, number: int, key_hash: int) -> None:
    file = shelf.holding(data[:36] + struct.pack(">i", number) + data[40:])

    found = file.lookup(key_hash, 1_000, -(2**63), 2**63)
    file.trim(2**62)

    assert len(found) <= ENTRIES
    assert file.trim(2**62) == 0


def test_a_file_that_is_going_away_answers_with_nothing(shelf: Shelf) -> None:
    file = shelf.new()
    file.put(1, 100, NOON)

    file.close()

    assert file.lookup(1, 10, *FOREVER) == []
    file.sync()


# Sync


def test_only_a_sync_after_the_last_put_makes_a_file_synced(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    file = shelf.new()
    file.put(1, 0, NOON)
    sync = RealRegion.sync

    def put_meanwhile(region: RealRegion, position: int, length: int) -> None:
        file.put(2, 100, NOON)
        sync(region, position, length)

    with monkeypatch.context() as patch:
        patch.setattr(RealRegion, "sync", put_meanwhile)
        file.sync()
    assert not file.is_synced

    file.sync()
    assert file.is_synced


# Trim


def times_of(puts: list[Put]) -> dict[int, int]:
    return {offset: time for _, offset, time in puts}


def assert_linked_as_put(file: IndexFile) -> None:
    """Slots, links and counts are those of a plain loop over the entries."""
    columns: EntryColumns = file.entries()
    newest: dict[int, int] = {}
    for number, (key_hash, previous) in enumerate(zip(columns.hashes, columns.previous, strict=True), 1):
        assert newest.get(int(key_hash) % SLOTS, 0) == previous
        newest[int(key_hash) % SLOTS] = number
    assert file.slot_values().tolist() == [newest.get(slot, 0) for slot in range(SLOTS)]
    assert file.slot_count == len(newest)


@with_shelf
@given(dispatched(), st.integers(0, 10_000))
def test_trimming_and_putting_again_leaves_the_bytes_of_a_file_never_trimmed(
    shelf: Shelf, puts: list[Put], before: int
) -> None:
    untouched, file = shelf.new(), shelf.new()
    put_as_columns(untouched, puts)
    put_as_columns(file, puts)
    again = [put for put in puts if put[1] >= before]

    dropped = file.trim(before, times_of(puts).__getitem__)
    trimmed = content(file)

    assert dropped == len(again)
    assert file.trim(before) == 0
    assert content(file) == trimmed
    assert_linked_as_put(file)
    put_as_columns(file, again)
    assert content(file) == content(untouched)


@with_shelf
@given(dispatched(), st.data())
def test_trim_rebuilds_slots_links_and_counts_from_the_entries_alone(
    shelf: Shelf, puts: list[Put], data: st.DataObject
) -> None:
    file = shelf.new()
    put_as_columns(file, puts)
    sound = content(file)
    damaged = bytearray(sound)
    for slot in range(SLOTS):
        struct.pack_into(">i", damaged, 40 + 4 * slot, data.draw(st.integers(-2, ENTRIES)))
    for number in range(1, len(puts) + 1):
        struct.pack_into(">i", damaged, BASE + 20 * number + 16, data.draw(st.integers(-2, ENTRIES)))
    struct.pack_into(">i", damaged, 32, data.draw(st.integers(-2, ENTRIES)))
    uncounted = data.draw(st.binary(max_size=20 * (ENTRIES - 1 - len(puts))))
    behind = BASE + 20 * (len(puts) + 1)
    damaged[behind : behind + len(uncounted)] = uncounted
    repaired = shelf.holding(bytes(damaged))

    assert repaired.trim(2**62) == 0

    assert content(repaired) == sound


def test_bytes_behind_the_count_are_cleared(shelf: Shelf) -> None:
    file = shelf.new()
    put_all(file, [(1, 100, NOON), (2, 200, NOON), (3, 300, NOON)])
    stale = content(file)
    stale = stale[:36] + struct.pack(">i", 3) + stale[40:]  # the header's page is older than the others
    repaired = shelf.holding(stale)

    repaired.trim(2**62)

    assert not any(content(repaired)[BASE + 60 :])
    assert repaired.end_physical_offset == 200
    assert repaired.slot_values().tolist() == [0, 1, 2, 0, 0]


@pytest.mark.parametrize(
    "lost",
    [(0, 0, 0, 0), (9, 150, 0, 0), (9, -1, 0, 0), (-9, 300, 0, 0)],
    ids=["nothing written", "offset goes back", "negative offset", "negative hash"],
)
def test_trim_keeps_nothing_from_the_first_entry_on_that_cannot_be(
    shelf: Shelf, lost: tuple[int, int, int, int]
) -> None:
    file = shelf.new()
    put_all(file, [(n, 100 * n, NOON) for n in range(1, 6)])
    damaged = bytearray(content(file))
    struct.pack_into(">iqii", damaged, BASE + 20 * 3, *lost)
    repaired = shelf.holding(bytes(damaged))

    assert repaired.trim(2**62) == 3

    assert repaired.entries().physical_offsets.tolist() == [100, 200]
    assert repaired.header == IndexHeader(NOON, NOON, 100, 200, 2, 3)


def test_entries_that_were_counted_but_lost_with_their_pages_are_not_taken_for_records(shelf: Shelf) -> None:
    header = struct.pack(">qqqqii", NOON, NOON, 0, 300, 4, 5)
    file = shelf.holding(header + bytes(SIZE - 40))

    assert file.trim(2**62) == 4

    assert content(file) == bytes(SIZE)


def test_the_record_at_offset_zero_is_a_record_like_any_other(shelf: Shelf) -> None:
    file = shelf.new()
    put_all(file, [(1, 0, NOON), (2, 0, NOON), (3, 100, NOON)])

    assert file.trim(100) == 1

    assert file.entries().physical_offsets.tolist() == [0, 0]


def test_a_file_trimmed_to_nothing_is_all_zeros(shelf: Shelf) -> None:
    file = shelf.new(end_physical_offset=50, end_timestamp=NOON)
    put_all(file, [(1, 100, NOON), (2, 200, NOON)])

    assert file.trim(100) == 2

    assert content(file) == bytes(SIZE)
    assert file.is_empty


def test_without_the_log_the_end_time_is_known_to_the_second(shelf: Shelf) -> None:
    puts: list[Put] = [(1, 100, NOON), (2, 200, NOON + 3_456), (3, 300, NOON + 9_000)]
    exact, rough, misled = shelf.new(), shelf.new(), shelf.new()
    for file in (exact, rough, misled):
        put_all(file, puts)

    exact.trim(300, times_of(puts).__getitem__)
    rough.trim(300)
    misled.trim(300, lambda _offset: -1)

    assert exact.end_timestamp == NOON + 3_456
    assert rough.end_timestamp == misled.end_timestamp == NOON + 3_000


def test_one_entry_left_in_a_rolled_file_ends_when_it_begins(shelf: Shelf) -> None:
    file = shelf.new(end_physical_offset=50, end_timestamp=NOON)
    put_all(file, [(1, 100, NOON + 8_000), (2, 200, NOON + 9_000)])

    file.trim(200)

    assert file.header == IndexHeader(NOON + 8_000, NOON + 8_000, 100, 100, 1, 2)


def test_a_trim_that_changes_nothing_leaves_the_file_synced(shelf: Shelf) -> None:
    file = shelf.new()
    put_all(file, [(n, 100 * n, NOON) for n in range(1, 9)])
    file.sync()

    file.trim(10_000)
    assert file.is_synced

    file.trim(500)
    assert not file.is_synced
