"""The cases: who takes part in which work, and the targets. Targets are read by the report; nothing asserts them."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import measure
from benchmarks.naive_dispatch import QueueBuffers, naive_dispatch, new_index_file
from benchmarks.peers import LmdbStore, PlainFile, RocksStore, SqliteStore
from benchmarks.protocol import (
    OURS,
    OURS_DISPATCH_FROM_LOG,
    OURS_DISPATCH_HANDED_OVER,
    OURS_SCAN_ISAL,
    OURS_SCAN_TWO_PROCESSES,
    OURS_SCAN_ZLIB,
    OURS_VIEWS,
    BenchMessage,
    CpuEntrant,
    Durability,
    LogFixture,
    OurSide,
    StoreFactory,
)
from benchmarks.workload import Scale

SQLITE_NORMAL = "SQLite (WAL, NORMAL)"
SQLITE_FULL = "SQLite (WAL, FULL)"
SQLITE = "SQLite"
LMDB_NOSYNC = "LMDB (nosync)"
LMDB_WRITEMAP = "LMDB (nosync, writemap)"
LMDB_SYNC = "LMDB (sync)"
LMDB = "LMDB"
LMDB_BUFFERS = "LMDB (buffers)"
ROCKSDB = "RocksDB (WAL)"
ROCKSDB_SYNC = "RocksDB (WAL, sync)"
PLAIN = "plain append"
PLAIN_SYNC = "plain append + fdatasync"
PLAIN_PREALLOCATED = "plain, preallocated + fdatasync"
BULK_CRC = "zlib.crc32, bulk"
BULK_CRC_WALL = "zlib.crc32, bulk (wall clock)"
NAIVE = "naive loop"

BEST_PEER = "the best peer"

CASE_NAMES = ("async", "batch100", "batch1000", "sync", "sync100", "read", "lookup", "scan", "dispatch")


@dataclass(frozen=True, slots=True)
class Entrant:
    """One contestant of one case: run it in an empty folder and get seconds."""

    name: str
    run: Callable[[Path], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Our rate over a peer's, taken round by round. `best_of` lists who may be the best peer."""

    ours: str = OURS
    peer: str
    must: float | None = None
    bold: float | None = None
    best_of: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of work. A run handles `messages` messages, `bytes_per_run` bytes if the rate is a bandwidth."""

    name: str
    title: str
    clock: str
    messages: int
    bytes_per_run: int | None = None
    entrants: tuple[Entrant, ...]
    targets: tuple[Target, ...]

    def rate(self, seconds: float) -> float:
        """Messages, or bytes, in a second."""
        return (self.messages if self.bytes_per_run is None else self.bytes_per_run) / seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all cases share. The logs of the CPU cases are made only when asked for."""

    messages: Sequence[BenchMessage]
    scale: Scale
    ours: OurSide | None
    seed: int
    make_log: Callable[[int], LogFixture]


def build_cases(setting: Setting, names: Sequence[str]) -> list[Case]:
    """The cases with these names, in the order of CASE_NAMES."""
    builders: dict[str, Callable[[Setting], Case]] = {
        "async": _async_single,
        "batch100": functools.partial(_async_batch, batch=100, must=1.3, bold=1.8),
        "batch1000": functools.partial(_async_batch, batch=1000, must=1.5, bold=1.8),
        "sync": _sync_single,
        "sync100": _sync_batch,
        "read": _read,
        "lookup": _lookup,
        "scan": _scan,
        "dispatch": _dispatch,
    }
    return [builders[name](setting) for name in CASE_NAMES if name in names]


Run = Callable[[StoreFactory, Path], float]


def _entrants(run: Run, stores: dict[str, StoreFactory]) -> tuple[Entrant, ...]:
    return tuple(Entrant(name, functools.partial(run, factory)) for name, factory in stores.items())


