"""The clocks: one function per kind of work. Each opens a store in an empty folder and returns seconds."""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.protocol import BenchMessage, CpuEntrant, Durability, Store, StoreFactory
from benchmarks.workload import QUEUES

FILL_BATCH = 1000


class WrongAnswerError(Exception):
    """A contestant did not give back what it was given. Its speed means nothing."""


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A collection would walk the prepared messages of everyone, in whichever run it happens to start."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def put_one_by_one(
    factory: StoreFactory, folder: Path, messages: Sequence[BenchMessage], durability: Durability
) -> float:
    """Seconds on the wall clock for one append a message."""
    store = factory()
    items = store.prepare(messages)
    store.open(folder, durability)
    try:
        append = store.append
        _quiet_disk()
        with no_garbage_collection():
            started = time.perf_counter()
            for item in items:
                append(item)
            store.settle()
            return time.perf_counter() - started
    finally:
        store.close()


def put_in_batches(
    factory: StoreFactory, folder: Path, messages: Sequence[BenchMessage], durability: Durability, batch: int
) -> float:
    """Seconds on the wall clock for one append per `batch` messages."""
    store = factory()
    items = store.prepare(messages)
    batches = [items[i : i + batch] for i in range(0, len(items), batch)]
    store.open(folder, durability)
    try:
        append_batch = store.append_batch
        _quiet_disk()
        with no_garbage_collection():
            started = time.perf_counter()
            for items in batches:
                append_batch(items)
            store.settle()
            return time.perf_counter() - started
    finally:
        store.close()


def read_all_queues(factory: StoreFactory, folder: Path, messages: Sequence[BenchMessage], passes: int) -> float:
    """CPU seconds to read every queue in order, `passes` times. One pass before checks what comes back."""
    store = factory()
    _fill(store, folder, messages)
    try:
        check_order(store, messages)
        with no_garbage_collection():
            started = time.thread_time()
            for _ in range(passes):
                for queue in range(QUEUES):
                    # A deque of no length takes every value and drops it, without a step of Python.
                    collections.deque(store.read_in_order(queue), maxlen=0)
            return time.thread_time() - started
    finally:
        store.close()


def lookup_all_keys(factory: StoreFactory, folder: Path, messages: Sequence[BenchMessage], seed: int) -> float:
    """CPU seconds to look every key up once in random order and compare the body."""
    store = factory()
    _fill(store, folder, messages)
    try:
        pairs = list(zip(store.prepare_keys(messages), (message.body for message in messages), strict=True))
        random.Random(seed).shuffle(pairs)
        lookup = store.lookup
        for key, _ in pairs[:FILL_BATCH]:
            lookup(key)
        with no_garbage_collection():
            started = time.thread_time()
            for key, body in pairs:
                if lookup(key) != body:
                    raise WrongAnswerError(f"lookup of {key!r} did not give the body that was put")
            return time.thread_time() - started
    finally:
        store.close()


def cpu_work(entrant: CpuEntrant, records: int) -> float:
    """Seconds of one run of prepared work, which has to do all records."""
    work = entrant.prepare()
    clock: Callable[[], float] = time.perf_counter if entrant.wall else time.thread_time
    with no_garbage_collection():
        started = clock()
        done = work()
        seconds = clock() - started
    if done != records:
        raise WrongAnswerError(f"{entrant.name}: {done:,} records done, {records:,} given")
    return seconds


def check_store(factory: StoreFactory, messages: Sequence[BenchMessage], durability: Durability, folder: Path) -> None:
    """Put half of the messages one by one and half as batches, read all back, look all up; also a warm-up."""
    store = factory()
    items = store.prepare(messages)
    store.open(folder, durability)
    try:
        half = len(items) // 2
        for item in items[:half]:
            store.append(item)
        store.append_batch(items[half:])
        store.settle()
        store.ready_to_read()
        # Under SYNC the plain file has one file for all queues and cannot be read by queue.
        if store.indexed or durability is Durability.ASYNC:
            check_order(store, messages)
        if store.indexed:
            for key, message in zip(store.prepare_keys(messages), messages, strict=True):
                if store.lookup(key) != message.body:
                    raise WrongAnswerError(f"lookup of {message.key} did not give the body that was put")
            (unknown,) = store.prepare_keys([BenchMessage(0, "no-such-key", b"")])
            if store.lookup(unknown) is not None:
                raise WrongAnswerError("lookup of a key that was never put found something")
    finally:
        store.close()


def check_order(store: Store[object, object], messages: Sequence[BenchMessage]) -> None:
    """Every queue gives back all its messages in the order they were put."""
    bodies: list[list[bytes]] = [[] for _ in range(QUEUES)]
    for message in messages:
        bodies[message.queue].append(message.body)
    for queue, expected in enumerate(bodies):
        count = 0
        for raw in store.read_in_order(queue):
            if count >= len(expected) or expected[count] not in bytes(raw):
                raise WrongAnswerError(f"queue {queue}, index {count}: not the message that was put there")
            count += 1
        if count != len(expected):
            raise WrongAnswerError(f"queue {queue}: {count:,} messages read, {len(expected):,} put")


def _fill(store: Store[object, object], folder: Path, messages: Sequence[BenchMessage]) -> None:
    items = store.prepare(messages)
    store.open(folder, Durability.ASYNC)
    for i in range(0, len(items), FILL_BATCH):
        store.append_batch(items[i : i + FILL_BATCH])
    store.settle()
    store.ready_to_read()


def _quiet_disk() -> None:
    """What the run before left in the page cache is written now, not on the clock of the next one."""
    os.sync()
