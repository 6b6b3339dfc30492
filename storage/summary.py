"""What each file of a store holds, in a few numbers: for people who look at a store they do not know.

Records are checked for structure and place here, not for their CRC: that is `verify`'s work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from brokerlab.storage.consume_queue import PRE_BLANK_SIZE, UNIT_SIZE
from brokerlab.storage.disk import Disk, FileInfo
from brokerlab.storage.errors import CorruptRecordError, DiskError
from brokerlab.storage.index_file import HEADER_SIZE, IndexHeader, read_index_header
from brokerlab.storage.log_scan import Columns
from brokerlab.storage.offline import QueueName, opened, start_of
from brokerlab.storage.offline_index import IndexShape, index_shape
from brokerlab.storage.offline_log import walk_segment
from brokerlab.storage.verify_queues import unit_columns, unit_ranges


class SegmentSummary(NamedTuple):
    """`end` is the position behind the last record; `state` says how the file ends."""

    path: str
    name: str
    start: int
    size: int
    records: int
    first_store_timestamp: int
    last_store_timestamp: int
    end: int
    damaged: int
    state: str


class QueueSummary(NamedTuple):
    """Indexes are those of the first and behind the last entry; offsets those of the first and the last record."""

    name: QueueName
    files: int
    min_index: int
    max_index: int
    first_physical_offset: int
    last_physical_offset: int
    problem: str = ""


class IndexSummary(NamedTuple):
    """The header as it is written, and what shape the file has."""

    path: str
    name: str
    size: int
    header: IndexHeader | None
    shape: IndexShape | None
    problem: str = ""


def summarize_segment(disk: Disk, info: FileInfo, progress: Callable[[int], None]) -> SegmentSummary:
    """One walk over the segment."""
    first = last = 0

    def visit(columns: Columns) -> None:
        nonlocal first, last
        first = first or int(columns.store_timestamps[0])
        last = int(columns.store_timestamps[-1])

    start = start_of(info)
    if not info.size:
        return SegmentSummary(info.path, info.name, start, 0, 0, 0, 0, 0, 0, "empty file")
    try:
        with opened(disk, info.path) as region:
            walk = walk_segment(region, start, visit, progress=progress)
    except DiskError as error:
        return SegmentSummary(info.path, info.name, start, info.size, 0, 0, 0, 0, 0, str(error))
    damaged = sum(damage.end - damage.start for damage in walk.damage if not damage.tail)
    if walk.blank:
        state = "full"
    elif not walk.damage or not walk.damage[-1].tail:
        state = "full, no blank record"
    elif walk.dirty_at < 0:
        state = "zeros behind the end" if walk.records else "unused, zeros"
    else:
        state = f"other bytes at {walk.dirty_at:,}" if walk.records else "no valid record"
    return SegmentSummary(
        info.path, info.name, start, info.size, walk.records, first, last, walk.end, damaged, state
    )  # fmt: skip


def summarize_queue(disk: Disk, name: QueueName, files: list[FileInfo]) -> QueueSummary:
    """The first and the last entry, looking at no more files than needed."""
    first = _edge(disk, files, last=False)
    last = _edge(disk, list(reversed(files)), last=True)
    if isinstance(first, str) or isinstance(last, str):
        return QueueSummary(name, len(files), -1, -1, -1, -1, first if isinstance(first, str) else str(last))
    if first is None or last is None:
        return QueueSummary(name, len(files), 0, 0, -1, -1)
    return QueueSummary(name, len(files), first[0], last[0] + 1, first[1], last[1])


def _edge(disk: Disk, files: list[FileInfo], *, last: bool) -> tuple[int, int] | str | None:
    """(index, physical offset) of the first or last real entry; a text if a file cannot be read."""
    for info in files:
        if info.size < UNIT_SIZE:
            continue
        try:
            with opened(disk, info.path) as region:
                ranges = unit_ranges(region.data_ranges(), region.size // UNIT_SIZE)
                for low, high in reversed(ranges) if last else ranges:
                    units = unit_columns(region, low, high)
                    real = np.flatnonzero((units.sizes > 0) & (units.sizes != PRE_BLANK_SIZE) & (units.offsets >= 0))
                    if len(real):
                        row = int(real[-1 if last else 0])
                        return start_of(info) // UNIT_SIZE + low + row, int(units.offsets[row])
        except DiskError as error:
            return str(error)
    return None


def summarize_index(
    disk: Disk, info: FileInfo, *, slots: int | None = None, known: IndexShape | None = None
) -> IndexSummary:
    """The header, and the shape."""
    if info.size < HEADER_SIZE:
        return IndexSummary(info.path, info.name, info.size, None, None, "shorter than a header")
    try:
        with opened(disk, info.path) as region:
            shape = index_shape(region, slots=slots, known=known)
            header = read_index_header(region.buf)
    except (DiskError, CorruptRecordError) as error:
        return IndexSummary(info.path, info.name, info.size, None, None, str(error))
    problem = "" if shape is not None else "no number of slots fits its size"
    return IndexSummary(info.path, info.name, info.size, header, shape, problem)
