"""The messages, the same for everyone, and how many of them each case takes."""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmarks.protocol import BenchMessage

BODY_BYTES = 1024
QUEUES = 8
MESSAGES_DEFAULT = 160_000
MESSAGES_MIN = 1_000


def make_messages(count: int, *, seed: int) -> list[BenchMessage]:
    """`count` messages, round robin over the queues, each with its own key and its own body that does not compress."""
    random_bytes = random.Random(seed).randbytes
    return [BenchMessage(i % QUEUES, f"order-{i:08d}", random_bytes(BODY_BYTES)) for i in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Messages per run of each case.

    Appending without a sync has to last longer than the 500 ms after which our store flushes, or its flushes would
    not be on the clock; all other runs a tenth of a second or more. Seven rounds of all cases together should take 3
    to 6 minutes on two cores.
    """

    single: int
    batch_100: int
    batch_1000: int
    sync: int
    sync_batch: int
    read: int
    read_passes: int
    lookup: int
    scan: int
    dispatch: int

    @classmethod
    def of(cls, messages: int) -> Scale:
        """All sizes from one number, the messages of the single put case."""
        if messages < MESSAGES_MIN:
            raise ValueError(f"messages: {messages:,}, must be {MESSAGES_MIN:,} or more")
        return cls(
            single=messages,
            batch_100=_whole_batches(messages * 5 // 2, 100),
            batch_1000=_whole_batches(messages * 5 // 2, 1000),
            sync=max(messages // 160, 50),
            sync_batch=_whole_batches(messages // 8, 100),
            read=messages // 4,
            read_passes=5,
            lookup=messages // 4,
            scan=messages // 2,
            dispatch=messages // 4,
        )

    @property
    def largest(self) -> int:
        """How many messages have to be made."""
        return max(self.single, self.batch_100, self.batch_1000, self.sync, self.sync_batch, self.read, self.lookup)


def _whole_batches(messages: int, batch: int) -> int:
    return max(messages // batch, 1) * batch