def _async_stores(setting: Setting) -> dict[str, StoreFactory]:
    stores: dict[str, StoreFactory] = {
        SQLITE_NORMAL: SqliteStore,
        LMDB_NOSYNC: LmdbStore,
        LMDB_WRITEMAP: functools.partial(LmdbStore, writemap=True),
        ROCKSDB: RocksStore,
        PLAIN: PlainFile,
    }
    return stores if setting.ours is None else {OURS: setting.ours.make_store, **stores}


def _sync_stores(setting: Setting) -> dict[str, StoreFactory]:
    stores: dict[str, StoreFactory] = {
        SQLITE_FULL: SqliteStore,
        LMDB_SYNC: LmdbStore,
        ROCKSDB_SYNC: RocksStore,
        PLAIN_SYNC: PlainFile,
        PLAIN_PREALLOCATED: functools.partial(PlainFile, preallocate=True),
    }
    return stores if setting.ours is None else {OURS: setting.ours.make_store, **stores}


def stores_to_check(setting: Setting, durability: Durability) -> dict[str, StoreFactory]:
    """Everyone who takes part in a case with a disk, for a check before the first round."""
    if durability is Durability.SYNC:
        return _sync_stores(setting)
    views = {} if setting.ours is None else {OURS_VIEWS: functools.partial(setting.ours.make_store, views=True)}
    return {**_async_stores(setting), LMDB_BUFFERS: functools.partial(LmdbStore, buffers=True), **views}


def _async_single(setting: Setting) -> Case:
    messages = setting.messages[: setting.scale.single]

    def run(factory: StoreFactory, folder: Path) -> float:
        return measure.put_one_by_one(factory, folder, messages, Durability.ASYNC)

    return Case(
        name="async",
        title="async, one message a put",
        clock="wall",
        messages=len(messages),
        entrants=_entrants(run, _async_stores(setting)),
        targets=(
            Target(peer=ROCKSDB, must=1.8, bold=2.7),
            Target(peer=LMDB_NOSYNC, must=3.0),
            Target(peer=SQLITE_NORMAL, must=8.0),
            Target(peer=PLAIN, bold=0.7),
        ),
    )


def _async_batch(setting: Setting, *, batch: int, must: float, bold: float) -> Case:
    count = setting.scale.batch_100 if batch == 100 else setting.scale.batch_1000
    messages = setting.messages[:count]

    def run(factory: StoreFactory, folder: Path) -> float:
        return measure.put_in_batches(factory, folder, messages, Durability.ASYNC, batch)

    return Case(
        name=f"batch{batch}",
        title=f"async, batches of {batch:,}",
        clock="wall",
        messages=len(messages),
        entrants=_entrants(run, _async_stores(setting)),
        targets=(Target(peer=LMDB_NOSYNC, must=must, bold=bold),),
    )


def _sync_single(setting: Setting) -> Case:
    messages = setting.messages[: setting.scale.sync]

    def run(factory: StoreFactory, folder: Path) -> float:
        return measure.put_one_by_one(factory, folder, messages, Durability.SYNC)

    return Case(
        name="sync",
        title="sync flush, one producer",
        clock="wall",
        messages=len(messages),
        entrants=_entrants(run, _sync_stores(setting)),
        targets=(Target(peer=PLAIN_SYNC, must=0.85, bold=0.95),),
    )


def _sync_batch(setting: Setting) -> Case:
    messages = setting.messages[: setting.scale.sync_batch]

    def run(factory: StoreFactory, folder: Path) -> float:
        return measure.put_in_batches(factory, folder, messages, Durability.SYNC, 100)

    return Case(
        name="sync100",
        title="sync flush, batches of 100",
        clock="wall",
        messages=len(messages),
        entrants=_entrants(run, _sync_stores(setting)),
        # The plain file is the limit and keeps no index: not a peer.
        targets=(Target(peer=BEST_PEER, must=0.9, bold=1.2, best_of=(SQLITE_FULL, LMDB_SYNC, ROCKSDB_SYNC)),),
    )


