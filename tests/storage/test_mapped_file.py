"""One mapped file: its three positions, its readers, and the pool of write buffers."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brokerlab.storage.errors import DiskIOError
from brokerlab.storage.mapped_file import MappedFile, TransientStorePool
from brokerlab.storage.real_disk import RealDisk, RealRegion

PAGE = 4096
SIZE = 16 * PAGE


class Region(RealRegion):
    """A real region that remembers its syncs and fails when told to."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.syncs: list[tuple[int, int]] = []
        self.wrote_calls: list[tuple[int, int]] = []
        self.failing: set[str] = set()

    def _fail(self, what: str) -> None:
        if what in self.failing:
            raise DiskIOError(what, self.path, errno.EIO)

    def wrote(self, position: int, length: int) -> None:
        self._fail("wrote")
        self.wrote_calls.append((position, length))

    def write(self, position: int, data: bytes) -> None:
        self._fail("write")
        super().write(position, data)

    def sync(self, position: int, length: int) -> None:
        self._fail("sync")
        super().sync(position, length)
        self.syncs.append((position, length))


class FailingDisk(RealDisk):
    """Cannot remove anything until it is repaired."""

    broken = True

    def unlink(self, path: str) -> None:
        if self.broken:
            raise DiskIOError("remove", path, errno.EIO)
        super().unlink(path)


def make(
    directory: Path, *, disk: RealDisk | None = None, buffer: bytearray | None = None, **options: Any
) -> MappedFile:
    path = directory / f"{len(list(directory.iterdir())):020d}"
    path.write_bytes(bytes(SIZE))
    region = Region(str(path), os.open(path, os.O_RDWR), SIZE, writable=True)
    return MappedFile(disk or RealDisk(), region, start=0, write_buffer=buffer, **options)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[MappedFile]:
    made = make(tmp_path)
    yield made
    made.shutdown(0)


@pytest.fixture
def buffered(tmp_path: Path) -> Iterator[MappedFile]:
    made = make(tmp_path, buffer=bytearray(SIZE))
    yield made
    made.shutdown(0)


def region_of(file: MappedFile) -> Region:
    assert isinstance(file.region, Region)
    return file.region


def append(file: MappedFile, data: bytes, store_timestamp: int = 1) -> None:
    position = file.wrote_position
    file.target[position : position + len(data)] = data
    file.appended(len(data), store_timestamp)


# Positions


def test_without_a_buffer_what_is_written_can_be_read(file: MappedFile) -> None:
    append(file, b"hello", 77)

    assert (file.wrote_position, file.read_position, file.committed_position, file.flushed_position) == (5, 5, 0, 0)
    assert bytes(file.view[:5]) == b"hello"
    assert (file.store_timestamp, region_of(file).wrote_calls) == (77, [(0, 5)])


def test_with_a_buffer_only_what_is_committed_can_be_read(buffered: MappedFile) -> None:
    append(buffered, b"hello")

    assert (buffered.wrote_position, buffered.read_position) == (5, 0)
    assert bytes(buffered.view[:5]) == bytes(5)
    assert buffered.flush(0) == 0
    assert buffered.commit(0) == 5
    assert (buffered.read_position, bytes(buffered.view[:5])) == (5, b"hello")
    assert buffered.flush(0) == 5
    assert region_of(buffered).wrote_calls == []


def test_all_positions_are_set_at_once(file: MappedFile) -> None:
    file.set_positions(SIZE)

    assert (file.wrote_position, file.committed_position, file.flushed_position) == (SIZE, SIZE, SIZE)
    assert file.is_full


