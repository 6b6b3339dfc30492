"""What a contestant has to do, and what `benchmarks/our_store.py` has to offer.

Every store does the same work: append a message to one of eight queues so that it can be found by its key, read a
queue in order, look a key up. What a producer would have in its hands before the call (the message object, the key
in the type that the store likes best) is prepared before the clock starts; whatever the store decides (queue index,
offset, time, checksum, record bytes) happens on the clock.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast

OURS = "brokerlab"
OURS_VIEWS = "brokerlab (views)"
OURS_SCAN_ZLIB = "brokerlab (zlib)"
OURS_SCAN_ISAL = "brokerlab (isal)"
OURS_SCAN_TWO_PROCESSES = "brokerlab (2 processes)"
OURS_DISPATCH_FROM_LOG = "brokerlab (from the log)"
OURS_DISPATCH_HANDED_OVER = "brokerlab (handed over)"

OUR_MODULE = "benchmarks.our_store"

ItemT = TypeVar("ItemT")
KeyT = TypeVar("KeyT")


class Durability(enum.Enum):
    """When an append may return."""

    ASYNC = "async"  # in the page cache, or on the way there; the store decides when it reaches the disk
    SYNC = "sync"  # on the disk


class BenchMessage(NamedTuple):
    """One message of the work: the queue it goes to, its unique key, its body."""

    queue: int
    key: str
    body: bytes


class Store(Protocol[ItemT, KeyT]):
    """One contestant. A new object is opened in an empty folder for each run.

    The calls come in this order: prepare, prepare_keys, open, append or append_batch many times, settle,
    ready_to_read, read_in_order or lookup many times, close. A tuple of items never spans two runs.
    """

    @property
    def indexed(self) -> bool:
        """Whether `lookup` can find anything. The plain file has no index."""
        ...

    def prepare(self, messages: Sequence[BenchMessage]) -> list[ItemT]:
        """Off the clock: the objects a producer hands over. Not the record, its checksum, its offset or its time."""
        ...

    def prepare_keys(self, messages: Sequence[BenchMessage]) -> list[KeyT]:
        """Off the clock: the keys in the type that `lookup` takes."""
        ...

    def open(self, folder: Path, durability: Durability) -> None:
        """Off the clock. `folder` exists and is empty."""
        ...

    def append(self, item: ItemT) -> None:
        """On the clock: one message, one acknowledgement of the promised durability."""
        ...

    def append_batch(self, items: Sequence[ItemT]) -> None:
        """On the clock: many messages (of all queues, round robin), one acknowledgement."""
        ...

    def settle(self) -> None:
        """On the clock, after the last append: finish what reading needs, such as a queue or index built behind."""
        ...

    def ready_to_read(self) -> None:
        """Off the clock: what an operator would have done long before the reads, such as a checkpoint."""
        ...

    def read_in_order(self, queue: int) -> Iterable[bytes | memoryview]:
        """On the clock: the raw values of one queue, oldest first. Each contains the body of its message."""
        ...

    def lookup(self, key: KeyT) -> bytes | None:
        """On the clock: the body of the message with this key, or None."""
        ...

    def close(self) -> None:
        """Off the clock."""
        ...


StoreFactory = Callable[[], Store[Any, Any]]


@dataclass(frozen=True, slots=True)
class LogFixture:
    """A commit log in RocketMQ's layout, written by `benchmarks.records` and not by the store under test.

    `data` holds the log from physical offset 0 to its end: records, and the blank that ends a full segment. The files
    in `folder / "commitlog"` hold the same bytes; the last one is filled up with zeros to `segment_bytes`.
    """

    folder: Path
    segment_bytes: int
    data: bytes
    records: int
    queues: int
    topic: str
    index_slots: int
    index_entries: int


@dataclass(frozen=True, slots=True)
class CpuEntrant:
    """One contestant of a case that needs no disk.

    `prepare` runs off the clock in every round and returns what is timed; that returns how many records it did, which
    must be all of them. `wall` takes the wall clock instead of the CPU time of the thread: needed for two processes.
    """

    name: str
    prepare: Callable[[], Callable[[], int]]
    wall: bool = False


class OurSide(Protocol):
    """The functions of the module `benchmarks.our_store`. It may leave out of a list what it cannot do."""

    def crc_implementation(self) -> str:
        """`isal` or `zlib`: what the store uses on the hot path here."""
        ...

    def make_store(self, *, views: bool = False) -> Store[Any, Any]:
        """A store that flushes every 500 ms under ASYNC. With `views`, reading yields memoryviews, not copies."""
        ...

    def scan_entrants(self, log: LogFixture) -> list[CpuEntrant]:
        """Recovery scans of `log.folder`, CRC of every body checked; named by the OURS_SCAN_ constants."""
        ...

    def dispatch_entrants(self, log: LogFixture) -> list[CpuEntrant]:
        """Records to queue entries and two index entries each; named by the OURS_DISPATCH_ constants."""
        ...


def load_our_side() -> OurSide | None:
    """Our store, or None while it is not there. An error inside the module is not hidden."""
    if importlib.util.find_spec(OUR_MODULE) is None:
        return None
    return cast("OurSide", importlib.import_module(OUR_MODULE))
