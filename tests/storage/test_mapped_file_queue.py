"""A row of files as one byte array: names, load, find, flush and commit file by file, truncate, delete."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brokerlab.storage.errors import DamagedStoreError, DiskIOError
from brokerlab.storage.mapped_file import MappedFile, TransientStorePool
from brokerlab.storage.mapped_file_queue import MappedFileQueue, file_name, is_segment_name
from brokerlab.storage.real_disk import RealDisk

SIZE = 2 * 4096


class RecordingDisk(RealDisk):
    """Remembers directory syncs and creations in order; a directory sync fails while `broken`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.broken = False

    def create(self, path: str, size: int, *, reserve: bool) -> Any:
        self.calls.append(f"create {Path(path).name.lstrip('0') or '0'}")
        return super().create(path, size, reserve=reserve)

    def sync_directory(self, path: str) -> None:
        if self.broken:
            raise DiskIOError("sync directory", path, errno.EIO)
        self.calls.append("sync directory")
        super().sync_directory(path)


@pytest.fixture
def disk() -> RecordingDisk:
    return RecordingDisk()


@pytest.fixture
def row(tmp_path: Path, disk: RecordingDisk) -> Iterator[MappedFileQueue]:
    (tmp_path / "row").mkdir()
    made = MappedFileQueue(disk, str(tmp_path / "row"), SIZE, reserve=True)
    yield made
    made.close(0)


def append(row: MappedFileQueue, length: int, store_timestamp: int = 1) -> MappedFile:
    """Append so many bytes to the file that is next, which must have room for them."""
    file = row.file_to_append()
    position = file.wrote_position
    file.target[position : position + length] = b"x" * length
    file.appended(length, store_timestamp)
    return file


def fill(row: MappedFileQueue, files: int) -> None:
    for number in range(files):
        append(row, SIZE, number + 1)


def names(row: MappedFileQueue) -> list[str]:
    return sorted(path.name for path in Path(row.directory).iterdir())


# Names and rolling


def test_a_file_is_named_by_its_first_byte_in_20_digits() -> None:
    assert file_name(0) == "0" * 20
    assert file_name(1_073_741_824) == "00000000001073741824"
    assert is_segment_name("00000000001073741824")
    wrong = ["", "0" * 19, "0" * 21, "0" * 19 + "x", "0" * 19 + "٣", "-" + "0" * 19, "0" * 16 + ".tmp"]
    assert not any(map(is_segment_name, wrong))


def test_a_full_file_is_followed_by_the_next(row: MappedFileQueue) -> None:
    first = append(row, SIZE - 1)
    assert append(row, 1) is first

    second = append(row, 5)
    assert (second.start, row.max_offset, row.min_offset) == (SIZE, SIZE + 5, 0)
    assert names(row) == [file_name(0), file_name(SIZE)]


def test_the_first_file_of_a_row_starts_where_it_is_asked_for_rounded_down(row: MappedFileQueue) -> None:
    file = row.file_to_append(start=3 * SIZE + 17)

    assert file.start == row.min_offset == 3 * SIZE
    assert (row.flushed_where, row.committed_where) == (3 * SIZE, 3 * SIZE)


def test_an_empty_row_has_no_offsets(row: MappedFileQueue) -> None:
    assert (row.min_offset, row.max_offset, row.max_wrote_offset, row.first, row.last) == (-1, 0, 0, None, None)
    assert row.find(0) is None
    assert row.flush(0)
    assert row.commit(0)
    assert row.gap() is None


def test_a_file_left_over_from_another_run_is_made_anew(row: MappedFileQueue) -> None:
    (Path(row.directory) / file_name(0)).write_bytes(b"old" * 100)

    file = row.file_to_append()
    assert bytes(file.view) == bytes(SIZE)


def test_a_files_name_is_durable_before_the_next_one_is_made(row: MappedFileQueue, disk: RecordingDisk) -> None:
    fill(row, 3)

    assert disk.calls == ["create 0", "sync directory", f"create {SIZE}", "sync directory", f"create {2 * SIZE}"]


# Find


