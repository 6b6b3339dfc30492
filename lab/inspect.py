"""`brokerlab inspect`: what a store, or one of its files, holds."""

from __future__ import annotations

import argparse
import base64
from collections.abc import Callable
from typing import Any

from rich.console import Console

from brokerlab.lab.hex import field_lines
from brokerlab.lab.terminal import add_row, make_table, printable, progress_bar, show_size, show_time
from brokerlab.lab.verify import UsageError, parse_queue, write_json
from brokerlab.storage.checkpoint import CHECKPOINT_SIZE, CheckpointValues, decode_checkpoint
from brokerlab.storage.consume_queue import UNIT_SIZE
from brokerlab.storage.disk import Disk, FileInfo
from brokerlab.storage.errors import CorruptRecordError, DiskError
from brokerlab.storage.index_file import read_index_header
from brokerlab.storage.java_hash import index_hash
from brokerlab.storage.log_scan import Columns
from brokerlab.storage.message import format_host
from brokerlab.storage.offline import QueueName, StoreFiles, look_at, opened, start_of
from brokerlab.storage.offline_index import ChainEntry, index_chain, longest_chains
from brokerlab.storage.offline_log import walk_segment
from brokerlab.storage.record import Record, decode_record
from brokerlab.storage.summary import (
    IndexSummary,
    QueueSummary,
    SegmentSummary,
    summarize_index,
    summarize_queue,
    summarize_segment,
)
from brokerlab.storage.verify_queues import unit_columns, unit_ranges

SHOWN_DEFAULT = 20
QUEUES_SHOWN = 40


def run_inspect(arguments: argparse.Namespace, disk: Disk, console: Console) -> int:
    """0 if everything asked for was there and sound, else 1."""
    files = look_at(disk, arguments.path, kind=arguments.kind)
    inspection = _Inspection(arguments, disk, console, files)
    asked = sum(
        (arguments.queue is not None, arguments.key is not None, arguments.slots, arguments.records or arguments.hex)
    )
    if asked > 1:
        raise UsageError("give only one of --records (or --hex), --queue, --key and --slots")
    if arguments.queue is not None:
        return inspection.queue(parse_queue(arguments.queue, with_index=False)[0])
    if arguments.key is not None:
        if arguments.topic is None:
            raise UsageError("--key needs --topic: the index knows only the hash of both")
        return inspection.key()
    if arguments.slots:
        return inspection.slots()
    wants_records = arguments.start is not None or arguments.topic is not None or arguments.body is not None
    if arguments.records or arguments.hex or wants_records:
        return inspection.records()
    return inspection.summary()


