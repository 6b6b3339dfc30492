"""A store directory seen from outside: what files there are, opened one at a time, read-only, without its settings.

Nothing here needs a configuration: the size of a segment is the size of the file, and the shape of an index file is
found from its bytes. A live store may be looked at too; what it writes meanwhile is seen or not.

Every region is closed before the next is opened (`FileCache` keeps a few), so a store with thousands of queues needs no
thousands of descriptors. A map with living views cannot be closed: visitors copy what they keep.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from brokerlab.storage.disk import Disk, FileInfo, Region
from brokerlab.storage.errors import DiskError
from brokerlab.storage.index_file import ENTRY_SIZE, HEADER_SIZE, SLOT_SIZE
from brokerlab.storage.mapped_file_queue import is_segment_name

BATCH_RECORDS = 8192
DEFAULT_SLOTS, DEFAULT_ENTRIES = 5_000_000, 20_000_000
OPEN_FILES_MAX = 96
KINDS = ("commitlog", "consumequeue", "index", "checkpoint")
_GIVEN, _DEFAULT = "as given", "RocketMQ's default"
_START_MAX = (1 << 62) - 1
_SMALL_NAMES = ("abort", "abort.bak", "lock")


class NotAStoreError(DiskError):
    """The path holds nothing that belongs to a store."""

    def __init__(self, path: str, why: str) -> None:
        self.why = why
        super().__init__("look at", path, 0, why)


class Stray(NamedTuple):
    """Something in the directory that is not part of the store, or cannot be read."""

    path: str
    reason: str
    unreadable: bool = False


class QueueName(NamedTuple):
    """Which queue."""

    topic: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.queue_id}"


@dataclass(slots=True)
class StoreFiles:
    """What a path holds. `kind` is "store", or that of the single file or directory that was given."""

    root: str
    kind: str
    segments: list[FileInfo] = field(default_factory=list)
    queues: dict[QueueName, list[FileInfo]] = field(default_factory=dict)
    index: list[FileInfo] = field(default_factory=list)
    checkpoint: FileInfo | None = None
    marks: dict[str, FileInfo] = field(default_factory=dict)
    strays: list[Stray] = field(default_factory=list)
    others: list[FileInfo] = field(default_factory=list)
    directories: set[str] = field(default_factory=set)

    @property
    def unclean(self) -> bool:
        """`abort` is there: the store is running, or was not stopped well."""
        return "abort" in self.marks


# What is there -------------------------------------------------------------------------------------------------------


def look_at(disk: Disk, path: str, *, kind: str | None = None) -> StoreFiles:
    """Catalogue a store, one of its directories, or a single file. DiskError if there is nothing to be read."""
    entries = _listing(disk, path)
    if entries is None:
        return _single(disk, path, kind)
    if not entries:
        raise NotAStoreError(path, "empty directory, not a store")
    names = {entry.name for entry in entries}
    if kind is None and names.isdisjoint(KINDS):
        kind = _kind_of_directory(path, entries)
        if kind is None:
            raise NotAStoreError(path, "holds no commitlog, consumequeue, index or checkpoint: not a store")
    if kind is None:
        return _store(disk, path, entries)
    found = StoreFiles(path, kind)
    if kind == "commitlog":
        found.segments = _segments(disk, entries, found)
    elif kind == "consumequeue":
        _add_queues(disk, path, entries, found)
    elif kind == "index":
        found.index = _index_files(disk, entries, found)
    else:
        raise NotAStoreError(path, "a checkpoint is a file, this is a directory")
    return found


def _listing(disk: Disk, path: str) -> list[FileInfo] | None:
    """Entries of a directory (also through a link); None for anything else. DiskError if nothing is there."""
    info = disk.stat(path)
    if info is None:
        raise NotAStoreError(path, "no such file or directory")
    if info.kind == "directory":
        return disk.list(path)
    if info.kind == "link":
        try:
            entries = disk.list(path)
        except DiskError:
            return None
        with_target = entries or disk.stat(path + "/.") is not None
        return entries if with_target else None
    return None


def _kind_of_directory(path: str, entries: list[FileInfo]) -> str | None:
    parts = path.rstrip("/").split("/")
    if parts[-1] == "index":
        return "index"
    if parts[-1] == "consumequeue" or "consumequeue" in parts[-3:]:
        return "consumequeue"
    if parts[-1] == "commitlog" or any(is_segment_name(entry.name) for entry in entries):
        return "commitlog"
    return None


def kind_of_file(path: str, size: int) -> str | None:
    """By the names of the directories above it, by its own, then by its size."""
    *parents, name = path.split("/")
    if name == "checkpoint":
        return "checkpoint"
    for depth, kind in ((1, "commitlog"), (1, "index"), (3, "consumequeue")):
        if len(parents) >= depth and parents[-depth] == kind:
            return kind
    if is_segment_name(name):
        return "commitlog"
    if name.isascii() and name.isdigit() and len(name) == 17:
        return "index"
    return "index" if size == HEADER_SIZE + SLOT_SIZE * DEFAULT_SLOTS + ENTRY_SIZE * DEFAULT_ENTRIES else None


def _single(disk: Disk, path: str, kind: str | None) -> StoreFiles:
    info = _followed(disk, disk.stat(path))
    if info is None or info.kind != "file":
        raise NotAStoreError(path, "neither a directory nor a regular file")
    kind = kind or kind_of_file(path, info.size)
    if kind is None:
        raise NotAStoreError(path, "cannot tell what kind of file this is (say it with --as)")
    if info.size == 0:
        raise NotAStoreError(path, "empty file")
    found = StoreFiles(path, kind)
    if kind == "commitlog":
        found.segments = [info]
    elif kind == "index":
        found.index = [info]
    elif kind == "consumequeue":
        found.queues[_queue_of(path)] = [info]
    else:
        found.checkpoint = info
    return found


def _queue_of(path: str) -> QueueName:
    parts = path.split("/")
    if len(parts) >= 3 and parts[-2].isascii() and parts[-2].isdigit():
        return QueueName(parts[-3], int(parts[-2][:18]))
    return QueueName("?", 0)


def _store(disk: Disk, root: str, entries: list[FileInfo]) -> StoreFiles:
    found = StoreFiles(root, "store")
    for entry in entries:
        if entry.name in _SMALL_NAMES:
            found.marks[entry.name] = entry
        elif entry.name == "checkpoint":
            target = _followed(disk, entry)
            if target is None or target.kind != "file":
                found.strays.append(Stray(entry.path, f"no regular file ({entry.kind})", True))
            else:
                found.checkpoint = target
        elif entry.name in KINDS:
            try:
                inside = _listing(disk, entry.path)
            except DiskError as error:
                found.strays.append(Stray(entry.path, str(error), True))
                continue
            if inside is None:
                found.strays.append(Stray(entry.path, f"no directory ({entry.kind})", True))
                continue
            found.directories.add(entry.name)
            if entry.name == "commitlog":
                found.segments = _segments(disk, inside, found)
            elif entry.name == "index":
                found.index = _index_files(disk, inside, found)
            else:
                _add_queues(disk, entry.path, inside, found)
        else:
            found.others.append(entry)
    return found


def _followed(disk: Disk, info: FileInfo | None) -> FileInfo | None:
    """A link to a regular file as that file, with its size; anything else as it is."""
    if info is None or info.kind != "link":
        return info
    try:
        region = disk.open(info.path)
    except DiskError:
        return info
    size = region.size
    region.close()
    return info._replace(size=size, kind="file")


def _segments(disk: Disk, entries: list[FileInfo], found: StoreFiles) -> list[FileInfo]:
    row = []
    for entry in entries:
        target = _followed(disk, entry)
        if target is None or target.kind != "file":
            found.strays.append(Stray(entry.path, f"no regular file ({entry.kind})", is_segment_name(entry.name)))
        elif not is_segment_name(entry.name):
            found.strays.append(Stray(entry.path, "not a segment: its name is not 20 digits"))
        elif int(entry.name) > _START_MAX:
            found.strays.append(Stray(entry.path, "its name is larger than any offset", True))
        else:
            row.append(target)
    return row


def _index_files(disk: Disk, entries: list[FileInfo], found: StoreFiles) -> list[FileInfo]:
    row = []
    for entry in entries:
        target = _followed(disk, entry)
        numeric = entry.name.isascii() and entry.name.isdigit()
        if target is None or target.kind != "file":
            found.strays.append(Stray(entry.path, f"no regular file ({entry.kind})", numeric))
        elif not numeric:
            found.strays.append(Stray(entry.path, "not an index file: its name is no time"))
        else:
            row.append(target)
    return row


def _add_queues(disk: Disk, path: str, topics: list[FileInfo], found: StoreFiles) -> None:
    """consumequeue/<topic>/<id>/<files>, where `path` may also be one topic's or one queue's directory."""
    if any(is_segment_name(entry.name) and entry.kind == "file" for entry in topics):
        found.queues[_queue_of(path.rstrip("/") + "/0")] = _segments(disk, topics, found)
        return
    for topic in topics:
        queues = _inside(disk, topic, found, "not a topic directory")
        if topic.name.isascii() and topic.name.isdigit() and any(is_segment_name(queue.name) for queue in queues):
            name = QueueName(path.rstrip("/").rpartition("/")[2], int(topic.name[:18]))
            found.queues[name] = _segments(disk, queues, found)
            continue
        for queue in queues:
            if not (queue.name.isascii() and queue.name.isdigit() and len(queue.name) <= 10):
                found.strays.append(Stray(queue.path, "not a queue directory: its name is no number"))
                continue
            files = _inside(disk, queue, found, "not a queue directory")
            if queue.kind in ("directory", "link"):
                found.queues[QueueName(topic.name, int(queue.name))] = _segments(disk, files, found)


def _inside(disk: Disk, info: FileInfo, found: StoreFiles, otherwise: str) -> list[FileInfo]:
    try:
        entries = _listing(disk, info.path)
    except DiskError as error:
        found.strays.append(Stray(info.path, str(error), True))
        return []
    if entries is None:
        found.strays.append(Stray(info.path, f"{otherwise} ({info.kind})"))
        return []
    return entries


def usual_size(files: list[FileInfo]) -> int:
    """The size that most files of a row have; of several, the first one's."""
    sizes = Counter(info.size for info in files if info.size)
    return sizes.most_common(1)[0][0] if sizes else 0


