"""Reading: pull from a queue, look up by message id, by key and time range, find an index by time.

A pull answers with views of the mapped log, not copies; they live until the result is released. Every record is checked
before it is served: that it is the one its queue entry means, and its body's CRC. What fails is left out and told.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import Enum
from types import TracebackType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from brokerlab.storage.checksum import CRC_MASK, crc32
from brokerlab.storage.commit_log import CommitLog
from brokerlab.storage.config import StoreConfig
from brokerlab.storage.consume_queue import PRE_BLANK_SIZE, UNIT_COLUMNS, UNIT_SIZE, ConsumeQueue
from brokerlab.storage.disk import Offsets
from brokerlab.storage.dispatch import describe
from brokerlab.storage.errors import CorruptRecordError
from brokerlab.storage.index_service import IndexService
from brokerlab.storage.java_hash import index_hash
from brokerlab.storage.log_scan import columns, plainly_good, same_text
from brokerlab.storage.mapped_file import MappedFile
from brokerlab.storage.message import SysFlag, decode_message_id, property_value
from brokerlab.storage.queue_table import QueueTable
from brokerlab.storage.record import FIXED_SIZE_V1, MAGIC_V1, Record, check, extract
from brokerlab.storage.results import GetMessageStatus

_HOT = struct.Struct(">iii16xqi44xi")
"""total size, magic, crc, physical offset, sys flag, body length of an IPv4 record."""
_COLUMNS_LEAST = 16
"""Fewer records than this are quicker checked one by one."""
_HOSTS_V6 = SysFlag.BORN_HOST_V6 | SysFlag.STORE_HOST_V6


class Damage(NamedTuple):
    """An entry that could not be served, and why."""

    queue_index: int
    physical_offset: int
    reason: str


class GetResult:
    """The answer to a pull. Use as a context manager, or `release` it: until then its log files stay mapped."""

    __slots__ = ("_held", "damaged", "indexes", "max_index", "min_index", "next_index", "records", "status")

    def __init__(self, status: GetMessageStatus, next_index: int, min_index: int, max_index: int) -> None:
        self.status = status
        self.next_index = next_index
        self.min_index = min_index
        self.max_index = max_index
        self.records: list[memoryview] = []
        self.indexes: list[int] = []
        self.damaged: list[Damage] = []
        self._held: list[MappedFile] = []

    def hold(self, file: MappedFile) -> bool:
        if file.hold():
            self._held.append(file)
            return True
        return False

    def decoded(self) -> list[Record]:
        """The records as values; they outlive the release."""
        return [extract(view, 0, check(view, 0, len(view), check_crc=False)) for view in self.records]

    def release(self) -> None:
        self.records.clear()
        held, self._held = self._held, []
        for file in held:
            file.release()

    def __enter__(self) -> GetResult:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Boundary(Enum):
    """Which entry a search by time means."""

    LOWER = "lower"  # the first that is not older
    UPPER = "upper"  # the last that is not newer
    NEAREST = "nearest"  # 4.x: whichever is nearer


class Reader:
    """Everything that is read from a store, and nothing that changes it."""

    def __init__(self, log: CommitLog, queues: QueueTable, index: IndexService | None, config: StoreConfig) -> None:
        self._log = log
        self._queues = queues
        self._index = index
        self._config = config

    # Pull

    def get_message(
        self,
        topic: str,
        queue_id: int,
        index: int,
        most: int = 32,
        *,
        tags_codes: frozenset[int] | None = None,
        byte_limit: int | None = None,
    ) -> GetResult:
        """Up to `most` messages from `index` on, of the given tags codes (None: all).

        The original's order of questions, statuses and next indexes; one call never crosses a queue file. RocketMQ's
        limits of count and bytes for a consumer apply, unless `byte_limit` says that `most` is meant as asked.
        """
        queue = self._queues.find(topic, queue_id)
        if queue is None:
            return GetResult(GetMessageStatus.NO_MATCHED_LOGIC_QUEUE, 0, 0, 0)
        low, high = queue.min_index, queue.max_index
        if high == 0:
            return GetResult(GetMessageStatus.NO_MESSAGE_IN_QUEUE, 0, low, high)
        if index < low:
            return GetResult(GetMessageStatus.OFFSET_TOO_SMALL, low, low, high)
        if index == high:
            return GetResult(GetMessageStatus.OFFSET_OVERFLOW_ONE, index, low, high)
        if index > high:
            return GetResult(GetMessageStatus.OFFSET_OVERFLOW_BADLY, high, low, high)
        file = queue.files.find(index * UNIT_SIZE)
        if file is None or not file.hold():
            per_file = queue.files.file_size // UNIT_SIZE
            return GetResult(GetMessageStatus.OFFSET_FOUND_NULL, (index // per_file + 1) * per_file, low, high)
        result = GetResult(GetMessageStatus.NO_MATCHED_MESSAGE, index, low, high)
        try:
            self._collect(queue, file, index, most, tags_codes, byte_limit, result)
        finally:
            file.release()
        return result

    def _collect(
        self,
        queue: ConsumeQueue,
        file: MappedFile,
        index: int,
        most: int,
        tags_codes: frozenset[int] | None,
        byte_limit: int | None,
        result: GetResult,
    ) -> None:
        """Choose entries by columns, then check and cut out their records, log file by log file."""
        config, log = self._config, self._log
        start = index * UNIT_SIZE - file.start
        most = max(most, 1)  # the original gives one record however few are asked for
        scan_bytes = max(config.max_filter_message_size, most * UNIT_SIZE)
        if tags_codes is None:
            scan_bytes = most * UNIT_SIZE + UNIT_SIZE  # nothing is passed over, so no more than these is looked at
        end = min(file.read_position, start + scan_bytes - scan_bytes % UNIT_SIZE)
        units = np.frombuffer(file.view, dtype=UNIT_COLUMNS, count=(end - start) // UNIT_SIZE, offset=start)
        offsets, sizes = units["offset"].astype(np.int64), units["size"].astype(np.int64)
        wanted = sizes > 0
        if tags_codes is not None:
            codes = units["code"].astype(np.int64)
            wanted &= np.isin((codes & 0xFFFFFFFF).astype(np.uint32).view(np.int32), list(tags_codes))
        removed = (sizes == PRE_BLANK_SIZE) & (offsets == 0)
        removed |= (offsets < log.files.min_offset) | (offsets + sizes > log.files.max_offset)
        del units
        taken = wanted & ~removed
        stop = self._full_at(offsets, sizes, taken, most, byte_limit)
        rows = np.flatnonzero(taken[:stop])
        result.next_index = index + stop
        topic = queue.topic.encode()
        while len(rows):
            found = log.files.find(int(offsets[rows[0]]))
            if found is None or not result.hold(found):
                removed[rows[0]] = True
                rows = rows[1:]
                continue
            here = int(np.searchsorted(offsets[rows], found.start + found.size)) or 1
            mine, rows = rows[:here], rows[here:]
            self._cut_out(found, offsets[mine], sizes[mine], index + mine, queue.queue_id, topic, result)
        if result.records:
            result.status = GetMessageStatus.FOUND
        elif (removed[:stop] & wanted[:stop]).any() or result.damaged:
            result.status = GetMessageStatus.MESSAGE_WAS_REMOVING

    def _full_at(
        self, offsets: Offsets, sizes: Offsets, taken: NDArray[np.bool_], most: int, byte_limit: int | None
    ) -> int:
        """How many entries are looked at until the answer is full; the first record always fits."""
        config = self._config
        counts: Offsets = np.cumsum(taken) - taken
        sizes_before = np.cumsum(np.where(taken, sizes, 0)) - np.where(taken, sizes, 0)
        if byte_limit is not None:
            full = (counts >= most) | (sizes_before + sizes > byte_limit)
        else:
            memory = config.physical_memory_bytes * config.access_message_in_memory_max_ratio // 100
            on_disk = self._log.files.max_offset - offsets > memory
            byte_most = np.where(
                on_disk, config.max_transfer_bytes_on_message_in_disk, config.max_transfer_bytes_on_message_in_memory
            )
            count_most = np.where(
                on_disk, config.max_transfer_count_on_message_in_disk, config.max_transfer_count_on_message_in_memory
            )
            full = (counts >= most) | (sizes_before + sizes > byte_most) | (counts > count_most - 1)
        full &= counts > 0
        return int(full.argmax()) if full.any() else len(full)

    def _cut_out(
        self,
        file: MappedFile,
        offsets: Offsets,
        sizes: Offsets,
        indexes: Offsets,
        queue_id: int,
        topic: bytes,
        result: GetResult,
    ) -> None:
        """Add the records at these offsets of one log file to the answer, each checked first."""
        begins = offsets - file.start
        views = list(map(file.view.__getitem__, map(slice, begins.tolist(), (begins + sizes).tolist())))
        numbers = indexes.tolist()
        if len(views) >= _COLUMNS_LEAST and _all_as_expected(
            file.view, begins, sizes, indexes, queue_id, topic, offsets
        ):
            result.records += views
            result.indexes += numbers
            return
        for view, number, offset in zip(views, numbers, offsets.tolist(), strict=True):
            problem = _problem(view, offset, queue_id, number, topic)
            if problem:
                result.damaged.append(Damage(number, offset, problem))
            else:
                result.records.append(view)
                result.indexes.append(number)

    # By offset, id, key

    def look_message_by_offset(self, physical_offset: int) -> Record | None:
        """The record that starts exactly here, checked; None if none does."""
        return self._log.read(physical_offset)

    def look_message_by_id(self, message_id: str) -> Record | None:
        """By offset id. CorruptRecordError for what is no id; None if the record is not there (any more)."""
        host, offset = decode_message_id(message_id)
        record = self._log.read(offset)
        return record if record is not None and record.store_host == host else None

    def query_message(self, topic: str, key: str, most: int, begin: int, end: int) -> list[Record]:
        """Messages of `topic` with this key (or unique key), stored in [begin, end] ms; oldest of the newest first.

        The index compares hashes, so every hit's own words are looked at before it counts.
        """
        if self._index is None:
            return []
        wanted = index_hash(topic, key)
        found: dict[int, Record] = {}
        most = min(most, self._config.max_msgs_num_batch)
        # The index knows times to the second only: ask a second more on either side and look at the record's own.
        for offset in self._index.newest_first(wanted, max(0, begin - 1000), end + 1000):
            if len(found) >= most:
                break
            record = self._log.read(offset)
            if record is None or record.topic != topic or not begin <= record.store_timestamp <= end:
                continue
            if key in describe(topic, record.properties, record.store_timestamp, ()).keys:
                found[offset] = record
        return [found[offset] for offset in sorted(found)]

    def body_by_key(self, topic: str, key: str) -> bytes | None:
        """Body of the newest message of `topic` with this key, checked; None if there is none. The short way: nothing
        but the body is decoded."""
        if self._index is None:
            return None
        encoded_topic, encoded_key = topic.encode(), key.encode()
        for offset in self._index.newest_first(index_hash(topic, key)):
            file = self._log.files.find(offset)
            if file is None or not file.hold():
                continue
            try:
                body = _body_if(file.view, offset - file.start, file.read_position, offset, encoded_topic, encoded_key)
            finally:
                file.release()
            if body is not None:
                return body
        return None

    # By time

    def index_by_time(self, topic: str, queue_id: int, timestamp: int, boundary: Boundary = Boundary.LOWER) -> int:
        """The queue index that belongs to a store time; clamped to what is there."""
        queue = self._queues.find(topic, queue_id)
        if queue is None:
            return 0
        low, high = queue.min_index, queue.max_index
        first_not_older = _search(low, high, lambda index: self.store_time(queue, index) >= timestamp)
        if boundary is Boundary.LOWER:
            return first_not_older
        last_not_newer = _search(low, high, lambda index: self.store_time(queue, index) > timestamp) - 1
        if boundary is Boundary.UPPER:
            return max(low, last_not_newer)
        left, right = max(low, first_not_older - 1), min(first_not_older, high - 1)
        if right <= left:
            return max(low, right)
        nearer_right = self.store_time(queue, right) - timestamp < timestamp - self.store_time(queue, left)
        return right if nearer_right else left

    def store_time(self, queue: ConsumeQueue, index: int) -> int:
        """Store time of a queue's message; -1 if it cannot be read."""
        unit = queue.unit(index)
        return -1 if unit is None or unit.is_pre_blank else self._log.store_timestamp_at(unit.physical_offset)

    def earliest_time(self, topic: str, queue_id: int) -> int:
        """Store time of the first message still there; -1 if there is none."""
        queue = self._queues.find(topic, queue_id)
        return -1 if queue is None else self.store_time(queue, queue.min_index)