class _Inspection:
    def __init__(self, arguments: argparse.Namespace, disk: Disk, console: Console, files: StoreFiles) -> None:
        self._arguments = arguments
        self._disk = disk
        self._console = console
        self._files = files
        self._json: bool = arguments.json
        self._limit: int | None = arguments.limit
        self._bad = False

    @property
    def _code(self) -> int:
        return 1 if self._bad else 0

    def _say(self, text: str, style: str = "") -> None:
        self._console.print(printable(text, 400), style=style)

    def _damage(self, text: str, **where: Any) -> None:
        self._bad = True
        if self._json:
            write_json(self._console, {"what": "damage", "reason": text, **where})
        else:
            self._say(text, "bold red")

    def _shown(self, default: int) -> int:
        """How many rows: as asked; all as JSON; else what fits a screen."""
        return self._limit if self._limit is not None else (1 << 62 if self._json else default)

    def _name(self, path: str) -> str:
        return path.removeprefix(self._files.root.rstrip("/") + "/")

    # What is there

    def summary(self) -> int:
        files = self._files
        if not self._json:
            state = ", not stopped cleanly or running" if files.unclean else ""
            self._say(f"{files.root}: {'a store' if files.kind == 'store' else files.kind}{state}", "bold")
            self._console.print()
        segments = self._segments() if files.segments else []
        self._queues()
        self._index_files()
        if files.checkpoint is not None:
            self._checkpoint(max((one.last_store_timestamp for one in segments), default=0))
        self._other_files()
        if files.kind == "commitlog" and len(files.segments) == 1 and not self._json:
            self.records()
        if files.kind == "consumequeue" and len(files.queues) == 1 and not self._json:
            self.queue(next(iter(files.queues)))
        for stray in files.strays:
            self._bad |= stray.unreadable
        return self._code

    def _segments(self) -> list[SegmentSummary]:
        everything, done = sum(info.size for info in self._files.segments), 0
        found = []
        with progress_bar() as report:
            for info in self._files.segments:
                base = done
                found.append(summarize_segment(self._disk, info, _reporter(report, base, everything, info.name)))
                done += info.size
        table = make_table(
            "Commit log", ["segment", ">size", ">records", "first and last stored", ">start and end", "*state"]
        )
        for one in found:
            if one.damaged or not one.size or one.state == "no valid record":
                self._bad = True
            if self._json:
                write_json(self._console, {"what": "segment", **one._asdict()})
                continue
            state = f"{one.damaged:,} bytes DAMAGED; {one.state}" if one.damaged else one.state
            times = (show_time(one.first_store_timestamp), show_time(one.last_store_timestamp))
            offsets = (f"{one.start:,}", f"{one.start + one.end:,}")
            style = "bold red" if one.damaged else ""
            add_row(table, one.name, show_size(one.size), f"{one.records:,}", times, offsets, state, style=style)
        self._table(table, bool(found))
        return found

    def _queues(self) -> None:
        names = sorted(self._files.queues)
        table = make_table(
            "Consume queues", ["*queue", ">files", ">min index", ">max index", ">first offset", ">last offset"]
        )
        shown = self._shown(QUEUES_SHOWN)
        for name in names[:shown]:
            one = summarize_queue(self._disk, name, self._files.queues[name])
            self._bad |= bool(one.problem)
            if self._json:
                write_json(self._console, _queue_json(one))
            elif one.problem:
                add_row(table, name, one.files, one.problem, "", "", "", style="bold red")
            else:
                edges = ("-" if offset < 0 else f"{offset:,}" for offset in one[4:6])
                add_row(table, name, one.files, f"{one.min_index:,}", f"{one.max_index:,}", *edges)
        self._table(table, bool(names))
        if len(names) > shown and not self._json:
            self._say(f"... and {len(names) - shown} more queues (--limit)")
            self._console.print()

    def _index_files(self) -> None:
        table = make_table(
            "Index", ["file", ">size", ">entries", ">slots used", "begin and end", ">first and last offset"]
        )
        known = None
        for info in self._files.index:
            one = summarize_index(self._disk, info, slots=self._arguments.index_slots, known=known)
            known = one.shape or known
            self._bad |= bool(one.problem)
            if self._json:
                write_json(self._console, _index_json(one))
            elif one.header is None:
                add_row(table, one.name, show_size(one.size), one.problem, "", "", "", style="bold red")
            else:
                header = one.header
                entries = f"{max(header.index_count - 1, 0):,}"
                times = (show_time(header.begin_timestamp), show_time(header.end_timestamp))
                offsets = (f"{header.begin_physical_offset:,}", f"{header.end_physical_offset:,}")
                add_row(table, one.name, show_size(one.size), entries, f"{header.slot_count:,}", times, offsets)
        self._table(table, bool(self._files.index))
        if known is not None and known.is_found and not self._json:
            self._say(f"index files have {known.slots:,} slots and {known.entries:,} entries ({known.how})", "dim")
            self._console.print()

    def _checkpoint(self, newest: int) -> None:
        info = self._files.checkpoint
        assert info is not None
        try:
            data = self._disk.read_small(info.path, most=CHECKPOINT_SIZE) or b""
        except DiskError as error:
            self._damage(str(error))
            return
        values = decode_checkpoint(data)
        if self._json:
            object_ = {"what": "checkpoint", "path": info.path, "size": info.size, **values._asdict()}
            write_json(self._console, {**object_, "newest_store_timestamp": newest or None})
            return
        table = make_table("Checkpoint", ["field", "value", "*against the files"])
        for name, value in values._asdict().items():
            is_time = name.endswith("timestamp")
            add_row(table, name, show_time(value) if is_time else f"{value:,}", _against(name, value, newest))
        add_row(table, "(recovery starts at)", show_time(values.min_timestamp), _margin(values))
        self._table(table, True)

    def _other_files(self) -> None:
        files = self._files
        table = make_table("Other files", ["*name", "kind", ">size", "*note"])
        notes = {"abort": "running, or not stopped cleanly", "lock": "process lock", "abort.bak": "former abort"}
        rows: list[tuple[str, str, int, str]] = [
            (name, info.kind, info.size, notes.get(name, "")) for name, info in sorted(files.marks.items())
        ]
        rows += [(info.name, info.kind, info.size, "") for info in files.others]
        for name, kind, size, note in rows:
            if self._json:
                write_json(self._console, {"what": "file", "name": name, "kind": kind, "size": size, "note": note})
            else:
                add_row(table, name, kind, "" if kind == "directory" else show_size(size), note)
        for stray in files.strays:
            if self._json:
                write_json(self._console, {"what": "stray", "path": stray.path, "reason": stray.reason})
            else:
                add_row(table, self._name(stray.path), "", "", stray.reason, style="yellow")
        self._table(table, bool(rows or files.strays))

    def _table(self, table: Any, wanted: bool) -> None:
        if wanted and not self._json:
            self._console.print(table)
            self._console.print()

    # Records

    def records(self) -> int:
        """Records from --from on, of --topic, at most --limit."""
        arguments, files = self._arguments, self._files
        if not files.segments:
            raise UsageError(f"{files.root}: holds no commit log to show records of")
        left = self._shown(1 if arguments.hex else SHOWN_DEFAULT)
        begin: int = arguments.start if arguments.start is not None else 0
        table = make_table(
            "Records", [">offset", ">size", "*topic", ">queue", ">number", "stored", ">body", "*tags", "*keys"]
        )
        shown = 0
        for info in files.segments:
            start = start_of(info)
            if start + info.size <= begin or shown >= left:
                continue
            position = max(begin - start, 0)
            if arguments.start is not None and not self._is_record(info, position) and position:
                self._damage(f"no record begins at offset {begin}: going on at the next one", offset=begin)
            try:
                with opened(self._disk, info.path) as region:
                    visitor = _Visitor(self, table, left - shown)
                    walk = walk_segment(
                        region, start, visitor.visit, position=position,
                        most=left - shown if arguments.topic is None else None,
                    )  # fmt: skip
                    shown += visitor.shown
            except DiskError as error:
                self._damage(str(error))
                continue
            for damage in walk.damage:
                if not damage.tail:
                    length = damage.end - damage.start
                    reason = f"{info.name}: {length:,} damaged bytes at {start + damage.start:,} ({damage.reason})"
                    self._damage(reason, offset=start + damage.start, length=length)
        if not arguments.hex:
            self._table(table, bool(shown))
        if not shown:
            self._bad = True
            if not self._json:
                self._say("no record to show")
        return self._code

    def _is_record(self, info: FileInfo, position: int) -> bool:
        try:
            with opened(self._disk, info.path) as region:
                return walk_segment(region, start_of(info), position=position, most=1).damage == []
        except DiskError:
            return True  # told when the records are read

    def show(self, table: Any, record: Record, raw: bytes) -> None:
        if self._json:
            write_json(self._console, record_json(record, self._arguments.body))
        elif self._arguments.hex:
            for line in field_lines(raw, record):
                self._console.print(line, soft_wrap=True)
            self._console.print()
        else:
            properties = record.properties_dict()
            add_row(
                table, f"{record.physical_offset:,}", record.total_size, record.topic, record.queue_id,
                record.queue_offset, show_time(record.store_timestamp), _body_cell(record, self._arguments.body),
                properties.get("TAGS", ""), properties.get("KEYS", properties.get("UNIQ_KEY", "")),
            )  # fmt: skip

    # Queue entries

    def queue(self, name: QueueName) -> int:
        """Entries of one queue."""
        row = self._files.queues.get(name)
        if row is None:
            raise UsageError(f"{self._files.root}: there is no queue {name}")
        table = make_table(f"Queue {printable(str(name))}", [">index", ">offset", ">size", ">tags code", "*note"])
        left, shown = self._shown(SHOWN_DEFAULT), 0
        for info in row:
            if shown >= left or info.size < UNIT_SIZE:
                continue
            try:
                with opened(self._disk, info.path) as region:
                    for low, high in unit_ranges(region.data_ranges(), region.size // UNIT_SIZE):
                        units = unit_columns(region, low, high)
                        for place, (offset, size, code) in enumerate(zip(*units, strict=True)):
                            if (offset or size or code) and shown < left:
                                index = start_of(info) // UNIT_SIZE + low + place
                                self._show_unit(table, name, index, int(offset), int(size), int(code))
                                shown += 1
            except DiskError as error:
                self._damage(str(error))
        self._table(table, bool(shown))
        if not shown and not self._json:
            self._say(f"queue {name} has no entry")
        return self._code

    def _show_unit(self, table: Any, name: QueueName, index: int, offset: int, size: int, code: int) -> None:
        note = "pre-blank: holds the place" if size == 0x7FFFFFFF and offset == 0 else ""
        if size <= 0 or offset < 0:
            note, self._bad = "no entry", True
        if self._json:
            values = {"index": index, "physical_offset": offset, "size": size, "tags_code": code, "note": note}
            write_json(self._console, {"what": "entry", "topic": name.topic, "queue_id": name.queue_id, **values})
        else:
            add_row(table, f"{index:,}", f"{offset:,}", f"{size:,}", code, note)

    # Index chains

    def key(self) -> int:
        """Entries under a key's hash in every index file, newest first."""
        wanted = index_hash(self._arguments.topic, self._arguments.key)
        found = self._chains(lambda _region, shape: [wanted % shape.slots], lambda entry: entry.hash == wanted)
        if not found:
            self._bad = True
            if not self._json:
                self._say(f"no index entry with hash {wanted}")
        return self._code

    def slots(self) -> int:
        """The slots with the longest chains."""
        most = self._shown(3) if not self._json else (self._limit or SHOWN_DEFAULT)
        if not self._chains(lambda region, shape: longest_chains(region, shape, most), lambda _entry: True):
            self._say("" if self._json else "the index is empty")
        return self._code

    def _chains(self, slots_of: Callable[[Any, Any], list[int]], wanted: Callable[[ChainEntry], bool]) -> int:
        if not self._files.index:
            raise UsageError(f"{self._files.root}: holds no index")
        table = make_table("Index entries", ["file", ">slot", ">entry", ">hash", ">offset", "time", ">previous"])
        shown, known = 0, None
        for info in reversed(self._files.index):
            one = summarize_index(self._disk, info, slots=self._arguments.index_slots, known=known)
            known = one.shape or known
            if one.shape is None:
                self._damage(f"{info.path}: {one.problem}")
                continue
            with opened(self._disk, info.path) as region:
                begin = read_index_header(region.buf).begin_timestamp
                for slot in slots_of(region, one.shape):
                    for entry in index_chain(region, one.shape, slot, most=1000):
                        if wanted(entry):
                            self._show_entry(table, info, slot, entry, begin)
                            shown += 1
        self._table(table, bool(shown))
        return shown

    def _show_entry(self, table: Any, info: FileInfo, slot: int, entry: ChainEntry, begin: int) -> None:
        if self._json:
            write_json(self._console, {"what": "index entry", "file": info.path, "slot": slot, **entry._asdict()})
        else:
            time = show_time(begin + 1000 * entry.time_diff)
            add_row(
                table, info.name, slot, entry.number, entry.hash, f"{entry.physical_offset:,}", time, entry.previous
            )  # fmt: skip


class _Visitor:
    """Shows the records of one segment, and stops the walk when enough are shown."""

    def __init__(self, inspection: _Inspection, table: Any, most: int) -> None:
        self.shown = 0
        self._inspection = inspection
        self._table = table
        self._most = most

    def visit(self, columns: Columns) -> None:
        topic: str | None = self._inspection._arguments.topic
        for row in range(len(columns)):
            if topic is not None:
                at, length = int(columns.topic_starts[row]), int(columns.topic_lengths[row])
                if columns.data[at : at + length].tobytes() != topic.encode("utf-8", "surrogateescape"):
                    continue
            position = int(columns.positions[row])
            raw = columns.data[position : position + int(columns.sizes[row])].tobytes()
            try:
                record = decode_record(raw, check_crc=False)
            except CorruptRecordError as error:  # somebody writes while we look
                self._inspection._damage(str(error))
                continue
            self._inspection.show(self._table, record, raw)
            self.shown += 1
            if self.shown >= self._most:
                return


def _reporter(report: Callable[[int, int, str], None], base: int, everything: int, name: str) -> Callable[[int], None]:
    return lambda position: report(base + position, everything, name)


def _body_cell(record: Record, how: str | None) -> str:
    if how is None:
        return f"{len(record.body):,}"
    key, text = body_of(record, how)
    return text if key == "body" else f"base64:{text}"


def body_of(record: Record, how: str) -> tuple[str, str]:
    """("body", text) where the body is text and that is wanted, else ("body_base64", ...)."""
    if how == "text":
        try:
            return "body", record.body.decode()
        except UnicodeDecodeError:
            pass
    return "body_base64", base64.b64encode(record.body).decode()


def record_json(record: Record, body: str | None) -> dict[str, Any]:
    """Every field of a record; the body only if asked for."""
    values = record._asdict()
    del values["body"], values["properties"]
    values["born_host"], values["store_host"] = format_host(record.born_host), format_host(record.store_host)
    values["body_length"] = len(record.body)
    values["properties"] = record.properties_dict()
    values["message_id"] = record.message_id
    if body is not None:
        key, text = body_of(record, body)
        values[key] = text
    return {"what": "record", **values}


def _queue_json(one: QueueSummary) -> dict[str, Any]:
    values = one._asdict()
    del values["name"]
    return {"what": "queue", "topic": one.name.topic, "queue_id": one.name.queue_id, **values}


def _index_json(one: IndexSummary) -> dict[str, Any]:
    header = one.header._asdict() if one.header else {}
    shape = {"slots": one.shape.slots, "entries": one.shape.entries, "shape": one.shape.how} if one.shape else {}
    return {"what": "index", "path": one.path, "size": one.size, **header, **shape, "problem": one.problem}


def _against(name: str, value: int, newest: int) -> str:
    if not name.endswith("timestamp") or not newest:
        return ""
    if value == 0:
        return "never set"
    if value > newest:
        return f"{value - newest:,} ms LATER than the newest record, {show_time(newest)}"
    if value == newest:
        return "that of the newest record"
    return f"{newest - value:,} ms before the newest record, {show_time(newest)}"


def _margin(values: CheckpointValues) -> str:
    return "the earlier of log and queues, less 3 s" if values.min_timestamp else "the first segment"
