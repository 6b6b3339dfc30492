"""Do the consume queues say what the log says? Both ways, in one pass over the log and one over the queues.

While the log is walked, each record's entry is looked up where it must stand, and the record's index is noted as seen.
Afterwards every entry that no record asked for is judged: expired, held open, stale, or pointing where it must not.
Memory: a few numbers per unbroken run of indexes, whatever the size of the log.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from brokerlab.storage.consume_queue import PRE_BLANK_SIZE, UNIT_COLUMNS, UNIT_SIZE
from brokerlab.storage.disk import Disk, FileInfo, Offsets, Region
from brokerlab.storage.dispatch import Dispatch, is_queued
from brokerlab.storage.errors import CorruptRecordError
from brokerlab.storage.findings import ALIKE_MAX, Findings
from brokerlab.storage.message import SCHEDULE_TOPIC, SysFlag
from brokerlab.storage.offline import FileCache, QueueName, StoreFiles, start_of, usual_size
from brokerlab.storage.offline_log import LogView
from brokerlab.storage.record import Record

_INDEX_MAX = 1 << 58
_NUMBER_MAX = (1 << 63) - 1
_EXT_ADDRESS_MAX = -(2**31) - 1
"""A code at or below this is an address in consumequeue_ext, not a tag's hash."""


