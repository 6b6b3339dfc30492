"""Which RocketMQ we speak (dialect), and which of its weaknesses we repeat (quirks).

A **dialect** is what differs between versions and harms nobody: bytes, limits, statuses. A **quirk** is a weakness of
the original, a named switch with its row in the museum (docs/museum.md). `strict`, the default, is the 5.3 dialect
with no quirk: the plain code path. A historic variant stands beside the plain one, where its quirk is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Dialect(Enum):
    """A family of RocketMQ versions whose files and answers agree."""

    V4_9 = "4.9"
    V5_3 = "5.3"

    @property
    def trailing_separator(self) -> bool:
        """Does the writer put 0x02 behind the last property?"""
        return self is not Dialect.V4_9

    @property
    def knows_record_v2(self) -> bool:
        """Records with a two-byte topic length exist from 5.1 on."""
        return self is not Dialect.V4_9

    @property
    def checkpoint_longs(self) -> int:
        """How many of the checkpoint's longs this version maintains."""
        return 3 if self is Dialect.V4_9 else 5

    @property
    def abort_holds_pid(self) -> bool:
        """5.x writes the process id into `abort` and keeps the former content in `abort.bak`."""
        return self is not Dialect.V4_9


class Quirk(Enum):
    """A weakness of the original that can be switched on. The value is its row in the museum."""

    STALE_TAIL_SURVIVES_TRUNCATION = 4
    PHYSICAL_OFFSET_UNCHECKED = 7
    ONE_BAD_RECORD_DROPS_THE_REST = 9
    QUEUE_GAP_SHIFTS_ENTRIES = 12
    QUEUE_ZERO_ENTRY_IS_VALID = 13
    EMPTY_QUEUE_FILE_BLOCKS_START = 14
    PREBLANK_QUEUE_STALLS_DISPATCH = 15
    RECOVERED_BYTES_COUNT_AS_FLUSHED = 41
    FAILED_APPEND_LEAVES_HALF_RECORD = 42
    STALE_QUEUE_TAIL_SURVIVES_TRUNCATION = 43
    NORMAL_RECOVERY_SKIPS_ONE = 44

    @property
    def label(self) -> str:
        """The name used in configuration and reports."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Preset:
    """A dialect and the quirks that go with it."""

    dialect: Dialect
    quirks: frozenset[Quirk]


STRICT = Preset(Dialect.V5_3, frozenset())

PRESETS = {
    "strict": STRICT,
    "rocketmq-4.9": Preset(Dialect.V4_9, frozenset(Quirk) - {Quirk.NORMAL_RECOVERY_SKIPS_ONE}),
    "rocketmq-5.3": Preset(Dialect.V5_3, frozenset(Quirk)),
}
