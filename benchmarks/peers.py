"""The peers, each used as somebody who knows it well would use it for this work.

What was tuned was measured first; the comments give the gain on an append of one message. What changes the promise of
a store is not tuned silently, it is a contestant of its own: `LmdbStore(writemap=True)`, `PlainFile(preallocate=True)`.
"""

from __future__ import annotations

import itertools
import operator
import os
import sqlite3
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import lmdb
import rocksdict

from benchmarks.protocol import BenchMessage, Durability
from benchmarks.workload import QUEUES

_POSITION = struct.Struct(">BQ")  # queue, index: sorts in queue order
_INDEX = struct.Struct(">Q")
_LENGTH = struct.Struct(">I")
_EncodedItem = tuple[int, bytes, bytes]  # queue, key, body


class SqliteStore:
    """SQLite in WAL mode: synchronous=NORMAL syncs at checkpoints only, FULL syncs the WAL at each commit.

    A rowid table appends at its right edge and the ordered index stays small. Making (queue, idx) the table's own key
    was slower: a clustered table (WITHOUT ROWID) 0.6 x, a rowid made of both 0.85 x.
    """

    indexed = True
    _INSERT = "INSERT INTO entry (queue, idx, key, body) VALUES (?, ?, ?, ?)"

    def prepare(self, messages: Sequence[BenchMessage]) -> list[BenchMessage]:
        return list(messages)

    def prepare_keys(self, messages: Sequence[BenchMessage]) -> list[str]:
        return [message.key for message in messages]

    def open(self, folder: Path, durability: Durability) -> None:
        self._next_index = [0] * QUEUES
        self._connection = sqlite3.connect(folder / "store.db", isolation_level=None)
        execute = self._connection.execute
        # One process owns the store, as a broker would: no file locks and the WAL index in memory, 1.13 x.
        execute("PRAGMA locking_mode=EXCLUSIVE")
        execute("PRAGMA journal_mode=WAL")
        execute(f"PRAGMA synchronous={'FULL' if durability is Durability.SYNC else 'NORMAL'}")
        # 40 MiB of WAL instead of 4 before it is copied back: 1.16 x.
        execute("PRAGMA wal_autocheckpoint=10000")
        execute("PRAGMA cache_size=-262144")
        execute("PRAGMA mmap_size=1073741824")
        execute("CREATE TABLE entry (queue INTEGER, idx INTEGER, key TEXT, body BLOB)")
        execute("CREATE UNIQUE INDEX entry_in_order ON entry (queue, idx)")
        execute("CREATE INDEX entry_by_key ON entry (key)")
        self._execute = execute

    def append(self, item: BenchMessage) -> None:
        queue, key, body = item
        index = self._next_index[queue]
        self._execute(self._INSERT, (queue, index, key, body))  # a transaction of its own
        self._next_index[queue] = index + 1

    def append_batch(self, items: Sequence[BenchMessage]) -> None:
        next_index = self._next_index
        rows = []
        for queue, key, body in items:
            rows.append((queue, next_index[queue], key, body))
            next_index[queue] += 1
        self._execute("BEGIN IMMEDIATE")
        self._connection.executemany(self._INSERT, rows)
        self._execute("COMMIT")

    def settle(self) -> None:
        pass

    def ready_to_read(self) -> None:
        self._execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def read_in_order(self, queue: int) -> Iterable[bytes]:
        rows = self._execute("SELECT body FROM entry WHERE queue = ? ORDER BY idx", (queue,))
        return map(operator.itemgetter(0), rows)

    def lookup(self, key: str) -> bytes | None:
        row = self._execute("SELECT body FROM entry WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        body: bytes = row[0]
        return body

    def close(self) -> None:
        self._connection.close()


class LmdbStore:
    """LMDB: sync=False (MDB_NOSYNC) under ASYNC, a sync of data and meta page at each commit under SYNC.

    One named database a queue, so that each is appended at its right edge (MDB_APPEND: full pages, no search; 1.1 x
    one database with the queue in the key), and one from key to (queue, index).

    `writemap` writes through the map instead of by pwrite: 2 to 3 x for single puts without a sync, no gain or a loss
    in batches. A stray write of the process then corrupts the database and the kernel may write its pages in any
    order. `buffers` reads memoryviews into the map instead of copies.
    """

    indexed = True

    def __init__(self, *, writemap: bool = False, buffers: bool = False) -> None:
        self._writemap = writemap
        self._buffers = buffers

    def prepare(self, messages: Sequence[BenchMessage]) -> list[_EncodedItem]:
        return [(message.queue, message.key.encode(), message.body) for message in messages]

    def prepare_keys(self, messages: Sequence[BenchMessage]) -> list[bytes]:
        return [message.key.encode() for message in messages]

    def open(self, folder: Path, durability: Durability) -> None:
        sync = durability is Durability.SYNC
        self._next_index = [0] * QUEUES
        self._environment = lmdb.open(
            str(folder),
            map_size=4 << 30,  # sparse: costs nothing until it is used
            max_dbs=QUEUES + 1,
            sync=sync,
            metasync=sync,
            writemap=self._writemap,
            map_async=self._writemap and not sync,
            max_spare_txns=2,
        )
        self._queues = [self._environment.open_db(b"queue-%d" % queue) for queue in range(QUEUES)]
        self._keys = self._environment.open_db(b"keys")

    def append(self, item: _EncodedItem) -> None:
        queue, key, body = item
        index = self._next_index[queue]
        with self._environment.begin(write=True) as transaction:
            transaction.put(_INDEX.pack(index), body, append=True, db=self._queues[queue])
            transaction.put(key, _POSITION.pack(queue, index), db=self._keys)
        self._next_index[queue] = index + 1

    def append_batch(self, items: Sequence[_EncodedItem]) -> None:
        next_index = self._next_index
        by_queue: list[list[tuple[bytes, bytes]]] = [[] for _ in range(QUEUES)]
        positions = []
        for queue, key, body in items:
            index = next_index[queue]
            by_queue[queue].append((_INDEX.pack(index), body))
            positions.append((key, _POSITION.pack(queue, index)))
            next_index[queue] = index + 1
        with self._environment.begin(write=True) as transaction:
            # putmulti loops in C: 1.2 x a put each.
            for database, entries in zip(self._queues, by_queue, strict=True):
                if entries:
                    transaction.cursor(database).putmulti(entries, append=True)
            transaction.cursor(self._keys).putmulti(positions)

    def settle(self) -> None:
        pass

    def ready_to_read(self) -> None:
        begin = self._environment.begin
        self._reader = begin(buffers=True) if self._buffers else begin()
        # A transaction kept open needs no begin and no reader slot for each lookup; plain bytes, the body is compared.
        self._lookups = self._environment.begin()

    def read_in_order(self, queue: int) -> Iterator[bytes | memoryview]:
        cursor = self._reader.cursor(self._queues[queue])
        values: Iterator[bytes | memoryview] = cursor.iternext(keys=False, values=True)
        return values

    def lookup(self, key: bytes) -> bytes | None:
        position = self._lookups.get(key, db=self._keys)
        if position is None:
            return None
        body: bytes | None = self._lookups.get(position[1:], db=self._queues[position[0]])
        return body

    def close(self) -> None:
        for transaction in (getattr(self, "_reader", None), getattr(self, "_lookups", None)):
            if transaction is not None:
                transaction.abort()
        self._environment.close()


class RocksStore:
    """RocksDB by rocksdict in raw mode: always with its write-ahead log, synced at each write under SYNC.

    Two column families, records by (queue, index) and positions by key: 1.04 x one for both, and each gets the
    options it wants.
    """

    indexed = True

    def prepare(self, messages: Sequence[BenchMessage]) -> list[_EncodedItem]:
        return [(message.queue, message.key.encode(), message.body) for message in messages]

    def prepare_keys(self, messages: Sequence[BenchMessage]) -> list[bytes]:
        return [message.key.encode() for message in messages]

    def open(self, folder: Path, durability: Durability) -> None:
        self._next_index = [0] * QUEUES
        cache = rocksdict.Cache(512 << 20)  # the default is too small for the data; the others have all of memory
        # The default memory table (64 MiB) would be written out in the middle of a run.
        self._database = rocksdict.Rdict(str(folder / "db"), self._options(cache, write_buffer_bytes=1 << 30))
        self._keys = self._database.create_column_family("keys", self._options(cache, write_buffer_bytes=128 << 20))
        self._keys_handle = self._database.get_column_family_handle("keys")
        self._records_handle = self._database.get_column_family_handle("default")
        self._write_options = rocksdict.WriteOptions()
        self._write_options.sync = durability is Durability.SYNC

    @staticmethod
    def _options(cache: rocksdict.Cache, *, write_buffer_bytes: int) -> rocksdict.Options:
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_write_buffer_size(write_buffer_bytes)
        options.set_compression_type(rocksdict.DBCompressionType.none())  # the bodies do not compress
        table = rocksdict.BlockBasedOptions()
        table.set_block_cache(cache)
        table.set_bloom_filter(10, False)
        options.set_block_based_table_factory(table)
        return options

    def append(self, item: _EncodedItem) -> None:
        queue, key, body = item
        index = self._next_index[queue]
        position = _POSITION.pack(queue, index)
        batch = rocksdict.WriteBatch(raw_mode=True)
        batch.put(position, body)
        batch.put(key, position, self._keys_handle)
        self._database.write(batch, self._write_options)
        self._next_index[queue] = index + 1

    def append_batch(self, items: Sequence[_EncodedItem]) -> None:
        next_index = self._next_index
        batch = rocksdict.WriteBatch(raw_mode=True)
        put = batch.put
        keys = self._keys_handle
        pack = _POSITION.pack
        for queue, key, body in items:
            index = next_index[queue]
            position = pack(queue, index)
            put(position, body)
            put(key, position, keys)
            next_index[queue] = index + 1
        self._database.write(batch, self._write_options)

    def settle(self) -> None:
        pass

    def ready_to_read(self) -> None:
        """Nothing: its memory table answers lookups 1.3 x as fast as flushed or compacted tables."""

    def read_in_order(self, queue: int) -> Iterator[bytes]:
        values: Iterator[bytes] = iter(self._database.values(from_key=_POSITION.pack(queue, 0)))
        return itertools.islice(values, self._next_index[queue])

    def lookup(self, key: bytes) -> bytes | None:
        position = self._keys.get(key)
        if position is None:
            return None
        body: bytes | None = self._database.get(position)
        return body

    def close(self) -> None:
        self._keys.close()
        self._database.close()


class PlainFile:
    """The limit: length and body appended to a file, no index, nothing else.

    Under ASYNC a file a queue, so that a queue can be read in order. Under SYNC one file for all: eight would need
    eight syncs a batch. `preallocate` writes into blocks reserved before the clock starts, so that a sync has no new
    file size to write: 1.1 to 1.3 x with one record a sync, 0.9 x in batches, and no longer a plain append.
    """

    indexed = False
    _PREALLOCATED_BYTES = 256 << 20

    def __init__(self, *, preallocate: bool = False) -> None:
        self._preallocate = preallocate

    def prepare(self, messages: Sequence[BenchMessage]) -> list[BenchMessage]:
        return list(messages)

    def prepare_keys(self, messages: Sequence[BenchMessage]) -> list[str]:
        return [message.key for message in messages]

    def open(self, folder: Path, durability: Durability) -> None:
        self._sync = durability is Durability.SYNC
        self._paths = [folder / f"queue-{queue}" for queue in range(1 if self._sync else QUEUES)]
        self._files = [os.open(path, os.O_RDWR | os.O_CREAT, 0o644) for path in self._paths]
        if self._preallocate:
            for file in self._files:
                os.posix_fallocate(file, 0, self._PREALLOCATED_BYTES)
                os.fsync(file)

    def append(self, item: BenchMessage) -> None:
        body = item.body
        record = _LENGTH.pack(len(body)) + body  # one write of a joined record; writev of the two is no faster
        if self._sync:
            file = self._files[0]
            os.write(file, record)
            os.fdatasync(file)
        else:
            os.write(self._files[item.queue], record)

    def append_batch(self, items: Sequence[BenchMessage]) -> None:
        files = self._files
        parts: list[list[bytes]] = [[] for _ in files]
        one_file = len(files) == 1
        for queue, _, body in items:
            parts[0 if one_file else queue] += (_LENGTH.pack(len(body)), body)
        for file, records in zip(files, parts, strict=True):
            os.write(file, b"".join(records))
            if self._sync:
                os.fdatasync(file)

    def settle(self) -> None:
        pass

    def ready_to_read(self) -> None:
        pass

    def read_in_order(self, queue: int) -> Iterator[bytes]:
        with self._paths[queue].open("rb", buffering=1 << 20) as file:
            while header := file.read(4):
                yield file.read(_LENGTH.unpack(header)[0])

    def lookup(self, key: str) -> bytes | None:
        raise NotImplementedError(f"a plain file has no index to find {key} by")

    def close(self) -> None:
        for file in self._files:
            os.close(file)
