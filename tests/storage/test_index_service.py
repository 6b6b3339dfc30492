"""The row of index files: names, rolling, what a start makes of them, queries, expiry, and trimming over files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brokerlab.storage.config import StoreConfig
from brokerlab.storage.disk import Disk
from brokerlab.storage.errors import DiskError, DiskFullError, DiskIOError
from brokerlab.storage.index_service import IndexService, index_file_name
from brokerlab.storage.real_disk import RealDisk, RealRegion

SLOTS, ENTRIES = 7, 5
PER_FILE = ENTRIES - 1
SIZE = 40 + 4 * SLOTS + 20 * ENTRIES
NOON = 1_700_000_000_000  # 2023-11-14 22:13:20 UTC
FOREVER = (0, 2**62)

Put = tuple[int, int, int]
Open = Callable[..., IndexService]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens an index in the test's directory; what the last run left is loaded as after a clean stop."""
    services: list[IndexService] = []

    def open_index(
        name: str = "index", *, disk: Disk | None = None, unclean: bool = False, checkpoint: int = 0, **settings: int
    ) -> IndexService:
        config = StoreConfig(**({"max_hash_slot_num": SLOTS, "max_index_num": ENTRIES} | settings))  # type: ignore[arg-type]
        service = IndexService(disk or RealDisk(), str(tmp_path / name), config)
        service.load(unclean=unclean, checkpoint_index_timestamp=checkpoint)
        services.append(service)
        return service

    yield open_index
    for service in services:
        service.close()


def puts(count: int, *, start: int = 0, step_ms: int = 1_000) -> list[Put]:
    """One key a record, every record 100 bytes, all hashes different."""
    return [(n + 1, 100 * n, NOON + step_ms * n) for n in range(start, start + count)]


def put(service: IndexService, entries: list[Put]) -> None:
    hashes, offsets, times = ([entry[column] for entry in entries] for column in range(3))
    service.put_many(np.array(hashes, np.int32), np.array(offsets, np.int64), np.array(times, np.int64))


def offsets(service: IndexService) -> list[list[int]]:
    return [file.entries().physical_offsets.tolist() for file in service.files]


def names(service: IndexService) -> list[str]:
    return [file.name for file in service.files]


def on_disk(service: IndexService) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(service.directory).iterdir())}


# Names


@pytest.mark.parametrize(
    ("time", "minutes", "name"),
    [
        (NOON + 7, 0, "20231114221320007"),
        (NOON, 8 * 60, "20231115061320000"),
        (NOON, -18 * 60, "20231114041320000"),
        (0, 0, "19700101000000000"),
        (-5, 0, "19700101000000000"),
        (2**63 - 1, 18 * 60, "99990101180000000"),
    ],
)
def test_a_file_is_named_by_local_time_to_the_millisecond(time: int, minutes: int, name: str) -> None:
    assert index_file_name(time, minutes) == name


def test_a_file_is_named_by_the_first_record_in_it(opened: Open) -> None:
    index = opened(utc_offset_minutes=60)

    put(index, puts(PER_FILE + 1))

    assert names(index) == ["20231114231320000", "20231114231324000"]
    assert {len(data) for data in on_disk(index).values()} == {SIZE}


def test_a_name_that_is_taken_moves_on_by_a_millisecond(opened: Open) -> None:
    index = opened()

    put(index, puts(3 * PER_FILE, step_ms=0))

    assert names(index) == ["20231114221320000", "20231114221320001", "20231114221320002"]


def test_a_clock_set_back_does_not_put_the_new_file_before_the_old_one(opened: Open) -> None:
    index = opened()
    put(index, puts(PER_FILE))

    put(index, [(99, 5_000, NOON - 3_600_000)])

    assert names(index) == ["20231114221320000", "20231114221320001"]


@pytest.mark.parametrize("foreign", ["99999999999999999", "5", "20231399000000000", "99991231235959999"])
def test_a_new_name_sorts_behind_any_number(opened: Open, tmp_path: Path, foreign: str) -> None:
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / foreign).write_bytes(bytes(SIZE))
    index = opened()

    put(index, puts(3 * PER_FILE))

    assert names(index)[0] == foreign
    assert names(index) == sorted(names(index)) and len(names(index)) == 3


# Put


def test_the_first_dispatch_makes_a_file_of_zeros_even_without_keys(opened: Open) -> None:
    index = opened()

    index.ensure_file(NOON)
    index.ensure_file(NOON + 5_000)

    assert on_disk(index) == {"20231114221320000": bytes(SIZE)}
    assert index.end_physical_offset == -1


