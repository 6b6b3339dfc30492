"""Recovery of the commit log: where to start reading, which record is the last good one, what to do behind it.

Fault model. After a process crash every byte that was written is in the page cache, but nobody knows which of it is on
the disk. After a power loss any page that was not synced may be missing or old. So the log may end in a torn record, in
zeros with good records behind them, or in a file that was made and never written. What was flushed (and the
checkpoint's physic time says up to when) must all be there: a bad record in front of a good one that was flushed is no
torn tail but damage, and cutting the log there would throw acknowledged messages away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from brokerlab.storage.checkpoint import CheckpointValues
from brokerlab.storage.commit_log import CommitLog
from brokerlab.storage.errors import DamagedStoreError
from brokerlab.storage.log_scan import Scan, Stop, find_next_record
from brokerlab.storage.mapped_file import MappedFile
from brokerlab.storage.quirks import Quirk
from brokerlab.storage.record import BLANK, BLANK_MAGIC, FIXED_SIZE_V1, check
from brokerlab.storage.recovery_report import RecoveryReport
from brokerlab.storage.salvage import fence

CLEAN_START_FILES = 3
"""After a clean stop the last three files are read again."""

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes to read)."""


class Start(NamedTuple):
    """Which file recovery reads first, and why."""

    file_index: int
    reason: str


def choose_start(
    log: CommitLog, checkpoint: CheckpointValues, *, unclean: bool, distrust: str, with_index: bool
) -> Start:
    """Far enough back that everything before is surely on the disk, in log, queues and index alike.

    `distrust` is a reason not to believe the clean stop ("" if there is none).
    """
    files = log.files.files
    if distrust:
        return Start(0, distrust)
    if not unclean:
        index = max(0, len(files) - CLEAN_START_FILES)
        return Start(index, "third file from the end" if index else "first file")
    limit = checkpoint.min_timestamp_index if with_index else checkpoint.min_timestamp
    chosen, former = -1, 1
    for index, file in enumerate(files):
        # Oldest first, and no further than the first file that is too new, or older than the one before: after a clock
        # that stepped back newer files carry older times (museum row 49), and what lies between must not be skipped.
        timestamp = log.first_store_timestamp(file)
        if not former <= timestamp <= limit:
            break
        chosen, former = index, timestamp
    if chosen <= 0:
        return Start(0, "first file: the checkpoint vouches for nothing behind it")
    return Start(chosen, f"first record is not newer than the checkpoint's time {limit}")


def recover_log(
    log: CommitLog,
    start: Start,
    checkpoint: CheckpointValues,
    report: RecoveryReport,
    *,
    now_ms: int,
    progress: Progress,
) -> None:
    """Read from the start file to the end of the log, cut what is behind it, and make sure of what stays."""
    quirks = log.config.quirks
    files = log.files.files
    report.start_offset, report.start_reason = files[start.file_index].start, start.reason
    end, last_good = _find_end(log, start.file_index, checkpoint, report, progress)
    if not report.unclean:
        # Dispatch may have gone over the blank at the end of the last file, into one that was never written.
        reached = files[-1].start + files[-1].size if report.end_reason == "blank record" else end
        refuse_missing_tail(log, reached, checkpoint)
    report.end_offset = end

    zero_tail = Quirk.STALE_TAIL_SURVIVES_TRUNCATION not in quirks
    cleared, deleted = log.files.truncate(end, now_ms, zero_tail=zero_tail)
    report.log_bytes_cleared += cleared
    report.files_deleted += deleted
    if report.unclean and Quirk.RECOVERED_BYTES_COUNT_AS_FLUSHED not in quirks:
        for file in log.files.files[start.file_index :]:
            file.resync(0, file.wrote_position)
            report.files_synced += 1
        log.files.sync_directory()
    log.files.flushed_where = log.files.committed_where = end
    log.last_store_timestamp = last_good or _last_store_timestamp(log, start.file_index)


def refuse_missing_tail(log: CommitLog, end: int, checkpoint: CheckpointValues) -> None:
    """A clean stop leaves no torn tail: a log that ends before what was dispatched then has lost acknowledged messages,
    and cutting queues and index to match would hide it."""
    promised = checkpoint.confirm_phy_offset
    tolerated = log.config.salvage or Quirk.ONE_BAD_RECORD_DROPS_THE_REST in log.config.quirks
    if end < promised and not tolerated:
        raise DamagedStoreError(
            f"the log ends at offset {end}, but at the last clean stop it reached {promised}. Nothing was changed; "
            "salvage goes on without the missing part",
            path=log.files.directory,
            offset=end,
            salvage=True,
        )


