"""What recovery did and why, as values that a person can read."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RecoveryReport:
    """Filled in while recovery runs; complete when it returns."""

    unclean: bool = False
    start_offset: int = 0
    start_reason: str = ""
    files_read: int = 0
    bytes_read: int = 0
    records: int = 0
    end_offset: int = 0
    end_reason: str = ""
    log_bytes_cleared: int = 0
    files_deleted: list[str] = field(default_factory=list)
    files_synced: int = 0
    queue_entries_written: int = 0
    queue_entries_removed: int = 0
    queues_changed: list[str] = field(default_factory=list)
    index_entries_dropped: int = 0
    index_entries_added: int = 0
    salvaged: list[tuple[int, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def changed_anything(self) -> bool:
        """Did recovery have to repair? False on a healthy store."""
        return bool(
            self.log_bytes_cleared
            or self.files_deleted
            or self.queue_entries_written
            or self.queue_entries_removed
            or self.salvaged
        )

    def lines(self) -> list[str]:
        """The story, a sentence a line."""
        said = [
            f"stop was {'unclean' if self.unclean else 'clean'}",
            f"started at offset {self.start_offset}: {self.start_reason}",
            f"read {self.files_read} files, {self.bytes_read} bytes, {self.records} records",
            f"log ends at offset {self.end_offset}: {self.end_reason}",
        ]
        if self.files_synced:
            said.append(f"rewrote and synced {self.files_synced} log files")
        if self.log_bytes_cleared or self.files_deleted:
            said.append(f"cleared {self.log_bytes_cleared} bytes, deleted {len(self.files_deleted)} files")
            said += [f"deleted {path}" for path in self.files_deleted]
        if self.queues_changed:
            said.append(
                f"queues: {self.queue_entries_written} entries written, {self.queue_entries_removed} removed in "
                f"{len(self.queues_changed)} queues ({', '.join(self.queues_changed[:5])}"
                f"{', ...' if len(self.queues_changed) > 5 else ''})"
            )
        if self.index_entries_dropped or self.index_entries_added:
            said.append(f"index: {self.index_entries_dropped} entries dropped, {self.index_entries_added} added")
        said += [f"salvaged: bytes {start} to {end} are damaged and were fenced off" for start, end in self.salvaged]
        return said + self.notes