class Runs:
    """A set of numbers, kept as unbroken runs [start, end)."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        if self.ends and start == self.ends[-1]:
            self.ends[-1] = end
        elif not self.ends or start > self.ends[-1]:
            self.starts.append(start)
            self.ends.append(end)
        else:
            self._merge(start, end)

    def _merge(self, start: int, end: int) -> None:
        first = bisect_right(self.ends, start - 1)
        last = bisect_right(self.starts, end)
        if first < last:
            start, end = min(start, self.starts[first]), max(end, self.ends[last - 1])
        self.starts[first:last] = [start]
        self.ends[first:last] = [end]

    def holds(self, numbers: Offsets) -> NDArray[np.bool_]:
        if not self.starts:
            return np.zeros(len(numbers), dtype=np.bool_)
        place = np.searchsorted(np.array(self.starts), numbers, side="right") - 1
        inside: NDArray[np.bool_] = (place >= 0) & (numbers < np.array(self.ends)[np.maximum(place, 0)])
        return inside


class Units(NamedTuple):
    """Entries as columns."""

    offsets: Offsets
    sizes: Offsets
    codes: Offsets


@dataclass(slots=True)
class QueueState:
    """What is known of one queue."""

    name: QueueName
    files: list[FileInfo]
    seen: Runs = field(default_factory=Runs)
    missing: list[tuple[int, int]] = field(default_factory=list)
    """(index, physical offset) of records without an entry, the first ones."""
    missing_count: int = 0
    last_index: int = -1
    last_good: int = -1
    records: int = 0
    entries: int = 0
    expired: int = 0
    held: int = 0


class QueueCheck:
    """Give it every batch of records, in order; then `finish`."""

    def __init__(self, disk: Disk, files: StoreFiles, findings: Findings) -> None:
        self.queues: dict[QueueName, QueueState] = {}
        self.inner_batches = 0
        self._root = files.root
        self._present = "consumequeue" in files.directories
        self._unclean = files.unclean
        self._findings = findings
        self._cache = FileCache(disk)
        for name, row in files.queues.items():
            self.queues[name] = QueueState(name, [info for info in row if self._is_usable(info, row)])

    def _is_usable(self, info: FileInfo, row: list[FileInfo]) -> bool:
        size, start = usual_size(row), start_of(info)
        if not info.size:
            self._findings.add("warning", info.path, None, "file is empty", "empty-file")
            return False
        if info.size != size:
            reason = f"file has {info.size} bytes, the others of its queue {size}"
            self._findings.add("error", info.path, None, reason, "wrong-size")
        if info.size % UNIT_SIZE:
            reason = f"size {info.size} is no multiple of {UNIT_SIZE}"
            self._findings.add("error", info.path, None, reason, "wrong-size")
        if start % UNIT_SIZE:
            reason = f"name is no multiple of {UNIT_SIZE}: entries would stand across its beginning"
            self._findings.add("error", info.path, None, reason, "wrong-name")
            return False
        before = row[row.index(info) - 1] if row[0] is not info else None
        if before is not None and before.size and start != start_of(before) + size:
            reason = f"begins at {start}, the file before it ends at {start_of(before) + size}"
            self._findings.add("error", info.path, None, reason, "gap")
        return info.size >= UNIT_SIZE

    # Records to entries

    def observe(self, dispatch: Dispatch) -> None:
        """Every record of this batch must have its entry."""
        rows = dispatch.columns
        queued = is_queued(rows.sys_flags)
        inner = (rows.sys_flags & SysFlag.INNER_BATCH) != 0
        self.inner_batches += int(np.count_nonzero(inner))
        queued &= ~inner  # these have their entries in batchconsumequeue
        for run in dispatch.runs:
            chosen = run.rows[queued[run.rows]]
            if len(chosen):
                name = QueueName(run.topic, run.queue_id)
                state = self.queues.get(name)
                if state is None:
                    state = self.queues[name] = QueueState(name, [])
                self._compare(state, dispatch, chosen)

    def _compare(self, state: QueueState, dispatch: Dispatch, chosen: Offsets) -> None:
        columns = dispatch.columns
        indexes = columns.queue_offsets[chosen]
        offsets, sizes, codes = columns.physical_offsets[chosen], columns.sizes[chosen], dispatch.tags_codes[chosen]
        state.records += len(indexes)
        again = self._note(state, indexes, offsets)
        if not self._present:
            return
        units = self._units(state, indexes)
        same_place = (units.offsets == offsets) & (units.sizes == sizes)
        good = same_place & (units.codes == codes)
        if good.any():
            state.last_good = max(state.last_good, int(indexes[good].max()))
        for row in np.flatnonzero(~good & ~again).tolist():
            index, offset = int(indexes[row]), int(offsets[row])
            held, size, code = int(units.offsets[row]), int(units.sizes[row]), int(units.codes[row])
            if size <= 0 or held < 0:
                state.missing_count += 1
                if len(state.missing) < ALIKE_MAX:
                    state.missing.append((index, offset))
            elif same_place[row]:
                self._wrong_code(state, index, offset, code, int(codes[row]))
            else:
                holds = "holds the place open" if size == PRE_BLANK_SIZE else f"says offset {held}, size {size}"
                reason = f"entry {index} of {state.name} {holds}; its record is at {offset}, size {int(sizes[row])}"
                self._tell(state, "error", index, reason, "wrong-entry")

    def _note(self, state: QueueState, indexes: Offsets, offsets: Offsets) -> NDArray[np.bool_]:
        """Mark these indexes as seen; True for those that were before."""
        again = state.seen.holds(indexes)
        steps = np.diff(indexes)
        if len(indexes) > 1 and not (steps == 1).all():
            _, first_places = np.unique(indexes, return_index=True)
            later = np.ones(len(indexes), dtype=np.bool_)
            later[first_places] = False
            again |= later
        for row in np.flatnonzero(again)[:ALIKE_MAX].tolist():
            reason = f"record at {int(offsets[row])} is number {int(indexes[row])} of {state.name}, which another is"
            self._log_finding("error", int(offsets[row]), reason, "duplicate")
        self._findings_more("error", "duplicate", int(np.count_nonzero(again)) - ALIKE_MAX)
        before = np.concatenate(([state.last_index], indexes[:-1]))
        jumps = np.flatnonzero((indexes - 1 > before) & ~again & (before >= 0))
        for row in jumps[:ALIKE_MAX].tolist():
            reason = f"record at {int(offsets[row])} is number {int(indexes[row])} of {state.name} behind {before[row]}"
            self._log_finding("warning", int(offsets[row]), reason, "queue-offset-gap")
        self._findings_more("warning", "queue-offset-gap", len(jumps) - ALIKE_MAX)
        state.last_index = max(state.last_index, int(indexes.max()))
        edges = np.flatnonzero(steps != 1) + 1
        for part in np.split(indexes, edges):
            state.seen.add(int(part[0]), min(int(part[-1]) + 1, _NUMBER_MAX))
        return again

    def _log_finding(self, severity: str, offset: int, reason: str, kind: str) -> None:
        self._findings.add(severity, self.log_file, offset - self.log_start, reason, kind)

    def _findings_more(self, severity: str, kind: str, count: int) -> None:
        if count > 0:
            self._findings.more(severity, self.log_file, kind, count)

    log_file = ""
    log_start = 0
    """The segment that is being walked: set by whoever walks."""

    def _wrong_code(self, state: QueueState, index: int, offset: int, held: int, expected: int) -> None:
        if held <= _EXT_ADDRESS_MAX:
            return
        # Delivery times depend on the broker's delay levels, which nobody told us.
        severity = "warning" if state.name.topic == SCHEDULE_TOPIC else "error"
        reason = f"entry {index} of {state.name} has tags code {held}, its record at {offset} has {expected}"
        self._tell(state, severity, index, reason, "wrong-tags-code")

    def _units(self, state: QueueState, indexes: Offsets) -> Units:
        """Entries at these indexes; zeros where there is none."""
        found = np.zeros(len(indexes), dtype=UNIT_COLUMNS)
        starts = np.array([start_of(info) for info in state.files], dtype=np.int64)
        ends = starts + np.array([info.size for info in state.files], dtype=np.int64)
        if len(starts):
            places = np.where(indexes < _INDEX_MAX, indexes, 0) * UNIT_SIZE
            numbers = np.searchsorted(starts, places, side="right") - 1
            inside = (numbers >= 0) & (places + UNIT_SIZE <= ends[np.maximum(numbers, 0)]) & (indexes < _INDEX_MAX)
            for number in np.unique(numbers[inside]).tolist():
                region = self._cache.get(state.files[number].path)
                if region is not None:
                    rows = np.flatnonzero(inside & (numbers == number))
                    cells = _cells(region)
                    within = (places[rows] - starts[number]) // UNIT_SIZE
                    found[rows] = cells[np.minimum(within, len(cells) - 1)]
                    del cells
        return Units(*(found[name].astype(np.int64) for name in ("offset", "size", "code")))

    def _tell(self, state: QueueState, severity: str, index: int, reason: str, kind: str) -> None:
        info = self._file_of(state, index)
        if info is None:
            self._findings.add(severity, f"{self._root}/consumequeue/{state.name}", None, reason, kind)
        else:
            self._findings.add(severity, info.path, index * UNIT_SIZE - start_of(info), reason, kind)

    @staticmethod
    def _file_of(state: QueueState, index: int) -> FileInfo | None:
        return next((f for f in state.files if start_of(f) <= index * UNIT_SIZE < start_of(f) + f.size), None)

    # Entries to records

    def finish(self, log: LogView, log_begin: int, log_end: int) -> None:
        """Judge what the log did not ask for, and what it asked for in vain."""
        without = 0
        for name in sorted(self.queues):
            state = self.queues[name]
            self._judge_files(state, log, log_begin, log_end)
            if state.missing_count and not state.files:
                without += state.missing_count
                self._tell_no_queue(state)
            elif state.missing_count:
                self._judge_missing(state)
        if not self._present and any(state.records for state in self.queues.values()):
            count = sum(state.records for state in self.queues.values())
            reason = f"no consumequeue directory: {count} records have no entry"
            self._findings.add("error", f"{self._root}/consumequeue", None, reason, "missing-part")
        self._cache.close()

    def _tell_no_queue(self, state: QueueState) -> None:
        reason = f"queue {state.name} has no file: {state.missing_count} records have no entry"
        severity = "warning" if self._unclean and state.missing_count == state.records else "error"
        self._findings.add(
            severity,
            f"{self._root}/consumequeue/{state.name}",
            None,
            reason,
            "missing-entry" if severity == "error" else "not-dispatched",
        )

    def _judge_missing(self, state: QueueState) -> None:
        """Entries missing at the end of a queue after an unclean stop are what recovery adds; others are lost."""
        tail = [one for one in state.missing if one[0] > state.last_good]
        if self._unclean and len(tail) == len(state.missing):
            index, offset = state.missing[0]
            reason = (
                f"{state.missing_count} records of {state.name} from number {index} (offset {offset}) on have no entry "
                "yet: the store was not stopped, the next start adds them"
            )
            self._tell(state, "info", index, reason, "not-dispatched")
            return
        for index, offset in state.missing:
            reason = f"entry {index} of {state.name} is missing; its record is at {offset}"
            self._tell(state, "error", index, reason, "missing-entry")
        if state.missing_count > len(state.missing):
            info = self._file_of(state, state.missing[-1][0])
            path = info.path if info else f"{self._root}/consumequeue/{state.name}"
            self._findings.more("error", path, "missing-entry", state.missing_count - len(state.missing))

    def _judge_files(self, state: QueueState, log: LogView, log_begin: int, log_end: int) -> None:
        empty_at = -1  # index of the first empty place: what stands behind it is a hole's far side, or stale
        real_before = False
        for info in state.files:
            region = self._cache.get(info.path)
            if region is None:
                self._findings.add("error", info.path, None, "cannot be opened", "unreadable")
                continue
            first = start_of(info) // UNIT_SIZE
            usable = region.size // UNIT_SIZE
            done = 0
            for low, high in unit_ranges(region.data_ranges(), usable):
                if low > done and empty_at < 0:
                    empty_at = first + done
                units = unit_columns(region, low, high)
                empty_at, real_before = self._judge_units(
                    state, info, first + low, units, log, (log_begin, log_end), empty_at, real_before
                )
                done = high
            if done < usable and empty_at < 0:
                empty_at = first + done

    def _judge_units(
        self,
        state: QueueState,
        info: FileInfo,
        first: int,
        units: Units,
        log: LogView,
        bounds: tuple[int, int],
        empty_at: int,
        real_before: bool,
    ) -> tuple[int, bool]:
        begin, end = bounds
        indexes = np.arange(first, first + len(units.sizes), dtype=np.int64)
        empty = (units.sizes <= 0) | (units.offsets < 0)
        seen = state.seen.holds(indexes)
        held = (units.offsets == 0) & (units.sizes == PRE_BLANK_SIZE) & ~empty
        expired = ~empty & ~held & ~seen & (units.offsets < begin)
        garbage = empty & ((units.offsets != 0) | (units.sizes != 0) | (units.codes != 0))
        state.entries += int(np.count_nonzero(~empty))
        state.held += int(np.count_nonzero(held))
        state.expired += int(np.count_nonzero(expired))
        for row in np.flatnonzero(garbage & ~seen)[:ALIKE_MAX].tolist():
            reason = (
                f"entry {first + row} of {state.name} is no entry: offset {units.offsets[row]}, size {units.sizes[row]}"
            )
            self._tell(state, "warning" if self._unclean else "error", first + row, reason, "garbage")
        if empty.any() and empty_at < 0:
            empty_at = first + int(np.argmax(empty))
        behind = indexes > empty_at if empty_at >= 0 else np.zeros(len(indexes), dtype=np.bool_)
        if real_before or (~empty & ~held).any():
            late = held & (indexes > (0 if real_before else first + int(np.argmax(~empty & ~held)))) & ~seen
            if late.any():
                where = first + int(np.argmax(late))
                reason = (
                    f"{np.count_nonzero(late)} places of {state.name} from {where} on are held open between entries"
                )
                self._tell(state, "warning", where, reason, "held-open")
            real_before = True
        far = behind & seen & ~empty
        if far.any() and empty_at >= 0 and not self._holds_index(state, empty_at):
            reason = f"queue {state.name} has a hole: entry {empty_at} is empty, {first + int(np.argmax(far))} is not"
            self._tell(state, "error", empty_at, reason, "hole")
        strange = np.flatnonzero(~empty & ~held & ~seen & ~expired)
        for row in strange[:ALIKE_MAX].tolist():
            self._judge_entry(
                state, first + row, int(units.offsets[row]), int(units.sizes[row]), end, log, bool(behind[row])
            )
        if len(strange) > ALIKE_MAX:
            # Queues of multi-dispatch hold entries of other topics' records throughout: a sample decides for all.
            sample = strange[ALIKE_MAX :: max(1, len(strange) // 50)]
            foreign = [
                self._belongs(state, first + int(r), int(units.offsets[r]), int(units.sizes[r]), log) for r in sample
            ]
            if any(why for why in foreign):
                self._findings.more("error", info.path, "wrong-entry", len(strange) - ALIKE_MAX)
        return empty_at, real_before

    @staticmethod
    def _holds_index(state: QueueState, index: int) -> bool:
        """A record of this index exists: its missing entry is told as such already."""
        return bool(state.seen.holds(np.array([index]))[0])

    def _judge_entry(
        self, state: QueueState, index: int, offset: int, size: int, log_end: int, log: LogView, behind: bool
    ) -> None:
        lenient = "warning" if self._unclean else "error"
        says = f"entry {index} of {state.name} (offset {offset}, size {size})"
        if offset >= log_end:
            repaired = ": the next start cuts it off" if self._unclean else ""
            reason = f"{says} points behind the end of the log at {log_end}{repaired}"
            self._tell(state, lenient, index, reason, "behind-the-log")
            return
        problem = self._belongs(state, index, offset, size, log)
        if problem:
            stale = behind and not self._holds_index(state, index)
            reason = f"{says} is stale, behind the queue's end: {problem}" if stale else f"{says} is wrong: {problem}"
            self._tell(state, lenient if stale else "error", index, reason, "stale" if stale else "wrong-entry")

    @staticmethod
    def _belongs(state: QueueState, index: int, offset: int, size: int, log: LogView) -> str:
        try:
            record = log.record(offset, check_crc=False)
        except CorruptRecordError as error:
            return f"no valid record there ({error.reason})"
        return entry_problem(record, state.name, index, size)


def entry_problem(record: Record, name: QueueName, index: int, size: int) -> str:
    """Why an entry of this queue must not point at this record, or ""."""
    if name.topic in record.properties_dict().get("INNER_MULTI_DISPATCH", "").split(","):
        return ""
    if (record.topic, record.queue_id, record.queue_offset) != (name.topic, name.queue_id, index):
        return f"the record there is number {record.queue_offset} of {record.topic}/{record.queue_id}"
    return "" if record.total_size == size else f"the record there has {record.total_size} bytes"


def _cells(region: Region) -> NDArray[np.void]:
    return np.frombuffer(region.buf, dtype=UNIT_COLUMNS, count=region.size // UNIT_SIZE)


def unit_columns(region: Region, low: int, high: int) -> Units:
    """A copy of the units low to high of a file."""
    cells = _cells(region)[low:high]
    return Units(*(cells[name].astype(np.int64) for name in ("offset", "size", "code")))


def unit_ranges(ranges: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """The units that these byte ranges touch, in order and without overlap."""
    found: list[tuple[int, int]] = []
    for start, end in ranges:
        low, high = start // UNIT_SIZE, min(-(-end // UNIT_SIZE), count)
        if found:
            low = max(low, found[-1][1])
        if low < high:
            found.append((low, high))
    return found
