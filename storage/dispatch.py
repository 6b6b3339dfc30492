"""From records in the log to what consume queues and the index store about them.

`describe` is the definition, for one record: its tags code and the keys it is found by. `dispatch_of` does the same for
a whole batch with numpy, straight from the mapped log: it finds the properties, hashes tags and keys, and groups rows
by queue. The two agree by a property test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from brokerlab.storage.disk import Offsets
from brokerlab.storage.java_hash import Bytes, Hashes, ascii_hashes, index_hashes, string_hash, tag_hash
from brokerlab.storage.log_scan import Columns, same_text
from brokerlab.storage.message import DELAY, KEYS, SCHEDULE_TOPIC, TAGS, UNIQ_KEY, SysFlag, java_int, property_value

Delays: TypeAlias = tuple[int, ...]
"""Delay of level 1, 2, ... in ms."""
Flags: TypeAlias = NDArray[np.bool_]

_UNKNOWN_LEVEL_DELAY_MS = 1000
_VECTOR_LEAST = 24
"""Below this many records a plain loop is cheaper than setting up the columns."""
_HASH_WIDTH_MAX = 512


class Description(NamedTuple):
    """What dispatch says about one record."""

    tags_code: int
    keys: list[str]
    note: str = ""


class IndexEntries(NamedTuple):
    """One row per key, in the order in which they go into the index."""

    hashes: Hashes
    physical_offsets: Offsets
    store_timestamps: Offsets


class QueueRun(NamedTuple):
    """Rows of a batch that belong to one queue, in log order."""

    topic: str
    queue_id: int
    rows: Offsets


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A batch of records, ready to be applied."""

    columns: Columns
    tags_codes: Offsets
    runs: list[QueueRun]
    index: IndexEntries
    notes: list[str]

    def only(self, wanted: Flags) -> Dispatch:
        """The same batch with queue entries and index entries of these rows only."""
        runs = [QueueRun(topic, queue_id, rows[wanted[rows]]) for topic, queue_id, rows in self.runs]
        kept = np.isin(self.index.physical_offsets, self.columns.physical_offsets[wanted])
        hashes, offsets, timestamps = self.index
        entries = IndexEntries(hashes[kept], offsets[kept], timestamps[kept])
        return Dispatch(self.columns, self.tags_codes, [run for run in runs if len(run.rows)], entries, self.notes)


def describe(topic: str, properties: bytes, store_timestamp: int, delays: Delays) -> Description:
    """Tags code and keys of one record: first the unique key, then each word of KEYS."""
    keys = []
    unique = property_value(properties, UNIQ_KEY.encode())
    if unique is not None:
        keys.append(unique.decode("utf-8", "replace"))
    words = property_value(properties, KEYS.encode())
    if words is not None:
        keys += [word for word in words.decode("utf-8", "replace").split(" ") if word]
    if topic == SCHEDULE_TOPIC:
        level_text = property_value(properties, DELAY.encode())
        if level_text is not None:
            level = java_int(level_text)
            if level is None:
                # The original cannot parse such a record and cuts the log here (museum row 64).
                return Description(0, keys, f"DELAY is {level_text[:20]!r}, not a number: served with code 0")
            if level > 0:
                level = min(level, len(delays)) if delays else level
                delay = delays[level - 1] if level <= len(delays) else _UNKNOWN_LEVEL_DELAY_MS
                return Description(store_timestamp + delay, keys)
    tags = property_value(properties, TAGS.encode())
    return Description(tag_hash(tags.decode("utf-8", "replace")) if tags else 0, keys)


def dispatch_of(columns: Columns, delays: Delays) -> Dispatch:
    """Everything the queues and the index need to know about these records."""
    runs = _group(columns)
    if len(columns) < _VECTOR_LEAST or any(run.topic == SCHEDULE_TOPIC for run in runs):
        return _dispatch_by_loop(columns, runs, delays)
    return _dispatch_by_column(columns, runs)


def is_queued(sys_flags: Offsets) -> Flags:
    """Prepared and rolled back records get no queue entry."""
    flags: Flags = (sys_flags & SysFlag.TRANSACTION_PREPARED) == 0
    return flags


def _is_indexed(sys_flags: Offsets) -> Flags:
    flags: Flags = (sys_flags & SysFlag.TRANSACTION_MASK) != SysFlag.TRANSACTION_ROLLBACK
    return flags


# Rows by queue -------------------------------------------------------------------------------------------------------


