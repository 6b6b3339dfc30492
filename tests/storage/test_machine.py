"""The store against a plain model of it, step by step: a list of what was sent, and where dispatch and flush stand.

The process may stop well or die at any step. Dead, it leaves the page cache: all that was written, but for a write
buffer's uncommitted bytes. Worse faults strike between death and restart: sectors of the log that were not flushed are
gone, the last record is cut at any byte, files of queues, index or checkpoint are gone. After each restart every
message beyond the fault's reach is there once, in order, through every path, and a second restart changes nothing.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, ClassVar

from hypothesis import HealthCheck, Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from brokerlab.storage.message import BatchItem, SysFlag, encode_properties
from brokerlab.storage.message_store import MessageStore
from brokerlab.storage.reading import Boundary
from brokerlab.storage.results import GetMessageStatus, PutMessageStatus
from tests.storage.store_model import (
    HOUR,
    NOW,
    HookedDisk,
    Queue,
    Sent,
    a_message,
    assert_visible,
    files_under,
    overwrite,
    put,
    scanned,
    sent_batch,
    survivors,
    tiny_config,
    tree,
)

SOAK = bool(os.environ.get("BROKERLAB_SOAK"))
SECTOR = 512

queues = st.tuples(st.sampled_from(["orders", "refunds"]), st.integers(0, 1))
# "Aa" and "BB" have one Java hash.
keys = st.lists(st.sampled_from(["Aa", "BB", "k1", "k2", "ключ"]), max_size=3).map(" ".join)
sizes = st.one_of(st.integers(0, 60), st.integers(0, 1500), st.integers(3500, 4096))
ticks = st.sampled_from([0, 0, 1, 40, 999, 1000, 3001, 20_000])


class StoreMachine(RuleBasedStateMachine):
    """`sent` is the model: everything that the log should hold, oldest first."""

    config: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="brokerlab-machine-"))
        self.root = self.folder / "store"
        self.now = NOW
        self.number = 0
        self.sent: list[Sent] = []
        self.gone: list[Sent] = []
        """Deleted by expiry, or taken by a fault. Nothing may find them."""
        self.next_index: dict[Queue, int] = {}
        self.store: MessageStore | None = None

    def teardown(self) -> None:
        if self.store is not None:
            self.store.abandon(self.now)
        shutil.rmtree(self.folder)

    @initialize(
        log=st.sampled_from([4096, 8192, 16384]),
        queue=st.sampled_from([200, 400]),
        index=st.sampled_from([(10, 20), (50, 100)]),
    )
    def begin(self, log: int, queue: int, index: tuple[int, int]) -> None:
        self.settings = tiny_config(
            mapped_file_size_commit_log=log,
            mapped_file_size_consume_queue=queue,
            max_hash_slot_num=index[0],
            max_index_num=index[1],
            **self.config,
        )
        self.start()

    @property
    def opened(self) -> MessageStore:
        assert self.store is not None
        return self.store

    def start(self) -> None:
        self.store = MessageStore(HookedDisk(), str(self.root), self.settings)
        self.store.open(self.now)

    # What producers and services do

    def text(self, size: int) -> bytes:
        self.number += 1
        return (f"{self.number}." * (size // 2 + 1)).encode()[:size]

    def count(self, new: list[Sent]) -> None:
        for message in new:
            if message.is_queued:
                assert message.queue_offset == self.next_index.get(message.queue, 0)
                self.next_index[message.queue] = message.queue_offset + 1
            else:
                assert message.queue_offset == 0
        self.sent += new

    @rule(
        queue=queues, size=sizes, keys=keys, tags=st.sampled_from(["", "TagA", "TagB"]), unique=st.booleans(), ms=ticks
    )
    def puts(self, queue: Queue, size: int, keys: str, tags: str, unique: bool, ms: int) -> None:
        self.now += ms
        body = self.text(size)
        message = a_message(
            body, topic=queue[0], queue_id=queue[1], keys=keys, tags=tags, unique=f"u{self.number}" if unique else ""
        )
        exact = 91 + len(body) + len(queue[0]) + len(message.properties)
        if exact + 8 > self.settings.mapped_file_size_commit_log:
            refused = self.opened.put(message, self.now)
            assert refused.status is PutMessageStatus.MESSAGE_ILLEGAL
            return
        self.count([put(self.opened, message, self.now)])

    @rule(queue=queues, sizes=st.lists(st.integers(0, 300), min_size=1, max_size=6), keys=keys, ms=ticks)
    def puts_a_batch(self, queue: Queue, sizes: list[int], keys: str, ms: int) -> None:
        self.now += ms
        envelope = a_message(b"", topic=queue[0], queue_id=queue[1])
        properties = encode_properties({"KEYS": keys}) if keys else b""
        items = [BatchItem(self.text(size), properties) for size in sizes]
        self.count(sent_batch(envelope, items, self.opened.put_batch(envelope, items, self.now)))

    @rule(queue=queues, rolled_back=st.booleans(), keys=keys)
    def puts_half_of_a_transaction(self, queue: Queue, rolled_back: bool, keys: str) -> None:
        flag = SysFlag.TRANSACTION_ROLLBACK if rolled_back else SysFlag.TRANSACTION_PREPARED
        message = a_message(self.text(30), topic=queue[0], queue_id=queue[1], keys=keys, sys_flag=flag)
        self.count([put(self.opened, message, self.now)])

    @rule(ms=st.integers(1, 5000))
    def clock_steps_back(self, ms: int) -> None:
        self.now -= ms

    @rule(most=st.sampled_from([1, 3, None, None]))
    def dispatches(self, most: int | None) -> None:
        store = self.opened
        store.dispatch(most)
        if most is None:
            assert not [m for m in self.sent if store.reput_from_offset < m.end <= store.confirm_offset]

    @rule()
    def commits(self) -> None:
        self.opened.commit_log.files.commit_all()

    @rule()
    def flushes_the_log(self) -> None:
        store = self.opened
        store.flush_log()
        assert store.commit_log.files.flushed_where == store.commit_log.files.max_offset

    @rule()
    def flushes_the_queues(self) -> None:
        self.opened.flush_queues()

    @rule(force=st.booleans(), hours=st.integers(0, 3))
    def old_files_expire(self, force: bool, hours: int) -> None:
        store, before = self.opened, self.opened.commit_log.files.min_offset
        self.now += hours * HOUR
        store.delete_expired_files(self.now, force=force)
        begin = store.commit_log.files.min_offset
        expired = [message for message in self.sent if before <= message.physical_offset < begin]
        assert all(message.end <= store.reput_from_offset for message in expired)
        assert force or all(message.store_timestamp <= self.now - HOUR for message in expired)
        self.sent = self.sent[len(expired) :]
        self.gone += expired
        event(f"expired {min(len(expired), 1)}")

    # What consumers see

    def visible(self) -> list[Sent]:
        return [message for message in self.sent if message.end <= self.opened.reput_from_offset]

    @rule()
    def everything_dispatched_is_found(self) -> None:
        assert_visible(self.opened, self.gone + self.sent, self.visible())

    @rule(queue=queues, ms=st.integers(-2, 2), pick=st.integers(0, 1000), boundary=st.sampled_from(list(Boundary)))
    def finds_by_time(self, queue: Queue, ms: int, pick: int, boundary: Boundary) -> None:
        there = [message for message in self.visible() if message.queue == queue and message.is_queued]
        if not there:
            return
        time = there[pick % len(there)].store_timestamp + ms
        index = self.opened.reader.index_by_time(*queue, time, boundary)
        older = [message for message in there if message.store_timestamp < time]
        not_newer = [message for message in there if message.store_timestamp <= time]
        first, last = there[0].queue_offset, there[-1].queue_offset
        if boundary is Boundary.LOWER:
            assert index == (older[-1].queue_offset + 1 if older else first)
        elif boundary is Boundary.UPPER:
            assert index == (not_newer[-1].queue_offset if not_newer else first)
        else:
            best = min(abs(message.store_timestamp - time) for message in there)
            assert first <= index <= last
            assert abs(there[index - first].store_timestamp - time) == best

    @rule(queue=queues, beyond=st.integers(1, 3))
    def asks_outside_of_a_queue(self, queue: Queue, beyond: int) -> None:
        found = self.opened.queues.find(*queue)
        if found is None or not found.max_index:
            return
        with self.opened.reader.get_message(*queue, found.max_index + beyond) as result:
            assert (result.status, result.next_index) == (GetMessageStatus.OFFSET_OVERFLOW_BADLY, found.max_index)
        if found.min_index:
            with self.opened.reader.get_message(*queue, found.min_index - 1) as result:
                assert (result.status, result.next_index) == (GetMessageStatus.OFFSET_TOO_SMALL, found.min_index)

    # Stop and restart

    @rule()
    def stops_and_starts_again(self) -> None:
        self.opened.close(self.now)
        assert not (self.root / "abort").exists()
        self.start()
        report = self.opened.report
        assert report is not None
        assert not report.unclean
        assert not report.queues_changed
        self.after_restart(len(self.sent))

    def dies(self) -> tuple[int, int]:
        """(flushed, written to the page cache) up to these offsets."""
        files = self.opened.commit_log.files
        reach = files.flushed_where, files.max_offset
        self.opened.abandon(self.now)
        self.store = None
        return reach

    def after_restart(self, at_least: int) -> None:
        """At least so many of the messages are there, and nothing else."""
        store = self.opened
        there = survivors(store, self.sent)
        assert len(there) >= at_least, f"{len(there)} of {at_least} messages are left"
        lost = self.sent[len(there) :]
        assert there == self.sent[: len(there)]
        for message in reversed(lost):
            if message.is_queued:
                self.next_index[message.queue] = message.queue_offset
        self.sent = there
        self.gone += lost
        for queue, index in self.next_index.items():
            assert store.commit_log.next_queue_offset.get(queue, 0) == index, queue
        assert store.reput_from_offset == store.commit_log.files.max_offset

    def count_up_to(self, offset: int) -> int:
        return sum(message.end <= offset for message in self.sent)

    @rule(again=st.booleans())
    def is_killed(self, again: bool) -> None:
        _, written = self.dies()
        self.start()
        self.after_restart(self.count_up_to(written))
        if again:
            self.dies()
            once = tree(self.root)
            self.start()
            self.dies()
            assert tree(self.root) == once
            self.start()

    @rule(data=st.data())
    def loses_sectors_that_were_not_flushed(self, data: st.DataObject) -> None:
        flushed, written = self.dies()
        sectors = list(range(flushed - flushed % SECTOR, written, SECTOR))
        if sectors:
            for start in data.draw(st.lists(st.sampled_from(sectors), unique=True, max_size=4)):
                self.zero(max(start, flushed), min(start + SECTOR, written))
        self.start()
        self.after_restart(self.count_up_to(flushed))

    @precondition(lambda self: self.sent)
    @rule(part=st.floats(0, 1, exclude_max=True))
    def dies_in_the_middle_of_the_last_put(self, part: float) -> None:
        flushed, written = self.dies()
        last = self.sent[-1]
        if last.end == written and flushed <= last.physical_offset:
            cut = last.physical_offset + int(last.size * part)
            self.zero(cut, written)
            written = last.physical_offset
        self.start()
        self.after_restart(self.count_up_to(written))

    @rule(data=st.data())
    def finds_garbage_behind_a_record(self, data: st.DataObject) -> None:
        flushed, written = self.dies()
        unsure = [message for message in self.sent if flushed <= message.physical_offset and message.end <= written]
        if unsure:
            message = data.draw(st.sampled_from(unsure))
            for offset in range(message.physical_offset, written):
                self.write(offset, bytes([(offset * 7919 + self.number) % 251]))
            written = message.physical_offset
        self.start()
        self.after_restart(self.count_up_to(written))

    def zero(self, start: int, end: int) -> None:
        for offset in range(start, end):
            self.write(offset, b"\0")

    def write(self, offset: int, data: bytes) -> None:
        size = self.settings.mapped_file_size_commit_log
        overwrite(self.root / "commitlog" / f"{offset - offset % size:020}", offset % size, data)

    @rule(what=st.sampled_from(["consumequeue", "index", "checkpoint", "one of each"]), pick=st.integers(0, 1000))
    def loses_what_can_be_rebuilt(self, what: str, pick: int) -> None:
        _, written = self.dies()
        if what == "one of each":
            (self.root / "checkpoint").unlink()
            for part in ("consumequeue", "index"):
                files = files_under(self.root, part)
                if files:
                    files[pick % len(files)].unlink()
        elif what == "checkpoint":
            (self.root / "checkpoint").unlink()
        else:
            shutil.rmtree(self.root / what, ignore_errors=True)
        there = self.sent[: self.count_up_to(written)]
        if what in ("consumequeue", "one of each"):
            # A queue without a record in the log has nothing left that says where it was.
            for queue in list(self.next_index):
                if not any(message.queue == queue and message.is_queued for message in there):
                    known = self.root / "consumequeue" / queue[0] / str(queue[1])
                    if not any(known.glob("*")):
                        self.next_index[queue] = 0
                        self.sent = [m for m in self.sent if m.queue != queue or not m.is_queued or m in there]
        self.start()
        self.after_restart(len(there))

    @invariant()
    def the_log_is_what_was_sent(self) -> None:
        if self.store is not None and self.sent:
            readable = [message for message in self.sent if message.end <= self.store.commit_log.files.max_offset]
            assert [m.physical_offset for m in readable] == [r.physical_offset for r in scanned(self.store)]


class PooledStoreMachine(StoreMachine):
    """With the pool a crash takes what was not committed; nothing of it can be read before."""

    config: ClassVar[dict[str, Any]] = {"transient_store_pool_enable": True}


StoreMachine.TestCase.settings = PooledStoreMachine.TestCase.settings = settings(
    max_examples=2000 if SOAK else 60,
    stateful_step_count=60 if SOAK else 40,
    deadline=None,
    derandomize=not SOAK,
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink],
)

TestStore = StoreMachine.TestCase
TestPooledStore = PooledStoreMachine.TestCase
