"""The commit log: every message of every topic, in arrival order, in one row of files.

A record never spans two files. Where it does not fit, the file ends with a blank record (its length and a magic, at
least 8 bytes) and the record opens the next file. Store time never decreases along the log: several searches, and the
choice of where recovery starts, rest on that.

The put path is the one writer of `wrote` positions, of the queue offset table and of `handed_over`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from brokerlab.storage.checksum import CRC_MASK, body_crc, crc32
from brokerlab.storage.config import StoreConfig
from brokerlab.storage.disk import Disk, FileInfo
from brokerlab.storage.errors import CorruptRecordError, DamagedStoreError, DiskError
from brokerlab.storage.limits import Refusal, refusal_of, refusal_of_batch
from brokerlab.storage.log_scan import TRUSTED, Columns, Scan, Validity, columns, scan
from brokerlab.storage.mapped_file import MappedFile, TransientStorePool
from brokerlab.storage.mapped_file_queue import MappedFileQueue
from brokerlab.storage.message import SCHEDULE_TOPIC, BatchItem, Message, SysFlag, join_properties, topic_bytes
from brokerlab.storage.quirks import Dialect, Quirk
from brokerlab.storage.record import (
    BLANK,
    BLANK_MAGIC,
    BLANK_SIZE_MIN,
    CRC_PROPERTY_SIZE,
    MAGIC_V1,
    MAGIC_V2,
    Record,
    check,
    extract,
    record_crc_property,
    record_struct,
)
from brokerlab.storage.results import PutMessageStatus, PutResult

HANDED_OVER_MAX = 1 << 16
"""Beyond this many records the dispatcher is told to read the log instead."""

_KINDS_MAX = 4096
_PUT_OK = PutMessageStatus.PUT_OK
_HOSTS_V6 = SysFlag.BORN_HOST_V6 | SysFlag.STORE_HOST_V6
_PREPARED_OR_ROLLBACK = SysFlag.TRANSACTION_PREPARED
_new_tuple = tuple.__new__


class Found(NamedTuple):
    """A record in place: its bytes are valid while `file` is held."""

    file: MappedFile
    view: memoryview


class _Kind(NamedTuple):
    """Messages of one topic that were put before: the topic's bytes, and a packer for each pair of lengths."""

    topic: bytes
    packers: dict[int, struct.Struct]


