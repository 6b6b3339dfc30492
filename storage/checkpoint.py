"""The checkpoint page, and the small files that say whether a store was stopped well.

`checkpoint`, 4096 bytes, big-endian longs:

offset  field                    meaning
0       physic_msg_timestamp     store time up to which the commit log is flushed
8       logics_msg_timestamp     store time up to which the consume queues are flushed
16      index_msg_timestamp      store time up to which the index is flushed
24      master_flushed_offset    5.x, replication
32      confirm_phy_offset       5.x
64      clean_seal               ours, strict only: 8 bytes of mark, 4 of CRC-32 over the queues at the last clean stop

RocketMQ maps the page and touches only its own longs, so the seal survives it; a seal that does not match what the
queues say is worth nothing, which is just what it is for. `abort` exists while a store runs and after an unclean stop.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from brokerlab.storage.config import StoreConfig
from brokerlab.storage.disk import Disk, Region
from brokerlab.storage.errors import DiskIOError

CHECKPOINT_SIZE = 4096
RECOVERY_MARGIN_MS = 3_000
"""Timestamps are kept to the millisecond, and flushes overlap: recovery starts this much earlier."""
_LONGS = struct.Struct(">5q")
_SEAL_AT = 64
_SEAL = struct.Struct(">8sI")
_SEAL_MARK = b"BLABSEAL"


class CheckpointValues(NamedTuple):
    """What the page says."""

    physic_msg_timestamp: int = 0
    logics_msg_timestamp: int = 0
    index_msg_timestamp: int = 0
    master_flushed_offset: int = 0
    confirm_phy_offset: int = 0

    @property
    def min_timestamp(self) -> int:
        """Up to here log and queues are surely flushed."""
        return max(0, min(self.physic_msg_timestamp, self.logics_msg_timestamp) - RECOVERY_MARGIN_MS)

    @property
    def min_timestamp_index(self) -> int:
        return min(self.min_timestamp, self.index_msg_timestamp)


def decode_checkpoint(data: bytes) -> CheckpointValues:
    """Any length is taken, as the original does: what is missing is 0."""
    return CheckpointValues._make(_LONGS.unpack_from(data[: _LONGS.size].ljust(_LONGS.size, b"\0")))


class Checkpoint:
    """The page, mapped. Values are set in memory and become durable with `flush`."""

    def __init__(self, disk: Disk, path: str, config: StoreConfig) -> None:
        self.path = path
        self.physic_msg_timestamp = 0
        self.logics_msg_timestamp = 0
        self.index_msg_timestamp = 0
        self.master_flushed_offset = 0
        self.confirm_phy_offset = 0
        self._disk = disk
        self._longs = config.dialect.checkpoint_longs
        self._region: Region | None = None

    def load(self) -> None:
        """Open the page, or make it."""
        info = self._disk.stat(self.path)
        if info is None:
            self._region = self._disk.create(self.path, CHECKPOINT_SIZE, reserve=True)
            return
        if info.size == 0:  # a crash between creation and the first byte
            self._disk.unlink(self.path)
            self._region = self._disk.create(self.path, CHECKPOINT_SIZE, reserve=True)
            return
        self._region = self._disk.open(self.path, size=CHECKPOINT_SIZE)
        values = decode_checkpoint(self._region.buf[: _LONGS.size])
        self.physic_msg_timestamp, self.logics_msg_timestamp, self.index_msg_timestamp = values[:3]
        self.master_flushed_offset, self.confirm_phy_offset = values[3:]

    @property
    def values(self) -> CheckpointValues:
        return CheckpointValues(
            self.physic_msg_timestamp,
            self.logics_msg_timestamp,
            self.index_msg_timestamp,
            self.master_flushed_offset,
            self.confirm_phy_offset,
        )

    def flush(self) -> None:
        """Write this dialect's longs and make the page durable."""
        size = 8 * self._longs
        self._store(0, _LONGS.pack(*self.values)[:size])

    def seal(self) -> int | None:
        """The CRC left by the last clean stop; None if there is none."""
        assert self._region is not None
        mark, crc = _SEAL.unpack_from(self._region.buf, _SEAL_AT)
        return crc if mark == _SEAL_MARK else None

    def set_seal(self, crc: int) -> None:
        self._store(_SEAL_AT, _SEAL.pack(_SEAL_MARK, crc))

    def _store(self, position: int, data: bytes) -> None:
        assert self._region is not None, "checkpoint is not loaded"
        if self._region.buf[position : position + len(data)] != data:
            self._region.buf[position : position + len(data)] = data
            self._region.wrote(position, len(data))
        self._region.sync(0, CHECKPOINT_SIZE)

    def close(self) -> None:
        if self._region is not None:
            self._region.close()
            self._region = None


class AbortFile:
    """Present while the store runs: found at start, it says that the last stop was not clean."""

    def __init__(self, disk: Disk, path: str, config: StoreConfig) -> None:
        self.path = path
        self._disk = disk
        self._text = str(config.process_id).encode() if config.dialect.abort_holds_pid else b""

    def exists(self) -> bool:
        return self._disk.stat(self.path) is not None

    def create(self) -> None:
        """Durable before the first put: a power cut must not make an unclean stop look clean."""
        if self._text:
            former = self._disk.read_small(self.path)
            self._disk.write_small(self.path + ".bak", former or b"")
        self._disk.replace_small(self.path, self._text)

    def remove(self) -> None:
        self._disk.unlink(self.path)
        parent = self.path.rpartition("/")[0]
        try:
            self._disk.sync_directory(parent)
        except DiskIOError:
            # The name is gone for us; should it come back after a power cut, the next start only looks closer.
            return
