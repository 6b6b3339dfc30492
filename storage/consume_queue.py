"""Consume queue unit, big-endian, 20 bytes. Rebuilt from the commit log after a crash, so it has no checksum.

offset  size  field            meaning
0       8     physical_offset  where the record starts in the commit log
8       4     size             record length in bytes; 0 marks an empty place
12      8     tags_code        hash of the tag, lets a consumer filter without reading the log

Entry k stands at byte 20 * k of the queue. A queue that does not begin at 0, because the log's older records are gone,
has its first file filled up to its first entry with pre-blank units (0, 2**31 - 1, 0): they hold a place and are never
served. A power loss leaves any unsynced page of a queue file zero, or in an older state; an entry counts only if the
record it points to says the same topic, queue and index.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from brokerlab.storage.disk import Disk, Offsets
from brokerlab.storage.errors import QueueGapError
from brokerlab.storage.mapped_file import MappedFile
from brokerlab.storage.mapped_file_queue import MappedFileQueue

UNIT_SIZE = 20
UNIT = struct.Struct(">qiq")
UNIT_COLUMNS = np.dtype([("offset", ">i8"), ("size", ">i4"), ("code", ">i8")])
assert UNIT.size == UNIT_SIZE == UNIT_COLUMNS.itemsize

PRE_BLANK_SIZE = 0x7FFFFFFF
PRE_BLANK = UNIT.pack(0, PRE_BLANK_SIZE, 0)


class Unit(NamedTuple):
    """One entry."""

    physical_offset: int
    size: int
    tags_code: int

    @property
    def is_pre_blank(self) -> bool:
        return self.physical_offset == 0 and self.size == PRE_BLANK_SIZE

    @property
    def is_empty(self) -> bool:
        return self.size <= 0 or self.physical_offset < 0


def encode_units(offsets: Offsets, sizes: Offsets, codes: Offsets) -> bytes:
    """Units as bytes, from columns."""
    units = np.empty(len(offsets), dtype=UNIT_COLUMNS)
    units["offset"], units["size"], units["code"] = offsets, sizes, codes
    return units.tobytes()


class ConsumeQueue:
    """One queue of one topic. The queue builder is the only writer."""

    def __init__(
        self, disk: Disk, directory: str, topic: str, queue_id: int, file_size: int, *, shift_gaps: bool = False
    ) -> None:
        assert file_size % UNIT_SIZE == 0
        self._shift_gaps = shift_gaps  # quirk queue_gap_shifts_entries (museum row 12)
        self.topic = topic
        self.queue_id = queue_id
        self.files = MappedFileQueue(disk, directory, file_size, reserve=False)
        self.max_physical_offset = -1
        """End of the last record that has an entry here; -1 before the first."""
        self.min_logic_offset = 0
        """Byte offset of the first entry whose record is still in the log."""

    def __repr__(self) -> str:
        return f"ConsumeQueue({self.topic}/{self.queue_id}, [{self.min_index}, {self.max_index}))"

    @property
    def min_index(self) -> int:
        return self.min_logic_offset // UNIT_SIZE

    @property
    def max_index(self) -> int:
        """Index that the next entry will have."""
        return self.files.max_offset // UNIT_SIZE

    # Write

    def put(self, indexes: Offsets, offsets: Offsets, sizes: Offsets, codes: Offsets) -> int:
        """Append entries of consecutive records of this queue and return how many were new.

        Entries that are there already are passed over, so dispatching twice does no harm. One that would leave a hole
        raises QueueGapError: appended where the queue ends, as the original does, it would shift every later index.
        """
        next_index, count = self.max_index, len(indexes)
        if (
            self.files.files
            and count
            and indexes[0] == next_index
            and indexes[-1] - indexes[0] == count - 1
            and offsets[0] >= self.max_physical_offset
            and (count < 3 or (np.diff(indexes) == 1).all())
        ):
            self._append(encode_units(offsets, sizes, codes))
            self.max_physical_offset = int(offsets[-1] + sizes[-1])
            return count
        new = offsets + sizes > self.max_physical_offset
        if self.files.files:
            new &= indexes >= next_index
        if not new.any():
            return 0
        if not new.all():
            indexes, offsets, sizes, codes = indexes[new], offsets[new], sizes[new], codes[new]
        first = int(indexes[0])
        if not self.files.files:
            self._begin_at(first)
        elif first != next_index and not self._shift_gaps:
            raise QueueGapError(self.topic, self.queue_id, next_index, first)
        steps = np.flatnonzero(np.diff(indexes) != 1)
        if len(steps) and not self._shift_gaps:  # take what fits, then say where it broke
            good = int(steps[0]) + 1
            self.put(indexes[:good], offsets[:good], sizes[:good], codes[:good])
            raise QueueGapError(self.topic, self.queue_id, int(indexes[good - 1]) + 1, int(indexes[good]))
        self._append(encode_units(offsets, sizes, codes))
        self.max_physical_offset = int(offsets[-1] + sizes[-1])
        return len(indexes)

    def _append(self, data: bytes) -> None:
        while data:
            file = self.files.file_to_append()
            room = file.size - file.wrote_position
            file.append_through_file(data[:room])
            data = data[room:]

    def _begin_at(self, index: int) -> None:
        """An empty queue whose first entry is not 0: hold the places before it in its file."""
        start = index * UNIT_SIZE
        file = self.files.file_to_append(start=start)
        if start > file.start:
            file.append_through_file(PRE_BLANK * ((start - file.start) // UNIT_SIZE))
        self.min_logic_offset = start

    def skip_to(self, index: int) -> int:
        """Hold the places from the end up to `index` with pre-blank units: their records are gone for good."""
        if not self.files.files:
            self._begin_at(index)
            return 0
        missing = index - self.max_index
        if missing > 0:
            self._append(PRE_BLANK * missing)
        return max(missing, 0)

    # Read

    def unit(self, index: int) -> Unit | None:
        """The entry at this index; None outside of what is written."""
        file = self.files.find(index * UNIT_SIZE) if index >= 0 else None
        if file is None:
            return None
        position = index * UNIT_SIZE - file.start
        if position + UNIT_SIZE > file.read_position:
            return None
        return Unit._make(UNIT.unpack_from(file.view, position))

    def units_of(self, file: MappedFile, end: int | None = None) -> NDArray[np.void]:
        """All units of a file up to `end` (default: its read position). A view: let go of it before the file closes."""
        limit = file.read_position if end is None else end
        return np.frombuffer(file.view, dtype=UNIT_COLUMNS, count=limit // UNIT_SIZE)

    def last_physical_end(self) -> int:
        """End of the record of the last entry that is no pre-blank; -1 if there is none."""
        for file in reversed(self.files.files):
            units = self.units_of(file)
            real = np.flatnonzero(units["size"] != PRE_BLANK_SIZE)
            if len(real):
                last = units[real[-1]]
                return int(last["offset"]) + int(last["size"])
        return -1

    # Shrink

    def correct_min_offset(self, min_physical_offset: int) -> None:
        """Move the minimum to the first entry whose record is still in the log, or to the end if none is."""
        for file in self.files.files:
            units = self.units_of(file)
            live = (units["offset"] >= min_physical_offset) & (units["size"] > 0) & (units["size"] != PRE_BLANK_SIZE)
            if live.any():
                self.min_logic_offset = file.start + int(live.argmax()) * UNIT_SIZE
                return
        self.min_logic_offset = self.files.max_offset

    def delete_expired(self, min_physical_offset: int, now_ms: int, *, force_after_ms: int) -> list[str]:
        """Delete leading files whose last entry points below the log's beginning; never the last file."""

        def keep(file: MappedFile) -> bool:
            offset = UNIT.unpack_from(file.view, file.size - UNIT_SIZE)[0]
            return bool(offset >= min_physical_offset)

        most = len(self.files.files)
        deleted = self.files.delete_first(keep, now_ms, force_after_ms=force_after_ms, most=most)
        self.correct_min_offset(min_physical_offset)
        return deleted

    def close(self, now_ms: int) -> None:
        self.files.close(now_ms)
