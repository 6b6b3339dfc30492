"""Vocabulary for tests of a whole store: small stores, damage, and a disk that fails and loses power on demand.

`Home` is a store directory with tiny files. All messages made by `a_message` give records of the same length, so that
record n of a log without other messages stands at a known place (`place_of`).

`FaultDisk` wraps the real disk. It numbers every operation that changes something, can make one of them fail, and
keeps a model of what is durable:
- content: each 4096-byte page as it was at its last completed sync, zeros before the first;
- names: as they were at the last `sync_directory` of their directory; directories themselves are durable at once
  (`make_directories` syncs them);
- a failing `wrote` or `write` has done the first half of its work (or none of it, if the test says so), anything else
  that fails has done nothing.
What the model leaves out: write-back by the kernel (a page that was not synced never survives) and torn pages.
"""

from __future__ import annotations

import errno
import mmap
import shutil
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from brokerlab.storage.config import StoreConfig
from brokerlab.storage.consume_queue import UNIT, UNIT_SIZE
from brokerlab.storage.disk import PAGE_SIZE, Disk, DiskLock, DiskUsage, FileInfo, Offsets
from brokerlab.storage.errors import DiskFullError, DiskIOError
from brokerlab.storage.mapped_file_queue import file_name
from brokerlab.storage.message import KEYS, Message, encode_properties
from brokerlab.storage.message_store import MessageStore
from brokerlab.storage.real_disk import RealDisk, RealRegion
from brokerlab.storage.results import PutMessageStatus, PutResult

LOG_FILE = 4096
RECORD = 256
PER_LOG_FILE = 15
"""A sixteenth record would fill the file to its end, but a blank must fit behind it."""
QUEUE_FILE = 10 * UNIT_SIZE
PER_QUEUE_FILE = 10
NOW = 1_700_000_000_000
STEP_MS = 1_000
"""Between two messages of `put`: four of them are further apart than recovery's safety margin."""

_SMALL: dict[str, Any] = {
    "mapped_file_size_commit_log": LOG_FILE,
    "mapped_file_size_consume_queue": QUEUE_FILE,
    "max_hash_slot_num": 50,
    "max_index_num": 400,
}


def small(**settings: Any) -> StoreConfig:
    """`strict` with tiny files, and what the test wants otherwise."""
    return StoreConfig(**(_SMALL | settings))


def small_preset(name: str, **settings: Any) -> StoreConfig:
    return StoreConfig.for_preset(name, **(_SMALL | settings))


def a_message(number: int, topic: str = "T", *, size: int = RECORD, queue_id: int = 0, **fields: Any) -> Message:
    """Message `number`, whose record has exactly `size` bytes. Its body begins with `topic-number.`, its key is
    `k<number>`."""
    properties = encode_properties({KEYS: f"k{number}"})
    body = f"{topic}-{number}.".encode().ljust(size - 91 - len(topic.encode()) - len(properties), b"x")
    return Message(topic=topic, body=body, properties=properties, queue_id=queue_id, **fields)


def label(body: bytes) -> str:
    """`topic-number` of a body made by `a_message`."""
    return body.partition(b".")[0].decode()


def labels(numbers: range | list[int], topic: str = "T") -> list[str]:
    return [f"{topic}-{number}" for number in numbers]


def place_of(number: int) -> int:
    """Where the nth record (from 0) starts in a log that holds nothing but records of the usual length."""
    return number // PER_LOG_FILE * LOG_FILE + number % PER_LOG_FILE * RECORD


def put(
    store: MessageStore, numbers: range, topic: str = "T", *, at: int = NOW, dispatch: bool = True
) -> list[PutResult]:
    """Put messages one STEP_MS apart (the first at `at`), all acknowledged; dispatched unless told otherwise."""
    results = []
    for step, number in enumerate(numbers):
        result = store.put(a_message(number, topic), at + step * STEP_MS)
        assert result.status is PutMessageStatus.PUT_OK, result
        results.append(result)
    if dispatch:
        store.dispatch()
    return results


def pull(store: MessageStore, topic: str = "T", queue_id: int = 0) -> list[tuple[int, str]]:
    """Everything a consumer gets from a queue: (index, label), from its minimum to its end."""
    found: list[tuple[int, str]] = []
    queue = store.queues.find(topic, queue_id)
    index = queue.min_index if queue else 0
    while queue and index < queue.max_index:
        with store.reader.get_message(topic, queue_id, index) as result:
            found += [
                (place, label(record.body)) for place, record in zip(result.indexes, result.decoded(), strict=True)
            ]
            assert result.next_index > index, f"a consumer stands still at {index}"
            index = result.next_index
    return found


