"""Our side of the benchmarks: the bare store, driven as its services would drive it.

The producer's own thread appends and dispatches; under ASYNC a second thread flushes every 500 ms, as RocketMQ's
flusher does; under SYNC every append (or batch) is flushed before it returns. Queues and index are built behind the
puts, 2048 records at a time, on the same clock.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.protocol import (
    OURS_DISPATCH_FROM_LOG,
    OURS_DISPATCH_HANDED_OVER,
    OURS_SCAN_ISAL,
    OURS_SCAN_TWO_PROCESSES,
    OURS_SCAN_ZLIB,
    BenchMessage,
    CpuEntrant,
    Durability,
    LogFixture,
)
from brokerlab.storage import checksum
from brokerlab.storage.config import StoreConfig
from brokerlab.storage.dispatch import dispatch_of
from brokerlab.storage.index_service import IndexService
from brokerlab.storage.log_scan import TRUSTED, Validity, columns, scan
from brokerlab.storage.message import Message, encode_properties, pack_host
from brokerlab.storage.message_store import MessageStore
from brokerlab.storage.queue_table import QueueTable
from brokerlab.storage.real_disk import RealDisk
from brokerlab.storage.results import PutMessageStatus

TOPIC = "TopicBench"
FLUSH_INTERVAL_S = 0.5
_HOST = pack_host("127.0.0.1", 10911)
_OK = PutMessageStatus.PUT_OK


def crc_implementation() -> str:
    return checksum.CRC32_IMPLEMENTATION


class OurStore:
    """A MessageStore behind the benchmark's protocol."""

    indexed = True

    def __init__(self, *, views: bool = False) -> None:
        self._views = views
        self._stop = threading.Event()
        self._flusher: threading.Thread | None = None
        self._pending = 0

    def prepare(self, messages: Sequence[BenchMessage]) -> list[Message]:
        now = _now_ms()
        return [
            Message(
                topic=TOPIC,
                queue_id=message.queue,
                body=message.body,
                properties=encode_properties({"KEYS": message.key}),
                born_timestamp=now,
                born_host=_HOST,
                store_host=_HOST,
            )
            for message in messages
        ]

    def prepare_keys(self, messages: Sequence[BenchMessage]) -> list[str]:
        return [message.key for message in messages]

    def open(self, folder: Path, durability: Durability) -> None:
        self._store = MessageStore(RealDisk(), str(folder), StoreConfig())
        self._store.open(_now_ms())
        self._sync = durability is Durability.SYNC
        self._batch = 2048
        if not self._sync:
            self._flusher = threading.Thread(target=self._flush_now_and_then, daemon=True)
            self._flusher.start()

    def append(self, item: Message) -> None:
        result = self._store.put(item, time.time_ns() // 1_000_000)
        if result.status is not _OK:
            raise RuntimeError(result.reason)
        self._after(1)

    def append_batch(self, items: Sequence[Message]) -> None:
        for result in self._store.put_many(items, _now_ms()):
            if result.status is not _OK:
                raise RuntimeError(result.reason)
        self._after(len(items))

    def _after(self, count: int) -> None:
        if self._sync:
            self._store.flush_log()
        self._pending += count
        if self._pending >= self._batch:
            self._store.dispatch()
            self._pending = 0

    def settle(self) -> None:
        self._store.dispatch()

    def ready_to_read(self) -> None:
        self._store.flush_log()
        self._store.flush_queues()

    def read_in_order(self, queue: int) -> Iterator[bytes | memoryview]:
        index, views, get = 0, self._views, self._store.reader.get_message
        while True:
            with get(TOPIC, queue, index, 1024, byte_limit=64 << 20) as result:
                if not result.records:
                    return
                if views:
                    yield from result.records
                else:
                    yield from map(bytes, result.records)
                index = result.next_index

    def lookup(self, key: str) -> bytes | None:
        return self._store.reader.body_by_key(TOPIC, key)

    def close(self) -> None:
        if self._flusher is not None:
            self._stop.set()
            self._flusher.join()
        self._store.close(_now_ms())

    def _flush_now_and_then(self) -> None:
        while not self._stop.wait(FLUSH_INTERVAL_S):
            self._store.flush_log(least_pages=4)


def make_store(*, views: bool = False) -> OurStore:
    return OurStore(views=views)


# Recovery scan -------------------------------------------------------------------------------------------------------


def scan_entrants(log: LogFixture) -> list[CpuEntrant]:
    """The scan that recovery runs, over the mapped segments."""

    def by(crc32: Callable[[bytes | bytearray | memoryview], int]) -> Callable[[], Callable[[], int]]:
        def prepare() -> Callable[[], int]:
            regions = [RealDisk(read_only=True).open(str(path)) for path in _segments(log)]
            views = [memoryview(region.buf) for region in regions]
            for view in views:
                zlib.crc32(view)  # every page mapped, for everyone

            def work() -> int:
                kept, checksum.crc32 = checksum.crc32, crc32
                try:
                    return sum(_scan(view, number * log.segment_bytes) for number, view in enumerate(views))
                finally:
                    checksum.crc32 = kept

            return work

        return prepare

    entrants = [CpuEntrant(OURS_SCAN_ZLIB, by(zlib.crc32))]
    if checksum.CRC32_IMPLEMENTATION == "isal":
        entrants.append(CpuEntrant(OURS_SCAN_ISAL, by(checksum.crc32)))
    entrants.append(CpuEntrant(OURS_SCAN_TWO_PROCESSES, lambda: _prepare_two_processes(log), wall=True))
    return entrants


def _scan(view: memoryview, start: int) -> int:
    return len(scan(view, 0, len(view), start, validity=Validity()).positions)


def _scan_file(path: str, start: int) -> int:
    region = RealDisk(read_only=True).open(path)
    view = memoryview(region.buf)
    try:
        return _scan(view, start)
    finally:
        view.release()
        region.close()


def _prepare_two_processes(log: LogFixture) -> Callable[[], int]:
    pool = multiprocessing.get_context("fork").Pool(2)
    work = [(str(path), number * log.segment_bytes) for number, path in enumerate(_segments(log))]
    pool.starmap(_scan_file, work)  # both processes awake, pages in the cache

    def run() -> int:
        try:
            return sum(pool.starmap(_scan_file, work, chunksize=1))
        finally:
            pool.terminate()

    return run


def _segments(log: LogFixture) -> list[Path]:
    return sorted((log.folder / "commitlog").iterdir())


# Dispatch ------------------------------------------------------------------------------------------------------------


def dispatch_entrants(log: LogFixture) -> list[CpuEntrant]:
    """Record to queue entry and two index entries: positions found by reading the log, or handed over."""

    def prepare(handed_over: bool) -> Callable[[], int]:
        folder = log.folder / f"dispatch-{time.perf_counter_ns()}"
        config = StoreConfig(max_hash_slot_num=log.index_slots, max_index_num=log.index_entries + 1)
        disk = RealDisk()
        queues = QueueTable(disk, str(folder / "consumequeue"), config)
        index = IndexService(disk, str(folder / "index"), config)
        index.ensure_file(1)
        for file in index.files:
            file.warm()
        regions = [RealDisk(read_only=True).open(str(path)) for path in _segments(log)]
        views = [memoryview(region.buf) for region in regions]
        known = [
            np.array(scan(view, 0, len(view), number * log.segment_bytes, validity=TRUSTED).positions, dtype=np.int64)
            for number, view in enumerate(views)
        ]

        def work() -> int:
            done = 0
            for number, view in enumerate(views):
                position, taken = 0, 0
                while True:
                    if handed_over:
                        batch = known[number][taken : taken + 1024]
                    else:
                        found = scan(view, position, len(view), number * log.segment_bytes, validity=TRUSTED, most=1024)
                        batch, position = np.array(found.positions, dtype=np.int64), found.end
                    if not len(batch):
                        break
                    taken += len(batch)
                    dispatch = dispatch_of(columns(view, batch), config.delay_levels_ms)
                    queues.apply(dispatch)
                    index.put_many(*dispatch.index)
                done += taken
            return done

        return work

    return [
        CpuEntrant(OURS_DISPATCH_FROM_LOG, lambda: prepare(False)),
        CpuEntrant(OURS_DISPATCH_HANDED_OVER, lambda: prepare(True)),
    ]


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