def test_a_full_file_is_handed_over_for_its_sync_and_the_next_starts_at_its_end(opened: Open) -> None:
    index = opened()
    put(index, puts(PER_FILE))
    assert index.rolled == [] and len(index.files) == 1

    put(index, puts(1, start=PER_FILE))

    first, second = index.files
    assert index.rolled == [first] and first.is_full
    assert (second.begin_timestamp, second.begin_physical_offset) == (NOON + 4_000, 400)
    assert second.entries().time_diffs.tolist() == [1]  # since the end of the former file
    assert index.end_physical_offset == 400


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 12), max_size=5))
def test_batches_of_any_size_leave_the_same_files(opened: Open, tmp_path: Path, sizes: list[int]) -> None:
    number = len(list(tmp_path.iterdir()))
    in_batches, singly = opened(f"{number}a"), opened(f"{number}b")
    entries = puts(sum(sizes))

    for size in sizes:
        put(in_batches, entries[:size])
        entries = entries[size:]
    for entry in puts(sum(sizes)):
        put(singly, [entry])

    in_batches.ensure_file(NOON)
    singly.ensure_file(NOON)
    assert on_disk(in_batches) == on_disk(singly)


class ShortDisk(RealDisk):
    """A disk with room for so many more files, or one whose directory cannot be synced."""

    def __init__(self) -> None:
        super().__init__()
        self.files_left = 1_000
        self.directory_syncs = True

    def create(self, path: str, size: int, *, reserve: bool) -> RealRegion:
        if self.files_left == 0:
            raise DiskFullError("create", path, 28)
        self.files_left -= 1
        return super().create(path, size, reserve=reserve)

    def sync_directory(self, path: str) -> None:
        if not self.directory_syncs:
            raise DiskIOError("sync directory", path, 5)
        super().sync_directory(path)


def test_no_room_for_a_file_is_one_error_and_nothing_is_put(opened: Open) -> None:
    disk = ShortDisk()
    index = opened(disk=disk)
    put(index, puts(3))
    before, disk.files_left = on_disk(index), 1

    for _ in range(3):
        with pytest.raises(DiskFullError):
            put(index, puts(7, start=3))  # one in the first file, then two files more
        assert on_disk(index) == before
        disk.files_left = 1
    disk.files_left = 2
    put(index, puts(7, start=3))

    assert offsets(index) == [[0, 100, 200, 300], [400, 500, 600, 700], [800, 900]]


def test_a_file_whose_name_cannot_be_made_durable_is_not_left_behind(opened: Open) -> None:
    disk = ShortDisk()
    index = opened(disk=disk)
    put(index, puts(PER_FILE))
    before, disk.directory_syncs = on_disk(index), False

    with pytest.raises(DiskIOError):
        put(index, puts(1, start=PER_FILE))

    assert on_disk(index) == before


# Load


def test_a_clean_start_finds_everything_and_goes_on_in_the_last_file(opened: Open) -> None:
    first = opened()
    put(first, puts(6))
    first.close()

    again = opened()
    put(again, puts(4, start=6))

    assert offsets(again) == [[0, 100, 200, 300], [400, 500, 600, 700], [800, 900]]
    assert again.notes == []


def test_an_unclean_start_keeps_files_that_end_behind_the_checkpoint(opened: Open) -> None:
    """The original deletes them (museum row 18)."""
    first = opened()
    put(first, puts(6))
    before = on_disk(first)
    first.close()

    again = opened(unclean=True, checkpoint=0)

    assert on_disk(again) == before
    assert offsets(again) == [[0, 100, 200, 300], [400, 500]]


def test_names_that_are_no_numbers_are_skipped_and_told(opened: Open, tmp_path: Path) -> None:
    directory = tmp_path / "index"
    (directory / "20231114000000000").mkdir(parents=True)
    for name in ("notes.txt", "²³", "-5"):
        (directory / name).write_bytes(bytes(SIZE))

    index = opened()

    assert index.files == []
    assert len(index.notes) == 4 and all("skipped" in note for note in index.notes)


@pytest.mark.parametrize("length", [0, 10, 40, SIZE - 1])
def test_a_file_that_is_too_short_is_extended(opened: Open, length: int) -> None:
    first = opened()
    put(first, puts(1))
    path = Path(first.files[0].path)
    first.close()
    path.write_bytes(path.read_bytes()[:length])

    index = opened()

    assert path.stat().st_size == SIZE
    assert len(index.files) == 1 and "configured are" in index.notes[0]


