"""A row of equally sized files that together are one long byte array: the commit log, or one consume queue.

A file is named by the offset of its first byte, in 20 digits. The two "wheres" are offsets on the whole row: what was
committed and what was flushed. Files appear at the end and go at the beginning.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from brokerlab.storage.disk import Disk, FileInfo
from brokerlab.storage.errors import DamagedStoreError, DiskError
from brokerlab.storage.mapped_file import MappedFile, TransientStorePool

NAME_DIGITS = 20
TRUNCATE_FORCE_MS = 1_000


def file_name(start: int) -> str:
    return f"{start:0{NAME_DIGITS}d}"


def is_segment_name(name: str) -> bool:
    return len(name) == NAME_DIGITS and name.isascii() and name.isdigit()


class MappedFileQueue:
    """The files of one directory, oldest first."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        file_size: int,
        *,
        reserve: bool,
        pool: TransientStorePool | None = None,
        half_appends: bool = False,
    ) -> None:
        self.directory = directory
        self.file_size = file_size
        self.files: list[MappedFile] = []
        self.flushed_where = 0
        self.committed_where = 0
        self.store_timestamp = 0
        """Store time of the last record that the last thorough flush covered. Written by the flusher."""
        self.notes: list[str] = []
        self.allocate: Callable[[int], MappedFile] = self.make_file
        """Where new files come from: made here, or taken from whoever makes them ahead of need."""
        self._disk = disk
        self._reserve = reserve
        self._pool = pool
        self._half_appends = half_appends
        self._directory_unsynced = False

    # Load

    def load(self, *, empty_files_block: Callable[[list[FileInfo]], bool] = lambda _empty: False) -> None:
        """Map every file of the directory. Stray names are skipped and told; a wrong size is refused by name.

        Files of length 0 at the end are what a crash leaves while a file is being made: removed, unless
        `empty_files_block` (the original's behaviour, museum row 14) says that they stop the start.
        """
        found = []
        for info in self._disk.list(self.directory):
            if info.kind == "link" and is_segment_name(info.name):
                raise DamagedStoreError(
                    "segment is a link: move the file itself here, or remove the link", path=info.path
                )
            if info.kind != "file" or not is_segment_name(info.name):
                self.notes.append(f"{info.path}: skipped, not a segment ({info.kind})")
            else:
                found.append(info)
        empty: list[FileInfo] = []
        while found and found[-1].size == 0:
            empty.append(found.pop())
        if empty and empty_files_block(empty):
            raise DamagedStoreError("file is empty, and this version refuses to start with it", path=empty[0].path)
        for info in found:
            if info.size != self.file_size:
                raise DamagedStoreError(f"file has {info.size} bytes, configured are {self.file_size}", path=info.path)
            if int(info.name) % self.file_size:
                raise DamagedStoreError(f"name is not a multiple of the file size {self.file_size}", path=info.path)
        for info in empty:
            self._disk.unlink(info.path)
            self.notes.append(f"{info.path}: removed, it was empty")
        self._directory_unsynced = True  # an earlier run may have made these names and ended before it synced them
        for info in found:
            file = MappedFile(
                self._disk, self._disk.open(info.path), start=int(info.name), half_appends=self._half_appends
            )
            file.set_positions(self.file_size)
            self.files.append(file)

    def gap(self) -> tuple[MappedFile, MappedFile] | None:
        """The first two neighbours that do not meet."""
        for left, right in zip(self.files, self.files[1:], strict=False):
            if left.start + self.file_size != right.start:
                return left, right
        return None

    # Files

    def make_file(self, start: int) -> MappedFile:
        """Create and map the file at `start`, without adding it to the row."""
        self._disk.make_directories(self.directory)
        path = f"{self.directory}/{file_name(start)}"
        left_over = self._disk.stat(path)
        if (
            left_over is not None and left_over.kind == "file"
        ):  # made ahead of need by a run that ended before it was used
            self._disk.unlink(path)
        if self._directory_unsynced:  # names become durable in order: a power cut must not leave the later one alone
            self.sync_directory()
        region = self._disk.create(path, self.file_size, reserve=self._reserve)
        self._directory_unsynced = True
        buffer = self._pool.borrow() if self._pool else None
        return MappedFile(self._disk, region, start=start, write_buffer=buffer, half_appends=self._half_appends)

    def file_to_append(self, *, start: int = 0) -> MappedFile:
        """The last file, or a new one if there is none (at `start`, rounded down) or the last one is full."""
        if self.files and not self.files[-1].is_full:
            return self.files[-1]
        next_start = self.files[-1].start + self.file_size if self.files else start - start % self.file_size
        return self.add(self.allocate(next_start))

    def add(self, file: MappedFile) -> MappedFile:
        """Put a new file at the end of the row."""
        if not self.files:
            self.flushed_where = max(self.flushed_where, file.start)
            self.committed_where = max(self.committed_where, file.start)
        self.files.append(file)
        self._directory_unsynced = True
        return file

    @property
    def first(self) -> MappedFile | None:
        return self.files[0] if self.files else None

    @property
    def last(self) -> MappedFile | None:
        return self.files[-1] if self.files else None

    @property
    def min_offset(self) -> int:
        """Start of the first file that is not going away; -1 if there is none."""
        return next((file.start for file in self.files if file.is_available), -1)

    @property
    def max_offset(self) -> int:
        """End of what can be read without a hole; 0 if there is no file."""
        last = self.last
        if self._pool is not None:  # behind a file whose buffer is not handed over in full nothing counts yet
            last = next((file for file in self.files if file.write_buffer is not None), last)
        return last.start + last.read_position if last else 0

    @property
    def max_wrote_offset(self) -> int:
        last = self.last
        return last.start + last.wrote_position if last else 0

    def find(self, offset: int) -> MappedFile | None:
        """The file that holds `offset`, by arithmetic; files that do not follow each other are searched."""
        files = self.files
        if not files or not files[0].start <= offset < files[-1].start + self.file_size:
            return None
        index = (offset - files[0].start) // self.file_size
        if index < len(files) and files[index].start <= offset < files[index].start + self.file_size:
            return files[index]
        index = bisect_right(files, offset, key=lambda file: file.start) - 1
        return files[index] if offset < files[index].start + self.file_size else None

    # Commit and flush: one file a call, True when nothing moved

    def _file_at(self, where: int) -> MappedFile | None:
        """The file to go on with; None if `where` is the very end. Files before the first are gone: go on there."""
        first = self.first
        return first if first is not None and where < first.start else self.find(where)

    def commit(self, least_pages: int) -> bool:
        file = self._file_at(self.committed_where)
        if file is None:
            return True
        before = self.committed_where
        self.committed_where = file.start + file.commit(least_pages)
        buffer = file.release_write_buffer()
        if buffer is not None and self._pool:
            self._pool.give_back(buffer)
        return self.committed_where == before

    def flush(self, least_pages: int) -> bool:
        if self._directory_unsynced and self.files:  # a durable page is of no use in a file whose name is not
            self.sync_directory()
        file = self._file_at(self.flushed_where)
        if file is None:
            return True
        before, timestamp = self.flushed_where, file.store_timestamp
        self.flushed_where = file.start + file.flush(least_pages)
        if least_pages == 0:
            self.store_timestamp = timestamp
        return self.flushed_where == before

    def sync_directory(self) -> None:
        """Make the files' names durable."""
        self._disk.sync_directory(self.directory)
        self._directory_unsynced = False

    def flush_all(self) -> None:
        """Until nothing moves: everything readable is durable."""
        while not self.flush(0):
            pass

    def commit_all(self) -> None:
        while not self.commit(0):
            pass

    # Shrinking

    def truncate(self, offset: int, now_ms: int, *, zero_tail: bool) -> tuple[int, list[str]]:
        """Cut the row at `offset`: (bytes cleared, paths deleted).

        Later files go first, each for good before the next, so that an interrupted truncation leaves no gap.
        `zero_tail` clears what stays behind the offset in its file; without it (the original, museum rows 4 and 43)
        old bytes can come back after a crash.
        """
        deleted, cleared = [], 0
        while self.files and self.files[-1].start > offset:
            file = self.files.pop()
            file.destroy(now_ms, 0)
            self.sync_directory()
            deleted.append(file.path)
        last = self.last
        if last is not None and last.start + self.file_size > offset:
            last.set_positions(offset - last.start)
            if zero_tail:
                cleared = last.zero_from(offset - last.start)
        self.flushed_where = min(self.flushed_where, offset)
        self.committed_where = min(self.committed_where, offset)
        return cleared, deleted[::-1]

    def delete_first(
        self, keep: Callable[[MappedFile], bool], now_ms: int, *, force_after_ms: int, most: int
    ) -> list[str]:
        """Delete from the front, never the last file: until one is to be kept or still read, or `most` are gone."""
        deleted: list[str] = []
        while len(self.files) > 1 and len(deleted) < most:
            file = self.files[0]
            if (file.is_available and keep(file)) or not file.destroy(now_ms, force_after_ms):
                break
            self.files.pop(0)
            self.sync_directory()  # before the next one goes: a power cut must not bring this one back without it
            deleted.append(file.path)
        return deleted

    def destroy(self, now_ms: int) -> None:
        """All files and the directory itself, if nothing else is in it."""
        for file in self.files:
            file.destroy(now_ms, 0)
        self.files.clear()
        self.flushed_where = self.committed_where = 0
        try:
            self._disk.remove_directory(self.directory)
        except DiskError:
            self.notes.append(f"{self.directory}: kept, it holds other files")

    def close(self, now_ms: int) -> None:
        for file in self.files:
            file.shutdown(now_ms)
        self.files.clear()