def _all_as_expected(
    view: memoryview, begins: Offsets, sizes: Offsets, indexes: Offsets, queue_id: int, topic: bytes, offsets: Offsets
) -> bool:
    """Are all of these exactly the records that the queue entries mean, bodies included? If not, look one by one."""
    if int(sizes.min()) < FIXED_SIZE_V1 or plainly_good(view, begins, begins + sizes, offsets) < len(begins):
        return False
    found = columns(view, begins)
    return bool(
        (found.queue_offsets == indexes).all()
        and (found.queue_ids == queue_id).all()
        and same_text(found.data, found.topic_starts, found.topic_lengths) == topic
    )


def _problem(view: memoryview, offset: int, queue_id: int, index: int, topic: bytes) -> str:
    """Why these bytes are not the record that the queue entry means, or ""."""
    size = len(view)
    try:
        found = check(view, 0, size, physical_offset=offset)
    except CorruptRecordError as error:
        return error.reason
    there = bytes(view[found.topic_at : found.topic_at + found.topic_length])
    if (there, found.queue_id, found.queue_offset) != (topic, queue_id, index):
        return f"entry points at {there.decode('utf-8', 'replace')}/{found.queue_id}/{found.queue_offset}"
    return "" if found.total_size == size else f"entry says {size} bytes, record {found.total_size}"