def start_of(info: FileInfo) -> int:
    """Where a segment says it starts. A single file under any other name is taken to start at 0."""
    return int(info.name) if is_segment_name(info.name) and int(info.name) <= _START_MAX else 0


# Open, one at a time -------------------------------------------------------------------------------------------------


@contextmanager
def opened(disk: Disk, path: str) -> Iterator[Region]:
    """A file, mapped while the block runs. Its views must be gone at the end of the block."""
    region = disk.open(path)
    try:
        yield region
    except BaseException:
        with suppress(BufferError):  # the error's own frames hold views: the map goes when they do
            region.close()
        raise
    region.close()


@contextmanager
def viewed(region: Region) -> Iterator[memoryview]:
    view = memoryview(region.buf)
    try:
        yield view
    except BaseException:
        with suppress(BufferError):
            view.release()
        raise
    view.release()


class FileCache:
    """A few files kept open. Whoever gets a region uses it at once and keeps no view of it."""

    def __init__(self, disk: Disk, most: int = OPEN_FILES_MAX) -> None:
        self._disk = disk
        self._most = most
        self._regions: OrderedDict[str, Region | None] = OrderedDict()

    def get(self, path: str) -> Region | None:
        """The region; None for a file that cannot be opened (whoever lists files has told why)."""
        if path in self._regions:
            self._regions.move_to_end(path)
            return self._regions[path]
        try:
            region: Region | None = self._disk.open(path)
        except DiskError:
            region = None
        self._regions[path] = region
        if len(self._regions) > self._most:
            _, oldest = self._regions.popitem(last=False)
            if oldest is not None:
                oldest.close()
        return region

    def close(self) -> None:
        for region in self._regions.values():
            if region is not None:
                region.close()
        self._regions.clear()