def _group(columns: Columns) -> list[QueueRun]:
    """Rows of each (topic, queue), by first appearance. Topics are compared as text, hashes only sort them."""
    count = len(columns)
    if not count:
        return []
    topic = same_text(columns.data, columns.topic_starts, columns.topic_lengths)
    if topic is not None:
        marks = columns.queue_ids
    else:
        hashes = ascii_hashes(columns.data, columns.topic_starts, columns.topic_lengths).astype(np.int64)
        marks = (hashes << 20) ^ columns.queue_ids ^ (columns.topic_lengths << 52)
    order = np.argsort(marks, kind="stable")
    edges = np.flatnonzero(np.diff(marks[order])) + 1
    if topic is not None:
        text = topic.decode("utf-8", "replace")
        runs_of_one = [QueueRun(text, int(marks[rows[0]]), rows) for rows in np.split(order, edges)]
        return sorted(runs_of_one, key=lambda run: int(run.rows[0]))
    runs: dict[tuple[bytes, int], list[Offsets]] = {}
    for rows in np.split(order, edges):
        topics = same_text(columns.data, columns.topic_starts[rows], columns.topic_lengths[rows])
        queue_ids = columns.queue_ids[rows]
        if topics is not None and (queue_ids == queue_ids[0]).all():
            runs.setdefault((topics, int(queue_ids[0])), []).append(rows)
            continue
        for row in rows.tolist():  # two topics met under one mark: take them one by one
            start, length = int(columns.topic_starts[row]), int(columns.topic_lengths[row])
            topic = columns.data[start : start + length].tobytes()
            runs.setdefault((topic, int(columns.queue_ids[row])), []).append(np.array([row]))
    grouped = [
        QueueRun(topic.decode("utf-8", "replace"), queue_id, np.sort(np.concatenate(parts)))
        for (topic, queue_id), parts in runs.items()
    ]
    return sorted(grouped, key=lambda run: int(run.rows[0]))


# One by one ----------------------------------------------------------------------------------------------------------


def _dispatch_by_loop(columns: Columns, runs: list[QueueRun], delays: Delays) -> Dispatch:
    topics = [""] * len(columns)
    for run in runs:
        for row in run.rows.tolist():
            topics[row] = run.topic
    codes = np.zeros(len(columns), dtype=np.int64)
    hashes: list[int] = []
    rows: list[int] = []
    notes: list[str] = []
    indexed = _is_indexed(columns.sys_flags)
    for row, topic in enumerate(topics):
        start = int(columns.properties_starts[row])
        wire = columns.data[start : start + int(columns.properties_lengths[row])].tobytes()
        said = describe(topic, wire, int(columns.store_timestamps[row]), delays)
        codes[row] = said.tags_code
        if said.note:
            notes.append(f"record at {columns.physical_offsets[row]}: {said.note}")
        if indexed[row]:
            hashes += [string_hash(f"{topic}#{key}") for key in said.keys]
            rows += [row] * len(said.keys)
    where = np.array(rows, dtype=np.int64)
    entries = IndexEntries(
        index_hashes(np.array(hashes, dtype=np.int32)), columns.physical_offsets[where], columns.store_timestamps[where]
    )
    return Dispatch(columns, codes, runs, entries, notes)


# By column -----------------------------------------------------------------------------------------------------------


class _Values(NamedTuple):
    """Where one property's value stands in the flat text, for the rows that have it."""

    rows: Offsets
    starts: Offsets
    lengths: Offsets


def _dispatch_by_column(columns: Columns, runs: list[QueueRun]) -> Dispatch:
    count = len(columns)
    flat, items = _flatten(columns)
    prefix = np.zeros(count, dtype=np.int32)
    for run in runs:
        prefix[run.rows] = string_hash(run.topic + "#")

    codes = np.zeros(count, dtype=np.int64)
    tags = _values(flat, items, TAGS, count)
    codes[tags.rows] = _hashes(flat, tags, None)

    unique = _values(flat, items, UNIQ_KEY, count)
    words, word_numbers = _words(flat, _values(flat, items, KEYS, count))
    rows = np.concatenate((unique.rows, words.rows))
    hashes = np.concatenate((_hashes(flat, unique, prefix), _hashes(flat, words, prefix)))
    order = np.lexsort((np.concatenate((np.zeros(len(unique.rows), np.int64), word_numbers)), rows))
    order = order[_is_indexed(columns.sys_flags)[rows[order]]]
    rows = rows[order]
    entries = IndexEntries(index_hashes(hashes[order]), columns.physical_offsets[rows], columns.store_timestamps[rows])
    return Dispatch(columns, codes, runs, entries, [])


