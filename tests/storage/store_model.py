"""What the tests of the whole store share: a tiny store, a plain model of it, and disks that fail.

The model is a list: every message in the order it was put, with where it landed. `survivors` reads a store through
every path (scan, queue, id, key), compares with that list, and says which of them are there.

Two disks wrap the real one. `FaultDisk` stops the process at the nth operation: what was stored stays, as in the page
cache. `PowerDisk` remembers what was synced; `image` lays out a directory as a power cut could have left it. Its model:
a page that was not synced is in any version it had since its last sync, a name that was not synced may be undone, a
file that was never synced may be empty. A rename (`replace_small`) is all or nothing, and so is a new directory.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from brokerlab.storage.config import StoreConfig
from brokerlab.storage.disk import PAGE_SIZE, DiskLock, DiskUsage, FileInfo, Offsets, Region
from brokerlab.storage.log_scan import Validity
from brokerlab.storage.message import BatchItem, Message, SysFlag, encode_properties, pack_host
from brokerlab.storage.message_store import MessageStore
from brokerlab.storage.real_disk import RealDisk
from brokerlab.storage.record import Record
from brokerlab.storage.results import GetMessageStatus, PutMessageStatus, PutResult

NOW = 1_700_000_000_000
HOUR = 3_600_000
FOREVER = (0, 1 << 60)
HOST = pack_host("10.0.0.7", 10911)
QUERY_MOST = 64

Queue = tuple[str, int]


def tiny_config(**settings: Any) -> StoreConfig:
    """Files so small that a handful of messages fills several of each kind."""
    small: dict[str, Any] = {
        "mapped_file_size_commit_log": 4096,
        "mapped_file_size_consume_queue": 200,
        "max_hash_slot_num": 10,
        "max_index_num": 20,
        "file_reserved_time": 1,
        "transient_store_pool_size": 2,
    }
    return StoreConfig(**(small | settings))


def open_store(
    root: Path | str, config: StoreConfig | None = None, *, disk: Any = None, now: int = NOW
) -> MessageStore:
    store = MessageStore(disk or HookedDisk(), str(root), config or tiny_config())
    store.open(now)
    return store


def a_message(
    body: bytes | str = b"hello",
    *,
    topic: str = "orders",
    queue_id: int = 0,
    keys: str = "",
    tags: str = "",
    unique: str = "",
    **fields: Any,
) -> Message:
    named = {"UNIQ_KEY": unique, "KEYS": keys, "TAGS": tags}
    return Message(
        topic=topic,
        queue_id=queue_id,
        body=body.encode() if isinstance(body, str) else body,
        properties=encode_properties({name: value for name, value in named.items() if value}),
        store_host=fields.pop("store_host", HOST),
        **fields,
    )


# The model -----------------------------------------------------------------------------------------------------------


class Sent(NamedTuple):
    """A message that was put, and where."""

    physical_offset: int
    size: int
    queue: Queue
    queue_offset: int
    body: bytes
    properties: bytes
    keys: tuple[str, ...]
    sys_flag: int
    store_timestamp: int

    @property
    def end(self) -> int:
        return self.physical_offset + self.size

    @property
    def is_queued(self) -> bool:
        return not self.sys_flag & SysFlag.TRANSACTION_PREPARED

    @property
    def is_indexed(self) -> bool:
        return self.sys_flag & SysFlag.TRANSACTION_MASK != SysFlag.TRANSACTION_ROLLBACK

    def is_record(self, record: Record) -> bool:
        return self[:6] == (
            record.physical_offset,
            record.total_size,
            (record.topic, record.queue_id),
            record.queue_offset,
            record.body,
            record.properties,
        ) and (self.sys_flag, self.store_timestamp) == (record.sys_flag, record.store_timestamp)


def keys_of(properties: bytes) -> tuple[str, ...]:
    """Said again, plainly: the unique key, then the words of KEYS; of a name that comes twice the last one counts."""
    pairs = dict(item.split("\x01", 1) for item in properties.decode().split("\x02") if "\x01" in item)
    return tuple(word for word in [pairs.get("UNIQ_KEY", ""), *pairs.get("KEYS", "").split(" ")] if word)


def sent(message: Message, result: PutResult) -> Sent:
    assert result.status is PutMessageStatus.PUT_OK, result
    return Sent(
        result.physical_offset,
        result.size,
        (message.topic, message.queue_id),
        result.queue_offset,
        message.body,
        message.properties,
        keys_of(message.properties),
        message.sys_flag,
        result.store_timestamp,
    )


def put(store: MessageStore, message: Message, now: int) -> Sent:
    return sent(message, store.put(message, now))


def sent_batch(envelope: Message, items: Iterable[BatchItem], result: PutResult) -> list[Sent]:
    """The records of a batch whose envelope has no properties of its own."""
    assert result.status is PutMessageStatus.PUT_OK, result
    assert not envelope.properties
    place, landed = result.physical_offset, []
    for number, item in enumerate(items):
        size = 91 + len(item.body) + len(envelope.topic.encode()) + len(item.properties)
        landed.append(
            Sent(
                place,
                size,
                (envelope.topic, envelope.queue_id),
                result.queue_offset + number,
                item.body,
                item.properties,
                keys_of(item.properties),
                envelope.sys_flag,
                result.store_timestamp,
            )
        )
        place += size
    assert place == result.physical_offset + result.size
    return landed


def scanned(store: MessageStore) -> list[Record]:
    """Every record of the log, checked in full."""
    return list(store.commit_log.records(validity=Validity()))


def pulled(store: MessageStore, queue: Queue) -> list[Record]:
    """A queue from its minimum to its end, as a consumer reads it."""
    topic, queue_id = queue
    found: list[Record] = []
    known = store.queues.find(topic, queue_id)
    if known is None:
        return found
    index = known.min_index
    while True:
        with store.reader.get_message(topic, queue_id, index) as result:
            assert not result.damaged, f"{queue} at {index}: {result.damaged}"
            found += result.decoded()
            assert result.next_index > index or result.status is not GetMessageStatus.FOUND
            if result.status in (GetMessageStatus.OFFSET_OVERFLOW_ONE, GetMessageStatus.NO_MESSAGE_IN_QUEUE):
                return found
            assert result.status is GetMessageStatus.FOUND, f"{queue} at {index}: {result.status}"
            index = result.next_index


def survivors(store: MessageStore, messages: list[Sent], *, dispatched: bool = True) -> list[Sent]:
    """The messages that the store holds: a run of what was sent, the same through every path. Else AssertionError."""
    records = scanned(store)
    begin = store.commit_log.files.min_offset
    there = [message for message in messages if message.physical_offset >= begin][: len(records)]
    assert len(there) == len(records), f"{len(records)} records, {len(there)} were sent"
    for message, record in zip(there, records, strict=True):
        assert message.is_record(record), f"sent {message}, found {record}"
    if dispatched:
        assert_visible(store, messages, there)
    return there


def assert_visible(store: MessageStore, messages: list[Sent], there: list[Sent]) -> None:
    """Queues, ids and index know exactly the messages in `there`."""
    for queue in sorted({message.queue for message in messages}):
        wanted = [message for message in there if message.queue == queue and message.is_queued]
        found = pulled(store, queue)
        assert [record.physical_offset for record in found] == [message.physical_offset for message in wanted], queue
        assert [record.queue_offset for record in found] == [message.queue_offset for message in wanted], queue
        assert [record.body for record in found] == [message.body for message in wanted], queue
    for message in there:
        record = store.reader.look_message_by_offset(message.physical_offset)
        assert record is not None
        assert store.reader.look_message_by_id(record.message_id) == record
    if store.index is None:
        return
    for topic, key in sorted({(message.queue[0], key) for message in messages for key in message.keys}):
        wanted = [m for m in there if m.queue[0] == topic and m.is_indexed and key in m.keys][-QUERY_MOST:]
        found = store.reader.query_message(topic, key, QUERY_MOST, *FOREVER)
        assert [record.physical_offset for record in found] == [m.physical_offset for m in wanted], (topic, key)


# Directories ---------------------------------------------------------------------------------------------------------

NOT_DATA = ("lock", "abort", "abort.bak", "abort.tmp")


def tree(root: Path | str) -> dict[str, str]:
    """A digest of every file, by its path under the root; without the marks of who runs."""
    top = Path(root)
    return {
        str(path.relative_to(top)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(top.rglob("*"))
        if path.is_file() and str(path.relative_to(top)) not in NOT_DATA
    }


def files_under(root: Path, part: str) -> list[Path]:
    return sorted(path for path in (root / part).rglob("*") if path.is_file())


def copy_store(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def overwrite(path: Path, position: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


# A process that dies -------------------------------------------------------------------------------------------------


class CrashError(Exception):
    """The process ended here. No DiskError: nobody handles it."""


class Step(NamedTuple):
    """One operation that can change something. `region` is given where `data` is about to be written to it."""

    action: str
    path: str
    position: int = 0
    data: bytes = b""
    region: Region | None = None

    def __str__(self) -> str:
        return f"{self.action} {self.path}"


class Hooks:
    """What the wrapping disk tells about every operation."""

    def before(self, step: Step) -> None:
        """May raise: then the operation does not happen."""

    def stored(self, region: Region, positions: Iterable[int], length: int) -> None:
        """These bytes of the file have changed."""

    def synced(self, region: Region, position: int, length: int) -> None:
        """These bytes are durable."""


class HookedRegion:
    """A real region that reports to hooks."""

    def __init__(self, inner: Region, hooks: Hooks) -> None:
        self.inner = inner
        self.path = inner.path
        self.size = inner.size
        self._hooks = hooks

    @property
    def buf(self) -> mmap.mmap:
        return self.inner.buf

    def wrote(self, position: int, length: int) -> None:
        self._hooks.stored(self.inner, (position,), length)
        self._hooks.before(Step("wrote", self.path, position))

    def wrote_scattered(self, positions: Offsets, length: int) -> None:
        self._hooks.stored(self.inner, positions.tolist(), length)
        self._hooks.before(Step("wrote", self.path))

    def write(self, position: int, data: bytes) -> None:
        self._hooks.before(Step("write", self.path, position, data, self.inner))
        self.inner.write(position, data)
        self._hooks.stored(self.inner, (position,), len(data))

    def sync(self, position: int, length: int) -> None:
        self._hooks.before(Step("sync", self.path))
        self._hooks.synced(self.inner, position, length)

    def data_ranges(self) -> list[tuple[int, int]]:
        return self.inner.data_ranges()

    def warm(self, position: int, length: int) -> None:
        self.inner.warm(position, length)

    def lock_memory(self) -> bool:
        return self.inner.lock_memory()

    def unlock_memory(self) -> None:
        self.inner.unlock_memory()

    def advise_random(self, random: bool) -> None:
        self.inner.advise_random(random)

    def close(self) -> None:
        self.inner.close()


class HookedDisk:
    """Real files that report to hooks. Reading, closing and unlocking are not reported: a dead process does those.

    Nothing is really synced: what that would mean is the hooks' to say, and the tests are ten times as fast.
    """

    read_only = False

    def __init__(self) -> None:
        self.real = RealDisk()
        self.hooks = Hooks()

    def create(self, path: str, size: int, *, reserve: bool) -> Region:
        self.hooks.before(Step("create", path))
        return HookedRegion(self.real.create(path, size, reserve=reserve), self.hooks)

    def open(self, path: str, *, size: int | None = None) -> Region:
        self.hooks.before(Step("open", path))
        return HookedRegion(self.real.open(path, size=size), self.hooks)

    def stat(self, path: str) -> FileInfo | None:
        return self.real.stat(path)

    def list(self, path: str) -> list[FileInfo]:
        return self.real.list(path)

    def make_directories(self, path: str) -> None:
        if not Path(path).is_dir():
            self.hooks.before(Step("make_directories", path))
        Path(path).mkdir(parents=True, exist_ok=True)

    def sync_directory(self, path: str) -> None:
        self.hooks.before(Step("sync_directory", path))

    def unlink(self, path: str) -> None:
        self.hooks.before(Step("unlink", path))
        self.real.unlink(path)

    def remove_directory(self, path: str) -> None:
        self.hooks.before(Step("remove_directory", path))
        self.real.remove_directory(path)

    def read_small(self, path: str, *, most: int = 1 << 20) -> bytes | None:
        return self.real.read_small(path, most=most)

    def write_small(self, path: str, data: bytes) -> None:
        self.hooks.before(Step("write_small", path))
        self.real.write_small(path, data)

    def replace_small(self, path: str, data: bytes) -> None:
        self.hooks.before(Step("replace_small", path))
        self.real.write_small(path + ".tmp", data)
        Path(path + ".tmp").replace(path)

    def usage(self, path: str) -> DiskUsage:
        return self.real.usage(path)

    def set_mtime(self, path: str, mtime_ms: int) -> None:
        self.hooks.before(Step("set_mtime", path))
        self.real.set_mtime(path, mtime_ms)

    def lock(self, path: str) -> DiskLock:
        return self.real.lock(path)


class FaultDisk(HookedDisk):
    """The process dies at operation `fail_at` (1, 2, ...) and cannot do anything more. A write dies half done.

    `error` makes it a disk error instead: raised once, and the process lives on.
    """

    def __init__(self, fail_at: int = 0, *, error: Callable[[str, str], Exception] | None = None) -> None:
        super().__init__()
        self.operations: list[str] = []
        self.fail_at = fail_at
        self._error = error
        disk = self

        class Counting(Hooks):
            def before(self, step: Step) -> None:
                disk.operations.append(str(step))
                if not disk.fail_at or len(disk.operations) < disk.fail_at:
                    return
                if disk._error is not None:
                    if len(disk.operations) == disk.fail_at:
                        raise disk._error(step.action, step.path)
                    return
                if step.region is not None and len(disk.operations) == disk.fail_at:
                    step.region.write(step.position, step.data[: len(step.data) // 2])
                raise CrashError(f"operation {len(disk.operations)}: {step}")

        self.hooks = Counting()

    @property
    def failed(self) -> bool:
        return 0 < self.fail_at <= len(self.operations)


# A machine that loses power ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Inode:
    """One file, whatever its name: every version of each page since its last sync, and if its size is durable."""

    content: Callable[[int, int], bytes]
    size: int
    size_synced: bool
    versions: dict[int, list[bytes]] = field(default_factory=dict)

    def pages(self) -> range:
        return range(-(-self.size // PAGE_SIZE))

    def page(self, number: int) -> bytes:
        return self.content(number * PAGE_SIZE, min(self.size, (number + 1) * PAGE_SIZE))


def _inode(data: bytes, *, size_synced: bool = True) -> _Inode:
    """A file with this content and no other version of it."""
    inode = _Inode(lambda start, end: data[start:end], len(data), size_synced)
    inode.versions = {number: [inode.page(number)] for number in inode.pages()}
    return inode


class Survival(NamedTuple):
    """Which of what was not synced is there after the cut: picks a version out of several, oldest first."""

    name: str
    pick: Callable[[int, int], int]
    """(how many versions, number of the choice) -> which."""


def survival_patterns(seed: int) -> list[Survival]:
    random = Random(seed)
    return [
        Survival("lost", lambda _versions, _number: 0),
        Survival("kept", lambda versions, _number: versions - 1),
        Survival("alternate", lambda versions, number: (versions - 1) * (number % 2)),
        Survival(f"random {seed}", lambda versions, _number: random.randrange(versions)),
    ]


class PowerDisk(HookedDisk):
    """Remembers what is durable. `on_step` is called before every operation: a good place for a cut."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = str(root)
        self.on_step: Callable[[str], None] = lambda _what: None
        self._names = {str(path): _inode(path.read_bytes()) for path in root.rglob("*") if path.is_file()}
        self._durable_names = dict(self._names)
        disk = self

        class Recording(Hooks):
            def before(self, step: Step) -> None:
                disk.on_step(str(step))

            def stored(self, region: Region, positions: Iterable[int], length: int) -> None:
                inode = disk._names.get(region.path)
                if inode is not None and length > 0:
                    for number in sorted(
                        {n for p in positions for n in range(p // PAGE_SIZE, (p + length - 1) // PAGE_SIZE + 1)}
                    ):
                        version = inode.page(number)
                        if version != inode.versions[number][-1]:
                            inode.versions[number].append(version)

            def synced(self, region: Region, position: int, length: int) -> None:
                inode = disk._names.get(region.path)
                if inode is not None and length > 0:
                    inode.size_synced = True
                    for number in range(position // PAGE_SIZE, (position + length - 1) // PAGE_SIZE + 1):
                        version = inode.page(number)
                        assert version == inode.versions[number][-1], f"{region.path}: a store was not declared"
                        inode.versions[number] = [version]

        self.hooks = Recording()

    def _adopt(self, path: str, region: Region, *, new: bool) -> None:
        buf = region.buf
        if path in self._names and not new:
            self._names[path].content = lambda start, end: bytes(buf[start:end])
            return
        inode = _Inode(lambda start, end: bytes(buf[start:end]), region.size, not new)
        inode.versions = {number: [inode.page(number)] for number in inode.pages()}
        self._names[path] = inode
        if not new:
            self._durable_names[path] = inode

    def create(self, path: str, size: int, *, reserve: bool) -> Region:
        region = super().create(path, size, reserve=reserve)
        self._adopt(path, region, new=True)
        return region

    def open(self, path: str, *, size: int | None = None) -> Region:
        region = super().open(path, size=size)
        self._adopt(path, region, new=False)
        return region

    def unlink(self, path: str) -> None:
        super().unlink(path)
        self._names.pop(path, None)

    def sync_directory(self, path: str) -> None:
        super().sync_directory(path)
        for name in {*self._names, *self._durable_names}:
            if name.rpartition("/")[0] == path:
                if name in self._names:
                    self._durable_names[name] = self._names[name]
                    self._names[name].size_synced = True
                else:
                    del self._durable_names[name]

    def write_small(self, path: str, data: bytes) -> None:
        super().write_small(path, data)
        self._names[path] = _inode(data, size_synced=False)

    def replace_small(self, path: str, data: bytes) -> None:
        super().replace_small(path, data)
        self._names[path] = _inode(data)
        self.sync_directory(path.rpartition("/")[0])

    def unsynced(self) -> int:
        """How many pages, names and sizes a cut could take."""
        pages = sum(len(kept) > 1 for inode in self._names.values() for kept in inode.versions.values())
        sizes = sum(not inode.size_synced for inode in self._names.values())
        return pages + sizes + sum(self._names.get(n) is not self._durable_names.get(n) for n in self._all_names())

    def _all_names(self) -> list[str]:
        return sorted({*self._names, *self._durable_names})

    def image(self, target: Path, survival: Survival) -> Path:
        """The directory after a cut right now."""
        choice = 0

        def pick(versions: int) -> int:
            nonlocal choice
            choice += versions > 1
            return survival.pick(versions, choice) if versions > 1 else 0

        for folder in [self.root, *(top for top, _, _ in os.walk(self.root))]:
            (target / os.path.relpath(folder, self.root)).mkdir(parents=True, exist_ok=True)
        for name in self._all_names():
            before, after = self._durable_names.get(name), self._names.get(name)
            inode = (before, after)[pick(2)] if before is not after else after
            if inode is None:
                continue
            whole = inode.size_synced or pick(2)
            content = b"".join(inode.versions[number][pick(len(inode.versions[number]))] for number in inode.pages())
            path = target / os.path.relpath(name, self.root)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if whole else b"")
        return target