class CommitLog:
    """Append, read, scan. Opening and truncating are recovery's."""

    def __init__(self, disk: Disk, directory: str, config: StoreConfig, *, pool: TransientStorePool | None) -> None:
        self.config = config
        self.files = MappedFileQueue(
            disk,
            directory,
            config.mapped_file_size_commit_log,
            reserve=True,
            pool=pool,
            half_appends=Quirk.FAILED_APPEND_LEAVES_HALF_RECORD in config.quirks,
        )
        self.next_queue_offset: dict[tuple[str, int], int] = {}
        self.last_store_timestamp = 0
        self._kinds: dict[str, _Kind] = {}
        self.handed_over: list[int] = []
        """Physical offsets of records that were appended and not yet dispatched, oldest first."""
        self.handed_over_complete = True
        """False once one was left out: the dispatcher must read the log until it has caught up."""

    def load(self) -> None:
        """Map the files. A hole between two of them is refused by name: messages are missing there."""
        config = self.config

        def blocks(empty: list[FileInfo]) -> bool:
            if Quirk.EMPTY_QUEUE_FILE_BLOCKS_START not in config.quirks:
                return False
            return config.dialect is Dialect.V4_9 or len(empty) > 1

        self.files.load(empty_files_block=blocks)
        gap = self.files.gap()
        if gap:
            left, right = gap
            raise DamagedStoreError(
                f"segments are missing between offsets {left.start + left.size} and {right.start}", path=right.path
            )

    @property
    def validity(self) -> Validity:
        """What recovery asks of a record."""
        config = self.config
        return Validity(
            crc=config.check_crc_on_recover,
            physical_offset=Quirk.PHYSICAL_OFFSET_UNCHECKED not in config.quirks,
            record_crc=config.force_verify_prop_crc,
        )

    @property
    def trusted(self) -> Validity:
        """What is asked of a record that recovery has seen, or that this process wrote."""
        return self.validity._replace(crc=False, record_crc=False)

    # Append

    def append(self, message: Message, now_ms: int) -> PutResult:
        """Append one message. Limits are answered with a status; a disk that refuses raises, and nothing is counted."""
        body, properties, queue_id = message.body, message.properties, message.queue_id
        kind = self._kinds.get(message.topic)
        packer = None
        if (
            kind is not None
            and len(message.born_host) == 8 == len(message.store_host)
            and queue_id >= 0
            and (not properties or (properties[0] and properties[-1]))
            and not message.sys_flag & SysFlag.INNER_BATCH
        ):
            packer = kind.packers.get(len(properties) << 32 | len(body))
        if kind is None or packer is None:  # lengths not met before: judge them, once
            refused = refusal_of(message, self.config)
            if refused is not None:
                return _refused(refused)
            packer, topic, properties, sys_flag = self._shape(message)
        else:
            topic, sys_flag = kind.topic, message.sys_flag & ~_HOSTS_V6
        size = packer.size
        files = self.files.files
        file = files[-1] if files else None
        if file is None or file.wrote_position + size + BLANK_SIZE_MIN > file.size or file.is_blotted:
            file = self._file_with_room(size)
        if now_ms < self.last_store_timestamp:
            now_ms = self.last_store_timestamp  # the clock stepped back: store time never does
        queue = (message.topic, queue_id)
        counted = not sys_flag & _PREPARED_OR_ROLLBACK  # the bit that prepared and rolled back share
        queue_offset = self.next_queue_offset.get(queue, 0) if counted else 0
        position = file.wrote_position
        physical_offset = file.start + position
        try:
            packer.pack_into(
                file.target, position, size, MAGIC_V1 if len(topic) <= 127 else MAGIC_V2, crc32(body) & CRC_MASK,
                queue_id, message.flag, queue_offset, physical_offset, sys_flag, message.born_timestamp,
                message.born_host, now_ms, message.store_host, message.reconsume_times,
                message.prepared_transaction_offset, len(body), body, len(topic), topic, len(properties), properties,
            )  # fmt: skip
        except struct.error as error:
            file.blot(size)
            return PutResult(PutMessageStatus.MESSAGE_ILLEGAL, reason=f"a field does not fit its place: {error}")
        if self.config.enabled_append_prop_crc:
            _fill_record_crc(file, position, size)
        file.appended(size, now_ms)

        self.last_store_timestamp = now_ms
        if counted:
            self.next_queue_offset[queue] = queue_offset + 1
        handed_over = self.handed_over
        if len(handed_over) < HANDED_OVER_MAX:
            handed_over.append(physical_offset)
        else:
            self.handed_over_complete = False
        # Half the price of PutResult(...), and one is made per message.
        return _new_tuple(PutResult, (_PUT_OK, physical_offset, size, queue_offset, now_ms, 1, ""))

    def append_many(self, messages: Sequence[Message], now_ms: int) -> list[PutResult]:
        """Append independent messages in order; each has its own answer, as if put alone."""
        results: list[PutResult] = []
        while len(results) < len(messages):
            results += self._append_run(messages, len(results), now_ms)
            if len(results) < len(messages):
                results.append(self.append(messages[len(results)], now_ms))
        return results

    def _append_run(self, messages: Sequence[Message], start: int, now_ms: int) -> list[PutResult]:
        """Append the messages from `start` on that need no second look and fit the last file; counted all at once."""
        results: list[PutResult] = []
        files = self.files.files
        if not files or files[-1].is_blotted or self.config.enabled_append_prop_crc:
            return results
        file = files[-1]
        kinds, offsets = self._kinds, self.next_queue_offset
        target, begin, room = file.target, file.wrote_position, file.size - BLANK_SIZE_MIN
        now_ms = max(now_ms, self.last_store_timestamp)
        position, file_start = begin, file.start
        counts: dict[tuple[str, int], int] = {}
        try:
            for number in range(start, len(messages)):
                message = messages[number]
                body, properties, topic, queue_id = message.body, message.properties, message.topic, message.queue_id
                kind = kinds.get(topic)
                packer = kind.packers.get(len(properties) << 32 | len(body)) if kind is not None else None
                if (
                    kind is None
                    or packer is None
                    or not len(message.born_host) == 8 == len(message.store_host)
                    or queue_id < 0
                    or message.sys_flag
                    or (properties and not (properties[0] and properties[-1]))
                    or position + packer.size > room
                ):
                    break
                queue, size = (topic, queue_id), packer.size
                queue_offset = counts.get(queue, -1)
                if queue_offset < 0:
                    queue_offset = offsets.get(queue, 0)
                packer.pack_into(
                    target, position, size, MAGIC_V1 if len(kind.topic) <= 127 else MAGIC_V2, crc32(body) & CRC_MASK,
                    queue_id, message.flag, queue_offset,
                    file_start + position, 0, message.born_timestamp, message.born_host, now_ms, message.store_host,
                    message.reconsume_times, message.prepared_transaction_offset, len(body), body, len(kind.topic),
                    kind.topic, len(properties), properties,
                )  # fmt: skip
                counts[queue] = queue_offset + 1
                results.append(
                    _new_tuple(PutResult, (_PUT_OK, file_start + position, size, queue_offset, now_ms, 1, ""))
                )
                position += size
        except struct.error:
            pass  # this one is put alone, and told why it does not fit
        if results:
            file.appended(position - begin, now_ms)
            self.last_store_timestamp = now_ms
            offsets.update(counts)
            for result in results:
                self._hand_over(result.physical_offset)
        return results

    def append_batch(self, envelope: Message, items: Sequence[BatchItem], now_ms: int) -> PutResult:
        """A client's batch: one record per item, with consecutive queue offsets, all in one file or none.

        Topic, queue, hosts and times come from the envelope; its properties are appended to each item's.
        """
        refused = refusal_of_batch(envelope, items, self.config)
        if refused is not None:
            return _refused(refused)
        if not items:
            return PutResult(_PUT_OK)
        messages = [
            Message(
                topic=envelope.topic,
                body=item.body,
                properties=join_properties(item.properties, envelope.properties),
                queue_id=envelope.queue_id,
                flag=item.flag,
                sys_flag=envelope.sys_flag,
                born_timestamp=envelope.born_timestamp,
                born_host=envelope.born_host,
                store_host=envelope.store_host,
                reconsume_times=envelope.reconsume_times,
            )
            for item in items
        ]
        whole = sum(self._shape(message)[0].size for message in messages)
        if whole + BLANK_SIZE_MIN > self.files.file_size:
            return _refused(
                Refusal(PutMessageStatus.MESSAGE_ILLEGAL, f"batch of {whole} bytes does not fit one log file")
            )
        file = self._file_with_room(whole)
        now_ms = max(now_ms, self.last_store_timestamp)
        queue = (envelope.topic, envelope.queue_id)
        first_queue_offset = self.next_queue_offset.get(queue, 0)
        first_position = position = file.wrote_position
        places = []
        for number, message in enumerate(messages):
            packer, topic, properties, sys_flag = self._shape(message)
            places.append(file.start + position)
            try:
                packer.pack_into(
                    file.target, position, packer.size, MAGIC_V1 if len(topic) <= 127 else MAGIC_V2,
                    body_crc(message.body), message.queue_id, message.flag, first_queue_offset + number, places[-1],
                    sys_flag, message.born_timestamp, message.born_host, now_ms, message.store_host,
                    message.reconsume_times, 0, len(message.body), message.body, len(topic), topic, len(properties),
                    properties,
                )  # fmt: skip
            except struct.error as error:
                file.blot(whole)
                return PutResult(PutMessageStatus.MESSAGE_ILLEGAL, reason=f"a field does not fit its place: {error}")
            if self.config.enabled_append_prop_crc:
                _fill_record_crc(file, position, packer.size)
            position += packer.size
        assert position - first_position == whole
        file.appended(whole, now_ms)  # counted as one: all of the batch, or none of it

        self.last_store_timestamp = now_ms
        self.next_queue_offset[queue] = first_queue_offset + len(items)
        for place in places:
            self._hand_over(place)
        return PutResult(_PUT_OK, places[0], whole, first_queue_offset, now_ms, len(items))

    def _shape(self, message: Message) -> tuple[struct.Struct, bytes, bytes, int]:
        """How the record will look: its Struct, topic, properties with their CRC's place, and sys flag."""
        topic, properties = topic_bytes(message.topic), message.properties
        if self.config.enabled_append_prop_crc:
            properties = _with_crc_reserve(properties)
        born, store, sys_flag = len(message.born_host), len(message.store_host), message.sys_flag & ~_HOSTS_V6
        if born != 8:
            sys_flag |= SysFlag.BORN_HOST_V6
        if store != 8:
            sys_flag |= SysFlag.STORE_HOST_V6
        packer = record_struct(len(message.body), len(topic), len(properties), born, store)
        plain = born == store == 8 and not self.config.enabled_append_prop_crc and len(properties) < 512
        if plain and message.topic != SCHEDULE_TOPIC:
            self._remember(message, topic, packer)
        return packer, topic, properties, sys_flag

    def _remember(self, message: Message, topic: bytes, packer: struct.Struct) -> None:
        """Messages of these lengths need no second look: every limit is one of lengths, but for the schedule topic's
        and for zeros in properties."""
        if len(self._kinds) >= _KINDS_MAX:
            self._kinds.clear()
        kind = self._kinds.setdefault(message.topic, _Kind(topic, {}))
        if len(kind.packers) >= _KINDS_MAX:
            kind.packers.clear()
        kind.packers[len(message.properties) << 32 | len(message.body)] = packer

    def _file_with_room(self, size: int) -> MappedFile:
        """The file to append `size` bytes to; ends the last one with a blank if they and a blank do not fit."""
        files = self.files.files
        if not files or files[-1].wrote_position == files[-1].size:
            return self.files.file_to_append()
        file = files[-1]
        if file.is_blotted:
            file.clear_blot()
        room = file.size - file.wrote_position
        if size + BLANK_SIZE_MIN <= room:
            return file
        # The next file first: where it cannot be made nothing has changed, and the put is simply refused.
        next_file = self.files.allocate(file.start + file.size)
        BLANK.pack_into(file.target, file.wrote_position, room, BLANK_MAGIC)
        try:
            file.appended(room, file.store_timestamp)
        except DiskError:
            next_file.destroy(0, 0)
            raise
        self.files.add(next_file)
        return next_file

    def _hand_over(self, physical_offset: int) -> None:
        if len(self.handed_over) < HANDED_OVER_MAX:
            self.handed_over.append(physical_offset)
        else:
            self.handed_over_complete = False

    # Read

    def find(self, physical_offset: int, size: int) -> Found | None:
        """The bytes at this offset, held: the caller releases `file`. None if they are not (or no longer) there."""
        file = self.files.find(physical_offset)
        if file is None or size <= 0:
            return None
        position = physical_offset - file.start
        if position + size > file.read_position or not file.hold():
            return None
        return Found(file, file.view[position : position + size])

    def read(self, physical_offset: int, *, check_crc: bool = True) -> Record | None:
        """The record that starts here, decoded and checked; None if nothing valid does."""
        file = self.files.find(physical_offset)
        if file is None or not file.hold():
            return None
        try:
            position = physical_offset - file.start
            found = check(file.view, position, file.read_position, physical_offset=physical_offset, check_crc=check_crc)
            return extract(file.view, position, found)
        except CorruptRecordError:
            return None
        finally:
            file.release()

    def store_timestamp_at(self, physical_offset: int) -> int:
        """Store time of the record that starts here; -1 if nothing valid does."""
        record = self.read(physical_offset, check_crc=False)
        return record.store_timestamp if record else -1

    def first_store_timestamp(self, file: MappedFile) -> int:
        """Store time of the file's first record; 0 if it does not begin with a valid one."""
        try:
            return check(file.view, 0, file.size, physical_offset=file.start, check_crc=False).store_timestamp
        except CorruptRecordError:
            return 0

    # Scan

    def scan_file(
        self, file: MappedFile, position: int, limit: int, *, validity: Validity = TRUSTED, most: int | None = None
    ) -> Scan:
        return scan(file.view, position, limit, file.start, validity=validity, most=most)

    def records(self, start: int | None = None, *, validity: Validity = TRUSTED) -> Iterator[Record]:
        """Every record from `start` (default: the first) to the end of what can be read; stops at a bad one."""
        offset = self.files.min_offset if start is None else start
        for file in list(self.files.files):
            if file.start + file.size <= offset or not file.hold():
                continue
            try:
                position = max(offset - file.start, 0)
                found = self.scan_file(file, position, file.read_position, validity=validity)
                for place in found.positions:
                    yield extract(file.view, place, check(file.view, place, file.read_position, check_crc=False))
            finally:
                file.release()
            if found.stop.value not in ("blank", "limit") or file.read_position < file.size:
                return

    def columns_between(self, start: int, end: int, *, most: int = 1 << 20) -> tuple[Columns, int] | None:
        """The records in [start, end) of the file that holds `start`, as columns, and where to go on.

        The file must be held by the caller or by nobody else's leave: dispatch runs before anything is deleted.
        None if `start` is not in the log. A bad record ends the columns; going on there gives no rows again.
        """
        file = self.files.find(start)
        if file is None:
            return None
        limit = min(end - file.start, file.read_position)
        found = self.scan_file(file, start - file.start, limit, validity=self.trusted, most=most)
        after = file.start + (file.size if found.stop.value == "blank" else found.end)
        return columns(file.view, np.array(found.positions, dtype=np.int64)), after


def _with_crc_reserve(properties: bytes) -> bytes:
    separator = b"\x02" if properties and not properties.endswith(b"\x02") else b""
    return properties + separator + bytes(CRC_PROPERTY_SIZE)


def _fill_record_crc(file: MappedFile, position: int, size: int) -> None:
    crc_at = position + size - CRC_PROPERTY_SIZE
    file.target[crc_at : position + size] = record_crc_property(bytes(file.target[position:crc_at]))


def _refused(refusal: Refusal) -> PutResult:
    return PutResult(refusal.status, reason=refusal.reason)