class _Items(NamedTuple):
    """name 0x01 value pairs in the flat text: row, start, place of the 0x01, end."""

    rows: Offsets
    starts: Offsets
    marks: Offsets
    ends: Offsets


def _flatten(columns: Columns) -> tuple[Bytes, _Items]:
    """All properties in one array, each closed by 0x02, and the pairs in it."""
    starts = columns.properties_starts
    view = columns.data.data
    pieces = map(view.__getitem__, map(slice, starts.tolist(), (starts + columns.properties_lengths).tolist()))
    flat = np.frombuffer(b"\x02".join(pieces) + b"\x02", dtype=np.uint8)
    ends = np.cumsum(columns.properties_lengths + 1)
    item_ends = np.flatnonzero(flat == 2)
    item_starts = np.empty_like(item_ends)
    item_starts[0] = 0
    item_starts[1:] = item_ends[:-1] + 1
    marks = np.flatnonzero(flat == 1)
    first_mark = np.searchsorted(marks, item_starts)
    mark = np.append(marks, len(flat))[first_mark]
    whole = (mark > item_starts) & (mark + 1 < item_ends)  # neither name nor value is empty
    starts = item_starts[whole]
    return flat, _Items(np.searchsorted(ends, starts, side="right"), starts, mark[whole], item_ends[whole])


def _values(flat: Bytes, items: _Items, name: str, count: int) -> _Values:
    """The last value of this name in each row that has one."""
    wanted = np.frombuffer(name.encode(), dtype=np.uint8)
    chosen = np.flatnonzero(items.marks - items.starts == len(wanted))
    for number, byte in enumerate(wanted):
        chosen = chosen[flat[items.starts[chosen] + number] == byte]
    last = np.full(count, -1, dtype=np.int64)
    last[items.rows[chosen]] = chosen  # of several, the last assignment stays
    chosen = last[last >= 0]
    starts = items.marks[chosen] + 1
    return _Values(items.rows[chosen], starts, items.ends[chosen] - starts)


def _words(flat: Bytes, keys: _Values) -> tuple[_Values, Offsets]:
    """KEYS split at spaces, and the number of each word within its row, from 1."""
    ends = keys.starts + keys.lengths
    spaces = np.flatnonzero(flat == 0x20)
    inside = np.searchsorted(keys.starts, spaces, side="right") - 1
    spaces = spaces[(inside >= 0) & (spaces < ends[np.maximum(inside, 0)])] if len(keys.rows) else spaces[:0]
    if not len(spaces):
        return keys, np.ones(len(keys.rows), dtype=np.int64)
    starts = np.sort(np.concatenate((keys.starts, spaces + 1)))
    stops = np.sort(np.concatenate((ends, spaces)))
    owner = np.searchsorted(keys.starts, starts, side="right") - 1
    filled = stops > starts
    starts, stops, owner = starts[filled], stops[filled], owner[filled]
    return _Values(keys.rows[owner], starts, stops - starts), np.arange(1, len(starts) + 1, dtype=np.int64)


def _hashes(flat: Bytes, values: _Values, prefix: Hashes | None) -> Hashes:
    """Hash of each value, with its row's `topic#` in front where `prefix` is given."""
    before = prefix[values.rows] if prefix is not None else None
    plain = values.lengths <= _HASH_WIDTH_MAX
    if flat.max(initial=0) >= 0x80:
        high = np.concatenate(([0], np.cumsum(flat >= 0x80)))
        plain &= high[values.starts + values.lengths] == high[values.starts]
    if plain.all():
        return ascii_hashes(flat, values.starts, values.lengths, before)
    hashes = np.empty(len(values.rows), dtype=np.int32)
    hashes[plain] = ascii_hashes(
        flat, values.starts[plain], values.lengths[plain], before[plain] if before is not None else None
    )
    for place in np.flatnonzero(~plain).tolist():
        start = int(values.starts[place])
        text = flat[start : start + int(values.lengths[place])].tobytes().decode("utf-8", "replace")
        # hash(a + b) = hash(a) * 31**len(b) + hash(b), with lengths in UTF-16 units
        units = len(text.encode("utf-16-le", "surrogatepass")) // 2
        whole = string_hash(text) + (int(before[place]) * pow(31, units, 1 << 32) if before is not None else 0)
        hashes[place] = np.uint32(whole & 0xFFFFFFFF).astype(np.int32)
    return hashes