@pytest.mark.parametrize("length", [0, 30, 60, SIZE - 35])
def test_a_read_only_disk_is_not_extended_and_nothing_is_read_behind_the_end(opened: Open, length: int) -> None:
    first = opened()
    put(first, puts(PER_FILE))
    path = Path(first.files[0].path)
    first.close()
    path.write_bytes(path.read_bytes()[:length])

    index = opened(disk=RealDisk(read_only=True), unclean=True)

    assert path.stat().st_size == length
    assert [index.query(n + 1, 9, *FOREVER)[0] for n in range(PER_FILE)] == (
        [[0], [100], [], []] if length == SIZE - 35 else [[]] * PER_FILE
    )


# Query


def test_a_query_goes_from_the_newest_file_to_the_oldest(opened: Open) -> None:
    index = opened()
    put(index, [(1 if n % 2 else 2, 100 * n, NOON + 1_000 * n) for n in range(10)])

    found, end_timestamp, end_physical_offset = index.query(1, 32, *FOREVER)

    assert found == [900, 700, 500, 300, 100]
    assert (end_timestamp, end_physical_offset) == (NOON + 9_000, 900)
    assert index.query(1, 2, *FOREVER)[0] == [900, 700]
    assert index.query(3, 32, *FOREVER)[0] == []


def test_a_query_is_capped_by_the_configuration(opened: Open) -> None:
    index = opened(max_msgs_num_batch=3)
    put(index, [(1, 100 * n, NOON) for n in range(10)])

    assert index.query(1, 1_000, *FOREVER)[0] == [900, 800, 700]


def test_a_query_keeps_to_its_time_range_over_files(opened: Open) -> None:
    index = opened()
    put(index, [(1, 100 * n, NOON + 1_000 * n) for n in range(12)])

    assert index.query(1, 32, NOON + 2_000, NOON + 9_000)[0] == [900, 800, 700, 600, 500, 400, 300, 200]
    assert index.query(1, 32, NOON + 60_000, NOON + 90_000)[0] == []


def test_a_query_ends_at_a_file_that_begins_before_the_range(opened: Open) -> None:
    """A file before it is not asked, even if a clock set back makes it match."""
    index = opened()
    put(index, [(1, 100 * n, NOON + 50_000) for n in range(4)] + [(1, 400 + 100 * n, NOON) for n in range(4)])

    assert index.query(1, 32, NOON + 10_000, NOON + 60_000)[0] == []


def test_an_index_without_entries_answers_with_nothing(opened: Open) -> None:
    index = opened()
    assert index.query(1, 32, *FOREVER) == ([], 0, 0)

    index.ensure_file(NOON)

    assert index.query(1, 32, *FOREVER) == ([], 0, 0)


# Flush


def test_flush_syncs_what_is_not_and_says_up_to_when(opened: Open) -> None:
    index = opened()
    assert index.flush() == 0
    put(index, puts(6))
    assert [file.is_synced for file in index.files] == [False, False]

    assert index.flush() == NOON + 5_000

    assert all(file.is_synced for file in index.files)
    assert index.rolled == []


