"""Recovery of consume queues as the original does it: each quirk of a preset picks its variant here.

The original walks a queue's entries by the look of them, dispatches the scanned part of the log on top, and lets
duplicates fall where they may. The plain way is `queue_recovery`; this is kept for presets, so that their damage can be
shown. Rows are those of the museum.
"""

from __future__ import annotations

from brokerlab.storage.checkpoint import CheckpointValues
from brokerlab.storage.commit_log import CommitLog
from brokerlab.storage.consume_queue import UNIT, UNIT_SIZE, ConsumeQueue, Unit
from brokerlab.storage.log_recovery import CLEAN_START_FILES, Start
from brokerlab.storage.mapped_file import MappedFile
from brokerlab.storage.queue_table import QueueTable
from brokerlab.storage.quirks import Dialect, Quirk

_QUEUE_QUIRKS = frozenset(
    {
        Quirk.QUEUE_GAP_SHIFTS_ENTRIES,
        Quirk.QUEUE_ZERO_ENTRY_IS_VALID,
        Quirk.PREBLANK_QUEUE_STALLS_DISPATCH,
        Quirk.STALE_QUEUE_TAIL_SURVIVES_TRUNCATION,
        Quirk.NORMAL_RECOVERY_SKIPS_ONE,
    }
)


def is_historic(quirks: frozenset[Quirk]) -> bool:
    """Does any of these quirks need the original's way of recovering queues?"""
    return bool(quirks & _QUEUE_QUIRKS)


def choose_start(log: CommitLog, queues: QueueTable, checkpoint: CheckpointValues, *, unclean: bool) -> Start:
    """The start file as the dialect chooses it: newest first, by store time alone after an unclean stop."""
    files, config = log.files.files, log.config
    if not unclean:
        if config.dialect is Dialect.V4_9:
            return Start(max(0, len(files) - CLEAN_START_FILES), "third file from the end")
        reached = queues.max_physical_offset
        index = max((number for number, file in enumerate(files) if file.start <= reached), default=0)
        return Start(index, f"last file that starts before the queues' end {reached}")
    safe = config.message_index_enable and config.message_index_safe
    limit = checkpoint.min_timestamp_index if safe else checkpoint.min_timestamp
    for index in range(len(files) - 1, -1, -1):
        if 0 < log.first_store_timestamp(files[index]) <= limit:
            return Start(index, f"newest file whose first record is not newer than {limit}")
    return Start(0, "no file matches the checkpoint")


def recover_queue(queue: ConsumeQueue, quirks: frozenset[Quirk], now_ms: int) -> None:
    """Walk the entries of the last three files while they look valid; the first bad one ends the queue."""
    files = queue.files.files
    if not files:
        return
    offset = files[max(0, len(files) - CLEAN_START_FILES)].start
    queue.max_physical_offset = -1
    while (unit := _unit(queue, offset)) is not None and not unit.is_empty:
        offset += UNIT_SIZE
        # Row 15: a pre-blank entry counts, and 2**31 - 1 becomes the end of the newest record.
        if not unit.is_pre_blank or Quirk.PREBLANK_QUEUE_STALLS_DISPATCH in quirks:
            queue.max_physical_offset = unit.physical_offset + unit.size
    queue.files.truncate(offset, now_ms, zero_tail=_zero_tail(quirks))
    queue.files.flushed_where = queue.files.committed_where = offset


def truncate_dirty(queue: ConsumeQueue, end: int, quirks: frozenset[Quirk], now_ms: int) -> None:
    """Drop entries that point at or behind `end`, from the last file backwards."""
    queue.max_physical_offset = end
    files = queue.files
    while files.files:
        file = files.files[-1]
        unit = _unit_at(file, 0)
        # Row 13: the size of a file's first entry is not looked at, so a file of zeros holds one valid entry.
        zero_accepted = Quirk.QUEUE_ZERO_ENTRY_IS_VALID in quirks
        if unit.physical_offset >= end or (unit.is_empty and not zero_accepted):
            if len(files.files) == 1 and not zero_accepted:
                files.truncate(file.start, now_ms, zero_tail=_zero_tail(quirks))
                return
            files.truncate(file.start - 1, now_ms, zero_tail=False)
            if files.files:
                files.files[-1].set_positions(files.file_size)
            continue
        position = UNIT_SIZE
        queue.max_physical_offset = unit.physical_offset + unit.size
        while position < file.size:
            unit = _unit_at(file, position)
            if unit.is_empty or unit.physical_offset >= end:
                break
            queue.max_physical_offset = unit.physical_offset + unit.size
            position += UNIT_SIZE
        files.truncate(file.start + position, now_ms, zero_tail=_zero_tail(quirks))
        files.flushed_where = files.committed_where = file.start + position
        return


def _zero_tail(quirks: frozenset[Quirk]) -> bool:
    """Row 43: without it old entries behind the end come back after the next crash."""
    return Quirk.STALE_QUEUE_TAIL_SURVIVES_TRUNCATION not in quirks


def _unit(queue: ConsumeQueue, offset: int) -> Unit | None:
    file = queue.files.find(offset)
    return _unit_at(file, offset - file.start) if file else None


def _unit_at(file: MappedFile, position: int) -> Unit:
    return Unit._make(UNIT.unpack_from(file.view, position))
