"""One mapped file with its three positions, and the pool of write buffers.

wrote      how far bytes were appended                       moved by the put path (queue files: the queue builder)
committed  how far a write buffer was handed to the OS       moved by the committer
flushed    how far bytes are durable                         moved by whoever holds the flush lock

wrote >= committed >= flushed with a write buffer; without one committed is not used. Each has one writer, so there is
no lock here. A position moves only after the work it stands for has succeeded.
"""

from __future__ import annotations

from collections import deque
from mmap import mmap

import numpy as np

from brokerlab.storage.disk import PAGE_SIZE, Disk, Region
from brokerlab.storage.errors import DiskError

_ZERO_CHUNK = 1 << 20


class MappedFile:
    """A file of fixed size that starts at `start` of its queue. Readers hold it, or it may go away under them."""

    def __init__(
        self,
        disk: Disk,
        region: Region,
        *,
        start: int,
        write_buffer: bytearray | None = None,
        half_appends: bool = False,
    ) -> None:
        self.start = start
        self.path = region.path
        self.size = region.size
        self.region = region
        self.view = memoryview(region.buf)
        self.write_buffer = write_buffer
        self.target: mmap | bytearray = region.buf if write_buffer is None else write_buffer
        self.wrote_position = 0
        self.committed_position = 0
        self.flushed_position = 0
        self.store_timestamp = 0
        self._disk = disk
        self._half_appends = half_appends  # quirk failed_append_leaves_half_record (museum row 42)
        self._blot_end = 0
        self.is_blotted = False
        """Did an append fail here and its bytes could not be cleared yet?"""
        self._references = 1
        self._available = True
        self._first_shutdown_ms = 0
        self._closed = False
        self._unlinked = False

    def __repr__(self) -> str:
        return (
            f"MappedFile({self.path}, wrote={self.wrote_position}, committed={self.committed_position}, "
            f"flushed={self.flushed_position})"
        )

    # Positions

    @property
    def is_full(self) -> bool:
        return self.wrote_position == self.size

    @property
    def read_position(self) -> int:
        """How far readers, and the flusher, may go."""
        return self.wrote_position if self.write_buffer is None else self.committed_position

    def set_positions(self, position: int) -> None:
        """All three at once: load and recovery."""
        self.wrote_position = self.committed_position = self.flushed_position = position

    # Append

    def appended(self, length: int, store_timestamp: int) -> None:
        """`length` bytes were just stored into `target` at `wrote_position`: count them."""
        position = self.wrote_position
        if self._half_appends:
            self.wrote_position = position + length
        if self.write_buffer is None:
            try:
                self.region.wrote(position, length)
            except DiskError:
                if not self._half_appends:
                    self.blot(length)
                raise
        self.wrote_position = position + length
        self.store_timestamp = store_timestamp

    def blot(self, length: int) -> None:
        """Zero what a failed append left, now or before the next append: half a record must never lie in the log."""
        self._blot_end = max(self._blot_end, self.wrote_position + length)
        self.is_blotted = True
        self.clear_blot()

    def clear_blot(self) -> None:
        """Raises nothing: a disk that cannot take the zeros now is asked again before the next append."""
        start, end = self.wrote_position, self._blot_end
        if end > start:
            self.target[start:end] = bytes(end - start)
            try:
                if self.write_buffer is None:
                    self.region.wrote(start, end - start)
            except DiskError:
                return
        self._blot_end = 0
        self.is_blotted = False

    def append_through_file(self, data: bytes) -> None:
        """Append by a file write, not through the map: for sparse files, where a full disk must be an error."""
        self.region.write(self.wrote_position, data)
        self.wrote_position += len(data)

    # Commit and flush

    def commit(self, least_pages: int) -> int:
        """Hand the write buffer's bytes to the OS and return `committed_position`. Called by the committer only."""
        if self.write_buffer is None:
            return self.wrote_position
        if _due(self.wrote_position, self.committed_position, least_pages, full=self.is_full):
            target = self.wrote_position
            self.region.write(self.committed_position, bytes(self.write_buffer[self.committed_position : target]))
            self.committed_position = target
        return self.committed_position

    def release_write_buffer(self) -> bytearray | None:
        """Once everything is committed the buffer can serve another file."""
        if self.write_buffer is None or self.committed_position < self.size:
            return None
        buffer, self.write_buffer, self.target = self.write_buffer, None, self.region.buf
        return buffer

    def flush(self, least_pages: int) -> int:
        """Make written bytes durable and return `flushed_position`. Called by the flusher only."""
        if _due(self.read_position, self.flushed_position, least_pages, full=self.is_full) and self.hold():
            try:
                # Read before the sync: it may pause us, and what is appended meanwhile is not covered by it.
                target = self.read_position
                self.region.sync(self.flushed_position, target - self.flushed_position)
                self.flushed_position = target  # not reached when sync raises
            finally:
                self.release()
        return self.flushed_position

    def zero_from(self, position: int, *, sync: bool = True) -> int:
        """Clear everything behind `position`, make that durable, and return how many bytes were not zero."""
        changed = 0
        cells = np.frombuffer(self.view, dtype=np.uint8)
        for start, end in self.region.data_ranges():
            for chunk in range(max(start, position), end, _ZERO_CHUNK):
                dirty = np.flatnonzero(cells[chunk : min(chunk + _ZERO_CHUNK, end)])
                if len(dirty):
                    first, last = chunk + int(dirty[0]), chunk + int(dirty[-1])
                    self.region.write(first, bytes(last + 1 - first))
                    changed += len(dirty)
        if sync:  # even if nothing changed: whoever cleared it before us may have ended before the sync
            self.region.sync(position, self.size - position)
        return changed

    def resync(self, position: int, end: int) -> None:
        """Rewrite these pages with what they hold, then sync: after a crash nobody knows which of them are durable,
        and the kernel may count a page as clean whose write-back failed."""
        if end > position:
            cells = np.frombuffer(self.region.buf, dtype=np.uint8)
            touched = np.arange(position - position % PAGE_SIZE, end, PAGE_SIZE, dtype=np.int64)
            cells[touched] = cells[touched]
            del cells
            self.region.wrote_scattered(touched, 1)
            self.region.sync(position, end - position)

    # References

    def hold(self) -> bool:
        """Keep the map alive until `release`; False if the file is going away."""
        if self._available and self._references > 0:
            self._references += 1
            return True
        return False

    def release(self) -> None:
        self._references -= 1
        if self._references <= 0 and not self._available:
            self._close()

    @property
    def is_available(self) -> bool:
        return self._available

    @property
    def holders(self) -> int:
        """Readers that hold the file now."""
        return self._references - self._available

    def shutdown(self, now_ms: int) -> None:
        """No new readers. The map goes when the last reader lets go."""
        if self._available:
            self._available = False
            self._first_shutdown_ms = now_ms
            self.release()

    def destroy(self, now_ms: int, force_after_ms: int) -> bool:
        """Shut down and delete the file. While somebody reads: False, and after `force_after_ms` the name is removed
        all the same; the reader's map lives until it is released."""
        self.shutdown(now_ms)
        if self._references > 0 and now_ms - self._first_shutdown_ms < force_after_ms:
            return False
        if not self._unlinked:
            self._disk.unlink(self.path)
            self._unlinked = True  # not reached when unlink raises: the next try removes the name
        return True

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self.view.release()
            self.region.close()


class TransientStorePool:
    """Write buffers of one segment each. An empty pool is no error: the file is then written through its map."""

    def __init__(self, buffers: int, size: int) -> None:
        self._free = deque(bytearray(size) for _ in range(buffers))
        self.buffers = buffers
        self.size = size

    def borrow(self) -> bytearray | None:
        return self._free.popleft() if self._free else None

    def give_back(self, buffer: bytearray) -> None:
        """Cleared first: bytes of older messages must not lie behind the next file's tail."""
        buffer[:] = bytes(len(buffer))
        self._free.appendleft(buffer)

    @property
    def available(self) -> int:
        return len(self._free)


def _due(written: int, done: int, least_pages: int, *, full: bool) -> bool:
    if full:
        return written > done
    if least_pages > 0:
        return written // PAGE_SIZE - done // PAGE_SIZE >= least_pages
    return written > done
