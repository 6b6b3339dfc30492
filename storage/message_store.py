"""The whole store as one passive object: open, put, dispatch, flush, read, clean, close.

Nothing happens by itself: whoever owns the store (services on threads, a simulated world, a test, a benchmark) calls,
and passes the time. The process lock is taken before anything is read, so a second process changes nothing.

Order of a put: `put` (log), `dispatch` (queues and index), `flush_log`, `flush_queues`; the last three as often as the
flush policy wants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from traceback import clear_frames

import numpy as np

from brokerlab.storage import recovery
from brokerlab.storage.checkpoint import AbortFile, Checkpoint
from brokerlab.storage.commit_log import CommitLog
from brokerlab.storage.config import BrokerRole, FlushDiskType, StoreConfig
from brokerlab.storage.disk import Disk, DiskLock
from brokerlab.storage.dispatch import Dispatch, dispatch_of
from brokerlab.storage.errors import ConfigError, StoreClosedError
from brokerlab.storage.historic_recovery import is_historic
from brokerlab.storage.index_service import IndexService
from brokerlab.storage.log_scan import columns
from brokerlab.storage.mapped_file import MappedFile, TransientStorePool
from brokerlab.storage.message import BatchItem, Message
from brokerlab.storage.queue_table import QueueTable
from brokerlab.storage.quirks import Dialect
from brokerlab.storage.reading import Reader
from brokerlab.storage.recovery_report import RecoveryReport
from brokerlab.storage.results import PutMessageStatus, PutResult

QUEUE_FORCE_MS = 60_000
_DISPATCH_BATCH = 4096
_NO_PROGRESS: Callable[[int, int], None] = lambda _done, _all: None  # noqa: E731


class MessageStore:
    """A store directory, opened for writing."""

    def __init__(self, disk: Disk, root: str, config: StoreConfig | None = None) -> None:
        self.config = config = config or StoreConfig()
        if config.duplication_enable:
            raise ConfigError(["duplicationEnable = true: allowed is false (records would have to carry DUP_INFO)"])
        if "," in (config.store_path_commit_log or ""):
            raise ConfigError(
                [f"storePathCommitLog = {config.store_path_commit_log}: allowed is one directory, not several"]
            )
        self.root = root.rstrip("/") or "/"
        pooled = config.transient_store_pool_enable and config.broker_role is not BrokerRole.SLAVE
        if config.dialect is Dialect.V4_9:  # 4.x uses the pool under asynchronous flush only
            pooled = pooled and config.flush_disk_type is FlushDiskType.ASYNC_FLUSH
        self.pool = (
            TransientStorePool(config.transient_store_pool_size, config.mapped_file_size_commit_log) if pooled else None
        )
        log_path = config.store_path_commit_log or f"{self.root}/commitlog"
        self.commit_log = CommitLog(disk, log_path, config, pool=self.pool)
        self.queues = QueueTable(disk, f"{self.root}/consumequeue", config)
        self.index = IndexService(disk, f"{self.root}/index", config) if config.message_index_enable else None
        self.checkpoint = Checkpoint(disk, f"{self.root}/checkpoint", config)
        self.reader = Reader(self.commit_log, self.queues, self.index, config)
        self.reput_from_offset = 0
        """Dispatched up to here. Written by the reputer."""
        self.report: RecoveryReport | None = None
        self._abort = AbortFile(disk, f"{self.root}/abort", config)
        self._disk = disk
        self._lock: DiskLock | None = None
        self._was_opened = False

    # Open and close

    def open(self, now_ms: int, *, progress: Callable[[int, int], None] = _NO_PROGRESS) -> RecoveryReport:
        """Lock, load, recover, and mark the store as running. On any error it is closed again, as unclean as it was."""
        disk = self._disk
        if self._was_opened:
            raise StoreClosedError(f"{self.root}: a store object is opened once; make a new one to open it again")
        self._was_opened = True
        disk.make_directories(self.root)
        self._lock = disk.lock(f"{self.root}/lock")
        try:
            for directory in (self.commit_log.files.directory, self.queues.directory):
                disk.make_directories(directory)
            unclean = self._abort.exists()
            self.commit_log.load()
            self.queues.load()
            self.checkpoint.load()
            if self.index is not None:
                self.index.load(unclean=unclean, checkpoint_index_timestamp=self.checkpoint.index_msg_timestamp)
            parts = recovery.Parts(self.config, self.commit_log, self.queues, self.index, self.checkpoint)
            self.report = recovery.recover(parts, unclean=unclean, now_ms=now_ms, progress=progress)
            self.reput_from_offset = recovery.dispatched_offset(parts, self.report)
            self._abort.create()
        except BaseException as error:
            clear_frames(error.__traceback__)  # they hold views of the maps, and a map with views cannot be closed
            self.abandon(now_ms)
            raise
        return self.report

    def close(self, now_ms: int) -> None:
        """Stop cleanly: everything written is dispatched, durable, and sealed; then `abort` goes.

        If any of that fails the store is closed all the same, `abort` stays, and the error is raised.
        """
        self._require_open()
        try:
            self.commit_log.files.commit_all()
            self.flush_log()
            self.dispatch()
            self.flush_queues()
            if self.reput_from_offset >= self.commit_log.files.max_offset:
                self._drop_unused_file(now_ms)
                if not is_historic(self.config.quirks):
                    self.checkpoint.set_seal(recovery.seal_of(self.queues, self.index))
                self._abort.remove()
        except BaseException as error:
            clear_frames(error.__traceback__)
            raise
        finally:
            self.abandon(now_ms)

    def abandon(self, now_ms: int) -> None:
        """Let go of every map and the lock, and write nothing: what a crash of the process would leave."""
        self.commit_log.files.close(now_ms)
        self.queues.close(now_ms)
        if self.index is not None:
            self.index.close()
        self.checkpoint.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @property
    def is_open(self) -> bool:
        return self._lock is not None

    def _require_open(self) -> None:
        if self._lock is None:
            raise StoreClosedError(f"{self.root}: the store is not open")

    def _drop_unused_file(self, now_ms: int) -> None:
        """A last log file that was made and never written need not survive a clean stop."""
        files = self.commit_log.files
        if len(files.files) > 1 and files.files[-1].wrote_position == 0:
            files.truncate(files.files[-1].start - 1, now_ms, zero_tail=False)
            files.files[-1].set_positions(files.file_size)

    # Put

    def put(self, message: Message, now_ms: int) -> PutResult:
        """Append one message to the log. Not durable before `flush_log`, not visible before `dispatch`."""
        if self._lock is None:
            return PutResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, reason="the store is not open")
        return self.commit_log.append(message, now_ms)

    def put_many(self, messages: Sequence[Message], now_ms: int) -> list[PutResult]:
        """Independent messages in order, an answer each."""
        if self._lock is None:
            closed = PutResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, reason="the store is not open")
            return [closed] * len(messages)
        return self.commit_log.append_many(messages, now_ms)

    def put_batch(self, envelope: Message, items: Sequence[BatchItem], now_ms: int) -> PutResult:
        """A client's batch: consecutive records in one file, all or none."""
        if self._lock is None:
            return PutResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, reason="the store is not open")
        return self.commit_log.append_batch(envelope, items, now_ms)

    # Dispatch

    @property
    def confirm_offset(self) -> int:
        """Dispatch goes no further: what a consumer sees under SYNC_FLUSH is durable."""
        if self.config.flush_disk_type is FlushDiskType.SYNC_FLUSH:
            return self.commit_log.files.flushed_where
        return self.commit_log.files.max_offset

    def dispatch(self, most: int | None = None) -> int:
        """Tell queues and index about records up to the confirm offset; returns how many records.

        Offsets handed over by the append are used where they are complete; otherwise the log is read again.
        """
        log, end, done = self.commit_log, self.confirm_offset, 0
        limit = most if most is not None else 1 << 62
        while done < limit and self.reput_from_offset < end:
            if log.handed_over and log.handed_over_complete and not self.config.dispatch_from_log:
                count = self._dispatch_handed_over(end, limit - done)
            else:
                count = self._dispatch_from_log(end, limit - done)
            if not count:
                break
            done += count
        return done

    def _dispatch_handed_over(self, end: int, most: int) -> int:
        handed = self.commit_log.handed_over
        batch = np.array(handed[: min(most, _DISPATCH_BATCH)], dtype=np.int64)
        file = self.commit_log.files.find(int(batch[0]))
        assert file is not None, "a record goes away only after it was dispatched"
        batch = batch[(batch < min(end, file.start + file.size)) & (batch >= self.reput_from_offset)]
        if not len(batch):
            stale = handed[0] < self.reput_from_offset
            if stale:
                del handed[0]
            return int(stale)
        found = columns(file.view, batch - file.start)
        self._apply(dispatch_of(found, self.config.delay_levels_ms))
        self.reput_from_offset = int(found.physical_offsets[-1] + found.sizes[-1])
        del handed[: len(batch)]
        return len(batch)

    def _dispatch_from_log(self, end: int, most: int) -> int:
        log = self.commit_log
        found = log.columns_between(
            max(self.reput_from_offset, log.files.min_offset), end, most=min(most, _DISPATCH_BATCH)
        )
        if found is None:
            return 0
        rows, after = found
        if len(rows):
            self._apply(dispatch_of(rows, self.config.delay_levels_ms))
        moved = after != self.reput_from_offset
        self.reput_from_offset = after
        # With the pool records beyond the committed end are known only by their hand-over: keep those.
        log.handed_over[:] = [offset for offset in log.handed_over if offset >= after]
        if after >= log.files.max_wrote_offset:
            log.handed_over_complete = True
        return len(rows) or int(moved)

    def _apply(self, dispatch: Dispatch) -> None:
        self.queues.apply(dispatch)
        if self.index is not None and len(dispatch.columns):
            self.index.ensure_file(int(dispatch.columns.store_timestamps[0]))
            entries = dispatch.index
            if len(entries.hashes):
                self.index.put_many(*entries)

    # Flush

    def flush_log(self, least_pages: int = 0) -> bool:
        """Make the log durable and the checkpoint's physic time follow; True if nothing moved."""
        files, still = self.commit_log.files, True
        if least_pages == 0:
            files.commit_all()  # with the pool: what is not in the file yet cannot be made durable
        # Read before the flush: it may pause us, and what is appended meanwhile is not covered by it.
        timestamp, end = self.commit_log.last_store_timestamp, files.max_wrote_offset
        while not files.flush(least_pages):
            still = False
        if least_pages == 0 and files.flushed_where >= end:
            # Everything appended is flushed, whichever file it went to; with a pool it was committed before.
            self.checkpoint.physic_msg_timestamp = max(self.checkpoint.physic_msg_timestamp, timestamp)
        return still

    def flush_queues(self) -> None:
        """The thorough flush: queues, then index, then the checkpoint that may now speak for them.

        The times are taken before the flush and published after it: what is put meanwhile is not covered.
        """
        dispatched = self.queues.dispatched_timestamp
        self.queues.flush_all()
        if self.index is not None:
            self.index.flush()
            self.checkpoint.index_msg_timestamp = dispatched
        self.checkpoint.logics_msg_timestamp = dispatched
        self.checkpoint.confirm_phy_offset = self.reput_from_offset
        self.checkpoint.flush()

    # Clean

    def delete_expired_files(self, now_ms: int, *, force: bool = False, most: int | None = None) -> list[str]:
        """Delete log files whose last record is older than fileReservedTime (all but the last with `force`), and what
        queues and index know about them. Never a file that is not dispatched yet."""
        config = self.config
        reserved_ms = config.file_reserved_time * 3_600_000
        log = self.commit_log

        def keep(file: MappedFile) -> bool:
            if file.start + file.size > self.reput_from_offset:
                return True
            follower = log.files.find(file.start + file.size)
            # Store time never decreases: the next file's first record is not older than this one's last.
            last = log.first_store_timestamp(follower) if follower else 0
            return not force and not 0 < last <= now_ms - reserved_ms

        first = log.files.first
        if first is not None and len(log.files.files) > 1 and not keep(first):
            # Without the records only the queues know how far they were numbered: that must be on the disk first.
            self.flush_queues()
        deleted = log.files.delete_first(
            keep,
            now_ms,
            force_after_ms=config.destroy_maped_file_interval_forcibly,
            most=config.delete_file_batch_max if most is None else most,
        )
        if deleted:
            self.forget_deleted(now_ms)
        return deleted

    def forget_deleted(self, now_ms: int) -> None:
        """Queues and index let go of records that are no longer in the log."""
        begin = self.commit_log.files.min_offset
        for queue in self.queues:
            queue.delete_expired(begin, now_ms, force_after_ms=QUEUE_FORCE_MS)
        if self.index is not None:
            self.index.delete_expired(begin, now_ms)
