"""One file of the key index: a hash table on disk, big-endian, 40 + 4·slots + 20·entries bytes.

offset  size  header field
0       8     begin_timestamp        store time of the first entry; before it, end of the former file (0: none)
8       8     end_timestamp          store time of the last entry
16      8     begin_physical_offset  record of the first entry
24      8     end_physical_offset    record of the last entry
32      4     slot_count             slots in use
36      4     index_count            number of the next entry: starts at 1, and 0 on disk is read as 1

40 + 4·slot              slot: i32 number of its newest entry, 0 = empty
40 + 4·slots + 20·number entry, from number 1 on; entry 0 is never used, so a file holds entries − 1

offset  size  entry field
0       4     hash             index hash of `topic#key`, never negative; its slot is hash mod slots
4       8     physical_offset  where the record starts in the commit log
12      4     time_diff        whole seconds since begin_timestamp, in [0, 2³¹−1]
16      4     previous         number of the next older entry of the slot, 0 = none; always below the entry's own

The first entry's time_diff is relative to the begin_timestamp that it then replaces. There is no checksum and no order
between pages. A process kill leaves at worst one put half done: an entry, or an entry and its slots, not yet counted.
A power cut may bring back any mixture of old and new pages, so links may lead anywhere: `lookup` follows them only
backwards and inside the file, and `trim` trusts the entries alone and derives slots, links and counts from them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress
from mmap import mmap
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from brokerlab.storage.disk import Offsets
from brokerlab.storage.errors import CorruptRecordError, DiskError
from brokerlab.storage.java_hash import Hashes
from brokerlab.storage.mapped_file import MappedFile

HEADER_SIZE, SLOT_SIZE, ENTRY_SIZE = 40, 4, 20
TIME_DIFF_MAX = 2**31 - 1

_HEADER = struct.Struct(">qqqqii")
_SLOT = struct.Struct(">i")
_ENTRY = struct.Struct(">iqii")
_SLOT_TYPE = np.dtype(">i4")
_ENTRY_TYPE = np.dtype([("hash", ">i4"), ("physical_offset", ">i8"), ("time_diff", ">i4"), ("previous", ">i4")])
assert _HEADER.size == HEADER_SIZE
assert _SLOT.size == _SLOT_TYPE.itemsize == SLOT_SIZE
assert _ENTRY.size == _ENTRY_TYPE.itemsize == ENTRY_SIZE
_PREVIOUS_AT = 16
_LOOP_BELOW = 12  # below it, setting up the columns costs more than it saves

Numbers: TypeAlias = NDArray[np.int32]


class IndexHeader(NamedTuple):
    """The first 40 bytes."""

    begin_timestamp: int = 0
    end_timestamp: int = 0
    begin_physical_offset: int = 0
    end_physical_offset: int = 0
    slot_count: int = 0
    index_count: int = 0


class EntryColumns(NamedTuple):
    """Entries as columns, in the order they were put; the first row is entry 1."""

    hashes: Hashes
    physical_offsets: Offsets
    time_diffs: Numbers
    previous: Numbers


def read_index_header(data: bytes | memoryview | mmap) -> IndexHeader:
    """The header as it is written, unjudged. Raises CorruptRecordError where there are fewer than 40 bytes."""
    if len(data) < HEADER_SIZE:
        raise CorruptRecordError(f"an index header has {HEADER_SIZE} bytes, found {len(data)}", offset=0, torn=True)
    return IndexHeader(*_HEADER.unpack_from(data, 0))


def _packed(header: IndexHeader) -> bytes:
    # As the original: the count goes to disk with the first entry, not before.
    return _HEADER.pack(*header[:5], header.index_count if header.index_count > 1 else 0)


def _time_diff(begin_timestamp: int, store_timestamp: int) -> int:
    if store_timestamp > begin_timestamp > 0:
        return min((store_timestamp - begin_timestamp) // 1000, TIME_DIFF_MAX)
    return 0


class _Chains(NamedTuple):
    """New entries of consecutive numbers, ordered by slot and then by number: each run of a slot is one chain."""

    order: NDArray[np.int64]  # where each stood in the input
    slots: NDArray[np.int64]
    numbers: NDArray[np.int64]
    heads: NDArray[np.bool_]  # the oldest of its slot: links to what the slot held before
    tips: NDArray[np.bool_]  # the newest of its slot: what the slot will hold

    @classmethod
    def of(cls, hashes: Hashes, slots: int, first_number: int) -> _Chains:
        # Slot and place in one number: a plain sort of it is the stable one, and several times faster than argsort.
        count = len(hashes)
        keys = (hashes % np.int32(slots)).astype(np.int64) << 32
        keys |= np.arange(count, dtype=np.int64)
        keys.sort()
        slot_of, order = keys >> 32, keys & 0xFFFFFFFF
        heads, tips = np.ones(count, dtype=np.bool_), np.ones(count, dtype=np.bool_)
        np.not_equal(slot_of[1:], slot_of[:-1], out=heads[1:])
        tips[:-1] = heads[1:]
        return cls(order, slot_of, order + first_number, heads, tips)

    def previous(self, held_before: NDArray[Any] | int) -> Numbers:
        """The link of each entry, in input order; `held_before` is what the slot of each head held."""
        links = np.empty(len(self.order), dtype=np.int32)
        links[1:] = self.numbers[:-1]
        links[self.heads] = held_before
        in_order = np.empty_like(links)
        in_order[self.order] = links
        return in_order


class IndexFile:
    """One mapped index file. Written by one service; others read, sync and close it. Stores go entry, slot, header:
    what is counted is there, and a reader never follows a link to nothing."""

    def __init__(self, file: MappedFile, slots: int, entries: int) -> None:
        self.path = file.path
        self.name = file.path.rpartition("/")[2]
        self.slots = slots
        self._file = file
        self._region = file.region
        self._base = HEADER_SIZE + SLOT_SIZE * slots
        if file.size < self._base:
            raise CorruptRecordError(f"{slots} slots need {self._base} bytes, found {file.size}", torn=True)
        # A file that could not be extended (read-only) holds fewer than it should; no link leads behind its end.
        self._limit = min(entries, (file.size - self._base) // ENTRY_SIZE)
        header = read_index_header(self._region.buf)
        # At least 1 and no more than fits, whatever is on disk.
        self._publish(header._replace(index_count=max(1, min(header.index_count, self._limit))))
        self._version = self._synced_version = 0

    @classmethod
    def start(
        cls, file: MappedFile, slots: int, entries: int, *, end_physical_offset: int = 0, end_timestamp: int = 0
    ) -> IndexFile:
        """A new file, all zeros so far, behind one that ended with this offset and time."""
        started = cls(file, slots, entries)
        time, offset = max(end_timestamp, 0), max(end_physical_offset, 0)
        if time or offset:
            started._set_header(IndexHeader(time, time, offset, offset, 0, 1))
        return started

    @property
    def is_empty(self) -> bool:
        return self.index_count <= 1

    @property
    def room(self) -> int:
        """How many entries still fit."""
        return max(0, self._limit - self.index_count)

    @property
    def is_full(self) -> bool:
        return self.room == 0

    def matches(self, begin: int, end: int) -> bool:
        """May this file hold something of the time range, both ends included?"""
        first, last = self.begin_timestamp, self.end_timestamp
        return (begin < first and end > last) or first <= begin <= last or first <= end <= last

    def _publish(self, header: IndexHeader) -> None:
        self.header = header
        self.begin_timestamp, self.end_timestamp = header.begin_timestamp, header.end_timestamp
        self.begin_physical_offset, self.end_physical_offset = header.begin_physical_offset, header.end_physical_offset
        self.slot_count, self.index_count = header.slot_count, header.index_count

    def _set_header(self, header: IndexHeader) -> None:
        self._region.buf[:HEADER_SIZE] = _packed(header)
        self._region.wrote(0, HEADER_SIZE)
        self._publish(header)
        self._version += 1

    def _count(self, added: int, new_slots: int, begin: tuple[int, int], end: tuple[int, int]) -> None:
        """Count entries that are in place, the first and the last of them given as (physical offset, store time)."""
        begin_time, _, begin_offset, _, slots, number = self.header
        if number <= 1:
            begin_offset, begin_time = begin
        self._set_header(IndexHeader(begin_time, end[1], begin_offset, end[0], slots + new_slots, number + added))

    # Put

    def put(self, key_hash: int, physical_offset: int, store_timestamp: int) -> bool:
        """Add one entry; False if the file is full."""
        assert key_hash >= 0
        number = self.index_count
        if number >= self._limit:
            return False
        region, buf, slot = self._region, self._region.buf, key_hash % self.slots
        slot_at, entry_at = HEADER_SIZE + SLOT_SIZE * slot, self._base + ENTRY_SIZE * number
        held: int = _SLOT.unpack_from(buf, slot_at)[0]
        previous = held if 0 < held <= number else 0
        diff = _time_diff(self.begin_timestamp, store_timestamp)
        _ENTRY.pack_into(buf, entry_at, key_hash, physical_offset, diff, previous)
        region.wrote(entry_at, ENTRY_SIZE)
        _SLOT.pack_into(buf, slot_at, number)
        here = (physical_offset, store_timestamp)
        try:
            region.wrote(slot_at, SLOT_SIZE)
            self._count(1, previous == 0, here, here)
        except DiskError:
            self._take_back(np.array([slot]), held)
            raise
        return True

    def put_many(self, hashes: Hashes, physical_offsets: Offsets, store_timestamps: Offsets) -> int:
        """Add as many as fit and return how many: the same bytes as `put` in a loop."""
        total = min(len(hashes), self.room)
        singly = total if total < _LOOP_BELOW else int(self.is_empty)  # the first sets the time of all others
        for row in range(singly):
            self.put(int(hashes[row]), int(physical_offsets[row]), int(store_timestamps[row]))
        if singly < total:
            self._put_columns(hashes[singly:total], physical_offsets[singly:total], store_timestamps[singly:total])
        return total

    def _put_columns(self, hashes: Hashes, physical_offsets: Offsets, store_timestamps: Offsets) -> None:
        assert int(hashes.min()) >= 0
        region, count, number = self._region, len(hashes), self.index_count
        slot_cells, entries = self._slot_cells(), self._entry_cells()[number : number + count]
        chains = _Chains.of(hashes, self.slots, number)
        slots = chains.slots[chains.heads]  # each once
        held = slot_cells[slots]
        linked = np.where((held > 0) & (held <= chains.numbers[chains.heads]), held, 0)
        entries["hash"] = hashes
        entries["physical_offset"] = physical_offsets
        # A time before the file's begin counts as its begin; a begin that is not known makes every difference 0.
        begin = self.begin_timestamp
        seconds = (np.maximum(store_timestamps, begin) - begin) // 1000 if begin > 0 else 0
        entries["time_diff"] = np.minimum(seconds, TIME_DIFF_MAX)
        entries["previous"] = chains.previous(linked)
        region.wrote(self._base + ENTRY_SIZE * number, ENTRY_SIZE * count)
        slot_cells[slots] = chains.numbers[chains.tips]
        first, last = ((int(physical_offsets[row]), int(store_timestamps[row])) for row in (0, -1))
        try:
            region.wrote_scattered(HEADER_SIZE + SLOT_SIZE * slots, SLOT_SIZE)
            self._count(count, len(slots) - int(np.count_nonzero(linked)), first, last)
        except DiskError:
            self._take_back(slots, held)
            raise

    def _take_back(self, slots: Offsets, held: NDArray[Any] | int) -> None:
        """After a failed store: else the next put would link to itself, and what the slots held before were lost."""
        self._slot_cells()[slots] = held
        with suppress(DiskError):
            self._region.wrote_scattered(HEADER_SIZE + SLOT_SIZE * slots, SLOT_SIZE)
        self._region.buf[:HEADER_SIZE] = _packed(self.header)
        with suppress(DiskError):
            self._region.wrote(0, HEADER_SIZE)

    # Read

    def lookup(self, key_hash: int, most: int, begin: int, end: int) -> list[int]:
        """Physical offsets under this hash whose time lies in the range, newest first, at most `most`. Only hashes are
        compared and times are whole seconds: the caller looks at the record itself."""
        found: list[int] = []
        if not self._file.hold():
            return found
        try:
            header, buf = self.header, self._region.buf
            number: int = _SLOT.unpack_from(buf, HEADER_SIZE + SLOT_SIZE * (key_hash % self.slots))[0]
            if header.index_count <= 1 or number > header.index_count:
                return found
            while len(found) < most and 0 < number < self._limit:
                entry_hash, physical_offset, diff, previous = _ENTRY.unpack_from(buf, self._base + ENTRY_SIZE * number)
                # The first entry's seconds are relative to the former file; its own time became the begin.
                time = header.begin_timestamp + (diff * 1000 if number > 1 else 0)
                if diff >= 0 and entry_hash == key_hash and begin <= time <= end:
                    found.append(physical_offset)
                # A link that does not lead back is damage. The original stops only where an entry links to itself,
                # and runs forever in a longer circle.
                if diff < 0 or time < begin or previous >= number:
                    break
                number = previous
            return found
        finally:
            self._file.release()

    def entries(self) -> EntryColumns:
        """A copy of what is counted."""
        used = self._entry_cells()[1 : self.index_count]
        native = (used[name].astype(used.dtype[name].newbyteorder("=")) for name in _ENTRY_TYPE.names or ())
        return EntryColumns(*native)

    def slot_values(self) -> Numbers:
        """A copy of all slots."""
        return self._slot_cells().astype(np.int32)

    # Views are made when needed and not kept: a map with views cannot be closed.

    def _slot_cells(self) -> NDArray[np.int32]:
        return np.frombuffer(self._region.buf, _SLOT_TYPE, self.slots, HEADER_SIZE)

    def _entry_cells(self) -> NDArray[np.void]:
        return np.frombuffer(self._region.buf, _ENTRY_TYPE, self._limit, self._base)

    # Durability

    @property
    def is_synced(self) -> bool:
        return self._synced_version == self._version

    def sync(self) -> None:
        """Make everything put so far durable. Raises DiskError; the file then still counts as unsynced."""
        if not self.is_synced and self._file.hold():
            try:
                version = self._version  # before the sync: it may pause us, and does not cover what is put meanwhile
                self._region.sync(0, self._used_size)
                self._synced_version = version
            finally:
                self._file.release()

    def resync(self) -> None:
        """Make durable what a crash left, of which nobody knows how much is. For recovery, while nobody puts."""
        self._file.resync(0, self._used_size)

    @property
    def _used_size(self) -> int:
        return self._base + ENTRY_SIZE * min(self.index_count, self._limit)

    # Recovery

    def sound_entries(self, before_offset: int) -> int:
        """How many leading entries were really written and point, in log order, to records below `before_offset`."""
        hashes, offsets, diffs, previous = self.entries()
        bad = (offsets < 0) | (offsets >= before_offset) | (hashes < 0)
        bad[1:] |= offsets[1:] < offsets[:-1]
        # Offset 0 is the log's first record; an entry that is zero altogether was lost with its page.
        bad |= (offsets | hashes | diffs | previous) == 0
        return int(np.argmax(bad)) if bad.any() else len(offsets)

    def trim(self, before_offset: int, store_timestamp_at: Callable[[int], int] | None = None) -> int:
        """Keep the `sound_entries`, rebuild everything else from them, and return how many entries were dropped.

        The end time is that of the last record kept, asked of `store_timestamp_at` (its offset in the log) and used
        where it agrees with the entry's seconds. Putting the dropped entries again then gives the bytes of a file that
        was never trimmed. The header is stored last, so that a trim that did not finish can be repeated.
        """
        kept = self.sound_entries(before_offset)
        dropped = self.index_count - 1 - kept
        used_slots = self._relink(kept)
        self._file.zero_from(self._base + ENTRY_SIZE * (kept + 1))  # synced: no old entry may come back behind new ones
        header = IndexHeader(index_count=1)
        if kept:
            cells = self._entry_cells()
            first, last = int(cells[1]["physical_offset"]), int(cells[kept]["physical_offset"])
            begin, end = self.begin_timestamp, self.end_timestamp
            if kept == 1:  # its seconds are relative to the former file, but its time became the begin
                end = begin
            elif dropped or last != self.end_physical_offset:
                diff = int(cells[kept]["time_diff"])
                asked = store_timestamp_at(last) if store_timestamp_at else -1
                end = asked if asked >= 0 and _time_diff(begin, asked) == diff else begin + 1000 * diff
            header = IndexHeader(begin, end, first, last, used_slots, kept + 1)
        if _packed(header) != self._region.buf[:HEADER_SIZE]:
            self._set_header(header)
        return dropped

    def _relink(self, kept: int) -> int:
        """Slots and links as entries 1 to `kept` make them; how many slots are in use. Stores only what differs."""
        entries, slot_cells = self._entry_cells()[1 : kept + 1], self._slot_cells()
        chains = _Chains.of(entries["hash"].astype(np.int32), self.slots, 1)
        previous = chains.previous(0)
        links = np.flatnonzero(entries["previous"] != previous)
        if len(links):
            entries["previous"][links] = previous[links]
            self._region.wrote_scattered(self._base + ENTRY_SIZE * (links + 1) + _PREVIOUS_AT, SLOT_SIZE)
        values = np.zeros(self.slots, dtype=np.int32)
        values[chains.slots[chains.tips]] = chains.numbers[chains.tips]
        slots = np.flatnonzero(slot_cells != values)
        if len(slots):
            slot_cells[slots] = values[slots]
            self._region.wrote_scattered(HEADER_SIZE + SLOT_SIZE * slots, SLOT_SIZE)
        self._version += len(links) + len(slots) > 0
        return int(np.count_nonzero(chains.tips))

    def warm(self) -> None:
        """Have every page in memory before the first put."""
        self._region.warm(0, self._file.size)

    # Going away

    def close(self) -> None:
        """No new readers; the map goes when the last one lets go. Nothing is synced by this."""
        self._file.shutdown(0)

    def destroy(self, now_ms: int = 0, force_after_ms: int = 0) -> bool:
        """Close and delete; False while somebody reads it and `force_after_ms` have not passed since the first try."""
        return self._file.destroy(now_ms, force_after_ms)