def in_order(numbers: range, topic: str = "T", *, start: int = 0) -> list[tuple[int, str]]:
    """What `pull` says about these messages if they are alone in their queue and nothing is missing."""
    return list(enumerate(labels(numbers, topic), start))


def in_log(store: MessageStore) -> list[str]:
    """Labels of all records, in log order."""
    return [label(record.body) for record in store.commit_log.records()]


def by_key(store: MessageStore, number: int, topic: str = "T") -> list[str]:
    return [label(record.body) for record in store.reader.query_message(topic, f"k{number}", 10, 0, 1 << 60)]


class Home:
    """A store directory of a test. Stores opened here are let go at the end of the `with`."""

    def __init__(self, root: Path, config: StoreConfig | None = None, disk: Disk | None = None) -> None:
        self.root = root
        self.config = config or small()
        self.disk: Disk = disk or RealDisk()
        self._opened: list[MessageStore] = []

    def __enter__(self) -> Home:
        return self

    def __exit__(self, *_: object) -> None:
        for store in self._opened:
            store.abandon(0)

    def open(self, config: StoreConfig | None = None, *, disk: Disk | None = None, at: int = NOW) -> MessageStore:
        store = MessageStore(disk or self.disk, str(self.root), config or self.config)
        self._opened.append(store)
        store.open(at)
        return store

    def at(self, root: Path) -> Home:
        """The same settings at another directory (a power cut's image), on a plain disk."""
        home = Home(root, self.config)
        home._opened = self._opened
        return home

    def log_file(self, start: int = 0) -> Path:
        return self.root / "commitlog" / file_name(start)

    def queue_file(self, topic: str = "T", queue_id: int = 0, start: int = 0) -> Path:
        return self.root / "consumequeue" / topic / str(queue_id) / file_name(start)

    @property
    def checkpoint(self) -> Path:
        return self.root / "checkpoint"

    @property
    def abort(self) -> Path:
        return self.root / "abort"


# Damage --------------------------------------------------------------------------------------------------------------


