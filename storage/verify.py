"""Read-only cross-check of a store: log, queues, index and checkpoint against each other. Findings are values.

Works on any directory of RocketMQ 4.x or 5.x or ours, running or not, on one of its directories, and on a single file.
It takes no lock, opens one file at a time and writes nothing. Settings are not needed: sizes are those of the files.

What counts as the end of the log: the last valid record. Bytes behind it that hold no valid record are a torn tail,
which every crash may leave; bytes that are no record but have a valid one behind them are damage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from brokerlab.storage.checkpoint import CHECKPOINT_SIZE, CheckpointValues, decode_checkpoint
from brokerlab.storage.config import StoreConfig
from brokerlab.storage.consume_queue import PRE_BLANK_SIZE, UNIT_SIZE
from brokerlab.storage.disk import Disk, FileInfo
from brokerlab.storage.dispatch import dispatch_of
from brokerlab.storage.errors import DiskError
from brokerlab.storage.findings import ALIKE_MAX, Finding, Findings
from brokerlab.storage.log_scan import Columns, Validity
from brokerlab.storage.offline import StoreFiles, look_at, opened, start_of, usual_size
from brokerlab.storage.offline_log import Damage, LogView, Walk, walk_segment
from brokerlab.storage.verify_index import IndexCheck
from brokerlab.storage.verify_queues import QueueCheck, unit_columns

Progress = Callable[[int, int, str], None]
"""Bytes done, bytes in all, what is being looked at."""


@dataclass(slots=True)
class LogFacts:
    """What the log itself proves."""

    begin: int = 0
    end: int = 0
    segments: int = 0
    records: int = 0
    bytes_read: int = 0
    first_store_timestamp: int = 0
    newest_store_timestamp: int = 0


@dataclass(slots=True)
class VerifyReport:
    """Everything that was found, and how much was looked at."""

    root: str
    kind: str
    findings: list[Finding] = field(default_factory=list)
    errors: int = 0
    warnings: int = 0
    log: LogFacts = field(default_factory=LogFacts)
    queues: int = 0
    queue_entries: int = 0
    queue_entries_expired: int = 0
    index_files: int = 0
    index_entries: int = 0
    index_entries_expired: int = 0
    checkpoint: CheckpointValues | None = None
    unclean: bool = False

    @property
    def ok(self) -> bool:
        return not self.errors


def verify_store(
    disk: Disk,
    root: str,
    config: StoreConfig | None = None,
    *,
    kind: str | None = None,
    index_slots: int | None = None,
    progress: Progress = lambda _done, _all, _what: None,
) -> VerifyReport:
    """Check everything that `root` holds. DiskError if it holds nothing that belongs to a store."""
    files = look_at(disk, root, kind=kind)
    check = _Verification(disk, files, config or StoreConfig(), index_slots, progress)
    try:
        return check.run()
    finally:
        check.log_view.close()


class _Verification:
    def __init__(
        self, disk: Disk, files: StoreFiles, config: StoreConfig, index_slots: int | None, progress: Progress
    ) -> None:
        self.log_view = LogView(disk, files.segments)
        self._disk = disk
        self._files = files
        self._config = config
        self._findings = Findings()
        self._queues = QueueCheck(disk, files, self._findings)
        self._index = IndexCheck(disk, files, self._findings, slots=index_slots)
        self._facts = LogFacts()
        self._progress = progress
        self._all = sum(info.size for info in files.segments) or 1
        self._with_log = files.kind == "store" and bool(files.segments)

    def run(self) -> VerifyReport:
        files, findings = self._files, self._findings
        report = VerifyReport(files.root, files.kind, log=self._facts, unclean=files.unclean)
        self._tell_strays()
        self._progress(0, self._all, "index")
        self._index.check_files()
        if files.segments:
            self._check_log()
        elif files.kind == "store":
            severity = "error" if files.queues or files.index else "warning"
            findings.add(severity, f"{files.root}/commitlog", None, "no commit log segment", "missing-part")
        self._progress(self._all, self._all, "queues")
        if files.kind == "store":
            self._queues.finish(self.log_view, self._facts.begin, self._facts.end)
        elif files.kind == "consumequeue":
            self._check_queues_alone()
        if files.kind in ("store", "checkpoint"):
            report.checkpoint = self._check_checkpoint()
        report.queues = len(files.queues)
        report.queue_entries = sum(state.entries for state in self._queues.queues.values())
        report.queue_entries_expired = sum(state.expired for state in self._queues.queues.values())
        report.index_files = len(files.index)
        report.index_entries, report.index_entries_expired = self._index.entries, self._index.expired
        self._tell_expired(report)
        report.findings = list(findings)
        report.errors, report.warnings = findings.count("error"), findings.count("warning")
        return report

    def _tell_strays(self) -> None:
        for stray in self._files.strays:
            severity, kind = ("error", "unreadable") if stray.unreadable else ("warning", "stray")
            self._findings.add(severity, stray.path, None, stray.reason, kind)
        abort = self._files.marks.get("abort")
        if abort is not None:
            reason = "present: the store is running, or was not stopped cleanly"
            self._findings.add("info", abort.path, None, reason, "unclean-stop")

    def _tell_expired(self, report: VerifyReport) -> None:
        for count, what in ((report.queue_entries_expired, "consumequeue"), (report.index_entries_expired, "index")):
            if count:
                reason = f"{count} entries point below the log's beginning at {self._facts.begin}: expired"
                self._findings.add("info", f"{self._files.root}/{what}", None, reason, "expired")
        held = sum(state.held for state in self._queues.queues.values())
        if held:
            reason = f"{held} places are held by pre-blank entries"
            self._findings.add("info", f"{self._files.root}/consumequeue", None, reason, "pre-blank")

    # The log

    def _check_log(self) -> None:
        segments, facts = self._files.segments, self._facts
        facts.segments = len(segments)
        facts.begin = facts.end = start_of(segments[0])
        if self._with_log:
            self._index.begin_log(facts.begin)
        self._check_row(segments)
        pending: list[tuple[FileInfo, Walk]] = []
        """Segments behind whose last record nothing valid was found yet."""
        for info in segments:
            walk = self._walk(info)
            if walk is None:
                continue
            if walk.records:
                for earlier, open_walk in pending:
                    self._tell_damage(earlier, open_walk.damage[-1])
                pending.clear()
                facts.end = start_of(info) + (info.size if walk.blank else walk.end)
            for damage in walk.damage:
                if damage.tail:
                    pending.append((info, walk))
                else:
                    self._tell_damage(info, damage)
            facts.bytes_read += info.size
        self._tell_end(pending)
        if self._with_log:
            self._index.finish(facts.end, self.log_view)

    def _check_row(self, segments: list[FileInfo]) -> None:
        size, add = usual_size(segments), self._findings.add
        for place, info in enumerate(segments):
            start = start_of(info)
            if not info.size:
                last = place == len(segments) - 1
                add("warning" if last else "error", info.path, None, "file is empty", "empty-file")
            elif info.size != size:
                add("error", info.path, None, f"file has {info.size} bytes, the others {size}", "wrong-size")
            if place:
                before = start_of(segments[place - 1]) + size
                if start != before:
                    what = "missing" if start > before else "doubly named"
                    reason = (
                        f"begins at {start}, the segment before it ends at {before}: {abs(start - before)} bytes {what}"
                    )
                    add("error", info.path, None, reason, "gap")

    def _walk(self, info: FileInfo) -> Walk | None:
        if not info.size:
            return None
        start, done = start_of(info), self._facts.bytes_read
        self._queues.log_file, self._queues.log_start = info.path, start
        validity = Validity(record_crc=self._config.force_verify_prop_crc)
        try:
            with opened(self._disk, info.path) as region:
                return walk_segment(
                    region,
                    start,
                    lambda columns: self._visit(info, columns),
                    validity=validity,
                    progress=lambda position: self._progress(done + position, self._all, info.name),
                )
        except DiskError as error:
            self._findings.add("error", info.path, None, str(error), "unreadable")
            return None

    def _visit(self, info: FileInfo, columns: Columns) -> None:
        facts, times = self._facts, columns.store_timestamps
        if not facts.records:
            facts.first_store_timestamp = int(times[0])
        before = np.maximum.accumulate(np.concatenate(([facts.newest_store_timestamp], times)))[:-1]
        back = np.flatnonzero(times < before)
        for row in back[:ALIKE_MAX].tolist():
            reason = (
                f"store time {times[row]} is {int(before[row]) - int(times[row])} ms before that of an earlier record"
            )
            self._findings.add("warning", info.path, int(columns.positions[row]), reason, "time-goes-back")
        if len(back) > ALIKE_MAX:
            self._findings.more("warning", info.path, "time-goes-back", len(back) - ALIKE_MAX)
        facts.newest_store_timestamp = max(facts.newest_store_timestamp, int(times.max()))
        facts.records += len(columns)
        dispatch = dispatch_of(columns, self._config.delay_levels_ms)
        self._queues.observe(dispatch)
        for note in dispatch.notes:
            self._findings.add("warning", info.path, None, note, "record-note")
        if self._with_log:
            start = int(columns.physical_offsets[0])
            end = int(columns.physical_offsets[-1] + columns.sizes[-1])
            self._index.observe(dispatch.index, start, end, self.log_view)

    def _tell_damage(self, info: FileInfo, damage: Damage) -> None:
        length = damage.end - damage.start
        reason = f"{length} bytes hold no valid record ({damage.reason}), but valid records follow"
        self._findings.add("error", info.path, damage.start, reason, "damaged-record")

    def _tell_end(self, pending: list[tuple[FileInfo, Walk]]) -> None:
        nothing = not self._facts.records
        for place, (info, walk) in enumerate(pending):
            damage = walk.damage[-1]
            if walk.dirty_at < 0:
                continue
            if nothing:
                reason = f"no valid record in the whole log ({damage.reason})"
                self._findings.add("error", info.path, walk.dirty_at, reason, "no-record")
            elif place == 0:
                reason = f"the log ends here; what follows is no valid record ({damage.reason})"
                self._findings.add("warning", info.path, damage.start, reason, "torn-tail")
            else:
                reason = "behind the end of the log, not empty, but without a valid record"
                self._findings.add("warning", info.path, walk.dirty_at, reason, "torn-tail")

    # Queue files alone

    def _check_queues_alone(self) -> None:
        for state in self._queues.queues.values():
            ended, last_end = -1, -1
            for info in state.files:
                try:
                    with opened(self._disk, info.path) as region:
                        units = unit_columns(region, 0, region.size // UNIT_SIZE)
                except DiskError as error:
                    self._findings.add("error", info.path, None, str(error), "unreadable")
                    continue
                empty = (units.sizes <= 0) | (units.offsets < 0)
                held = (units.offsets == 0) & (units.sizes == PRE_BLANK_SIZE)
                state.entries += int(np.count_nonzero(~empty))
                state.held += int(np.count_nonzero(held))
                garbage = empty & ((units.offsets | units.sizes | units.codes) != 0)
                for row in np.flatnonzero(garbage)[:ALIKE_MAX].tolist():
                    reason = f"no entry: offset {units.offsets[row]}, size {units.sizes[row]}"
                    self._findings.add("error", info.path, row * UNIT_SIZE, reason, "garbage")
                if (~empty).any() and (ended >= 0 or empty[: int(np.flatnonzero(~empty)[-1])].any()):
                    row = int(np.argmax(empty)) if ended < 0 else 0
                    reason = "an empty place with entries behind it"
                    self._findings.add("error", info.path, row * UNIT_SIZE, reason, "hole")
                ended = 1 if empty.any() else ended
                real = np.flatnonzero(~empty & ~held)
                starts = units.offsets[real]
                ends = np.concatenate(([last_end], starts + units.sizes[real]))
                back = np.flatnonzero(starts < ends[:-1])
                for row in back[:ALIKE_MAX].tolist():
                    reason = f"offset {starts[row]} lies before the end of the record before, {ends[row]}"
                    self._findings.add("error", info.path, int(real[row]) * UNIT_SIZE, reason, "wrong-entry")
                last_end = int(ends[-1])

    # The checkpoint

    def _check_checkpoint(self) -> CheckpointValues | None:
        files, add = self._files, self._findings.add
        info = files.checkpoint
        if info is None:
            add("warning", f"{files.root}/checkpoint", None, "no checkpoint", "missing-part")
            return None
        try:
            data = self._disk.read_small(info.path, most=CHECKPOINT_SIZE)
        except DiskError as error:
            add("error", info.path, None, str(error), "unreadable")
            return None
        if info.size != CHECKPOINT_SIZE:
            reason = f"file has {info.size} bytes, a checkpoint {CHECKPOINT_SIZE}"
            add("warning", info.path, None, reason, "wrong-size")
        values = decode_checkpoint(data or b"")
        newest = self._facts.newest_store_timestamp
        for place, (name, value) in enumerate(values._asdict().items()):
            if value < 0:
                # In 5.x a replica may say -1: "not known".
                severity = "warning" if value == -1 and place >= 3 else "error"
                add(severity, info.path, 8 * place, f"{name} is {value}", "checkpoint")
            elif place < 3 and value > newest and files.kind == "store" and self._facts.records:
                self._tell_ahead(info, place, name, value, newest)
        if values.confirm_phy_offset > self._facts.end and self._facts.records:
            reason = f"confirm_phy_offset is {values.confirm_phy_offset}, the log ends at {self._facts.end}"
            add("warning", info.path, 32, reason, "checkpoint-ahead")
        return values

    def _tell_ahead(self, info: FileInfo, place: int, name: str, value: int, newest: int) -> None:
        # The log's time is set after its flush, so what it covers must be there. The others may be set earlier.
        severity = "error" if place == 0 else "warning"
        what = ("the log was flushed", "the queues were flushed", "the index was flushed")[place]
        reason = f"{name}: {what} up to {value}, but the newest record is of {newest}, {value - newest} ms earlier"
        self._findings.add(severity, info.path, 8 * place, reason, "checkpoint-ahead")