def test_flush_does_not_speak_for_what_is_put_meanwhile(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    index = opened()
    put(index, puts(3))
    sync = RealRegion.sync

    def put_meanwhile(region: RealRegion, position: int, length: int) -> None:
        monkeypatch.undo()
        put(index, puts(3, start=3))
        sync(region, position, length)

    monkeypatch.setattr(RealRegion, "sync", put_meanwhile)

    assert index.flush() == NOON + 2_000
    assert not index.files[0].is_synced and not index.files[1].is_synced
    assert index.rolled == index.files[:1]


def test_a_failed_sync_is_told_and_tried_again(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    index = opened()
    put(index, puts(6))

    def refuse(region: RealRegion, _position: int, _length: int) -> None:
        raise DiskIOError("sync", region.path, 5)

    with monkeypatch.context() as patch:
        patch.setattr(RealRegion, "sync", refuse)
        with pytest.raises(DiskIOError):
            index.flush()
    assert index.rolled == index.files[:1]

    assert index.flush() == NOON + 5_000
    assert index.rolled == []


# Expiry


@pytest.mark.parametrize(("minimum", "left"), [(0, 3), (300, 3), (301, 2), (700, 2), (701, 1), (99_999, 1)])
def test_files_that_only_point_below_the_log_expire_but_never_the_last(opened: Open, minimum: int, left: int) -> None:
    index = opened()
    put(index, puts(3 * PER_FILE))
    paths = [file.path for file in index.files]

    deleted = index.delete_expired(minimum, now_ms=NOON)

    assert deleted == paths[: 3 - left]
    assert sorted(on_disk(index)) == names(index) and len(names(index)) == left
    assert all(file in index.files for file in index.rolled)


# Trim


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.integers(1, 3), max_size=12), st.integers(0, 1_300), st.booleans())
def test_trimming_and_putting_again_leaves_the_files_of_an_index_never_trimmed(
    opened: Open, tmp_path: Path, keys: list[int], before: int, unclean: bool
) -> None:
    number = len(list(tmp_path.iterdir()))
    entries = [
        (7 * row + key + 1, 100 * row, NOON + 1_234 * row) for row, count in enumerate(keys) for key in range(count)
    ]
    untouched, first = opened(f"{number}a"), opened(f"{number}b")
    put(untouched, entries)
    put(first, entries)
    first.close()
    index = opened(f"{number}b", unclean=unclean)
    again = [entry for entry in entries if entry[1] >= before]

    dropped = index.trim(before, {offset: time for _, offset, time in entries}.__getitem__)

    assert dropped == len(again)
    assert index.end_physical_offset < before
    assert index.trim(before) == 0
    put(index, again)
    (tmp_path / f"{number}a").mkdir(exist_ok=True)
    (tmp_path / f"{number}b").mkdir(exist_ok=True)
    assert on_disk(index) == on_disk(untouched)


def test_a_file_left_without_entries_is_deleted_even_the_only_one(opened: Open) -> None:
    index = opened()
    put(index, puts(6))

    assert index.trim(0) == 6

    assert index.files == index.rolled == []
    assert on_disk(index) == {}
    assert index.end_physical_offset == -1


def test_nothing_stays_behind_a_file_that_lost_entries(opened: Open) -> None:
    """A rolled file whose pages did not reach the disk, before one whose pages did."""
    first = opened()
    put(first, puts(2 * PER_FILE))
    path = Path(first.files[0].path)
    first.close()
    damaged = bytearray(path.read_bytes())
    damaged[-40:] = bytes(40)
    path.write_bytes(damaged)

    index = opened(unclean=True, checkpoint=NOON)

    assert index.trim(10_000) == 2 + PER_FILE
    assert offsets(index) == [[0, 100]]


@pytest.mark.parametrize("unclean", [True, False])
def test_an_older_header_before_another_file_is_a_gap_after_an_unclean_stop(opened: Open, unclean: bool) -> None:
    """The page with the count is that of an earlier sync, so nothing in the file itself looks wrong."""
    first = opened()
    put(first, puts(2))
    earlier = Path(first.files[0].path).read_bytes()[:40]
    put(first, puts(PER_FILE, start=2))
    path = Path(first.files[0].path)
    first.close()
    path.write_bytes(earlier + path.read_bytes()[40:])

    index = opened(unclean=unclean, checkpoint=NOON + 1_000)
    index.trim(10_000)

    assert offsets(index) == ([[0, 100]] if unclean else [[0, 100], [400, 500]])


def test_files_covered_by_the_checkpoint_are_not_read_again(opened: Open) -> None:
    first = opened()
    put(first, puts(2 * PER_FILE + 1))
    path = Path(first.files[0].path)
    first.close()
    damaged = bytearray(path.read_bytes())
    damaged[-40:] = bytes(40)
    path.write_bytes(damaged)

    index = opened(unclean=True, checkpoint=NOON + 5_000)

    assert index.trim(10_000) == 0


# Close


def test_destroy_removes_all_files_and_the_directory(opened: Open) -> None:
    index = opened()
    put(index, puts(6))

    index.destroy()

    assert not Path(index.directory).exists()


def test_destroy_leaves_what_is_not_ours(opened: Open) -> None:
    index = opened()
    put(index, puts(6))
    (Path(index.directory) / "notes.txt").write_text("mine")

    index.destroy()

    assert list(on_disk(index)) == ["notes.txt"]
    assert "kept" in index.notes[0]


def test_a_disk_error_is_an_error_of_the_store(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "index").write_text("a file where the directory should be")

    with pytest.raises(DiskError):
        opened()
