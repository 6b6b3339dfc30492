"""What every disk must do. A simulated disk joins by adding its factory to `DISKS`."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from brokerlab.storage.disk import Disk, DiskUsage, Region
from brokerlab.storage.errors import DiskError, DiskFullError, DiskIOError, StoreLockedError
from brokerlab.storage.real_disk import RealDisk

DISKS: list[Callable[[], Disk]] = [RealDisk]
READ_ONLY_DISKS: list[Callable[[], Disk]] = [lambda: RealDisk(read_only=True)]

MIB = 1 << 20


@pytest.fixture(params=DISKS)
def disk(request: pytest.FixtureRequest) -> Disk:
    made: Disk = request.param()
    return made


@pytest.fixture(params=READ_ONLY_DISKS)
def read_only(request: pytest.FixtureRequest) -> Disk:
    made: Disk = request.param()
    return made


@pytest.fixture
def small_partition(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB: a really full disk. Mounting needs root, as in the container that runs these tests."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system of one MiB")
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)], check=True, timeout=30)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True, timeout=30)


def run_elsewhere(program: str, *arguments: str) -> str:
    """What another process prints."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# Files and maps


@pytest.mark.parametrize("reserve", [True, False])
def test_a_new_file_is_zeros_of_its_size(disk: Disk, tmp_path: Path, reserve: bool) -> None:
    region = disk.create(str(tmp_path / "f"), 10_000, reserve=reserve)

    assert (region.size, len(region.buf), region.path) == (10_000, 10_000, str(tmp_path / "f"))
    assert region.buf[:] == bytes(10_000)
    assert (tmp_path / "f").stat().st_size == 10_000
    assert ((tmp_path / "f").stat().st_blocks * 512 >= 10_000) == reserve
    region.close()


def test_a_file_is_created_once(disk: Disk, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"mine")

    with pytest.raises(DiskIOError) as caught:
        disk.create(str(tmp_path / "f"), 4096, reserve=True)
    assert (caught.value.errno, caught.value.path) == (errno.EEXIST, str(tmp_path / "f"))
    assert (tmp_path / "f").read_bytes() == b"mine"


def test_the_map_and_the_file_show_the_same_bytes(disk: Disk, tmp_path: Path) -> None:
    region = disk.create(str(tmp_path / "f"), 8192, reserve=True)

    region.buf[0:3] = b"map"
    region.wrote(0, 3)
    region.write(4094, b"file")
    region.wrote_scattered(np.array([0, 4096]), 1)
    assert region.buf[4094:4098] == b"file"
    assert (tmp_path / "f").read_bytes()[:3] == b"map"
    region.sync(0, 8192)
    region.sync(4095, 2)
    region.sync(100, 0)
    region.close()
    again = disk.open(str(tmp_path / "f"))
    assert (again.buf[0:3], again.buf[4094:4098]) == (b"map", b"file")
    again.close()