@pytest.mark.parametrize(
    ("flushed", "wrote", "least_pages", "due"),
    [
        (0, PAGE - 1, 1, False),
        (0, PAGE, 1, True),
        (1, PAGE, 1, True),
        (PAGE - 1, PAGE, 1, True),
        (PAGE, 2 * PAGE - 1, 1, False),
        (PAGE, 2 * PAGE, 1, True),
        (0, 4 * PAGE - 1, 4, False),
        (0, 4 * PAGE, 4, True),
        (PAGE - 1, 4 * PAGE, 4, True),
        (PAGE, 4 * PAGE, 4, False),
        (0, 1, 0, True),
        (0, 0, 0, False),
        (5, 5, 0, False),
        (5, 6, -1, True),
        (SIZE - 1, SIZE, 4, True),  # a full file needs no pages
        (SIZE, SIZE, 0, False),
    ],
)
def test_least_pages_are_counted_in_whole_pages(
    tmp_path: Path, flushed: int, wrote: int, least_pages: int, due: bool
) -> None:
    plain, buffered = make(tmp_path), make(tmp_path, buffer=bytearray(SIZE))
    plain.set_positions(flushed)
    plain.wrote_position = wrote
    buffered.committed_position, buffered.wrote_position = flushed, wrote

    assert plain.flush(least_pages) == (wrote if due else flushed)
    assert region_of(plain).syncs == ([(flushed, wrote - flushed)] if due else [])
    assert buffered.commit(least_pages) == (wrote if due else flushed)
    for made in (plain, buffered):
        made.shutdown(0)


def test_commit_without_a_buffer_is_the_wrote_position(file: MappedFile) -> None:
    append(file, b"12345")

    assert file.commit(0) == file.commit(4) == 5
    assert file.committed_position == 0


def test_a_failed_sync_moves_no_position(file: MappedFile) -> None:
    append(file, b"12345")
    region_of(file).failing = {"sync"}

    for _ in range(2):
        with pytest.raises(DiskIOError):
            file.flush(0)
        assert (file.flushed_position, file.holders) == (0, 0)
    region_of(file).failing = set()
    assert file.flush(0) == 5


def test_a_failed_commit_moves_no_position(buffered: MappedFile) -> None:
    append(buffered, b"12345")
    region_of(buffered).failing = {"write"}

    with pytest.raises(DiskIOError):
        buffered.commit(0)
    assert (buffered.committed_position, buffered.read_position) == (0, 0)


def test_a_failed_append_is_not_counted_and_its_bytes_are_cleared(file: MappedFile) -> None:
    """Museum row 42, strict side."""
    append(file, b"whole")
    region_of(file).failing = {"wrote"}

    with pytest.raises(DiskIOError):
        append(file, b"half of it", 99)
    assert (file.wrote_position, file.store_timestamp) == (5, 1)
    blotted = [file.is_blotted]
    region_of(file).failing = set()
    file.clear_blot()
    blotted.append(file.is_blotted)
    assert blotted == [True, False]
    assert bytes(file.view[:20]) == b"whole" + bytes(15)


def test_the_quirk_counts_a_failed_append(tmp_path: Path) -> None:
    """Museum row 42, historic side."""
    file = make(tmp_path, half_appends=True)
    region_of(file).failing = {"wrote"}

    with pytest.raises(DiskIOError):
        append(file, b"half")
    assert file.wrote_position == 4
    file.shutdown(0)


def test_appending_through_the_file_is_seen_in_the_map_and_counted_when_it_succeeds(file: MappedFile) -> None:
    file.append_through_file(b"abc")
    region_of(file).failing = {"write"}

    with pytest.raises(DiskIOError):
        file.append_through_file(b"def")
    assert (file.wrote_position, bytes(file.view[:6])) == (3, b"abc\0\0\0")


# Clearing and syncing again


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, SIZE - 1), st.binary(min_size=1, max_size=50)), max_size=6), st.integers(0, SIZE)
)
def test_everything_behind_a_position_is_cleared(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[int, bytes]], position: int
) -> None:
    file = make(tmp_path_factory.mktemp("zero"))
    for place, data in writes:
        file.region.write(place, data[: SIZE - place])
    before = bytes(file.view)

    dirty = sum(byte != 0 for byte in before[position:])
    assert file.zero_from(position) == dirty
    assert bytes(file.view) == before[:position] + bytes(SIZE - position)
    assert region_of(file).syncs == [(position, SIZE - position)]  # a run before us may have ended before its sync
    file.shutdown(0)


