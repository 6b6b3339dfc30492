"""Recovery: from whatever a stop left in the directory to a store that keeps its promises.

1. choose a start file: everything before it is surely on the disk, in log, queues and index alike
2. read the log from there, record by record; find its end; cut and clear what is behind (`log_recovery`)
3. after an unclean stop, rewrite and sync what was read: bytes in the page cache are no promise
4. bring the queues (`queue_recovery`) and the index in line with the log
5. number the next message of each queue

Recovery changes nothing on a healthy store, can be broken off at any write, and run again. Nothing is published (no
position moves, nothing is dispatched) before what it stands for is durable.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from brokerlab.storage import historic_recovery as historic
from brokerlab.storage.checkpoint import Checkpoint
from brokerlab.storage.commit_log import CommitLog
from brokerlab.storage.config import StoreConfig
from brokerlab.storage.dispatch import Dispatch, dispatch_of
from brokerlab.storage.index_service import IndexService
from brokerlab.storage.log_recovery import Progress, choose_start, recover_log, refuse_missing_tail
from brokerlab.storage.queue_recovery import NeedsOlderRecordsError, QueuesRepair, queue_end
from brokerlab.storage.queue_table import QueueTable
from brokerlab.storage.quirks import Dialect, Quirk
from brokerlab.storage.recovery_report import RecoveryReport

_BATCH = 4096


@dataclass(frozen=True, slots=True)
class Parts:
    """The loaded parts of a store."""

    config: StoreConfig
    log: CommitLog
    queues: QueueTable
    index: IndexService | None
    checkpoint: Checkpoint


def recover(parts: Parts, *, unclean: bool, now_ms: int, progress: Progress) -> RecoveryReport:
    """Repair the loaded store in place and say what was done."""
    report = RecoveryReport(unclean=unclean)
    log, queues = parts.log, parts.queues
    report.notes += log.files.notes + queues.notes + (parts.index.notes if parts.index else [])
    if historic.is_historic(parts.config.quirks):
        _recover_as_the_original(parts, report, now_ms, progress)
    else:
        _recover(parts, report, now_ms, progress)
    for queue in queues:
        log.next_queue_offset[queue.topic, queue.queue_id] = queue.max_index
    queues.correct_min_offsets(max(0, log.files.min_offset))
    _settle_checkpoint(parts, report)
    return report


def _recover(parts: Parts, report: RecoveryReport, now_ms: int, progress: Progress) -> None:
    log, queues = parts.log, parts.queues
    distrust = _reason_to_distrust(parts, unclean=report.unclean)
    while True:
        from_first_file = True
        if log.files.files:
            start = choose_start(
                log,
                parts.checkpoint.values,
                unclean=report.unclean,
                distrust=distrust,
                with_index=parts.index is not None,
            )
            recover_log(log, start, parts.checkpoint.values, report, now_ms=now_ms, progress=progress)
            from_first_file = start.file_index == 0
        else:
            if not report.unclean:
                refuse_missing_tail(log, 0, parts.checkpoint.values)
            report.start_reason = report.end_reason = "the log is empty"
        repair = QueuesRepair(queues, log, report, from_first_file=from_first_file)
        index = _IndexRepair(parts, report, rebuild=bool(distrust or report.salvaged))
        try:
            for dispatch in dispatches(parts, report.start_offset, report.end_offset, report):
                repair.apply(dispatch)
                index.apply(dispatch)
            index.finish()
        except NeedsOlderRecordsError as lack:
            distrust = f"first file: {lack}"
            continue
        repair.finish(now_ms)
        if distrust:  # what was written again lies before what the checkpoint speaks of: it must be true at once
            queues.flush_all()
            if parts.index is not None:
                parts.index.flush()
        return


def dispatches(parts: Parts, start: int, end: int, report: RecoveryReport) -> Iterator[Dispatch]:
    """The records in [start, end) as dispatch batches, file by file."""
    offset, delays = start, parts.config.delay_levels_ms
    while offset < end:
        found = parts.log.columns_between(offset, end, most=_BATCH)
        if found is None:
            return
        columns, after = found
        if len(columns):
            dispatch = dispatch_of(columns, delays)
            report.notes += dispatch.notes
            yield dispatch
        if after == offset:
            return
        offset = after


def _reason_to_distrust(parts: Parts, *, unclean: bool) -> str:
    """Why queues or index cannot be what the checkpoint says they are; "" if nothing speaks against them."""
    if not parts.log.files.files:
        return ""
    for queue in parts.queues:
        gap = queue.files.gap()
        if gap is not None:
            return f"first file: queue {queue.topic}/{queue.queue_id} has no file between {gap[0].path} and the next"
    if not any(queue.files.files for queue in parts.queues):
        return "first file: there are no queues"
    if parts.index is not None and not parts.index.files:
        return "first file: there is no index"
    seal = None if unclean else parts.checkpoint.seal()
    if seal is not None and seal != seal_of(parts.queues, parts.index):
        return "first file: queues or index are not as the last clean stop left them"
    return ""


def seal_of(queues: QueueTable, index: IndexService | None) -> int:
    """Where every queue and index file begins and ends, as one number; the next start compares it."""
    lines = [
        f"{queue.topic}\0{queue.queue_id}\0{queue.files.files[0].start}\0{queue_end(queue)}\n"
        for queue in queues
        if queue.files.files
    ]
    if index is not None:
        lines += [f"{file.name}\0{file.index_count}\0{file.end_physical_offset}\n" for file in index.files]
    return zlib.crc32("".join(lines).encode())


class _IndexRepair:
    """The index while the log is read: entries that were not surely flushed are dropped and written again."""

    def __init__(self, parts: Parts, report: RecoveryReport, *, rebuild: bool = False) -> None:
        self._parts = parts
        self._index = parts.index
        self._report = report
        # Entries of records older than this were synced with the checkpoint. Those of the very same millisecond may
        # have come after it.
        self._synced_before = 0 if rebuild else parts.checkpoint.index_msg_timestamp
        self._trimmed = not report.unclean and not rebuild
        self._last_synced_key = -1

    def apply(self, dispatch: Dispatch) -> None:
        if self._index is None:
            return
        columns, entries = dispatch.columns, dispatch.index
        if not self._trimmed:
            unsure = columns.store_timestamps >= self._synced_before
            begin = int(columns.physical_offsets[int(unsure.argmax())]) if unsure.any() else self._end
            synced = entries.physical_offsets[entries.physical_offsets < begin]
            if len(synced):
                self._last_synced_key = int(synced[-1])
            if not unsure.any():
                return
            self._trim(begin)
        fresh = entries.physical_offsets > self._index.end_physical_offset
        self._index.ensure_file(int(columns.store_timestamps[0]))
        if fresh.any():
            self._index.put_many(
                entries.hashes[fresh], entries.physical_offsets[fresh], entries.store_timestamps[fresh]
            )
            self._report.index_entries_added += int(fresh.sum())

    def finish(self) -> None:
        """The log may have been cut: the index must not know more than it."""
        if self._index is not None and (not self._trimmed or self._index.end_physical_offset >= self._end):
            self._trim(self._end)

    @property
    def _end(self) -> int:
        return self._report.end_offset

    def _trim(self, before: int) -> None:
        assert self._index is not None
        self._trimmed = True
        self._report.index_entries_dropped += self._index.trim(before, self._parts.log.store_timestamp_at)
        # The original does not go back for them.
        historic_way = historic.is_historic(self._parts.config.quirks)
        if self._index.end_physical_offset < self._last_synced_key and not historic_way:
            raise NeedsOlderRecordsError("the index lost entries that were synced")


def _recover_as_the_original(parts: Parts, report: RecoveryReport, now_ms: int, progress: Progress) -> None:
    log, queues, quirks = parts.log, parts.queues, parts.config.quirks
    for queue in queues:
        historic.recover_queue(queue, quirks, now_ms)
    reached = queues.max_physical_offset
    if not log.files.files:
        report.start_reason = report.end_reason = "the log is empty"
        for queue in list(queues):
            queues.remove(queue, now_ms)
        return
    start = historic.choose_start(log, queues, parts.checkpoint.values, unclean=report.unclean)
    recover_log(log, start, parts.checkpoint.values, report, now_ms=now_ms, progress=progress)
    index = _IndexRepair(parts, report)
    for dispatch in dispatches(parts, report.start_offset, report.end_offset, report):
        chosen = dispatch
        if not report.unclean:
            if parts.config.dialect is Dialect.V4_9:
                break  # a clean start leaves this to the reputer
            offsets = dispatch.columns.physical_offsets
            # Row 44: `reached` is the end of the last dispatched record, so the next one starts exactly there.
            skips_one = Quirk.NORMAL_RECOVERY_SKIPS_ONE in quirks
            chosen = dispatch.only(offsets > reached if skips_one else offsets >= reached)
        report.queue_entries_written += queues.apply(chosen)
        index.apply(chosen)
    index.finish()
    if reached >= report.end_offset:
        for queue in queues:
            historic.truncate_dirty(queue, report.end_offset, quirks, now_ms)
    if parts.config.dialect is Dialect.V4_9:
        # Before queues are numbered the reputer catches up, from the largest offset that any queue has reached.
        behind = max(log.files.min_offset, queues.max_physical_offset)
        for dispatch in dispatches(parts, behind, report.end_offset, report):
            report.queue_entries_written += queues.apply(dispatch)
            index.apply(dispatch)


def dispatched_offset(parts: Parts, report: RecoveryReport) -> int:
    """Where dispatch goes on after recovery."""
    if historic.is_historic(parts.config.quirks) and parts.config.dialect is Dialect.V4_9:
        return max(report.end_offset, parts.queues.max_physical_offset)  # row 15: far behind the end
    return report.end_offset


def _settle_checkpoint(parts: Parts, report: RecoveryReport) -> None:
    """No time may claim more than the log still holds; lowering one is always safe."""
    checkpoint, last = parts.checkpoint, parts.log.last_store_timestamp
    claimed = checkpoint.values
    checkpoint.physic_msg_timestamp = min(checkpoint.physic_msg_timestamp, last)
    checkpoint.logics_msg_timestamp = min(checkpoint.logics_msg_timestamp, last)
    checkpoint.index_msg_timestamp = min(checkpoint.index_msg_timestamp, last)
    checkpoint.confirm_phy_offset = min(checkpoint.confirm_phy_offset, report.end_offset)
    if checkpoint.values != claimed:  # for good: records put from now on may have the times that were claimed before
        checkpoint.flush()
    parts.queues.dispatched_timestamp = last if report.end_offset else 0
    if report.files_synced:
        checkpoint.physic_msg_timestamp = last
