"""The key index: a row of index files, oldest first, named by the local time at which each began.

The name is `yyyyMMddHHmmssSSS` of the store time of the first record in the file, not of the clock: an index that is
rebuilt from the log has the same files as the one that was lost. Names order the files, so a new name is always
behind the last, and a file is never created over another.

The index is derived from the commit log. After a crash the files stay as they are found (the original deletes the one
in use and rebuilds only part of it: museum row 18), and recovery cuts them back with `trim` to what is sure. Whoever
dispatches then goes on with the first record behind `end_physical_offset`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from brokerlab.storage.config import StoreConfig
from brokerlab.storage.disk import Disk, Offsets
from brokerlab.storage.errors import DiskError
from brokerlab.storage.index_file import HEADER_SIZE, SLOT_SIZE, IndexFile
from brokerlab.storage.java_hash import Hashes
from brokerlab.storage.mapped_file import MappedFile

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NAMEABLE_MS = 253_370_764_800_000  # year 9999; a damaged record may claim any time
_ALL_TIMES = 1 << 62
_DESTROY_FORCE_MS = 3_000


def index_file_name(store_timestamp: int, utc_offset_minutes: int) -> str:
    """Local time as yyyyMMddHHmmssSSS."""
    shown = min(max(store_timestamp, 0), _NAMEABLE_MS)
    local = _EPOCH + timedelta(milliseconds=shown, minutes=utc_offset_minutes)
    return f"{local.year:04}{local:%m%d%H%M%S}{local.microsecond // 1000:03}"


def _name_after(name: str) -> str:
    """One millisecond later; for a number that is no time, any name that sorts behind it."""
    try:
        time = datetime.strptime(name[:14], "%Y%m%d%H%M%S").replace(tzinfo=UTC) - _EPOCH
        later = index_file_name(time // timedelta(milliseconds=1) + int(name[14:]) + 1, 0)
    except ValueError:
        later = ""
    return later if later > name else name + "0"


def _is_index_name(name: str) -> bool:
    return name.isascii() and name.isdigit()


class IndexService:
    """All index files of a store. `put_many`, `trim` and `flush` are called by one service each."""

    def __init__(self, disk: Disk, directory: str, config: StoreConfig) -> None:
        self.directory = directory
        self.files: list[IndexFile] = []
        self.rolled: list[IndexFile] = []
        """Full files that are not durable yet: to be synced, and their end noted in the checkpoint, soon after."""
        self.notes: list[str] = []
        self._disk = disk
        self._config = config
        self._slots, self._entries = config.max_hash_slot_num, config.max_index_num
        self._unsure: list[IndexFile] = []  # loaded after an unclean stop and not covered by the checkpoint

    # Load

    def load(self, *, unclean: bool, checkpoint_index_timestamp: int) -> None:
        """Open every file, whatever it holds; a shorter one is extended.

        After an unclean stop a file may have lost pages that ends behind the checkpoint, or is the newest, or is not
        full although another follows: `trim` will look at every entry of these.
        """
        size = self._config.index_file_size
        for info in self._disk.list(self.directory):
            if info.kind != "file" or not _is_index_name(info.name):
                self.notes.append(f"{info.path}: skipped, not an index file ({info.kind})")
                continue
            if info.size != size:
                self.notes.append(f"{info.path}: has {info.size} bytes, configured are {size}")
            if self._disk.read_only and info.size < HEADER_SIZE + SLOT_SIZE * self._slots:
                self.notes.append(f"{info.path}: skipped, it ends inside its slots")
                continue
            region = self._disk.open(info.path, size=None if self._disk.read_only else size)
            self.files.append(IndexFile(MappedFile(self._disk, region, start=0), self._slots, self._entries))
        if unclean and not self._disk.read_only:
            for file in self.files:
                behind = file.end_timestamp > checkpoint_index_timestamp
                if behind or not file.is_full or file is self.files[-1]:
                    file.resync()
                    self._unsure.append(file)

    # Put

    @property
    def end_physical_offset(self) -> int:
        """Offset of the last record that has an entry, -1 if none has. Records up to it are not indexed again."""
        return next((file.end_physical_offset for file in reversed(self.files) if not file.is_empty), -1)

    def ensure_file(self, store_timestamp: int) -> None:
        """The first record dispatched makes the first file, with or without keys. Later ones come with their entries:
        a file is named by the first record in it."""
        if not self.files:
            self._begin(self._create(store_timestamp, ""))

    def put_many(self, hashes: Hashes, physical_offsets: Offsets, store_timestamps: Offsets) -> None:
        """Index these keys, over as many files as it takes.

        The new files are made first: when the disk has no room for one, DiskError says so and nothing was put. After
        a DiskError out of a store into the map, what was put stays; `trim` to the first of these offsets removes it.
        """
        room = self.files[-1].room if self.files else 0
        behind = self.files[-1].path if self.files else ""
        made: list[MappedFile] = []
        try:
            for row in range(room, len(hashes), self._entries - 1):
                made.append(self._create(int(store_timestamps[row]), behind))
                behind = made[-1].path
            done = 0
            if room:
                done = self.files[-1].put_many(hashes, physical_offsets, store_timestamps)
            while made:
                self._begin(made[0])
                del made[0]
                done += self.files[-1].put_many(hashes[done:], physical_offsets[done:], store_timestamps[done:])
        except DiskError:
            for unused in made:
                self._discard(unused)
            raise

    def _create(self, store_timestamp: int, behind: str) -> MappedFile:
        """An empty file with a free name that sorts behind this path; on failure there is no file."""
        self._disk.make_directories(self.directory)
        name = index_file_name(store_timestamp, self._config.utc_offset_minutes)
        if behind:
            name = max(name, _name_after(behind.rpartition("/")[2]))
        while self._disk.stat(f"{self.directory}/{name}") is not None:
            name = _name_after(name)
        region = self._disk.create(f"{self.directory}/{name}", self._config.index_file_size, reserve=True)
        file = MappedFile(self._disk, region, start=0)
        try:
            self._disk.sync_directory(self.directory)
        except DiskError:
            self._discard(file)
            raise
        return file

    def _begin(self, made: MappedFile) -> None:
        """Let this file follow the last one, which is full."""
        last = self.files[-1] if self.files else None
        self.files.append(
            IndexFile.start(
                made,
                self._slots,
                self._entries,
                end_physical_offset=last.end_physical_offset if last else 0,
                end_timestamp=last.end_timestamp if last else 0,
            )
        )
        if last is not None and not last.is_synced:
            self.rolled.append(last)

    def _discard(self, unused: MappedFile) -> None:
        with suppress(DiskError):  # the error that brought us here is the one to tell
            unused.destroy(0, 0)

    # Query

    def query(self, key_hash: int, most: int, begin: int, end: int) -> tuple[list[int], int, int]:
        """Offsets under this hash in the time range, newest first; and end time and end offset of the newest file.

        Other keys may have the same hash: the caller compares the text.
        """
        files = list(self.files)
        most = min(most, self._config.max_msgs_num_batch)
        found: list[int] = []
        for file in reversed(files):
            if file.is_empty:
                continue  # its begin says nothing, and must not hide the files before it
            if file.matches(begin, end):
                found += file.lookup(key_hash, most - len(found), begin, end)
            if file.begin_timestamp < begin or len(found) >= most:
                break
        newest = files[-1].header if files else None
        return found, newest.end_timestamp if newest else 0, newest.end_physical_offset if newest else 0

    def newest_first(self, key_hash: int, begin: int = 0, end: int = _ALL_TIMES) -> Iterator[int]:
        """Every offset under this hash in the time range, however many: the caller stops when it has enough."""
        for file in reversed(list(self.files)):
            if file.is_empty:
                continue
            if file.matches(begin, end):
                yield from file.lookup(key_hash, self._config.max_index_num, begin, end)
            if file.begin_timestamp < begin:
                return

    # Flush

    def flush(self) -> int:
        """Sync every file with unsynced changes and return the store time up to which the index is now durable."""
        # Read before the syncs: they may pause us, and what is put meanwhile is not covered by them.
        files = list(self.files)
        end_timestamp = next((file.end_timestamp for file in reversed(files) if not file.is_empty), 0)
        for file in files:
            file.sync()
            if file.is_synced:  # not if it was put into, and rolled, meanwhile
                with suppress(ValueError):
                    self.rolled.remove(file)
        return end_timestamp

    # Shrinking

    def delete_expired(self, min_log_offset: int, now_ms: int) -> list[str]:
        """Delete leading files that only point below the log, never the last one; the paths."""
        deleted: list[str] = []
        while len(self.files) > 1:
            file = self.files[0]
            if file.end_physical_offset >= min_log_offset or not file.destroy(now_ms, _DESTROY_FORCE_MS):
                break
            self._forget(file)
            deleted.append(file.path)
        if deleted:
            self._disk.sync_directory(self.directory)
        return deleted

    def trim(self, before_offset: int, store_timestamp_at: Callable[[int], int] | None = None, now_ms: int = 0) -> int:
        """Keep entries of records below `before_offset`, and only as far as they are sound; how many were dropped.

        Nothing stays behind an entry that is missing: dispatch goes on behind the last one, so a gap would never be
        filled. Files without entries are deleted, the later ones first. `store_timestamp_at` reads the store time of
        the record at an offset from the log: it is asked for the last one kept, whose entry knows it to the second.
        """
        dropped = 0
        for place, file in enumerate(self.files):
            sure = file not in self._unsure
            if sure and not file.is_empty and file.end_physical_offset < before_offset:
                continue
            sound = file.sound_entries(before_offset)
            goes_on = sound == file.index_count - 1 and (sure or file.is_full)
            if not goes_on or not sound:
                dropped += self._delete_from(place + 1 if sound else place, now_ms)
            if sound:
                dropped += file.trim(before_offset, store_timestamp_at)
            if not goes_on:
                break
        self._unsure.clear()
        return dropped

    def _delete_from(self, place: int, now_ms: int = 0) -> int:
        """Delete this file and all later ones, the last first; how many entries they had."""
        doomed = self.files[place:]
        for file in reversed(doomed):
            file.destroy(now_ms, 0)
            self._forget(file)
        if doomed:
            self._disk.sync_directory(self.directory)
        return sum(file.index_count - 1 for file in doomed)

    def _forget(self, file: IndexFile) -> None:
        for row in (self.files, self.rolled, self._unsure):
            if file in row:
                row.remove(file)

    # Close

    def close(self) -> None:
        """Unmap all files. Nothing is synced by this."""
        for file in self.files:
            file.close()
        self.files, self.rolled, self._unsure = [], [], []

    def destroy(self) -> None:
        """All files, and the directory itself if nothing else is in it."""
        self._delete_from(0)
        try:
            self._disk.remove_directory(self.directory)
        except DiskError:
            self.notes.append(f"{self.directory}: kept, it holds other files")
