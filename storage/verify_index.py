"""Does the index say what the log says? Header, chains, and every key of every record from the index's begin on.

An index file is checked by itself first: what its header claims, that each slot leads through exactly the entries that
hash to it. Then, while the log is walked, the keys of each stretch of the log are compared with the entries that point
into it. A file's entries are in memory (12 bytes each) only while the walk passes the records they point to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from brokerlab.storage.disk import Disk, FileInfo, Offsets, Region
from brokerlab.storage.dispatch import IndexEntries
from brokerlab.storage.errors import CorruptRecordError, DiskError
from brokerlab.storage.findings import ALIKE_MAX, Findings
from brokerlab.storage.index_file import ENTRY_SIZE, HEADER_SIZE, SLOT_SIZE, IndexHeader, read_index_header
from brokerlab.storage.java_hash import Hashes, index_hash
from brokerlab.storage.message import TAGS
from brokerlab.storage.offline import StoreFiles, opened
from brokerlab.storage.offline_index import IndexShape, index_shape
from brokerlab.storage.offline_log import LogView, first_nonzero

_ENTRY_TYPE = np.dtype([("hash", ">i4"), ("offset", ">i8"), ("diff", ">i4"), ("previous", ">i4")])
assert _ENTRY_TYPE.itemsize == ENTRY_SIZE


@dataclass(slots=True)
class IndexState:
    """One index file, as far as it could be read."""

    info: FileInfo
    header: IndexHeader
    shape: IndexShape
    least: int
    most: int
    count: int
    hashes: Hashes | None = None
    offsets: Offsets | None = None
    order: Offsets | None = None

    def position(self, number: int) -> int:
        return HEADER_SIZE + SLOT_SIZE * self.shape.slots + ENTRY_SIZE * number


class IndexCheck:
    """`check_files` first, then every batch of records in order, then `finish`."""

    def __init__(self, disk: Disk, files: StoreFiles, findings: Findings, *, slots: int | None = None) -> None:
        self.states: list[IndexState] = []
        self.entries = 0
        self.expired = 0
        self._disk = disk
        self._files = files
        self._findings = findings
        self._slots = slots
        self._known: IndexShape | None = None
        self._from = -1
        self._missing: list[tuple[int, int]] = []  # (offset, hash), the first ones
        self._missing_count = 0
        self._missing_inside = 0  # before the last entry: no dispatch will ever add them

    # Each file by itself

    def check_files(self) -> None:
        for info in self._files.index:
            if info.size < HEADER_SIZE:
                reason = f"{info.size} bytes are less than a header"
                severity = "warning" if not info.size else "error"
                self._findings.add(severity, info.path, None, reason, "empty-file" if not info.size else "wrong-size")
                continue
            try:
                with opened(self._disk, info.path) as region:
                    self._check_file(info, region)
            except (DiskError, CorruptRecordError) as error:
                self._findings.add("error", info.path, None, str(error), "unreadable")
        for left, right in zip(self.states, self.states[1:], strict=False):
            if (
                left.count > 1
                and right.count > 1
                and right.header.begin_physical_offset < left.header.end_physical_offset
            ):
                reason = f"begins at offset {right.header.begin_physical_offset}, before the end of {left.info.name}"
                self._findings.add("error", right.info.path, 16, reason, "index-order")

    def _check_file(self, info: FileInfo, region: Region) -> None:
        shape = index_shape(region, slots=self._slots, known=self._known)
        if shape is None:
            reason = f"no number of slots fits its {info.size} bytes (say it with --index-slots)"
            self._findings.add("error", info.path, None, reason, "index-shape")
            return
        if shape.is_found and shape != self._known:
            self._known = shape
            reason = f"taken to have {shape.slots} slots and {shape.entries} entries ({shape.how})"
            self._findings.add("info", info.path, None, reason, "index-shape")
        header = read_index_header(region.buf)
        if not 0 <= header.index_count <= shape.entries:
            reason = f"header counts {header.index_count} entries, there is room for {shape.entries}"
            self._findings.add("error", info.path, 36, reason, "index-header")
        count = min(max(header.index_count, 1), shape.entries)
        state = IndexState(info, header, shape, -1, -1, count)
        self.entries += count - 1
        self.states.append(state)
        if count > 1:
            self._check_entries(state, region)
        else:
            self._check_unused(state, region)

    def _check_unused(self, state: IndexState, region: Region) -> None:
        with memoryview(region.buf) as view:
            at = first_nonzero(view, region.data_ranges(), HEADER_SIZE)
        if at >= 0:
            self._findings.add(
                "warning" if self._files.unclean else "error", state.info.path, at,
                "the header counts no entry, but there is something", "index-header",
            )  # fmt: skip

    def _check_entries(self, state: IndexState, region: Region) -> None:
        slots, count = state.shape.slots, state.count
        cells = np.frombuffer(region.buf, _ENTRY_TYPE, count, HEADER_SIZE + SLOT_SIZE * slots)[1:]
        hashes, offsets = cells["hash"].astype(np.int32), cells["offset"].astype(np.int64)
        diffs, previous = cells["diff"].astype(np.int64), cells["previous"].astype(np.int64)
        del cells
        state.least, state.most = int(offsets.min()), int(offsets.max())
        self._check_header(state, offsets)
        bad = (hashes < 0) | (offsets < 0) | (diffs < 0)
        bad |= (hashes == 0) & (offsets == 0) & (diffs == 0) & (previous == 0)
        self._tell_rows(state, bad, lambda _row: "is no entry", "index-entry")
        back = np.zeros(count - 1, dtype=np.bool_)
        back[1:] = offsets[1:] < np.maximum.accumulate(offsets)[:-1]
        back &= ~bad
        self._tell_rows(state, back, lambda row: f"points back to offset {offsets[row]}", "index-order")
        held = np.frombuffer(region.buf, np.dtype(">i4"), slots, HEADER_SIZE).astype(np.int64)
        self._check_chains(state, np.where(bad, 0, hashes).astype(np.int64), previous, held, bad)

    def _check_header(self, state: IndexState, offsets: Offsets) -> None:
        header, add = state.header, self._findings.add
        path, unclean = state.info.path, self._files.unclean
        severity = "warning" if unclean else "error"
        if header.begin_physical_offset != offsets[0]:
            reason = f"header begins at offset {header.begin_physical_offset}, the first entry at {offsets[0]}"
            add(severity, path, 16, reason, "index-header")
        if header.end_physical_offset != offsets[-1]:
            reason = f"header ends at offset {header.end_physical_offset}, the last entry at {offsets[-1]}"
            add(severity, path, 24, reason, "index-header")
        if header.begin_timestamp > header.end_timestamp:
            reason = f"header begins at time {header.begin_timestamp}, behind its end {header.end_timestamp}"
            add("warning", path, 0, reason, "index-header")

    def _check_chains(
        self, state: IndexState, hashes: Offsets, previous: Offsets, held: Offsets, bad: NDArray[np.bool_]
    ) -> None:
        """The slot holds its newest entry, and each entry links to the next older one of its slot."""
        count = len(hashes)
        keys = ((hashes % len(held)) << 32) | np.arange(1, count + 1, dtype=np.int64)
        keys.sort()
        slots, numbers = keys >> 32, keys & 0xFFFFFFFF
        first = np.ones(count, dtype=np.bool_)
        first[1:] = slots[1:] != slots[:-1]
        expected = np.zeros(count, dtype=np.int64)
        expected[numbers[1:] - 1] = np.where(first[1:], 0, numbers[:-1])
        wrong = (previous != expected) & ~bad
        self._tell_rows(
            state, wrong, lambda row: f"links to entry {previous[row]}, not to {expected[row]}", "index-chain"
        )
        newest = np.zeros(len(held), dtype=np.int64)
        newest[slots] = numbers  # of several, the last assignment stays
        lost = np.flatnonzero(held != newest)
        for slot in lost[:ALIKE_MAX].tolist():
            reason = f"slot {slot} holds entry {held[slot]}, its newest is {newest[slot]}"
            # A put that a crash cut short: the slot already leads to an entry that is not counted yet.
            half = self._files.unclean and held[slot] >= state.count
            position = HEADER_SIZE + SLOT_SIZE * slot
            self._findings.add("warning" if half else "error", state.info.path, position, reason, "index-chain")
        if len(lost) > ALIKE_MAX:
            self._findings.more("error", state.info.path, "index-chain", len(lost) - ALIKE_MAX)
        used = int(np.count_nonzero(newest))
        if used != state.header.slot_count and state.header.slot_count != count:  # 4.7.0 and older count every key
            reason = f"header counts {state.header.slot_count} slots in use, there are {used}"
            self._findings.add("warning", state.info.path, 32, reason, "index-header")

    def _tell_rows(self, state: IndexState, wrong: NDArray[np.bool_], why: Callable[[int], str], kind: str) -> None:
        rows = np.flatnonzero(wrong)
        for row in rows[:ALIKE_MAX].tolist():
            reason = f"entry {row + 1} {why(row)}"
            self._findings.add("error", state.info.path, state.position(row + 1), reason, kind)
        if len(rows) > ALIKE_MAX:
            self._findings.more("error", state.info.path, kind, len(rows) - ALIKE_MAX)

    # Against the log

    @property
    def begin(self) -> int:
        """Keys of records from here on must be in the index; -1 if it is empty."""
        return next((state.header.begin_physical_offset for state in self.states if state.count > 1), -1)

    @property
    def end(self) -> int:
        """Offset of the last record that has an entry; -1 if none has."""
        return max((state.most for state in self.states if state.count > 1), default=-1)

    def observe(self, entries: IndexEntries, start: int, end: int, log: LogView) -> None:
        """The keys of all records in [start, end) of the log. What was left out before `start` holds no record."""
        for state in self._overlapping(self._from, start):
            self._judge_extra(state, *self._entries_between(state, self._from, start), log)
        self._from = end
        expected = _packed(entries.physical_offsets - start, entries.hashes)
        found: list[Offsets] = []
        for state in self._overlapping(start, end):
            offsets, hashes = self._entries_between(state, start, end)
            packed = _packed(offsets - start, hashes)
            found.append(packed)
            strange = ~np.isin(packed, expected)
            if strange.any():
                self._judge_extra(state, offsets[strange], hashes[strange], log)
        for state in self.states:
            if state.most < end:
                self._drop(state)
        actual = np.concatenate(found) if found else np.zeros(0, dtype=np.int64)
        missing = ~np.isin(expected, actual) & (entries.physical_offsets >= self.begin)
        self._judge_missing(entries.physical_offsets[missing], entries.hashes[missing])

    def _overlapping(self, low: int, high: int) -> list[IndexState]:
        return [s for s in self.states if low < high and s.count > 1 and s.least < high and s.most >= low]

    def begin_log(self, log_begin: int) -> None:
        """Entries below are of records that are gone."""
        self._from = log_begin
        for state in self.states:
            if state.count > 1 and state.least < log_begin:
                self._load(state)
                assert state.offsets is not None
                self.expired += int(np.count_nonzero((state.offsets < log_begin) & (state.offsets >= 0)))
                if state.most < log_begin:
                    self._drop(state)

    def _load(self, state: IndexState) -> None:
        if state.offsets is not None:
            return
        try:
            with opened(self._disk, state.info.path) as region:
                cells = np.frombuffer(
                    region.buf, _ENTRY_TYPE, state.count, HEADER_SIZE + SLOT_SIZE * state.shape.slots
                )[1:]
                hashes, offsets = cells["hash"].astype(np.int32), cells["offset"].astype(np.int64)
                del cells
        except (DiskError, ValueError):  # it went away, or shrank, while we looked
            hashes, offsets = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64)
        if (np.diff(offsets) < 0).any():
            state.order = np.argsort(offsets, kind="stable")
            hashes, offsets = hashes[state.order], offsets[state.order]
        state.hashes, state.offsets = hashes, offsets

    @staticmethod
    def _drop(state: IndexState) -> None:
        state.hashes = state.offsets = state.order = None

    def _entries_between(self, state: IndexState, low: int, end: int) -> tuple[Offsets, Hashes]:
        self._load(state)
        assert state.offsets is not None and state.hashes is not None
        first, last = np.searchsorted(state.offsets, (low, end))
        return state.offsets[first:last], state.hashes[first:last]

    def _judge_extra(self, state: IndexState, offsets: Offsets, hashes: Hashes, log: LogView) -> None:
        told = 0
        for row in range(len(offsets)):
            offset, key_hash = int(offsets[row]), int(hashes[row])
            problem = _entry_problem(log, offset, key_hash)
            if not problem:
                continue
            told += 1
            if told <= ALIKE_MAX:
                number = self._number_of(state, offset, key_hash)
                reason = f"entry {number} (hash {key_hash}) points to offset {offset}: {problem}"
                self._findings.add("error", state.info.path, state.position(number), reason, "index-entry")
            else:  # enough are shown: what follows is counted, not looked at
                self._findings.more("error", state.info.path, "index-entry", len(offsets) - row)
                return

    def _number_of(self, state: IndexState, offset: int, key_hash: int) -> int:
        self._load(state)
        assert state.offsets is not None and state.hashes is not None
        row = int(np.argmax((state.offsets == offset) & (state.hashes == key_hash)))
        return (int(state.order[row]) if state.order is not None else row) + 1

    def _judge_missing(self, offsets: Offsets, hashes: Hashes) -> None:
        self._missing_count += len(offsets)
        self._missing_inside += int(np.count_nonzero(offsets <= self.end))
        for row in range(min(len(offsets), ALIKE_MAX - len(self._missing))):
            self._missing.append((int(offsets[row]), int(hashes[row])))

    def finish(self, log_end: int, log: LogView) -> None:
        """Entries that point behind the log, and keys that the index does not know."""
        lenient = "warning" if self._files.unclean else "error"
        for state in self.states:
            if state.count > 1 and state.most >= log_end:
                if state.least < log_end and self._from < log_end:
                    self._judge_extra(state, *self._entries_between(state, self._from, log_end), log)
                self._load(state)
                assert state.offsets is not None and state.hashes is not None
                rows = np.flatnonzero(state.offsets >= log_end)
                for row in rows[:ALIKE_MAX].tolist():
                    number = (int(state.order[row]) if state.order is not None else row) + 1
                    reason = (
                        f"entry {number} points to offset {state.offsets[row]}, behind the end of the log at {log_end}"
                    )
                    self._findings.add(lenient, state.info.path, state.position(number), reason, "behind-the-log")
                if len(rows) > ALIKE_MAX:
                    self._findings.more(lenient, state.info.path, "behind-the-log", len(rows) - ALIKE_MAX)
            self._drop(state)
        if self._missing_count:
            self._tell_missing()

    def _tell_missing(self) -> None:
        directory = f"{self._files.root}/index"
        offset = self._missing[0][0]
        if "index" not in self._files.directories or self.begin < 0:
            reason = f"no index: {self._missing_count} keys are found by scanning only"
            self._findings.add("warning", directory, None, reason, "missing-part")
        elif self._files.unclean and not self._missing_inside:
            reason = f"{self._missing_count} keys of records from offset {offset} on are not indexed yet"
            self._findings.add("info", directory, None, reason, "not-dispatched")
        else:
            for offset, key_hash in self._missing:
                reason = f"no entry for a key (hash {key_hash}) of the record at offset {offset}"
                self._findings.add("error", self._file_for(offset), None, reason, "missing-key")
            if self._missing_count > len(self._missing):
                path = self._file_for(self._missing[-1][0])
                self._findings.more("error", path, "missing-key", self._missing_count - len(self._missing))

    def _file_for(self, offset: int) -> str:
        """The index file that should have had the entry."""
        used = [state for state in self.states if state.count > 1]
        before = [state for state in used if state.header.begin_physical_offset <= offset]
        return (before or used)[-1].info.path


def _packed(offsets: Offsets, hashes: Hashes) -> Offsets:
    """Offset (below 4 GiB) and hash in one number: comparing columns of it is one sort."""
    return (offsets << 31) | (hashes.astype(np.int64) & 0x7FFFFFFF)


def _entry_problem(log: LogView, offset: int, key_hash: int) -> str:
    """Why no index entry may have this offset and hash, or "". Since 5.4 a record is also indexed by its tags."""
    try:
        record = log.record(offset, check_crc=False)
    except CorruptRecordError as error:
        return f"no valid record there ({error.reason})"
    tags = record.properties_dict().get(TAGS)
    if tags and index_hash(record.topic, f"T#{tags}") == key_hash:
        return ""
    return f"the record there (of {record.topic}) has no such key"