def _find_end(
    log: CommitLog, start_index: int, checkpoint: CheckpointValues, report: RecoveryReport, progress: Progress
) -> tuple[int, int]:
    """(offset where the log ends, store time of the last good record read)."""
    files = log.files.files
    to_read = sum(file.size for file in files[start_index:])
    last_good = 0
    for index in range(start_index, len(files)):
        file, position = files[index], 0
        while True:
            found = log.scan_file(file, position, file.size, validity=log.validity)
            report.records += len(found.positions)
            report.bytes_read += found.end - position
            if found.positions:
                last_good = _store_timestamp(file, found.positions[-1])
            if found.stop is not Stop.BAD:
                break
            _refuse_unmet_setting(log, file, found)
            # Of the checkpoint's own millisecond: after a crash it may have come after the flush that it speaks of.
            flushed = checkpoint.physic_msg_timestamp - report.unclean
            behind = _flushed_record_behind(log, index, found, last_good, flushed)
            if behind is None:
                report.files_read = index - start_index + 1
                report.end_reason = found.reason
                return file.start + found.end, last_good
            if not log.config.salvage:
                raise DamagedStoreError(
                    f"{found.reason}, but a valid record that was flushed follows at offset {behind}: damage in the "
                    "middle of the log. Nothing was changed; salvage keeps what is behind it",
                    path=file.path,
                    offset=file.start + found.end,
                    salvage=True,
                )
            position = _fence_damage(file, found.end, behind, last_good, report)
            if position >= file.size:
                break
        progress(min((index - start_index + 1) * file.size, to_read), to_read)
        report.files_read = index - start_index + 1
        if index == len(files) - 1:
            report.end_reason = "end of the last file" if found.stop is Stop.LIMIT else "blank record"
            return file.start + found.end, last_good
    raise AssertionError("the last file returns")


def _flushed_record_behind(log: CommitLog, index: int, bad: Scan, last_good: int, flushed: int) -> int | None:
    """Offset of a valid record behind the bad one whose store time is not later than `flushed`, up to which everything
    was durable before the stop; None if the tail is just torn."""
    if Quirk.ONE_BAD_RECORD_DROPS_THE_REST in log.config.quirks:
        return None
    position = bad.end + FIXED_SIZE_V1 + 1  # what is damaged was at least one record
    for file in log.files.files[index:]:
        ranges = file.region.data_ranges()
        found = find_next_record(file.view, position, file.size, file.start, ranges, validity=log.validity)
        if found is not None:
            timestamp = _store_timestamp(file, found)
            # Older than the last good record: left over from before an earlier truncation, not part of this log.
            if last_good <= timestamp <= flushed:
                return file.start + found
            return None
        position = 0
    return None


def _refuse_unmet_setting(log: CommitLog, file: MappedFile, bad: Scan) -> None:
    """A record that is good but for a CRC that was not asked for when it was written: the setting is wrong, not it."""
    if log.validity.record_crc:
        plain = log.validity._replace(record_crc=False)
        if (
            log.scan_file(file, bad.end, file.size, validity=plain, most=1).positions
            and "no whole-record" in bad.reason
        ):
            raise DamagedStoreError(
                "forceVerifyPropCRC is on, but this record was stored without a whole-record CRC; switch it off",
                path=file.path,
                offset=file.start + bad.end,
            )


def _fence_damage(file: MappedFile, start: int, behind: int, last_good: int, report: RecoveryReport) -> int:
    """Make the damaged bytes readable as something that nobody is served; where the file goes on."""
    end = behind - file.start
    if end < file.size:
        fence(file, start, end, store_timestamp=last_good)
    else:  # the next good record is in a later file: this one ends here
        end = file.size
        file.region.write(start, BLANK.pack(file.size - start, BLANK_MAGIC))
    file.region.sync(start, end - start)
    report.salvaged.append((file.start + start, file.start + end))
    return end


def _store_timestamp(file: MappedFile, position: int) -> int:
    return check(file.view, position, file.size, check_crc=False).store_timestamp


def _last_store_timestamp(log: CommitLog, before_index: int) -> int:
    """Store time of the last record in front of this file; 0 if there is none."""
    for file in reversed(log.files.files[:before_index]):
        found = log.scan_file(file, 0, file.size)
        if found.positions:
            return _store_timestamp(file, found.positions[-1])
    return 0
