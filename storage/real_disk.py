"""The disk of the operating system, behind the port. Linux; everything here is a system call.

Notes that cost somebody a day:
- `mmap.flush` holds the interpreter lock during msync and stops every thread; libc's msync by ctypes does not.
- msync of a range covers bytes written through the file too: both go through the same page cache.
- Storing through a map into a hole of a full file system kills the process with SIGBUS, hence `reserve`.
- A POSIX record lock belongs to the process, and closing *any* descriptor of the file drops it: the lock file is
  opened nowhere else, and a second store of this process is refused by our own table.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat as stat_modes
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from brokerlab.storage.disk import PAGE_SIZE, DiskUsage, FileInfo, Offsets
from brokerlab.storage.errors import DiskError, DiskFullError, DiskIOError, StoreLockedError

_libc = ctypes.CDLL(None, use_errno=True)
_libc.msync.argtypes = _libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mlock.argtypes = _libc.munlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MS_SYNC = 4
_MADV_POPULATE_WRITE = 23
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def _errors(action: str, path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _translated(action, path, error.errno or 0, error.strerror or "") from error


def _translated(action: str, path: str, number: int, detail: str = "") -> DiskIOError | DiskFullError:
    kind = DiskFullError if number in _FULL else DiskIOError
    return kind(action, path, number, detail or os.strerror(number))


class RealRegion:
    """A mapped file. `wrote` has nothing to do: the kernel sees every store."""

    def __init__(self, path: str, descriptor: int, size: int, *, writable: bool) -> None:
        self.path = path
        self.size = size
        self._descriptor = descriptor
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self.buf = mmap.mmap(descriptor, size, access=access)
        self._address = _address_of(self.buf) if writable else 0

    def wrote(self, position: int, length: int) -> None:
        pass

    def wrote_scattered(self, positions: Offsets, length: int) -> None:
        pass

    def write(self, position: int, data: bytes) -> None:
        done = 0
        with _errors("write", self.path):
            while done < len(data):  # a short write is no error to the kernel; what follows it may be
                done += os.pwrite(self._descriptor, data[done:] if done else data, position + done)

    def sync(self, position: int, length: int) -> None:
        if length <= 0:
            return
        start = position - position % PAGE_SIZE
        if _libc.msync(self._address + start, position + length - start, _MS_SYNC):
            raise _translated("sync", self.path, ctypes.get_errno())

    def data_ranges(self) -> list[tuple[int, int]]:
        ranges, position = [], 0
        while position < self.size:
            try:
                start = os.lseek(self._descriptor, position, os.SEEK_DATA)
                end = os.lseek(self._descriptor, start, os.SEEK_HOLE)
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing but hole up to the end
                    break
                ranges.append((position, self.size))  # a file system that cannot tell
                break
            ranges.append((start, min(end, self.size)))
            position = end
        return ranges

    def warm(self, position: int, length: int) -> None:
        start = position - position % PAGE_SIZE
        if _libc.madvise(self._address + start, position + length - start, _MADV_POPULATE_WRITE):
            for page in range(start, position + length, PAGE_SIZE):  # before Linux 5.14: a touch per page
                self.buf[page : page + 1] = self.buf[page : page + 1]

    def lock_memory(self) -> bool:
        return bool(_libc.mlock(self._address, self.size) == 0)

    def unlock_memory(self) -> None:
        _libc.munlock(self._address, self.size)

    def advise_random(self, random: bool) -> None:
        self.buf.madvise(mmap.MADV_RANDOM if random else mmap.MADV_WILLNEED)

    def close(self) -> None:
        if self._descriptor >= 0:
            self.buf.close()
            os.close(self._descriptor)
            self._descriptor = -1


def _address_of(mapped: mmap.mmap) -> int:
    # The ctypes object exports the buffer, and a map with exports cannot be closed: take the address and let go.
    export = ctypes.c_char.from_buffer(mapped)
    address = ctypes.addressof(export)
    del export
    return address


class RealLock:
    """An exclusive POSIX lock on byte 0, the one a Java FileChannel takes."""

    _held: set[tuple[int, int]] = set()  # noqa: RUF012  POSIX locks do not exclude within one process

    def __init__(self, path: str) -> None:
        # Look before opening: closing a second descriptor would drop the lock that the first store holds.
        with suppress(OSError):
            there = os.stat(path)
            if (there.st_dev, there.st_ino) in RealLock._held:
                raise StoreLockedError(f"{path}: another store of this process has this directory open")
        with _errors("open", path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        info = os.fstat(self._descriptor)
        self._identity = (info.st_dev, info.st_ino)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        except OSError as error:
            os.close(self._descriptor)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise StoreLockedError(f"{path}: another process has this store open for writing") from error
            raise _translated("lock", path, error.errno or 0) from error
        RealLock._held.add(self._identity)
        try:
            with _errors("write", path):
                os.pwrite(self._descriptor, b"lock", 0)
        except DiskError:
            self.release()
            raise

    def release(self) -> None:
        if self._descriptor >= 0:
            RealLock._held.discard(self._identity)
            os.close(self._descriptor)
            self._descriptor = -1


class RealDisk:
    """The operating system's disk. With `read_only` every file is opened O_RDONLY and every change is refused."""

    def __init__(self, *, read_only: bool = False) -> None:
        self.read_only = read_only

    def create(self, path: str, size: int, *, reserve: bool) -> RealRegion:
        self._refuse_if_read_only("create", path)
        with _errors("create", path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                if reserve:
                    os.posix_fallocate(descriptor, 0, size)
                else:
                    os.ftruncate(descriptor, size)
                return RealRegion(path, descriptor, size, writable=True)
            except BaseException:
                os.close(descriptor)
                os.unlink(path)
                raise

    def open(self, path: str, *, size: int | None = None) -> RealRegion:
        with _errors("open", path):
            flags = (os.O_RDONLY if self.read_only else os.O_RDWR) | os.O_CLOEXEC | os.O_NONBLOCK
            descriptor = os.open(path, flags)
            try:
                info = os.fstat(descriptor)
                if not stat_modes.S_ISREG(info.st_mode):
                    raise OSError(errno.EINVAL, "not a regular file")
                length = info.st_size
                if size is not None and length < size:
                    self._refuse_if_read_only("extend", path)
                    os.ftruncate(descriptor, size)
                    length = size
                if length == 0:
                    raise OSError(errno.EINVAL, "file is empty")
                return RealRegion(path, descriptor, length, writable=not self.read_only)
            except BaseException:
                os.close(descriptor)
                raise

    def stat(self, path: str) -> FileInfo | None:
        with _errors("look at", path):
            try:
                return _file_info(os.path.basename(path), path, os.lstat(path))
            except (FileNotFoundError, NotADirectoryError):
                return None

    def list(self, path: str) -> list[FileInfo]:
        with _errors("list", path):
            try:
                entries = sorted(os.scandir(path), key=lambda entry: entry.name)
            except FileNotFoundError:
                return []
            found = []
            for entry in entries:
                with suppress(FileNotFoundError):  # removed by somebody else between the listing and the look
                    found.append(_file_info(entry.name, entry.path, entry.stat(follow_symlinks=False)))
            return found

    def make_directories(self, path: str) -> None:
        if os.path.isdir(path):
            return
        self._refuse_if_read_only("create", path)
        parent = os.path.dirname(path)
        if parent and parent != path:
            self.make_directories(parent)
        with _errors("create directory", path):
            with suppress(FileExistsError):
                os.mkdir(path, 0o755)
            if not os.path.isdir(path):
                raise OSError(errno.ENOTDIR, "a file stands where a directory is needed")
        self.sync_directory(parent or ".")

    def sync_directory(self, path: str) -> None:
        self._refuse_if_read_only("sync", path)
        with _errors("sync directory", path):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def unlink(self, path: str) -> None:
        self._refuse_if_read_only("remove", path)
        with _errors("remove", path):
            os.unlink(path)

    def remove_directory(self, path: str) -> None:
        self._refuse_if_read_only("remove", path)
        with _errors("remove directory", path):
            os.rmdir(path)

    def read_small(self, path: str, *, most: int = 1 << 20) -> bytes | None:
        with _errors("read", path):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except FileNotFoundError:
                return None
            try:
                return os.pread(descriptor, most, 0)
            finally:
                os.close(descriptor)

    def write_small(self, path: str, data: bytes) -> None:
        self._refuse_if_read_only("write", path)
        self._write(path, data, sync=False)

    def replace_small(self, path: str, data: bytes) -> None:
        self._refuse_if_read_only("write", path)
        aside = path + ".tmp"
        self._write(aside, data, sync=True)
        with _errors("rename", path):
            os.replace(aside, path)
        self.sync_directory(os.path.dirname(path) or ".")

    def usage(self, path: str) -> DiskUsage:
        with _errors("look at the partition of", path):
            info = os.statvfs(path)
        unit = info.f_frsize
        return DiskUsage(info.f_blocks * unit, info.f_bfree * unit, info.f_bavail * unit)

    def set_mtime(self, path: str, mtime_ms: int) -> None:
        self._refuse_if_read_only("touch", path)
        with _errors("touch", path):
            os.utime(path, ns=(mtime_ms * 1_000_000, mtime_ms * 1_000_000))

    def lock(self, path: str) -> RealLock:
        self._refuse_if_read_only("lock", path)
        return RealLock(path)

    def _write(self, path: str, data: bytes, *, sync: bool) -> None:
        with _errors("write", path):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                done = 0
                while done < len(data):
                    done += os.write(descriptor, data[done:])
                if sync:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _refuse_if_read_only(self, action: str, path: str) -> None:
        if self.read_only:
            raise DiskIOError(action, path, errno.EROFS, "opened read-only")


def _file_info(name: str, path: str, info: os.stat_result) -> FileInfo:
    mode = info.st_mode
    if stat_modes.S_ISREG(mode):
        kind = "file"
    elif stat_modes.S_ISDIR(mode):
        kind = "directory"
    elif stat_modes.S_ISLNK(mode):
        kind = "link"
    else:
        kind = "other"
    return FileInfo(name, path, info.st_size, info.st_mtime_ns // 1_000_000, kind)