def test_syncing_again_changes_no_byte_and_covers_the_range(file: MappedFile) -> None:
    file.region.write(0, bytes(range(256)) * (SIZE // 256))
    before = bytes(file.view)

    file.resync(100, 3 * PAGE + 5)
    file.resync(7, 7)
    assert bytes(file.view) == before
    assert region_of(file).syncs == [(100, 3 * PAGE + 5 - 100)]


# Readers


def test_a_held_file_is_closed_when_the_last_reader_lets_go(file: MappedFile) -> None:
    assert file.hold()
    assert file.hold()
    assert file.holders == 2

    file.shutdown(0)
    assert not file.is_available
    assert not file.hold()
    file.release()
    assert file.view[0] == 0
    file.release()
    with pytest.raises(ValueError, match="released"):
        _ = file.view[0]


def test_a_file_is_not_destroyed_under_a_reader_before_the_time_is_over(file: MappedFile) -> None:
    append(file, b"read me")
    file.hold()

    assert not file.destroy(1_000, 500)
    assert not file.destroy(1_499, 500)
    assert Path(file.path).exists()
    assert file.destroy(1_500, 500)
    assert not Path(file.path).exists()
    assert bytes(file.view[:7]) == b"read me"  # the name is gone, the reader's map is not (museum row 28)
    file.release()
    with pytest.raises(ValueError):
        _ = file.view[0]


def test_a_file_nobody_reads_is_destroyed_at_once(file: MappedFile) -> None:
    assert file.destroy(0, 120_000)
    assert not Path(file.path).exists()
    assert file.destroy(1, 120_000)


def test_a_file_whose_name_could_not_be_removed_is_tried_again(tmp_path: Path) -> None:
    disk = FailingDisk()
    file = make(tmp_path, disk=disk)
    with pytest.raises(DiskIOError):
        file.destroy(0, 0)

    disk.broken = False
    assert file.destroy(0, 0)
    assert not Path(file.path).exists()


def test_a_file_going_away_is_not_flushed(file: MappedFile) -> None:
    """Museum row 2: what cannot be held does not count as flushed."""
    append(file, b"12345")
    file.hold()
    file.shutdown(0)

    assert file.flush(0) == 0
    assert region_of(file).syncs == []
    file.release()


# Pool


def test_a_pool_lends_as_many_buffers_as_it_has() -> None:
    pool = TransientStorePool(2, SIZE)

    first, second = pool.borrow(), pool.borrow()
    assert first is not None
    assert second is not None
    assert (pool.borrow(), pool.available) == (None, 0)
    pool.give_back(second)
    assert (pool.available, pool.borrow() is second) == (1, True)


def test_a_buffer_comes_back_cleared() -> None:
    """Museum row 61: bytes of older messages must not lie behind the next file's tail."""
    pool = TransientStorePool(1, 10)
    buffer = pool.borrow()
    assert buffer is not None
    buffer[:] = b"0123456789"

    pool.give_back(buffer)
    assert pool.borrow() == bytearray(10)


def test_a_buffer_is_given_up_only_when_all_of_it_is_committed(buffered: MappedFile) -> None:
    append(buffered, b"x" * (SIZE - 1))
    buffered.commit(0)
    assert buffered.release_write_buffer() is None

    append(buffered, b"y")
    assert buffered.release_write_buffer() is None
    buffered.commit(4)
    assert buffered.release_write_buffer() is not None
    assert buffered.read_position == SIZE
    assert buffered.target is buffered.region.buf
    assert buffered.release_write_buffer() is None