def _body_if(view: memoryview, position: int, limit: int, offset: int, topic: bytes, key: bytes) -> bytes | None:
    """The body of the record at `position` if it is valid, of this topic and has this key."""
    if limit - position >= FIXED_SIZE_V1:
        size, magic, crc, physical, sys_flag, body_length = _HOT.unpack_from(view, position)
        body_at, end = position + 88, position + size
        topic_at = body_at + body_length + 1
        if (
            magic == MAGIC_V1
            and physical == offset
            and not sys_flag & _HOSTS_V6
            and 0 <= body_length <= size - FIXED_SIZE_V1
            and end <= limit
        ):
            tail = bytes(view[topic_at:end])
            if tail.startswith(topic) and property_value(tail[len(topic) + 2 :], b"KEYS") == key:
                body = bytes(view[body_at : topic_at - 1])
                if crc32(body) & CRC_MASK == crc and view[topic_at - 1] == len(topic):
                    return body
    return _body_slowly(view, position, limit, offset, topic, key)


def _body_slowly(view: memoryview, position: int, limit: int, offset: int, topic: bytes, key: bytes) -> bytes | None:
    try:
        found = check(view, position, limit, physical_offset=offset)
    except CorruptRecordError:
        return None
    if view[found.topic_at : found.topic_at + found.topic_length] != topic:
        return None
    wire = bytes(view[found.properties_at : found.properties_at + found.properties_length])
    words = property_value(wire, b"KEYS")
    if (words is None or key not in words.split(b" ")) and property_value(wire, b"UNIQ_KEY") != key:
        return None
    return bytes(view[found.body_at : found.body_at + found.body_length])


def _search(low: int, high: int, is_right: Callable[[int], bool]) -> int:
    while low < high:
        middle = (low + high) // 2
        if is_right(middle):
            high = middle
        else:
            low = middle + 1
    return low
