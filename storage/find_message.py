"""Where is this message? By key, by id or by its place in a queue: what log, queue and index say, and do they agree.

The log is the truth. Queue and index are asked for the record that the log holds, so a record that the index forgot is
found all the same, by looking through the log.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from brokerlab.storage.config import StoreConfig
from brokerlab.storage.consume_queue import PRE_BLANK_SIZE, UNIT, UNIT_SIZE, Unit
from brokerlab.storage.disk import Disk, FileInfo
from brokerlab.storage.dispatch import describe
from brokerlab.storage.errors import CorruptRecordError, DiskError
from brokerlab.storage.index_file import HEADER_SIZE
from brokerlab.storage.java_hash import index_hash
from brokerlab.storage.log_scan import Columns
from brokerlab.storage.message import SysFlag, decode_message_id
from brokerlab.storage.offline import FileCache, QueueName, StoreFiles, opened, start_of
from brokerlab.storage.offline_index import IndexShape, index_chain, index_shape
from brokerlab.storage.offline_log import LogView, walk_segment
from brokerlab.storage.record import Record
from brokerlab.storage.verify_queues import entry_problem

Progress = Callable[[int, int, str], None]


class Place(NamedTuple):
    """Where one part of the store speaks of the message, what it says, and whether that is right.

    `agrees` is None where the part need not know the message, or is not there.
    """

    part: str
    file: str
    position: int | None
    says: str
    agrees: bool | None


@dataclass(slots=True)
class Sighting:
    """One message, wherever it was seen. `record` is None if only a queue or the index speaks of it."""

    record: Record | None
    places: list[Place]

    @property
    def agrees(self) -> bool:
        return self.record is not None and all(place.agrees is not False for place in self.places)


@dataclass(slots=True)
class Search:
    """What was looked for, and what was found. `problem` says why nothing was."""

    wanted: str
    sightings: list[Sighting] = field(default_factory=list)
    problem: str = ""

    @property
    def ok(self) -> bool:
        return bool(self.sightings) and all(sighting.agrees for sighting in self.sightings)


class Finder:
    """Looks into one store. Close it afterwards."""

    def __init__(self, disk: Disk, files: StoreFiles, *, index_slots: int | None = None) -> None:
        self._disk = disk
        self._files = files
        self._index_slots = index_slots
        self._log = LogView(disk, files.segments)
        self._cache = FileCache(disk, 16)
        self._delays = StoreConfig().delay_levels_ms

    def close(self) -> None:
        self._log.close()
        self._cache.close()

    # Three ways to ask

    def by_queue(self, name: QueueName, index: int) -> Search:
        """The message that is number `index` of a queue."""
        search = Search(f"{name}/{index}")
        found = self._unit(name, index)
        if found is None:
            known = name in self._files.queues
            search.problem = f"queue {name} has no entry {index}" if known else f"there is no queue {name}"
            return search
        info, position, unit = found
        if unit.is_empty or unit.is_pre_blank:
            what = (
                "holds the place of a message that was gone when the queue began" if unit.is_pre_blank else "is empty"
            )
            search.problem = f"entry {index} of {name} {what}"
            return search
        try:
            record = self._log.record(unit.physical_offset)
        except CorruptRecordError as error:
            place = Place("queue", info.path, position, _says(unit), False)
            search.sightings.append(Sighting(None, [place]))
            search.problem = f"entry {index} of {name} points to offset {unit.physical_offset}: {error.reason}"
            return search
        sighting = self._sighting(record)
        wrong = entry_problem(record, name, index, unit.size)
        if wrong:
            sighting.places.insert(0, Place("queue", info.path, position, f"{_says(unit)}: {wrong}", False))
            search.problem = f"entry {index} of {name} points to another message: {wrong}"
        search.sightings.append(sighting)
        return search

    def by_id(self, message_id: str, progress: Progress = lambda _done, _all, _what: None) -> Search:
        """The message with this offset id; an id that a client made (UNIQ_KEY) is looked for as a key."""
        search = Search(message_id)
        try:
            host, offset = decode_message_id(message_id)
            record = self._log.record(offset)
        except CorruptRecordError as error:
            by_key = self.by_key(message_id, None, progress)
            if by_key.sightings:
                return by_key
            search.problem = f"no message with id {message_id}: {error.reason}"
            return search
        if record.store_host != host:
            search.problem = f"the record at {offset} was stored by another host: its id is {record.message_id}"
        search.sightings.append(self._sighting(record))
        return search

    def by_key(
        self,
        key: str,
        topic: str | None,
        progress: Progress = lambda _done, _all, _what: None,
        *,
        most: int = 100,
    ) -> Search:
        """Messages that have this key, in log order, at most `most`."""
        search = Search(key if topic is None else f"{topic}#{key}")
        offsets: list[int] = []
        done, everything = 0, sum(info.size for info in self._files.segments) or 1
        for info in self._files.segments:
            progress(done, everything, info.name)
            if info.size and len(offsets) < most:
                try:
                    offsets += self._scan(info, key, topic, most - len(offsets))
                except DiskError as error:
                    search.problem = str(error)
            done += info.size
        for offset in offsets:
            search.sightings.append(self._sighting(self._log.record(offset, check_crc=False)))
        if not offsets:
            search.problem = search.problem or f"no message with key {search.wanted}"
        return search

    def _scan(self, info: FileInfo, key: str, topic: str | None, most: int) -> list[int]:
        """Offsets of records in this segment that have the key. Bytes first: few records hold them at all."""
        needle = key.encode("utf-8", "surrogateescape")
        offsets: list[int] = []

        def visit(columns: Columns) -> None:
            ends = columns.positions + columns.sizes
            at, last = int(columns.positions[0]), int(ends[-1])
            while len(offsets) < most and (at := region.buf.find(needle, at, last)) >= 0:
                row = int(ends.searchsorted(at, side="right"))
                text_at = int(columns.topic_starts[row])
                found = bytes(region.buf[text_at : text_at + int(columns.topic_lengths[row])]).decode(
                    "utf-8", "replace"
                )
                wire_at = int(columns.properties_starts[row])
                wire = bytes(region.buf[wire_at : wire_at + int(columns.properties_lengths[row])])
                if topic in (None, found) and key in describe(found, wire, 0, self._delays).keys:
                    offsets.append(int(columns.physical_offsets[row]))
                at = int(ends[row])

        with opened(self._disk, info.path) as region:
            ranges = region.data_ranges()
            if needle and any(region.buf.find(needle, start, end) >= 0 for start, end in ranges):
                walk_segment(region, start_of(info), visit)
        return offsets

    # One message everywhere

    def _sighting(self, record: Record) -> Sighting:
        found = self._log.segment_at(record.physical_offset)
        assert found is not None
        info, position = found
        try:
            self._log.record(record.physical_offset)
            says, sound = f"{record.total_size} bytes, stored {record.store_timestamp}", True
        except CorruptRecordError as error:
            says, sound = error.reason, False
        places = [Place("log", info.path, position, says, sound), self._queue_place(record)]
        return Sighting(record, places + self._index_places(record))

    def _queue_place(self, record: Record) -> Place:
        name = QueueName(record.topic, record.queue_id)
        directory = f"{self._files.root}/consumequeue/{name}"
        if record.sys_flag & SysFlag.TRANSACTION_PREPARED:
            return Place("queue", directory, None, "prepared and rolled back messages have no entry", None)
        if record.sys_flag & SysFlag.INNER_BATCH:
            return Place("queue", directory, None, "a batch of messages has its entry in batchconsumequeue", None)
        if self._files.kind != "store":
            return Place("queue", directory, None, "not looked at: only the log was given", None)
        found = self._unit(name, record.queue_offset)
        if found is None:
            return Place("queue", directory, None, f"no entry {record.queue_offset}", False)
        info, position, unit = found
        if unit.is_empty:
            return Place("queue", info.path, position, f"entry {record.queue_offset} is empty", False)
        code = describe(record.topic, record.properties, record.store_timestamp, self._delays).tags_code
        right = unit == (record.physical_offset, record.total_size, code)
        return Place("queue", info.path, position, f"entry {record.queue_offset}: {_says(unit)}", right)

    def _unit(self, name: QueueName, index: int) -> tuple[FileInfo, int, Unit] | None:
        for info in self._files.queues.get(name, []):
            position = index * UNIT_SIZE - start_of(info)
            if 0 <= position <= info.size - UNIT_SIZE:
                region = self._cache.get(info.path)
                if region is not None:
                    return info, position, Unit._make(UNIT.unpack_from(region.buf, position))
        return None

    def _index_places(self, record: Record) -> list[Place]:
        directory = f"{self._files.root}/index"
        if record.sys_flag & SysFlag.TRANSACTION_MASK == SysFlag.TRANSACTION_ROLLBACK:
            return [Place("index", directory, None, "rolled back messages are not indexed", None)]
        keys = describe(record.topic, record.properties, record.store_timestamp, self._delays).keys
        if not keys:
            return [Place("index", directory, None, "the message has no key", None)]
        if not self._files.index:
            return [Place("index", directory, None, "there is no index", None)]
        return [self._index_place(record, key) for key in dict.fromkeys(keys)]

    def _index_place(self, record: Record, key: str) -> Place:
        wanted = index_hash(record.topic, key)
        known: IndexShape | None = None
        for info in reversed(self._files.index):
            region = self._cache.get(info.path) if info.size >= HEADER_SIZE else None
            shape = index_shape(region, slots=self._index_slots, known=known) if region is not None else None
            if region is None or shape is None:
                continue
            known = shape
            for entry in index_chain(region, shape, wanted % shape.slots):
                if entry.hash == wanted and entry.physical_offset == record.physical_offset:
                    says = f"key {key}: entry {entry.number} in slot {wanted % shape.slots}"
                    return Place("index", info.path, entry.position, says, True)
        return Place("index", f"{self._files.root}/index", None, f"key {key} (hash {wanted}): no entry", False)


def _says(unit: Unit) -> str:
    size = "pre-blank" if unit.size == PRE_BLANK_SIZE else f"size {unit.size}"
    return f"offset {unit.physical_offset}, {size}, tags code {unit.tags_code}"