@settings(deadline=None)
@given(
    present=st.sets(st.integers(0, 7), min_size=1),
    offset=st.one_of(st.integers(-SIZE, 9 * SIZE), st.integers(-1, 8).map(lambda n: n * SIZE)),
)
def test_an_offset_is_found_in_the_file_that_holds_it_with_or_without_gaps(
    tmp_path_factory: pytest.TempPathFactory, present: set[int], offset: int
) -> None:
    directory = tmp_path_factory.mktemp("find")
    for number in present:
        (directory / file_name(number * SIZE)).write_bytes(bytes(SIZE))
    row = MappedFileQueue(RealDisk(), str(directory), SIZE, reserve=True)
    row.load()

    found = row.find(offset)
    assert (None if found is None else found.start // SIZE) == (offset // SIZE if offset // SIZE in present else None)
    gap = row.gap()
    assert (gap is None) == (max(present) - min(present) + 1 == len(present))
    if gap:
        assert gap[0].start // SIZE + 1 not in present
        assert gap[1].start // SIZE - 1 not in present
    row.close(0)


def test_a_deleted_file_is_not_found_and_offset_0_means_no_other(row: MappedFileQueue) -> None:
    """Museum row 65: the original serves offset 0 from the first file that exists."""
    fill(row, 3)

    row.delete_first(lambda file: file.start >= SIZE, 0, force_after_ms=0, most=10)
    assert row.find(0) is None
    assert row.find(SIZE - 1) is None
    found = row.find(SIZE)
    assert found is not None
    assert found.start == row.min_offset == SIZE


# Load


def load(directory: Path, **options: Any) -> MappedFileQueue:
    row = MappedFileQueue(RealDisk(), str(directory), SIZE, reserve=True)
    row.load(**options)
    return row


def test_loaded_files_count_as_full_until_recovery_says_otherwise(tmp_path: Path) -> None:
    for start in (SIZE, 0):
        (tmp_path / file_name(start)).write_bytes(bytes(SIZE))

    row = load(tmp_path)
    assert [file.start for file in row.files] == [0, SIZE]
    assert {(file.wrote_position, file.committed_position, file.flushed_position) for file in row.files} == {
        (SIZE,) * 3
    }
    row.close(0)


def test_a_missing_directory_is_an_empty_row(tmp_path: Path) -> None:
    assert load(tmp_path / "none").files == []


def test_stray_names_are_skipped_and_told(tmp_path: Path) -> None:
    """Museum row 54."""
    (tmp_path / file_name(0)).write_bytes(bytes(SIZE))
    (tmp_path / "notes.txt").write_bytes(b"hello")
    (tmp_path / "lost+found").mkdir()

    row = load(tmp_path)
    assert [file.start for file in row.files] == [0]
    assert len(row.notes) == 2
    assert all("skipped" in note for note in row.notes)
    row.close(0)


def test_a_segment_that_is_a_link_is_refused_by_name_and_kept(tmp_path: Path) -> None:
    """Skipping it would cut the log in front of it, and the next roll would take its name."""
    (tmp_path / file_name(0)).write_bytes(bytes(SIZE))
    link = tmp_path / file_name(SIZE)
    link.symlink_to(tmp_path / file_name(0))

    with pytest.raises(DamagedStoreError, match="is a link"):
        load(tmp_path)
    assert link.is_symlink()


@pytest.mark.parametrize("size", [1, SIZE - 1, SIZE + 1])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_file_of_another_size_is_refused_by_name_and_nothing_changes(tmp_path: Path, size: int, number: int) -> None:
    """Museum row 31."""
    for start in range(3):
        (tmp_path / file_name(start * SIZE)).write_bytes(bytes(size if start == number else SIZE))
    (tmp_path / file_name(3 * SIZE)).write_bytes(b"")

    with pytest.raises(DamagedStoreError, match=f"has {size} bytes, configured are {SIZE}") as caught:
        load(tmp_path)
    assert caught.value.path == str(tmp_path / file_name(number * SIZE))
    assert (tmp_path / file_name(3 * SIZE)).exists()


def test_a_name_that_is_no_multiple_of_the_size_is_refused(tmp_path: Path) -> None:
    (tmp_path / file_name(SIZE + 1)).write_bytes(bytes(SIZE))

    with pytest.raises(DamagedStoreError, match="not a multiple"):
        load(tmp_path)


def test_empty_files_at_the_end_are_removed_and_told(tmp_path: Path) -> None:
    """Museum row 14: a crash while a file is being made."""
    for start, size in ((0, SIZE), (SIZE, 0), (2 * SIZE, 0)):
        (tmp_path / file_name(start)).write_bytes(bytes(size))

    row = load(tmp_path)
    assert names(row) == [file_name(0)]
    assert len(row.notes) == 2
    row.close(0)


def test_an_empty_file_in_the_middle_is_refused(tmp_path: Path) -> None:
    for start, size in ((0, 0), (SIZE, SIZE)):
        (tmp_path / file_name(start)).write_bytes(bytes(size))

    with pytest.raises(DamagedStoreError, match="has 0 bytes"):
        load(tmp_path)


def test_empty_files_can_be_made_to_block_the_start(tmp_path: Path) -> None:
    (tmp_path / file_name(0)).write_bytes(b"")

    with pytest.raises(DamagedStoreError, match="refuses to start"):
        load(tmp_path, empty_files_block=lambda empty: len(empty) == 1)
    assert (tmp_path / file_name(0)).exists()


# Flush and commit


def test_one_call_flushes_one_file_and_says_whether_anything_moved(row: MappedFileQueue) -> None:
    fill(row, 2)
    append(row, 10, 3)

    wheres = []
    for _ in range(4):
        still = row.flush(0)
        wheres.append((row.flushed_where, still))
    assert wheres == [(SIZE, False), (2 * SIZE, False), (2 * SIZE + 10, False), (2 * SIZE + 10, True)]


def test_only_a_thorough_flush_tells_the_store_time(row: MappedFileQueue) -> None:
    append(row, 4096, 77)

    row.flush(1)
    assert (row.flushed_where, row.store_timestamp) == (4096, 0)
    append(row, 10, 78)
    assert row.flush(1)
    row.flush(0)
    assert (row.flushed_where, row.store_timestamp) == (4106, 78)


def test_names_are_synced_before_the_first_page_counts_as_flushed(row: MappedFileQueue, disk: RecordingDisk) -> None:
    append(row, 10)
    disk.broken = True

    with pytest.raises(DiskIOError):
        row.flush(0)
    assert row.flushed_where == 0
    disk.broken = False
    row.flush(0)
    append(row, 10)
    row.flush(0)
    assert row.flushed_where == 20
    assert disk.calls == ["create 0", "sync directory"]


def test_a_failed_sync_of_a_file_moves_no_where(row: MappedFileQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    file = append(row, 10, 5)

    def broken(position: int, length: int) -> None:
        raise DiskIOError("sync", f"{position}+{length}", errno.EIO)

    with monkeypatch.context() as patch:
        patch.setattr(file.region, "sync", broken)
        with pytest.raises(DiskIOError):
            row.flush(0)
    assert (row.flushed_where, file.flushed_position, row.store_timestamp) == (0, 0, 0)
    row.flush_all()
    assert row.flushed_where == 10


def test_flushing_goes_on_at_the_first_file_when_the_old_ones_are_gone(row: MappedFileQueue) -> None:
    fill(row, 3)

    row.delete_first(lambda file: file.start >= 2 * SIZE, 0, force_after_ms=0, most=10)
    row.flush_all()
    assert row.flushed_where == 3 * SIZE


def test_with_a_pool_bytes_are_committed_then_flushed_and_buffers_go_round(tmp_path: Path) -> None:
    pool = TransientStorePool(1, SIZE)
    row = MappedFileQueue(RealDisk(), str(tmp_path), SIZE, reserve=True, pool=pool)
    append(row, SIZE)
    second = append(row, 10)
    assert second.write_buffer is None  # the pool was empty: written through the map (museum row 27)
    assert pool.available == 0

    assert row.flush(0)
    assert not row.commit(0)
    assert (row.committed_where, pool.available) == (SIZE, 1)
    row.commit_all()
    assert row.committed_where == row.max_offset == SIZE + 10
    row.flush_all()
    assert row.flushed_where == SIZE + 10
    assert all(b == ord("x") for b in row.files[0].view[:SIZE])
    row.close(0)


def test_uncommitted_bytes_are_beyond_the_end(tmp_path: Path) -> None:
    row = MappedFileQueue(RealDisk(), str(tmp_path), SIZE, reserve=True, pool=TransientStorePool(1, SIZE))
    append(row, 10)

    assert (row.max_offset, row.max_wrote_offset) == (0, 10)
    row.commit(0)
    assert (row.max_offset, row.max_wrote_offset) == (10, 10)
    row.close(0)


# Shrinking


@pytest.mark.parametrize(
    ("offset", "left"),
    [
        (0, [0]),
        (1, [0]),
        (SIZE - 1, [0]),
        (SIZE, [0, 1]),
        (SIZE + 5, [0, 1]),
        (3 * SIZE - 1, [0, 1, 2]),
        (3 * SIZE, [0, 1, 2]),
    ],
)
@pytest.mark.parametrize("zero_tail", [True, False])
def test_truncation_drops_later_files_and_clears_the_tail(
    row: MappedFileQueue, offset: int, left: list[int], zero_tail: bool
) -> None:
    fill(row, 3)
    row.flush_all()

    cleared, deleted = row.truncate(offset, 0, zero_tail=zero_tail)
    assert [file.start // SIZE for file in row.files] == left
    assert names(row) == [file_name(number * SIZE) for number in left]
    assert deleted == [f"{row.directory}/{file_name(number * SIZE)}" for number in range(3) if number not in left]
    assert (row.max_offset, row.flushed_where) == (offset, offset)
    tail = bytes(row.files[-1].view[offset - row.files[-1].start :])
    assert cleared == (len(tail) if zero_tail else 0)
    assert tail == (bytes(len(tail)) if zero_tail else b"x" * len(tail))


def test_deleting_stops_at_the_first_file_to_keep_and_spares_the_last(row: MappedFileQueue) -> None:
    fill(row, 5)

    assert row.delete_first(lambda file: file.start != SIZE, 0, force_after_ms=0, most=10) == []
    deleted = row.delete_first(lambda file: file.start >= SIZE, 0, force_after_ms=0, most=10)
    assert deleted == [f"{row.directory}/{file_name(0)}"]
    assert len(row.delete_first(lambda _file: False, 0, force_after_ms=0, most=2)) == 2
    assert len(row.delete_first(lambda _file: False, 0, force_after_ms=0, most=10)) == 1
    assert [file.start for file in row.files] == [4 * SIZE]


def test_a_file_that_is_read_stops_deletion_until_it_may_be_forced(row: MappedFileQueue) -> None:
    fill(row, 3)
    reader = row.files[0]
    reader.hold()

    assert row.delete_first(lambda _file: False, 1_000, force_after_ms=500, most=10) == []
    assert row.min_offset == SIZE  # it is going away, though still there
    assert len(row.delete_first(lambda _file: False, 1_500, force_after_ms=500, most=1)) == 1
    assert reader.view[0] == ord("x")
    reader.release()


def test_a_destroyed_row_leaves_nothing_but_what_others_put_there(tmp_path: Path) -> None:
    for stray in (False, True):
        directory = tmp_path / str(stray)
        row = MappedFileQueue(RealDisk(), str(directory), SIZE, reserve=True)
        fill(row, 2)
        if stray:
            (directory / "mine").write_bytes(b"x")

        row.destroy(0)
        assert directory.exists() == stray
        assert (row.files, row.flushed_where, row.max_offset) == ([], 0, 0)
        assert len(row.notes) == stray


def test_a_closed_row_keeps_its_files(row: MappedFileQueue) -> None:
    fill(row, 2)

    row.close(0)
    assert row.files == []
    assert len(names(row)) == 2