def test_a_whole_buffer_is_written(disk: Disk, tmp_path: Path) -> None:
    region = disk.create(str(tmp_path / "f"), 3 * MIB, reserve=False)
    data = bytes(range(256)) * (3 * MIB // 256)

    region.write(0, data)
    assert region.buf[:] == data
    region.close()


def test_an_existing_file_is_opened_and_extended_if_asked(disk: Disk, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"12345")

    plain = disk.open(str(path))
    assert (plain.size, plain.buf[:]) == (5, b"12345")
    plain.close()
    longer = disk.open(str(path), size=10)
    assert (longer.size, longer.buf[:]) == (10, b"12345" + bytes(5))
    longer.close()
    shorter = disk.open(str(path), size=4)
    assert shorter.size == 10
    shorter.close()


@pytest.mark.parametrize("what", ["missing", "directory", "empty", "fifo", "loop"])
def test_what_is_no_plain_file_with_bytes_is_refused(disk: Disk, tmp_path: Path, what: str) -> None:
    path = tmp_path / "x"
    match what:
        case "directory":
            path.mkdir()
        case "empty":
            path.write_bytes(b"")
        case "fifo":
            os.mkfifo(path)
        case "loop":
            path.symlink_to(path)

    with pytest.raises(DiskIOError) as caught:
        disk.open(str(path))
    assert caught.value.path == str(path)
    assert caught.value.errno > 0


def test_a_region_with_a_living_view_refuses_to_close(disk: Disk, tmp_path: Path) -> None:
    region = disk.create(str(tmp_path / "f"), 4096, reserve=True)
    view = memoryview(region.buf)

    with pytest.raises(BufferError):
        region.close()
    assert view[0] == 0
    view.release()
    region.close()
    region.close()


def test_a_map_outlives_its_name(disk: Disk, tmp_path: Path) -> None:
    region = disk.create(str(tmp_path / "f"), 4096, reserve=True)
    region.buf[0:2] = b"hi"

    disk.unlink(str(tmp_path / "f"))
    assert disk.stat(str(tmp_path / "f")) is None
    assert region.buf[0:2] == b"hi"
    region.close()


def test_descriptors_are_given_back(disk: Disk, tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))

    for number in range(20):
        region = disk.create(str(tmp_path / f"f{number}"), 4096, reserve=True)
        region.close()
        disk.open(str(tmp_path / f"f{number}")).close()
        disk.read_small(str(tmp_path / f"f{number}"))
        disk.list(str(tmp_path))
        for wrong in (tmp_path, tmp_path / "none"):
            with pytest.raises(DiskIOError):
                disk.open(str(wrong))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_data_ranges_tell_data_from_holes(disk: Disk, tmp_path: Path) -> None:
    region = disk.create(str(tmp_path / "f"), MIB, reserve=False)
    assert covered(region) == set()

    region.write(5 * 4096 + 7, b"x")
    region.write(100 * 4096, b"y" * 8192)
    ranges = region.data_ranges()
    assert {5, 100, 101} <= covered(region)
    assert len(covered(region)) < 256
    assert ranges == sorted(ranges)
    assert all(0 <= start < end <= MIB for start, end in ranges)
    holes = bytearray(region.buf[:])
    for start, end in ranges:
        holes[start:end] = bytes(end - start)
    assert not any(holes)
    region.close()


