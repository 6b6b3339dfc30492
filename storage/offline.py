"""A store directory seen from outside: what files there are, opened one at a time, read-only, without its settings.

Nothing here needs a configuration: the size of a segment is the size of the file, and the shape of an index file is
found from its bytes. A live store may be looked at too; what it writes meanwhile is seen or not.

Every region is closed before the next is opened (`FileCache` keeps a few), so a store with thousands of queues needs no
thousands of descriptors. A map with living views cannot be closed: visitors copy what they keep.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from brokerlab.storage.disk import Disk, FileInfo, Region
from brokerlab.storage.errors import CorruptRecordError, DiskError
from brokerlab.storage.index_file import ENTRY_SIZE, HEADER_SIZE, SLOT_SIZE, IndexHeader, read_index_header
from brokerlab.storage.log_scan import TRUSTED, Columns, Stop, Validity, columns, find_next_record, scan
from brokerlab.storage.mapped_file_queue import is_segment_name
from brokerlab.storage.record import Record, check, extract

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
def _viewed(region: Region) -> Iterator[memoryview]:
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


class LogView:
    """Records of the log by physical offset, wherever they are."""

    def __init__(self, disk: Disk, segments: list[FileInfo]) -> None:
        self._segments = sorted((start_of(info), info) for info in segments if info.size)
        self._starts = [start for start, _ in self._segments]
        self._cache = FileCache(disk, 8)

    def segment_at(self, offset: int) -> tuple[FileInfo, int] | None:
        """The segment that holds this offset, and the position in it."""
        place = bisect_right(self._starts, offset) - 1
        if place < 0:
            return None
        start, info = self._segments[place]
        return (info, offset - start) if offset - start < info.size else None

    def record(self, offset: int, *, check_crc: bool = True) -> Record:
        """The record at this offset; CorruptRecordError says why there is none."""
        found = self.segment_at(offset) if offset >= 0 else None
        if found is None:
            raise CorruptRecordError("no segment holds this offset", offset=offset)
        info, position = found
        region = self._cache.get(info.path)
        if region is None:
            raise CorruptRecordError(f"{info.path} cannot be opened", offset=offset)
        with memoryview(region.buf) as view:
            layout = check(view, position, len(view), physical_offset=offset, check_crc=check_crc)
            return extract(view, position, layout)

    def close(self) -> None:
        self._cache.close()


# Walk over a segment -------------------------------------------------------------------------------------------------


class Damage(NamedTuple):
    """Bytes [start, end) of a segment that are no valid record. `tail`: nothing valid follows in this file."""

    start: int
    end: int
    reason: str
    tail: bool


@dataclass(slots=True)
class Walk:
    """What one pass over a segment found."""

    records: int = 0
    end: int = 0
    """Position behind the last valid record."""
    blank: bool = False
    """The file ends with a blank record, as it should when the log goes on in the next."""
    damage: list[Damage] = field(default_factory=list)
    dirty_at: int = -1
    """First byte behind the end that is not zero; -1 if there is none."""


Visit = Callable[[Columns], None]


def walk_segment(
    region: Region,
    start: int,
    visit: Visit | None = None,
    *,
    validity: Validity = TRUSTED,
    progress: Callable[[int], None] = lambda _position: None,
    position: int = 0,
    most: int | None = None,
) -> Walk:
    """Visit the valid records of a segment in batches of columns; behind damage it goes on at the next valid record.

    `most` ends the walk early. Columns die with the visit: they look into the map.
    """
    walk = Walk(end=position)
    ranges = region.data_ranges()
    with _viewed(region) as view:
        while most is None or walk.records < most:
            batch = BATCH_RECORDS if most is None else min(BATCH_RECORDS, most - walk.records)
            found = scan(view, position, region.size, start, validity=validity, most=batch)
            walk.records += len(found.positions)
            if found.positions:
                walk.end = found.end
                if visit is not None:
                    visit(columns(view, np.array(found.positions, dtype=np.int64)))
            progress(found.end)
            position = found.end
            if found.stop in (Stop.LIMIT, Stop.BLANK):
                walk.blank = found.stop is Stop.BLANK
                break
            if found.stop is Stop.ENOUGH:
                continue
            following = _resync(view, position, region.size, start, ranges, validity)
            if following is None:
                walk.damage.append(Damage(position, region.size, found.reason, True))
                walk.dirty_at = first_nonzero(view, ranges, position)
                break
            walk.damage.append(Damage(position, following, found.reason, False))
            position = following
    return walk


def _resync(
    view: memoryview, position: int, size: int, start: int, ranges: list[tuple[int, int]], validity: Validity
) -> int | None:
    # Look nearby first: where every page is damaged, each search would otherwise read a megabyte.
    near = [(max(a, position), min(b, position + 16384)) for a, b in ranges if b > position and a < position + 16384]
    found = find_next_record(view, position, size, start, near, validity=validity)
    if found is None:
        found = find_next_record(view, position, size, start, ranges, validity=validity)
    return found if found is None or found > position else None


def first_nonzero(view: memoryview, ranges: list[tuple[int, int]], position: int) -> int:
    """Position of the first byte at or behind `position` that is not 0; -1 if all are."""
    data = np.frombuffer(view, dtype=np.uint8)
    for start, end in ranges:
        for at in range(max(start, position), end, 1 << 22):
            chunk = data[at : min(at + (1 << 22), end)]
            if chunk.any():
                return at + int(np.argmax(chunk != 0))
    return -1


# The shape of an index file ------------------------------------------------------------------------------------------


class IndexShape(NamedTuple):
    """How many slots and entries, and how that is known."""

    slots: int
    entries: int
    how: str

    @property
    def is_found(self) -> bool:
        """Derived from the file itself: worth telling."""
        return self.how not in (_GIVEN, _DEFAULT)


def index_shape(region: Region, *, slots: int | None = None, known: IndexShape | None = None) -> IndexShape | None:
    """Slots and entries of this file: as told, RocketMQ's default, or found from its bytes. None: no shape fits.

    `known` is the shape of another file of the same store: files of one store are alike.
    """
    room = region.size - HEADER_SIZE
    if slots is not None:
        left = room - SLOT_SIZE * slots
        return IndexShape(slots, left // ENTRY_SIZE, _GIVEN) if slots > 0 and left >= ENTRY_SIZE else None
    if room == SLOT_SIZE * DEFAULT_SLOTS + ENTRY_SIZE * DEFAULT_ENTRIES:
        return IndexShape(DEFAULT_SLOTS, DEFAULT_ENTRIES, _DEFAULT)
    if known is not None and room == SLOT_SIZE * known.slots + ENTRY_SIZE * known.entries:
        return known
    if room < SLOT_SIZE + ENTRY_SIZE or room % SLOT_SIZE:
        return None
    header = read_index_header(region.buf)
    usual = room // (SLOT_SIZE + 4 * ENTRY_SIZE)
    ratio = IndexShape(usual, 4 * usual, "from its size, with four entries a slot")
    fits_ratio = room % (SLOT_SIZE + 4 * ENTRY_SIZE) == 0
    if header.index_count <= 1:
        return ratio if fits_ratio else IndexShape(usual, (room - SLOT_SIZE * usual) // ENTRY_SIZE, "a guess: no entry")
    if fits_ratio and _shape_fits(region, header, usual):
        return ratio
    found = _search_slots(region, header)
    if found is not None:
        return IndexShape(found, (room - SLOT_SIZE * found) // ENTRY_SIZE, "found from its entries")
    return ratio if fits_ratio else None


def _shape_fits(region: Region, header: IndexHeader, slots: int) -> bool:
    """Does the newest entry stand where this many slots put it, and does its slot lead to it?"""
    number = header.index_count - 1
    at = HEADER_SIZE + SLOT_SIZE * slots + ENTRY_SIZE * number
    if at + ENTRY_SIZE > region.size:
        return False
    entry_hash = int.from_bytes(region.buf[at : at + 4], "big", signed=True)
    offset = int.from_bytes(region.buf[at + 4 : at + 12], "big", signed=True)
    slot_at = HEADER_SIZE + SLOT_SIZE * (entry_hash % slots)
    held = int.from_bytes(region.buf[slot_at : slot_at + 4], "big", signed=True)
    return entry_hash >= 0 and offset == header.end_physical_offset and held == number


def _search_slots(region: Region, header: IndexHeader) -> int | None:
    """Entries fill the file to its end, so their places differ by multiples of an entry between possible shapes."""
    number = header.index_count - 1
    room = region.size - HEADER_SIZE
    least = (room // SLOT_SIZE) % (ENTRY_SIZE // SLOT_SIZE) or ENTRY_SIZE // SLOT_SIZE
    first_at = HEADER_SIZE + SLOT_SIZE * least + ENTRY_SIZE * number + 4
    count = (region.size - first_at - 16) // ENTRY_SIZE + 1
    if count <= 0:
        return None
    offsets = np.ndarray((count,), dtype=">i8", buffer=region.buf, offset=first_at, strides=(ENTRY_SIZE,))
    hits = np.flatnonzero(offsets == header.end_physical_offset)[:100_000].tolist()
    del offsets
    step = ENTRY_SIZE // SLOT_SIZE
    return next((least + step * hit for hit in hits if _shape_fits(region, header, least + step * hit)), None)


class ChainEntry(NamedTuple):
    """One entry of an index file as it is reached from its slot."""

    number: int
    position: int
    hash: int
    physical_offset: int
    time_diff: int
    previous: int


_ENTRY = struct.Struct(">iqii")


def index_chain(region: Region, shape: IndexShape, slot: int, *, most: int = 1_000_000) -> list[ChainEntry]:
    """The entries that a slot leads to, newest first. A link that does not lead back ends it: it is damage."""
    header = read_index_header(region.buf)
    slot_at = HEADER_SIZE + SLOT_SIZE * slot
    number = int.from_bytes(region.buf[slot_at : slot_at + SLOT_SIZE], "big", signed=True)
    found: list[ChainEntry] = []
    if number > header.index_count:
        return found
    while 0 < number < shape.entries and len(found) < most:
        at = HEADER_SIZE + SLOT_SIZE * shape.slots + ENTRY_SIZE * number
        entry = ChainEntry(number, at, *_ENTRY.unpack_from(region.buf, at))
        found.append(entry)
        if entry.previous >= number:
            break
        number = entry.previous
    return found


def longest_chains(region: Region, shape: IndexShape, most: int) -> list[int]:
    """The slots that lead to the most entries, the fullest first."""
    count = min(max(read_index_header(region.buf).index_count, 1), shape.entries)
    hashes = np.ndarray(
        (count,),
        dtype=">i4",
        buffer=region.buf,
        offset=HEADER_SIZE + SLOT_SIZE * shape.slots,
        strides=(ENTRY_SIZE,),
    )[1:].astype(np.int64)
    slots, counts = np.unique(hashes[hashes >= 0] % shape.slots, return_counts=True)
    return [int(slot) for slot in slots[np.argsort(-counts, kind="stable")][:most]]