def _read(setting: Setting) -> Case:
    messages = setting.messages[: setting.scale.read]
    passes = setting.scale.read_passes

    def run(factory: StoreFactory, folder: Path) -> float:
        return measure.read_all_queues(factory, folder, messages, passes)

    stores: dict[str, StoreFactory] = {
        SQLITE: SqliteStore,
        LMDB: LmdbStore,
        LMDB_BUFFERS: functools.partial(LmdbStore, buffers=True),
        ROCKSDB: RocksStore,
        PLAIN: PlainFile,
    }
    if setting.ours is not None:
        views: StoreFactory = functools.partial(setting.ours.make_store, views=True)
        stores = {OURS: setting.ours.make_store, OURS_VIEWS: views, **stores}
    return Case(
        name="read",
        title="ordered read-back, raw records",
        clock="thread CPU",
        messages=len(messages) * passes,
        entrants=_entrants(run, stores),
        targets=(Target(peer=LMDB, must=1.0), Target(ours=OURS_VIEWS, peer=LMDB, bold=2.0)),
    )


def _lookup(setting: Setting) -> Case:
    messages = setting.messages[: setting.scale.lookup]

    def run(factory: StoreFactory, folder: Path) -> float:
        return measure.lookup_all_keys(factory, folder, messages, setting.seed)

    stores: dict[str, StoreFactory] = {SQLITE: SqliteStore, LMDB: LmdbStore, ROCKSDB: RocksStore}
    if setting.ours is not None:
        stores = {OURS: setting.ours.make_store, **stores}
    return Case(
        name="lookup",
        title="lookup by key, record read and checked",
        clock="thread CPU",
        messages=len(messages),
        entrants=_entrants(run, stores),
        targets=(Target(peer=LMDB, must=0.75, bold=1.0),),
    )


def _cpu_entrants(entrants: Sequence[CpuEntrant], records: int) -> tuple[Entrant, ...]:
    def run(entrant: CpuEntrant, _folder: Path) -> float:
        return measure.cpu_work(entrant, records)

    return tuple(Entrant(entrant.name, functools.partial(run, entrant)) for entrant in entrants)


def _scan(setting: Setting) -> Case:
    log = setting.make_log(setting.scale.scan)

    def bulk_crc() -> Callable[[], int]:
        def work() -> int:
            zlib.crc32(log.data)
            return log.records

        return work

    entrants = [CpuEntrant(BULK_CRC, bulk_crc), CpuEntrant(BULK_CRC_WALL, bulk_crc, wall=True)]
    if setting.ours is not None:
        entrants = [*setting.ours.scan_entrants(log), *entrants]
    return Case(
        name="scan",
        title="recovery scan with the CRC of every body",
        clock="thread CPU, wall for 2 processes",
        messages=log.records,
        bytes_per_run=len(log.data),
        entrants=_cpu_entrants(entrants, log.records),
        targets=(
            Target(ours=OURS_SCAN_ZLIB, peer=BULK_CRC, must=0.40),
            Target(ours=OURS_SCAN_ISAL, peer=BULK_CRC, must=0.80),
            Target(ours=OURS_SCAN_TWO_PROCESSES, peer=BULK_CRC_WALL, bold=1.4),
        ),
    )


def _dispatch(setting: Setting) -> Case:
    log = setting.make_log(setting.scale.dispatch)

    def naive() -> Callable[[], int]:
        queues: QueueBuffers = {}
        index = new_index_file(log.index_slots, log.index_entries)
        data = memoryview(log.data)
        return lambda: naive_dispatch(data, 0, len(data), queues, index, log.index_slots, log.index_entries)

    entrants = [CpuEntrant(NAIVE, naive)]
    if setting.ours is not None:
        entrants = [*setting.ours.dispatch_entrants(log), *entrants]
    return Case(
        name="dispatch",
        title="dispatch: record to queue entry and 2 index entries",
        clock="thread CPU",
        messages=log.records,
        entrants=_cpu_entrants(entrants, log.records),
        targets=(
            Target(ours=OURS_DISPATCH_FROM_LOG, peer=NAIVE, must=3.5, bold=5.0),
            Target(ours=OURS_DISPATCH_HANDED_OVER, peer=NAIVE, must=8.0, bold=13.0),
        ),
    )