def covered(region: Region) -> set[int]:
    return {page for start, end in region.data_ranges() for page in range(start // 4096, -(-end // 4096))}


def test_warming_changes_no_byte(disk: Disk, tmp_path: Path) -> None:
    region = disk.create(str(tmp_path / "f"), 10 * 4096, reserve=True)
    region.buf[4096:4100] = b"warm"

    region.warm(5000, 20_000)
    region.warm(0, 10 * 4096)
    region.advise_random(True)
    region.advise_random(False)
    if region.lock_memory():
        region.unlock_memory()
    assert region.buf[4096:4100] == b"warm"
    assert not any(region.buf[:4096])
    region.close()


# Full


def test_a_full_disk_is_an_error_at_creation_and_leaves_no_file(disk: Disk, small_partition: Path) -> None:
    path = small_partition / "00000000000000000000"

    with pytest.raises(DiskFullError) as caught:
        disk.create(str(path), 4 * MIB, reserve=True)
    assert (caught.value.errno, caught.value.path, caught.value.action) == (errno.ENOSPC, str(path), "create")
    assert "ENOSPC" in str(caught.value)
    assert list(small_partition.iterdir()) == []
    disk.create(str(path), MIB // 2, reserve=True).close()


def test_a_full_disk_is_an_error_at_a_write_to_a_sparse_file(disk: Disk, small_partition: Path) -> None:
    region = disk.create(str(small_partition / "sparse"), 4 * MIB, reserve=False)

    with pytest.raises(DiskFullError) as caught:
        region.write(0, bytes(2 * MIB))
    assert caught.value.errno == errno.ENOSPC
    region.close()
    with pytest.raises(DiskFullError):
        disk.replace_small(str(small_partition / "text"), b"x" * 2 * MIB)


def test_a_small_file_on_a_full_disk_keeps_its_former_content(disk: Disk, small_partition: Path) -> None:
    disk.replace_small(str(small_partition / "text"), b"former")
    filler = small_partition / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError):
        for _ in range(1 << 12):
            file.write(bytes(4096))

    with pytest.raises(DiskFullError):
        disk.replace_small(str(small_partition / "text"), b"x" * 5000)
    assert disk.read_small(str(small_partition / "text")) == b"former"


def test_a_lock_that_cannot_be_written_is_not_held(disk: Disk, small_partition: Path) -> None:
    with (small_partition / "filler").open("wb", buffering=0) as file, pytest.raises(OSError):
        for _ in range(1 << 12):
            file.write(bytes(4096))
    path = str(small_partition / "lock")

    for _ in range(2):
        with pytest.raises(DiskFullError):
            disk.lock(path)
    (small_partition / "filler").unlink()
    disk.lock(path).release()


# Names


def test_stat_and_list_tell_what_is_there(disk: Disk, tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"123")
    (tmp_path / "a").mkdir()
    (tmp_path / "c").symlink_to("b")
    os.mkfifo(tmp_path / "d")

    listed = disk.list(str(tmp_path))
    assert [(info.name, info.kind) for info in listed] == [
        ("a", "directory"), ("b", "file"), ("c", "link"), ("d", "other"),
    ]  # fmt: skip
    assert listed[1] == disk.stat(str(tmp_path / "b"))
    assert (listed[1].size, listed[1].path) == (3, str(tmp_path / "b"))
    assert disk.stat(str(tmp_path / "none")) is None
    assert disk.stat(str(tmp_path / "b" / "below")) is None
    assert disk.list(str(tmp_path / "none")) == []
    with pytest.raises(DiskIOError):
        disk.list(str(tmp_path / "b"))


def test_directories_are_made_with_their_parents(disk: Disk, tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b" / "c"

    disk.make_directories(str(deep))
    disk.make_directories(str(deep))
    assert deep.is_dir()
    disk.remove_directory(str(deep))
    assert not deep.exists()
    with pytest.raises(DiskIOError):
        disk.remove_directory(str(tmp_path / "a"))
    (tmp_path / "file").write_bytes(b"x")
    for blocked in ("file", "file/below"):
        with pytest.raises(DiskIOError) as caught:
            disk.make_directories(str(tmp_path / blocked))
        assert caught.value.errno == errno.ENOTDIR


def test_small_files_are_read_written_and_replaced(disk: Disk, tmp_path: Path) -> None:
    path = str(tmp_path / "small")
    assert disk.read_small(path) is None

    disk.write_small(path, b"longer text")
    disk.write_small(path, b"short")
    assert disk.read_small(path) == b"short"
    assert disk.read_small(path, most=2) == b"sh"
    disk.replace_small(path, b"new")
    assert disk.read_small(path) == b"new"
    assert [item.name for item in tmp_path.iterdir()] == ["small"]
    with pytest.raises(DiskIOError):
        disk.read_small(str(tmp_path))


def test_a_replaced_file_is_a_new_one_and_readers_of_the_old_one_see_no_mixture(disk: Disk, tmp_path: Path) -> None:
    path = tmp_path / "small"
    disk.replace_small(str(path), b"old " * 1000)

    with path.open("rb") as reader:
        disk.replace_small(str(path), b"new")
        assert reader.read() == b"old " * 1000
    assert path.read_bytes() == b"new"


def test_removing_what_is_not_there_is_told(disk: Disk, tmp_path: Path) -> None:
    with pytest.raises(DiskIOError, match=r"cannot remove .*gone.* \[ENOENT\]"):
        disk.unlink(str(tmp_path / "gone"))
    with pytest.raises(DiskIOError):
        disk.sync_directory(str(tmp_path / "gone"))
    disk.sync_directory(str(tmp_path))


def test_the_modification_time_is_set_in_milliseconds(disk: Disk, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")

    disk.set_mtime(str(tmp_path / "f"), 1_234_567_890_123)
    info = disk.stat(str(tmp_path / "f"))
    assert info is not None
    assert info.mtime_ms == 1_234_567_890_123


def test_usage_is_that_of_the_partition(disk: Disk, small_partition: Path) -> None:
    assert disk.usage(str(small_partition)) == DiskUsage(MIB, MIB, MIB)
    disk.create(str(small_partition / "half"), MIB // 2, reserve=True).close()
    assert disk.usage(str(small_partition)).used_ratio == 0.5


@pytest.mark.parametrize(
    ("usage", "ratio"),
    [((100, 50, 50), 0.5), ((1000, 499, 499), 0.51), ((100, 30, 10), 0.88), ((100, 100, 0), -1.0), ((0, 0, 0), -1.0)],
)
def test_the_used_ratio_is_rounded_up_to_a_percent(usage: tuple[int, int, int], ratio: float) -> None:
    assert DiskUsage(*usage).used_ratio == ratio


# Read-only


def test_a_read_only_disk_refuses_every_change(read_only: Disk, tmp_path: Path) -> None:
    path = str(tmp_path / "f")
    (tmp_path / "f").write_bytes(b"12345")
    (tmp_path / "d").mkdir()
    changes: list[Callable[[], object]] = [
        lambda: read_only.create(str(tmp_path / "new"), 10, reserve=False),
        lambda: read_only.open(path, size=10),
        lambda: read_only.make_directories(str(tmp_path / "x" / "y")),
        lambda: read_only.sync_directory(str(tmp_path)),
        lambda: read_only.unlink(path),
        lambda: read_only.remove_directory(str(tmp_path / "d")),
        lambda: read_only.write_small(path, b"x"),
        lambda: read_only.replace_small(path, b"x"),
        lambda: read_only.set_mtime(path, 0),
        lambda: read_only.lock(str(tmp_path / "lock")),
    ]
    before = {item.name: (item.stat().st_mtime_ns, item.stat().st_size) for item in tmp_path.iterdir()}

    for change in changes:
        with pytest.raises(DiskError) as caught:
            change()
        assert caught.value.errno == errno.EROFS
    assert read_only.read_only
    assert {item.name: (item.stat().st_mtime_ns, item.stat().st_size) for item in tmp_path.iterdir()} == before


def test_a_region_of_a_read_only_disk_cannot_be_written(read_only: Disk, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    (tmp_path / "f").chmod(stat.S_IRUSR)
    region = read_only.open(str(tmp_path / "f"))

    with pytest.raises(TypeError):
        region.buf[0:1] = b"x"
    with pytest.raises(DiskIOError):
        region.write(0, b"x")
    assert region.buf[:] == b"12345"
    assert region.data_ranges() == [(0, 5)]
    assert isinstance(region.buf, mmap.mmap)
    region.close()
    assert (tmp_path / "f").read_bytes() == b"12345"


# Lock

TRY_TO_LOCK = """
import sys
from brokerlab.storage.errors import StoreLockedError
from brokerlab.storage.real_disk import RealDisk
try:
    RealDisk().lock(sys.argv[1])
    print("locked")
except StoreLockedError as error:
    print("refused:", error)
"""

TRY_AS_JAVA_DOES = """
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        print("locked")
    except OSError:
        print("refused")
"""


def test_a_lock_excludes_other_processes_until_it_is_released(disk: Disk, tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    held = disk.lock(path)

    assert run_elsewhere(TRY_TO_LOCK, path).startswith("refused:")
    assert run_elsewhere(TRY_AS_JAVA_DOES, path) == "refused"
    held.release()
    assert run_elsewhere(TRY_TO_LOCK, path) == "locked"
    assert (tmp_path / "lock").read_bytes() == b"lock"


def test_a_lock_excludes_another_store_of_this_process_and_survives_its_attempt(disk: Disk, tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    link = tmp_path / "other"
    link.symlink_to(tmp_path, target_is_directory=True)
    held = disk.lock(path)

    for second in (path, str(link / "lock")):
        with pytest.raises(StoreLockedError, match="this process"):
            disk.lock(second)
        assert run_elsewhere(TRY_AS_JAVA_DOES, path) == "refused"
    held.release()
    held.release()
    disk.lock(path).release()


def test_a_lock_of_another_process_is_respected(disk: Disk, tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    hold = f"{TRY_TO_LOCK}\nsys.stdout.flush()\nsys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        for _ in range(2):
            with pytest.raises(StoreLockedError, match="another process"):
                disk.lock(path)
        other.communicate("", timeout=30)
    disk.lock(path).release()


def test_a_lock_in_a_missing_directory_is_a_disk_error(disk: Disk, tmp_path: Path) -> None:
    with pytest.raises(DiskIOError) as caught:
        disk.lock(str(tmp_path / "none" / "lock"))
    assert caught.value.errno == errno.ENOENT
