"""All consume queues of a store: the table (topic, queue id) -> queue, and what is done to all of them."""

from __future__ import annotations

from collections.abc import Iterator

from brokerlab.storage.config import StoreConfig
from brokerlab.storage.consume_queue import ConsumeQueue
from brokerlab.storage.disk import Disk, FileInfo
from brokerlab.storage.dispatch import Dispatch, is_queued
from brokerlab.storage.errors import DiskError, QueueGapError, StoreError
from brokerlab.storage.message import topic_problem
from brokerlab.storage.quirks import Dialect, Quirk


class QueueTable:
    """Queues are found by name, made on demand, and visited in a fixed order."""

    def __init__(self, disk: Disk, directory: str, config: StoreConfig) -> None:
        self.directory = directory
        self.notes: list[str] = []
        self.dispatched_timestamp = 0
        """Store time of the newest record whose entry was put. Not durable before the next thorough flush."""
        self._disk = disk
        self._config = config
        self._queues: dict[tuple[str, int], ConsumeQueue] = {}

    def __iter__(self) -> Iterator[ConsumeQueue]:
        for key in sorted(self._queues):
            yield self._queues[key]

    def __len__(self) -> int:
        return len(self._queues)

    def load(self) -> None:
        """consumequeue/<topic>/<queue id>/<files>; anything else in there is skipped and told."""
        for topic in self._disk.list(self.directory):
            if topic.kind != "directory":
                self.notes.append(f"{topic.path}: skipped, not a topic directory")
                continue
            for queue in self._disk.list(topic.path):
                if queue.kind == "directory" and queue.name.isascii() and queue.name.isdigit():
                    self._load(topic.name, int(queue.name), queue)
                else:
                    self.notes.append(f"{queue.path}: skipped, not a queue directory")

    def _load(self, topic: str, queue_id: int, directory: FileInfo) -> None:
        queue = self._make(topic, queue_id, directory.path)
        quirky = Quirk.EMPTY_QUEUE_FILE_BLOCKS_START in self._config.quirks
        old = self._config.dialect is Dialect.V4_9
        queue.files.load(empty_files_block=lambda empty: quirky and (old or len(empty) > 1))
        self.notes += queue.files.notes
        self._queues[topic, queue_id] = queue

    def _make(self, topic: str, queue_id: int, directory: str) -> ConsumeQueue:
        size = self._config.consume_queue_file_size
        shift_gaps = Quirk.QUEUE_GAP_SHIFTS_ENTRIES in self._config.quirks
        return ConsumeQueue(self._disk, directory, topic, queue_id, size, shift_gaps=shift_gaps)

    def find(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        return self._queues.get((topic, queue_id))

    def get(self, topic: str, queue_id: int) -> ConsumeQueue:
        """The queue, made if there is none yet (in memory: its first file comes with its first entry)."""
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            assert not topic_problem(topic.encode()), f"a record with topic {topic!r} should not have passed the check"
            directory = f"{self.directory}/{topic}/{queue_id}"
            queue = self._make(topic, queue_id, directory)
            self._queues[topic, queue_id] = queue
        return queue

    def apply(self, dispatch: Dispatch) -> int:
        """Put the entries of a batch into their queues; how many were new.

        A queue that cannot be written does not keep the others waiting: its error is raised when they have theirs.
        """
        columns, new = dispatch.columns, 0
        failed: StoreError | None = None
        if not len(columns):
            return 0
        queued = is_queued(columns.sys_flags)
        plain = bool(queued.all())
        for run in dispatch.runs:
            rows = run.rows if plain else run.rows[queued[run.rows]]
            if not len(rows):
                continue
            try:
                new += self.get(run.topic, run.queue_id).put(
                    columns.queue_offsets[rows],
                    columns.physical_offsets[rows],
                    columns.sizes[rows],
                    dispatch.tags_codes[rows],
                )
            except (DiskError, QueueGapError) as error:
                failed = failed or error
        if failed is not None:
            try:
                raise failed
            finally:
                del failed  # it would keep this frame alive, and with it the batch's views of the log
        self.dispatched_timestamp = max(self.dispatched_timestamp, int(columns.store_timestamps[-1]))
        return new

    def flush(self, least_pages: int) -> bool:
        """Flush every queue once; True if nothing moved."""
        still = True
        for queue in self:
            still &= queue.files.flush(least_pages)
        return still

    def flush_all(self) -> None:
        for queue in self:
            queue.files.flush_all()

    @property
    def max_physical_offset(self) -> int:
        """End of the newest record that has an entry in any queue; -1 if none has."""
        return max((queue.max_physical_offset for queue in self._queues.values()), default=-1)

    def correct_min_offsets(self, min_physical_offset: int) -> None:
        for queue in self:
            queue.correct_min_offset(min_physical_offset)

    def remove(self, queue: ConsumeQueue, now_ms: int) -> None:
        """Forget a queue and delete its files."""
        queue.files.destroy(now_ms)
        del self._queues[queue.topic, queue.queue_id]

    def close(self, now_ms: int) -> None:
        for queue in self._queues.values():
            queue.close(now_ms)
        self._queues.clear()
