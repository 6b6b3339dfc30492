"""Recovery of consume queues: what stands before the recovery start is kept, what comes after is written from the log.

A queue has no checksum, and after a crash any of its unsynced pages may be missing, old, or left over from before an
earlier truncation. But everything it says can be said again by the log. So each queue is split at the offset where
recovery starts reading: entries below it were flushed (the checkpoint says so) and stay, after a look at the last of
them; all others are compared with the log's records and written where they differ; what is left behind is cleared.
Doing this twice changes nothing, and it can be broken off anywhere.
"""

from __future__ import annotations

import numpy as np

from brokerlab.storage.commit_log import CommitLog
from brokerlab.storage.consume_queue import PRE_BLANK, PRE_BLANK_SIZE, UNIT_SIZE, ConsumeQueue, Unit, encode_units
from brokerlab.storage.disk import Offsets
from brokerlab.storage.dispatch import Dispatch, is_queued
from brokerlab.storage.queue_table import QueueTable
from brokerlab.storage.recovery_report import RecoveryReport


class NeedsOlderRecordsError(Exception):
    """Queues or index lack entries whose records lie before the recovery start: it must begin at the first file."""


def queue_end(queue: ConsumeQueue, below: int | None = None) -> tuple[int, int]:
    """(index behind the last good entry, end of that entry's record or -1), by the queue's own files alone.

    `below`: entries that point at or behind this offset end it too. Reads from the last file backwards, so the cost
    does not grow with the queue.
    """
    for file in reversed(queue.files.files):
        units = queue.units_of(file, file.size)
        sizes, offsets = units["size"], units["offset"]
        bad = (sizes <= 0) | (offsets < 0)
        if below is not None:
            bad |= (offsets >= below) & (sizes != PRE_BLANK_SIZE)
        count = int(bad.argmax()) if bad.any() else len(units)
        if count:
            last = units[count - 1]
            pre_blank = int(last["size"]) == PRE_BLANK_SIZE
            return file.start // UNIT_SIZE + count, -1 if pre_blank else int(last["offset"]) + int(last["size"])
    first = queue.files.first
    return (first.start // UNIT_SIZE if first else 0), -1


class QueueRepair:
    """One queue while it is being brought in line with the log."""

    def __init__(self, queue: ConsumeQueue, log: CommitLog, start: int, *, rewrite: bool) -> None:
        self.queue = queue
        self.next_index, _ = queue_end(queue, start)
        self.written = 0
        self._rewrite = rewrite
        self._files = queue.files
        self._unmatched = 0
        self._drop_entries_of_other_records(log)
        self._kept_index = self.next_index

    def _drop_entries_of_other_records(self, log: CommitLog) -> None:
        """Entries left from before an earlier truncation point at records of other queues or other indexes."""
        first = self._files.first
        lowest = first.start // UNIT_SIZE if first else 0
        while self.next_index > lowest:
            unit = self._unit(self.next_index - 1)
            if unit.is_pre_blank or unit.physical_offset < log.files.min_offset or self._points_right(log, unit):
                break
            self.next_index -= 1

    def _unit(self, index: int) -> Unit:
        unit = self.queue.unit(index)
        assert unit is not None
        return unit

    def _points_right(self, log: CommitLog, unit: Unit) -> bool:
        record = log.read(unit.physical_offset, check_crc=False)
        return record is not None and (
            (record.topic, record.queue_id, record.queue_offset, record.total_size)
            == (self.queue.topic, self.queue.queue_id, self.next_index - 1, unit.size)
        )

    def lacks_its_beginning(self, index: int) -> bool:
        """Do the queue's files begin behind a record that the log still has? They are never deleted before it."""
        first = self._files.first
        return first is not None and index * UNIT_SIZE < first.start

    def start_over(self, now_ms: int) -> None:
        """Forget all files: the whole queue is written again."""
        self._files.truncate(-1, now_ms, zero_tail=False)
        self.next_index = self._kept_index = 0

    def place(self, indexes: Offsets, offsets: Offsets, sizes: Offsets, codes: Offsets, *, holes_allowed: bool) -> int:
        """Entries of the next records of this queue; how many of them repeat an index that is taken."""
        if self._take_back_pre_blanks(int(indexes[0])) and not holes_allowed:
            raise NeedsOlderRecordsError(
                f"queue {self.queue.topic}/{self.queue.queue_id} holds places for records that the log has"
            )
        repeated = indexes < np.maximum.accumulate(np.concatenate(([self.next_index], indexes[:-1] + 1)))
        if repeated.any():
            fresh = ~repeated
            indexes, offsets, sizes, codes = indexes[fresh], offsets[fresh], sizes[fresh], codes[fresh]
        at = 0
        while at < len(indexes):
            if int(indexes[at]) > self.next_index:
                if not holes_allowed:
                    raise NeedsOlderRecordsError(
                        f"queue {self.queue.topic}/{self.queue.queue_id} ends at {self.next_index}, the log goes on "
                        f"with {int(indexes[at])}"
                    )
                self._hold_places(int(indexes[at]))
            steps = np.flatnonzero(np.diff(indexes[at:]) != 1)
            stop = at + int(steps[0]) + 1 if len(steps) else len(indexes)
            self._write(encode_units(offsets[at:stop], sizes[at:stop], codes[at:stop]))
            at = stop
        return int(repeated.sum())

    def _take_back_pre_blanks(self, index: int) -> bool:
        """Places held for records that were thought gone (a crash after the pre-fill, museum row 15), if the log has
        one for them after all."""
        end = self.next_index
        while self.next_index > index and (unit := self.queue.unit(self.next_index - 1)) and unit.is_pre_blank:
            self.next_index -= 1
        self._kept_index = min(self._kept_index, self.next_index)
        return self.next_index < end

    def _hold_places(self, index: int) -> None:
        if not self._files.files:  # begins where the log begins: older files are not made up
            self.next_index = self._kept_index = index - index % (self._files.file_size // UNIT_SIZE)
        self._write(PRE_BLANK * (index - self.next_index))

    def _write(self, data: bytes) -> None:
        """Lay units down from `next_index`; only what differs counts as written."""
        while data:
            offset = self.next_index * UNIT_SIZE
            file = self._files.find(offset)
            if file is None:
                file = self._files.add(self._files.allocate(offset - offset % self._files.file_size))
                file.set_positions(file.size)
            position = offset - file.start
            piece = data[: file.size - position]
            there = np.frombuffer(file.view, dtype=np.uint8, count=len(piece), offset=position)
            differs = (there != np.frombuffer(piece, dtype=np.uint8)).reshape(-1, UNIT_SIZE).any(axis=1)
            changed = int(differs.sum())
            del there
            if changed or self._rewrite:
                file.region.write(position, piece)
            self.written += changed
            self.next_index += len(piece) // UNIT_SIZE
            data = data[len(piece) :]

    def finish(self, now_ms: int) -> int:
        """Clear what is left behind the end, and hand the queue back; how many entries were removed."""
        files, end = self._files, self.next_index * UNIT_SIZE
        removed = 0
        for file in files.files:
            if file.start + file.size > end:
                units = self.queue.units_of(file, file.size)
                removed += int((units["size"][max(0, end - file.start) // UNIT_SIZE :] > 0).sum())
                del units
        if files.files:
            files.truncate(max(end, files.files[0].start), now_ms, zero_tail=True)
        # What was laid down again is in the page cache only: the next flush must cover it.
        unflushed = self._kept_index * UNIT_SIZE
        for file in files.files:
            if file.start + file.size > unflushed:
                file.flushed_position = min(file.flushed_position, max(0, unflushed - file.start))
        files.flushed_where = min(files.max_offset, unflushed) if files.files else 0
        files.committed_where = files.max_offset
        self.queue.max_physical_offset = self.queue.last_physical_end()
        return removed


class QueuesRepair:
    """All queues of a store, repaired together in one pass over the log."""

    def __init__(self, queues: QueueTable, log: CommitLog, report: RecoveryReport, *, from_first_file: bool) -> None:
        self._queues = queues
        self._log = log
        self._report = report
        self._start = report.start_offset
        self._holes_allowed = from_first_file
        self._repairs = {(queue.topic, queue.queue_id): self._begin(queue) for queue in queues}
        self._repeated = 0

    def _begin(self, queue: ConsumeQueue) -> QueueRepair:
        gap = queue.files.gap()
        if gap is not None:  # what stands behind a missing file is written again with it
            queue.files.truncate(gap[0].start + gap[0].size, 0, zero_tail=False)
        return QueueRepair(queue, self._log, self._start, rewrite=self._report.unclean)

    def apply(self, dispatch: Dispatch) -> None:
        columns = dispatch.columns
        queued = is_queued(columns.sys_flags)
        for run in dispatch.runs:
            rows = run.rows[queued[run.rows]]
            if not len(rows):
                continue
            key = (run.topic, run.queue_id)
            repair = self._repairs.get(key)
            if repair is None:
                repair = self._repairs[key] = self._begin(self._queues.get(*key))
            if repair.lacks_its_beginning(int(columns.queue_offsets[rows[0]])):
                if not self._holes_allowed:
                    raise NeedsOlderRecordsError(f"queue {run.topic}/{run.queue_id} lost its first files")
                repair.start_over(0)
            self._repeated += repair.place(
                columns.queue_offsets[rows],
                columns.physical_offsets[rows],
                columns.sizes[rows],
                dispatch.tags_codes[rows],
                holes_allowed=self._holes_allowed or bool(self._report.salvaged),
            )

    def finish(self, now_ms: int) -> None:
        report = self._report
        for (topic, queue_id), repair in sorted(self._repairs.items()):
            removed = repair.finish(now_ms)
            report.queue_entries_written += repair.written
            report.queue_entries_removed += removed
            if repair.written or removed:
                report.queues_changed.append(f"{topic}/{queue_id}")
        if self._repeated:
            report.notes.append(
                f"{self._repeated} records carry a queue index that an earlier record has: they are in the log only"
            )