def overwrite(path: Path, position: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


def flip(path: Path, position: int) -> None:
    """One bit of this byte."""
    overwrite(path, position, bytes([path.read_bytes()[position] ^ 1]))


def lose_records(home: Home, first: int) -> None:
    """Records from number `first` on never reached the disk, whole files after it neither."""
    start = place_of(first)
    for path in sorted((home.root / "commitlog").iterdir()):
        if int(path.name) > start:
            path.unlink()
        elif int(path.name) + LOG_FILE > start:
            overwrite(path, start - int(path.name), bytes(LOG_FILE - (start - int(path.name))))


def lose_entries(home: Home, first: int, last: int | None = None, topic: str = "T") -> None:
    """Queue entries [first, last) become zeros; without `last`, all from `first` on."""
    for path in sorted((home.root / "consumequeue" / topic / "0").iterdir()):
        begin, end = int(path.name) // UNIT_SIZE, int(path.name) // UNIT_SIZE + PER_QUEUE_FILE
        start, stop = max(first, begin), end if last is None else min(last, end)
        if start < stop:
            overwrite(path, (start - begin) * UNIT_SIZE, bytes((stop - start) * UNIT_SIZE))


def entry(home: Home, index: int, topic: str = "T") -> tuple[int, int, int]:
    """A queue entry as it stands in its file: physical offset, size, tags code."""
    file_index, position = divmod(index, PER_QUEUE_FILE)
    unit: tuple[int, int, int] = UNIT.unpack_from(
        home.queue_file(topic, 0, file_index * QUEUE_FILE).read_bytes(), position * UNIT_SIZE
    )
    return unit


def snapshot(root: Path) -> dict[str, bytes]:
    """Every file of a directory tree with its bytes."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


# A disk that fails and loses power -----------------------------------------------------------------------------------


class CrashError(BaseException):
    """The process dies here. No `except Exception` of the store may live through it."""


class Fault(Enum):
    """How an operation fails."""

    FULL = "full"
    IO = "io"
    CRASH = "crash"

    def error(self, action: str, path: str) -> BaseException:
        if self is Fault.FULL:
            return DiskFullError(action, path, errno.ENOSPC, "injected")
        if self is Fault.IO:
            return DiskIOError(action, path, errno.EIO, "injected")
        return CrashError(f"{action} {path}")


class Strike(NamedTuple):
    """A fault that an operation met."""

    error: BaseException
    half: bool

    def done(self, whole: int) -> int:
        """How much of the work is done all the same."""
        return whole // 2 if self.half else 0


class Operation(NamedTuple):
    """One changing call: what, where, and which bytes (0, 0 where that makes no sense)."""

    action: str
    path: str
    start: int = 0
    end: int = 0


@dataclass(slots=True)
class _File:
    """The model of one file: its bytes as far as they were declared, and as far as they are durable."""

    seen: bytearray
    durable: bytearray
    synced_once: bool = False


@dataclass(slots=True)
class _Plan:
    nth: int
    fault: Fault
    action: str
    path: str
    lasting: bool
    half: bool
    met: int = 0

    def strikes(self, operation: Operation) -> bool:
        if self.action not in ("", operation.action) or self.path not in operation.path:
            return False
        self.met += 1
        return self.met == self.nth or (self.lasting and self.met > self.nth)


@dataclass(slots=True)
class FaultDisk:
    """The real disk, with a record of every change, faults on demand, and power that can be cut."""

    read_only: bool = False
    operations: list[Operation] = field(default_factory=list)
    _inner: RealDisk = field(default_factory=RealDisk)
    _plans: list[_Plan] = field(default_factory=list)
    _names: dict[str, _File] = field(default_factory=dict)
    _durable_names: dict[str, _File] = field(default_factory=dict)
    _crashed: bool = False

    # Faults

    def fail(
        self, nth: int, fault: Fault, *, action: str = "", path: str = "", lasting: bool = False, half: bool = True
    ) -> None:
        """The nth operation from now on (of this action, with this text in its path) fails; `lasting`: all later too.

        `half`: a write has done the first half of its work. After a CRASH every change is refused until `restart`.
        """
        self._plans.append(_Plan(nth, fault, action, path, lasting, half))

    def heal(self) -> None:
        """No fault is waiting any more."""
        self._plans.clear()

    def restart(self) -> None:
        """After a CRASH: a new process may use the disk."""
        self.heal()
        self._crashed = False

    def _step(self, operation: Operation) -> Strike | None:
        if self._crashed:
            raise CrashError(f"{operation.action} {operation.path} after the crash")
        self.operations.append(operation)
        struck = [plan for plan in self._plans if plan.strikes(operation)]
        if not struck:
            return None
        self._crashed = struck[0].fault is Fault.CRASH
        return Strike(struck[0].fault.error(operation.action, operation.path), struck[0].half)

    def _step_or_raise(self, action: str, path: str) -> None:
        strike = self._step(Operation(action, path))
        if strike is not None:
            raise strike.error

    # What was done

    def synced(self, path: str | Path, start: int, end: int, *, since: int = 0) -> bool:
        """Did completed syncs, from operation number `since` on, cover all of these bytes?"""
        covered = np.zeros(end, dtype=np.bool_)
        for operation in self.operations[since:]:
            if operation.action == "sync" and operation.path == str(path):
                covered[operation.start : operation.end] = True
        return bool(covered[start:].all())

    def undeclared(self, path: str | Path) -> list[int]:
        """Positions of a file whose bytes changed without a word through the port. None ever should."""
        file = self._names[str(path)]
        now = np.frombuffer(Path(path).read_bytes(), dtype=np.uint8)
        return np.flatnonzero(now != np.frombuffer(file.seen, dtype=np.uint8)).tolist()

    # Power

    def power_cut(self, root: Path, image: Path, *, new_files_empty: bool = False) -> Path:
        """Lay out what survives of `root` as a directory of its own and return it.

        `new_files_empty`: a file whose name is durable but that was never synced has length 0, as after a cut while
        it was being made; otherwise it has its full length in zeros.
        """
        shutil.rmtree(image, ignore_errors=True)
        image.mkdir(parents=True)
        for path, file in self._durable_names.items():
            if Path(path).is_relative_to(root):
                target = image / Path(path).relative_to(root)
                target.parent.mkdir(parents=True, exist_ok=True)
                lost = new_files_empty and not file.synced_once
                target.write_bytes(b"" if lost else bytes(file.durable))
        return image

    def _sync_names(self, directory: str) -> None:
        for path in [*self._names, *self._durable_names]:
            if path.rpartition("/")[0] == directory:
                if path in self._names:
                    self._durable_names[path] = self._names[path]
                else:
                    self._durable_names.pop(path, None)

    def _known(self, path: str) -> _File:
        """The model of an existing file. What was there before this disk was used is durable."""
        if path not in self._names:
            content = Path(path).read_bytes()
            self._names[path] = self._durable_names[path] = _File(bytearray(content), bytearray(content), True)
        return self._names[path]

    # The port

    def create(self, path: str, size: int, *, reserve: bool) -> FaultRegion:
        self._step_or_raise("create", path)
        region = self._inner.create(path, size, reserve=reserve)
        self._names[path] = _File(bytearray(size), bytearray(size))
        return FaultRegion(self, region, self._names[path])

    def open(self, path: str, *, size: int | None = None) -> FaultRegion:
        file = self._known(path)
        if size is not None and len(file.seen) < size:
            self._step_or_raise("extend", path)
            missing = bytes(size - len(file.seen))
            file.seen += missing
            file.durable += missing
        return FaultRegion(self, self._inner.open(path, size=size), file)

    def stat(self, path: str) -> FileInfo | None:
        return self._inner.stat(path)

    def list(self, path: str) -> list[FileInfo]:
        return self._inner.list(path)

    def make_directories(self, path: str) -> None:
        if not Path(path).is_dir():
            self._step_or_raise("make_directories", path)
            self._inner.make_directories(path)

    def sync_directory(self, path: str) -> None:
        self._step_or_raise("sync_directory", path)
        self._inner.sync_directory(path)
        self._sync_names(path)

    def unlink(self, path: str) -> None:
        self._step_or_raise("unlink", path)
        self._known(path)
        self._inner.unlink(path)
        del self._names[path]

    def remove_directory(self, path: str) -> None:
        self._step_or_raise("remove_directory", path)
        self._inner.remove_directory(path)

    def read_small(self, path: str, *, most: int = 1 << 20) -> bytes | None:
        return self._inner.read_small(path, most=most)

    def write_small(self, path: str, data: bytes) -> None:
        self._step_or_raise("write_small", path)
        former = self._known(path).durable if Path(path).exists() else bytearray()
        self._inner.write_small(path, data)
        self._names[path] = _File(bytearray(data), former)
        if path in self._durable_names:  # written in place: the name stays, the content is not durable
            self._durable_names[path] = self._names[path]

    def replace_small(self, path: str, data: bytes) -> None:
        self._step_or_raise("replace_small", path)
        self._inner.replace_small(path, data)
        self._names[path] = _File(bytearray(data), bytearray(data), True)
        self._sync_names(path.rpartition("/")[0])

    def usage(self, path: str) -> DiskUsage:
        return self._inner.usage(path)

    def set_mtime(self, path: str, mtime_ms: int) -> None:
        self._step_or_raise("set_mtime", path)
        self._inner.set_mtime(path, mtime_ms)

    def lock(self, path: str) -> DiskLock:
        return self._inner.lock(path)


class FaultRegion:
    """A mapped file of a FaultDisk."""

    def __init__(self, disk: FaultDisk, inner: RealRegion, file: _File) -> None:
        self._disk = disk
        self._inner = inner
        self._file = file

    @property
    def path(self) -> str:
        return self._inner.path

    @property
    def size(self) -> int:
        return self._inner.size

    @property
    def buf(self) -> mmap.mmap:
        return self._inner.buf

    def _declare(self, start: int, end: int) -> None:
        self._file.seen[start:end] = self.buf[start:end]

    def _step(self, action: str, start: int, end: int) -> Strike | None:
        return self._disk._step(Operation(action, self.path, start, end))

    def _restore(self, start: int, end: int) -> None:
        """These bytes were never stored."""
        self.buf[start:end] = bytes(self._file.seen[start:end])

    def wrote(self, position: int, length: int) -> None:
        strike = self._step("wrote", position, position + length)
        done = strike.done(length) if strike else length
        self._declare(position, position + done)
        if strike is not None:
            self._restore(position + done, position + length)
            raise strike.error

    def wrote_scattered(self, positions: Offsets, length: int) -> None:
        places = positions.tolist()
        strike = self._step("wrote_scattered", min(places, default=0), max(places, default=0) + length)
        done = strike.done(len(places)) if strike else len(places)
        for position in places[:done]:
            self._declare(position, position + length)
        for position in places[done:]:
            self._restore(position, position + length)
        if strike is not None:
            raise strike.error

    def write(self, position: int, data: bytes) -> None:
        strike = self._step("write", position, position + len(data))
        done = data[: strike.done(len(data))] if strike else data
        self._inner.write(position, done)
        self._declare(position, position + len(done))
        if strike is not None:
            raise strike.error

    def sync(self, position: int, length: int) -> None:
        strike = self._step("sync", position, position + length)
        if strike is not None:
            del self._disk.operations[-1]  # what failed has synced nothing
            raise strike.error
        self._inner.sync(position, length)
        start = position - position % PAGE_SIZE
        end = min(-(-(position + length) // PAGE_SIZE) * PAGE_SIZE, self.size) if length > 0 else start
        self._file.durable[start:end] = self.buf[start:end]
        self._file.synced_once |= length > 0

    def data_ranges(self) -> list[tuple[int, int]]:
        return self._inner.data_ranges()

    def warm(self, position: int, length: int) -> None:
        self._inner.warm(position, length)

    def lock_memory(self) -> bool:
        return self._inner.lock_memory()

    def unlock_memory(self) -> None:
        self._inner.unlock_memory()

    def advise_random(self, random: bool) -> None:
        self._inner.advise_random(random)

    def close(self) -> None:
        self._inner.close()
