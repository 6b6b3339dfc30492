"""The port to the disk: everything the store asks of the operating system goes through here.

Two protocols. A `Disk` deals in names: create, open, list, unlink, lock. A `Region` is one open file, mapped into
memory: `buf` is the map. Whoever stores into `buf` calls `wrote` right afterwards, with no wait in between. A live
disk needs no such word, but a simulated one learns every dirty page from it, and may crash the process there, with
half a record copied. `read_only` disks refuse every call that would change anything.

Only `sync` and `sync_directory` are promises. After a power cut a page that was written but not synced may hold any
version it had since the last sync, and a name that was created, renamed or removed may be undone until its directory
is synced. A failed sync promises nothing about the pages it covered, not even that a later sync will write them.

Paths are plain strings. Errors are `DiskFullError` and `DiskIOError`, both with path and errno.
"""

from __future__ import annotations

import mmap
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

PAGE_SIZE = 4096

Offsets: TypeAlias = NDArray[np.int64]


class FileInfo(NamedTuple):
    """One directory entry. `kind` is "file", "directory", "link" or "other"."""

    name: str
    path: str
    size: int
    mtime_ms: int
    kind: str


class DiskUsage(NamedTuple):
    """Bytes of a partition: all of them, free for root, free for us."""

    total: int
    free: int
    usable: int

    @property
    def used_ratio(self) -> float:
        """RocketMQ's figure (since 4.9.2): used / (used + usable), rounded up to a whole percent."""
        used = self.total - self.free
        whole = used + self.usable
        return -(-100 * used // whole) / 100 if whole > 0 else -1.0


class Region(Protocol):
    """One open file and its map. Closing it while a view of `buf` lives is refused with BufferError."""

    @property
    def path(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def buf(self) -> mmap.mmap: ...

    def wrote(self, position: int, length: int) -> None:
        """These bytes of `buf` were just stored. A crash point."""

    def wrote_scattered(self, positions: Offsets, length: int) -> None:
        """`length` bytes at each of these positions were just stored. A crash point."""

    def write(self, position: int, data: bytes) -> None:
        """Write through the file (not the map) and see the whole of it written, or raise."""

    def sync(self, position: int, length: int) -> None:
        """Make these bytes durable. Returns only when they are."""

    def data_ranges(self) -> list[tuple[int, int]]:
        """(start, end) of what is not a hole, in order. Bytes outside are zero. May say more than is needed."""

    def warm(self, position: int, length: int) -> None:
        """Have these pages in memory and writable, so that a later store meets no page fault."""

    def lock_memory(self) -> bool:
        """Keep the whole map from being swapped out; False where the limit does not allow it."""

    def unlock_memory(self) -> None:
        """Undo `lock_memory`."""

    def advise_random(self, random: bool) -> None:
        """Tell the kernel to read ahead (False) or not (True)."""

    def close(self) -> None:
        """Unmap and close. Nothing is synced by this."""


class DiskLock(Protocol):
    """A held process lock."""

    def release(self) -> None: ...


class Disk(Protocol):
    """Names, directories, small files, and regions."""

    @property
    def read_only(self) -> bool: ...

    def create(self, path: str, size: int, *, reserve: bool) -> Region:
        """A new file of `size` zeros. `reserve` takes the space now, so that a full disk is an error here and not
        a SIGBUS later. On failure no file is left behind."""

    def open(self, path: str, *, size: int | None = None) -> Region:
        """An existing file; `size` extends a shorter one first (refused on a read-only disk)."""

    def stat(self, path: str) -> FileInfo | None:
        """What is there, links not followed; None if nothing is."""

    def list(self, path: str) -> list[FileInfo]:
        """The directory's entries sorted by name; empty if there is no such directory."""

    def make_directories(self, path: str) -> None:
        """The directory with its parents, and the new names synced."""

    def sync_directory(self, path: str) -> None:
        """Make creations, renames and unlinks in it durable."""

    def unlink(self, path: str) -> None:
        """Remove a file's name; open maps of it live on."""

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""

    def read_small(self, path: str, *, most: int = 1 << 20) -> bytes | None:
        """At most `most` bytes of a file; None if there is none."""

    def write_small(self, path: str, data: bytes) -> None:
        """Create or overwrite in place, no sync (as the original writes `abort`)."""

    def replace_small(self, path: str, data: bytes) -> None:
        """Put `data` under this name at once: write aside, sync, rename, sync the directory."""

    def usage(self, path: str) -> DiskUsage:
        """Space on the partition that holds `path`."""

    def set_mtime(self, path: str, mtime_ms: int) -> None:
        """Set the modification time."""

    def lock(self, path: str) -> DiskLock:
        """Exclusive lock on the first byte, as the original takes it; StoreLockedError if somebody has it."""
