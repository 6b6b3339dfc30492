"""What can go wrong in the store, as one small tree.

A word of the protocol (`PutMessageStatus.MESSAGE_ILLEGAL`, "end of file") is a returned value, not an error. These
are raised when the disk broke its promise, the files contradict the format, or the caller asked for what cannot be.
"""

from __future__ import annotations

import errno as errno_names


class StoreError(Exception):
    """Parent of every error that the store raises on purpose."""


class ConfigError(StoreError):
    """A configuration value is not allowed. Each problem names the key, the value and what is allowed."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


class CorruptRecordError(StoreError):
    """These bytes are not a valid record. The only error that decoding raises.

    `torn` is true where the bytes simply end too early: a longer read might have decoded.
    """

    def __init__(self, reason: str, *, offset: int | None = None, torn: bool = False) -> None:
        self.reason = reason
        self.offset = offset
        self.torn = torn
        super().__init__(reason if offset is None else f"{reason} at offset {offset}")


class DiskError(StoreError):
    """The disk refused: carries what was tried, the path and errno."""

    def __init__(self, action: str, path: str, errno: int, detail: str = "") -> None:
        self.action = action
        self.path = path
        self.errno = errno
        name = errno_names.errorcode.get(errno, str(errno))
        super().__init__(f"cannot {action} {path}: {detail or name} [{name}]")


class DiskFullError(DiskError):
    """ENOSPC or EDQUOT: there was no room. Nothing of the operation counts as done."""


class DiskIOError(DiskError):
    """Any other failure of a disk operation."""


class StoreLockedError(StoreError):
    """Another process (or another store of this process) has the directory open for writing."""


class StoreClosedError(StoreError):
    """The store, or the file asked for, has been shut down."""


class DamagedStoreError(StoreError):
    """The directory contradicts itself in a way that recovery must not repair by guessing.

    Names the file, and the offset where there is one. `salvage` says that opening with salvage goes on behind it.
    """

    def __init__(self, reason: str, *, path: str = "", offset: int | None = None, salvage: bool = False) -> None:
        self.reason = reason
        self.path = path
        self.offset = offset
        self.salvage = salvage
        where = f"{path}: " if path else ""
        at = f" (offset {offset})" if offset is not None else ""
        super().__init__(f"{where}{reason}{at}")


class QueueGapError(StoreError):
    """A consume queue was handed an index beyond its end. Appending it would shift every later index."""

    def __init__(self, topic: str, queue_id: int, expected: int, found: int) -> None:
        self.topic, self.queue_id, self.expected, self.found = topic, queue_id, expected, found
        super().__init__(f"queue {topic}/{queue_id}: next index is {expected}, record has {found}")
