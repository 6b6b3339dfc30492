"""Recovery of a whole store: where it starts, what it cuts, what it writes again, what it tells, and that it can be
broken off anywhere and run again."""

from __future__ import annotations

import errno
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from brokerlab.storage.config import StoreConfig
from brokerlab.storage.consume_queue import PRE_BLANK
from brokerlab.storage.errors import DamagedStoreError, DiskIOError, StoreError
from brokerlab.storage.message_store import MessageStore
from brokerlab.storage.recovery_report import RecoveryReport
from tests.storage.store_model import (
    NOW,
    CrashError,
    FaultDisk,
    HookedDisk,
    Sent,
    a_message,
    copy_store,
    files_under,
    open_store,
    overwrite,
    put,
    scanned,
    survivors,
    tiny_config,
    tree,
)

LATER = NOW + 10_000_000


def fill(store: MessageStore, count: int, *, size: int = 900, step_ms: int = 1000, now: int = NOW) -> list[Sent]:
    """So many messages, four to a log file of 4096, in turn to two queues of two topics; dispatched."""
    messages = [
        put(
            store,
            a_message(
                f"{number}:".ljust(size, "x"),
                topic=("orders", "refunds")[number // 2 % 2],
                queue_id=number % 2,
                keys=f"k{number % 5} every",
            ),
            now + number * step_ms,
        )
        for number in range(count)
    ]
    store.dispatch()
    return messages


def filled(root: Path, count: int, *, config: StoreConfig | None = None, clean: bool, size: int = 900) -> list[Sent]:
    """A stopped store with so many messages, everything dispatched and flushed."""
    store = open_store(root, config)
    messages = fill(store, count, size=size)
    store.flush_log()
    store.flush_queues()
    if clean:
        store.close(NOW)
    else:
        store.abandon(NOW)
    return messages


def recovered(root: Path, config: StoreConfig | None = None) -> RecoveryReport:
    """Open, keep the report, and let go as a crash would."""
    store = open_store(root, config, now=LATER)
    store.abandon(LATER)
    assert store.report is not None
    return store.report


def log_file(root: Path, number: int) -> Path:
    return files_under(root, "commitlog")[number]


def set_checkpoint(root: Path, *times: int) -> None:
    overwrite(root / "checkpoint", 0, struct.pack(f">{len(times)}q", *times))


def zero(root: Path, start: int, end: int, file_size: int = 4096) -> None:
    """Bytes of the log, by offset; within one file."""
    overwrite(root / "commitlog" / f"{start - start % file_size:020}", start % file_size, bytes(end - start))


# Where it starts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("messages", "start", "reason"), [(9, 0, "first file"), (20, 8192, "third file from the end")])
def test_a_clean_start_reads_the_last_three_files(tmp_path: Path, messages: int, start: int, reason: str) -> None:
    filled(tmp_path, messages, clean=True)

    report = recovered(tmp_path)

    assert not report.unclean
    assert (report.start_offset, report.start_reason, report.files_read) == (start, reason, 3)


@pytest.mark.parametrize(("early_ms", "start"), [(0, 3 * 4096), (1, 2 * 4096)])
def test_an_unclean_start_reads_from_the_file_that_is_three_seconds_older_than_the_checkpoint(
    tmp_path: Path, early_ms: int, start: int
) -> None:
    messages = filled(tmp_path, 20, clean=False)
    first_of_file_3 = next(message for message in messages if message.physical_offset == 3 * 4096)
    time = first_of_file_3.store_timestamp + 3000 - early_ms
    set_checkpoint(tmp_path, time, time, time)

    report = recovered(tmp_path)

    assert report.unclean
    assert report.start_offset == start
    assert str(time - 3000) in report.start_reason


@pytest.mark.parametrize("behind", ["log", "queues", "index"])
def test_the_start_is_as_early_as_the_least_of_the_three_times(tmp_path: Path, behind: str) -> None:
    messages = filled(tmp_path, 20, clean=False)
    late, early = LATER, messages[4].store_timestamp + (0 if behind == "index" else 3000)
    times = [early if part == behind else late for part in ("log", "queues", "index")]
    set_checkpoint(tmp_path, *times)

    report = recovered(tmp_path)

    # The index time has no margin of its own: entries of the very millisecond are written again.
    assert report.start_offset == 4096


def test_a_checkpoint_that_says_nothing_makes_recovery_read_everything(tmp_path: Path) -> None:
    messages = filled(tmp_path, 20, clean=False)
    set_checkpoint(tmp_path, 0, 0, 0)

    report = recovered(tmp_path)

    assert (report.start_offset, report.records) == (0, len(messages))
    assert "vouches for nothing" in report.start_reason


def test_files_whose_times_step_back_do_not_lead_the_start_astray(tmp_path: Path) -> None:
    """Museum row 49: another broker's clock stepped back, so the newest files are the oldest by their times."""
    messages = filled(tmp_path, 20, clean=False)
    for message in messages:
        if message.physical_offset >= 3 * 4096:
            position = message.physical_offset % 4096 + 56
            overwrite(log_file(tmp_path, message.physical_offset // 4096), position, struct.pack(">q", NOW - 3_600_000))
    set_checkpoint(tmp_path, *[messages[8].store_timestamp + 3000] * 3)

    report = recovered(tmp_path)

    assert report.start_offset == 2 * 4096
    assert report.end_offset == messages[-1].end


def test_store_time_never_decreases_even_after_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, a_message("late"), NOW + 500)
    store.abandon(NOW)

    store = open_store(tmp_path, now=NOW)
    again = put(store, a_message("clock stepped back"), NOW)

    assert again.store_timestamp == NOW + 500
    store.abandon(NOW)


# What it cuts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", ["", "k1 k2"], ids=["no properties", "with properties"])
def test_a_last_record_torn_at_any_byte_is_cut_off(tmp_path: Path, keys: str) -> None:
    root = tmp_path / "whole"
    store = open_store(root)
    messages = [put(store, a_message(f"body {n}" * 3, keys=keys, tags="t" * bool(keys)), NOW + n) for n in range(3)]
    store.dispatch()
    store.abandon(NOW)
    last = messages[-1]
    record = log_file(root, 0).read_bytes()[last.physical_offset : last.end]

    for kept in range(last.size):
        torn = copy_store(root, tmp_path / f"torn-{kept}")
        zero(torn, last.physical_offset + kept, last.end)
        store = open_store(torn, now=LATER)
        there = survivors(store, messages)
        store.abandon(LATER)
        unchanged = not any(record[kept:])
        assert len(there) == (3 if unchanged else 2), f"with {kept} of {last.size} bytes"
        assert store.report is not None
        assert store.report.queue_entries_removed == (0 if unchanged else 1)


def test_every_byte_behind_the_end_is_zero_after_recovery(tmp_path: Path) -> None:
    messages = filled(tmp_path, 7, clean=False)
    set_checkpoint(tmp_path, 0, 0, 0)
    zero(tmp_path, messages[4].physical_offset, messages[4].physical_offset + 8)

    report = recovered(tmp_path)

    assert report.end_offset == messages[4].physical_offset
    tail = log_file(tmp_path, 1).read_bytes()[report.end_offset % 4096 :]
    assert not any(tail)
    assert report.log_bytes_cleared > 2 * 900
    for path in files_under(tmp_path, "consumequeue"):
        units = path.read_bytes()
        ends = [
            sum(struct.unpack_from(">qi", units, at)) for at in range(0, len(units), 20) if any(units[at : at + 20])
        ]
        assert all(end <= report.end_offset for end in ends)


def test_files_behind_a_cut_are_deleted_and_named(tmp_path: Path) -> None:
    messages = filled(tmp_path, 14, clean=False)
    set_checkpoint(tmp_path, 0, 0, 0)
    doomed = [str(path) for path in files_under(tmp_path, "commitlog")[2:]]
    zero(tmp_path, messages[5].physical_offset, messages[5].physical_offset + 8)

    report = recovered(tmp_path)

    assert report.end_offset == messages[5].physical_offset
    assert report.files_deleted == doomed
    assert "magic 00000000 is not a record's" in report.end_reason
    assert any(doomed[0] in line for line in report.lines())


def test_a_blank_that_ends_the_last_file_is_written_over_by_the_next_put(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    messages = fill(store, 5, size=850)
    store.abandon(NOW)
    log_file(tmp_path, 1).unlink()
    blank_at = messages[3].end

    store = open_store(tmp_path, now=LATER)
    report = store.report
    small = put(store, a_message("fits"), LATER)
    store.dispatch()

    assert report is not None
    assert (report.end_offset, report.end_reason) == (blank_at, "blank record")
    assert small.physical_offset == blank_at
    assert survivors(store, [*messages[:4], small]) == [*messages[:4], small]
    store.abandon(LATER)


def test_a_file_that_was_made_ahead_of_need_goes(tmp_path: Path) -> None:
    messages = filled(tmp_path, 5, clean=False)
    for start in (8192, 12288):
        (tmp_path / "commitlog" / f"{start:020}").write_bytes(bytes(4096))

    store = open_store(tmp_path, now=LATER)

    assert survivors(store, messages) == messages
    assert len(files_under(tmp_path, "commitlog")) == 2
    assert store.report is not None
    assert len(store.report.files_deleted) == 2
    store.abandon(LATER)


def test_files_that_never_got_their_size_go(tmp_path: Path) -> None:
    messages = filled(tmp_path, 5, clean=False)
    (tmp_path / "commitlog" / f"{8192:020}").touch()
    (tmp_path / "consumequeue" / "orders" / "0" / f"{200:020}").touch()

    store = open_store(tmp_path, now=LATER)

    assert survivors(store, messages) == messages
    assert store.report is not None
    assert sum("removed, it was empty" in note for note in store.report.notes) == 2
    store.abandon(LATER)


# Queues --------------------------------------------------------------------------------------------------------------


def test_a_queue_that_knows_more_than_the_log_forgets_it(tmp_path: Path) -> None:
    messages = filled(tmp_path, 9, clean=False)
    set_checkpoint(tmp_path, 0, 0, 0)
    zero(tmp_path, messages[7].physical_offset, messages[7].end - 1)

    store = open_store(tmp_path, now=LATER)

    assert store.report is not None
    assert survivors(store, messages) == messages[:7]
    assert store.report.queue_entries_removed == 2
    assert sorted(store.report.queues_changed) == ["orders/0", "refunds/1"]
    assert store.commit_log.next_queue_offset == {
        ("orders", 0): 2, ("orders", 1): 2, ("refunds", 0): 2, ("refunds", 1): 1,
    }  # fmt: skip
    store.abandon(LATER)


def test_a_queue_that_knows_less_than_the_log_is_told(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    messages = fill(store, 6)
    messages += [put(store, a_message(f"late {n}", keys="late"), NOW + 90_000) for n in range(4)]
    store.flush_log()
    store.abandon(NOW)

    store = open_store(tmp_path, now=LATER)

    assert survivors(store, messages) == messages
    assert store.report is not None
    assert (store.report.queue_entries_written, store.report.queues_changed) == (4, ["orders/0"])
    store.abandon(LATER)


@pytest.mark.parametrize("clean", [True, False], ids=["clean stop", "crash"])
@pytest.mark.parametrize("lost", ["one queue", "one topic", "all queues", "first file", "middle file", "last file"])
def test_lost_queue_files_are_written_again(tmp_path: Path, lost: str, clean: bool) -> None:
    config = tiny_config(mapped_file_size_consume_queue=60)
    messages = filled(tmp_path, 45, config=config, clean=clean, size=300)
    if not clean and lost != "middle file":
        set_checkpoint(tmp_path, 0, 0, 0)  # after a crash it alone says what should be there
    whole = tree(tmp_path / "consumequeue")
    folder = tmp_path / "consumequeue"
    files = files_under(folder, "orders/0")
    assert len(files) == 4
    match lost:
        case "one queue":
            shutil.rmtree(folder / "orders" / "0")
        case "one topic":
            shutil.rmtree(folder / "orders")
        case "all queues":
            shutil.rmtree(folder)
        case "first file":
            files[0].unlink()
        case "middle file":
            files[1].unlink()
        case "last file":
            files[-1].unlink()

    store = open_store(tmp_path, config, now=LATER)
    there = survivors(store, messages)
    store.close(LATER)

    assert there == messages
    assert tree(tmp_path / "consumequeue") == whole


def test_a_damaged_entry_in_a_queue_is_corrected(tmp_path: Path) -> None:
    """Museum row 43: an entry that points at another queue's record must not be served."""
    messages = filled(tmp_path, 9, clean=False)
    set_checkpoint(tmp_path, 0, 0, 0)
    whole = tree(tmp_path / "consumequeue")
    path = files_under(tmp_path, "consumequeue/orders/0")[0]
    overwrite(path, 20, struct.pack(">qiq", messages[1].physical_offset, messages[1].size, 0))

    report = recovered(tmp_path)

    assert tree(tmp_path / "consumequeue") == whole
    assert (report.queue_entries_written, report.queues_changed) == (1, ["orders/0"])


def test_a_queue_lost_after_its_first_records_expired_begins_where_the_log_begins(tmp_path: Path) -> None:
    config = tiny_config(mapped_file_size_consume_queue=60)
    store = open_store(tmp_path, config)
    messages = fill(store, 45, size=300)
    store.delete_expired_files(NOW, force=True, most=2)
    begin = store.commit_log.files.min_offset
    store.abandon(NOW)
    shutil.rmtree(tmp_path / "consumequeue")

    store = open_store(tmp_path, config, now=LATER)

    there = [message for message in messages if message.physical_offset >= begin]
    assert survivors(store, messages) == there
    for queue in store.queues:
        first = next(m.queue_offset for m in there if m.queue == (queue.topic, queue.queue_id))
        assert queue.min_index == first
        held = files_under(tmp_path, f"consumequeue/{queue.topic}/{queue.queue_id}")[0].read_bytes()
        assert held.startswith(PRE_BLANK * (first % 3))
    store.abandon(LATER)


def test_a_queue_without_records_keeps_its_number_when_the_tail_is_lost(tmp_path: Path) -> None:
    """Museum row 48."""
    store = open_store(tmp_path)
    for number in range(8):
        put(store, a_message(b"x" * 900), NOW + number)
    store.dispatch()
    store.flush_log()
    store.flush_queues()
    expired = store.delete_expired_files(NOW, force=True)
    tail = put(store, a_message("tail"), NOW + 9)
    store.dispatch()
    store.abandon(NOW)
    assert len(expired) == 1
    for number in range(4, 8):
        at = number % 4 * 1005  # every record of the one file that is left
        zero(tmp_path, 4096 + at, 4096 + at + 8)
    zero(tmp_path, tail.physical_offset, tail.end)
    set_checkpoint(tmp_path, 0, 0, 0)

    store = open_store(tmp_path, now=LATER)
    again = put(store, a_message("again"), LATER)

    assert scanned(store)[0].body == b"again"
    assert again.queue_offset == 4
    store.abandon(LATER)


# Index ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dispatched", [0, 1, 10, 30])
def test_an_index_that_was_cut_and_written_again_is_the_same_bytes(tmp_path: Path, dispatched: int) -> None:
    def run(root: Path, *, crash: bool) -> dict[str, str]:
        store = open_store(root)
        fill(store, 20, size=200, step_ms=777)
        store.flush_log()
        store.flush_queues()
        for number in range(30):
            put(store, a_message("more", keys=f"k{number} every", unique=f"u{number}"), NOW + 20_000 + number * 400)
        store.dispatch(dispatched)
        if crash:
            store.abandon(NOW)
            store = open_store(root, now=LATER)
        store.dispatch()
        store.close(LATER)
        return tree(root / "index")

    assert run(tmp_path / "crashed", crash=True) == run(tmp_path / "never", crash=False)


@pytest.mark.parametrize("clean", [True, False], ids=["clean stop", "crash"])
@pytest.mark.parametrize("lost", ["all", "first", "middle", "last"])
def test_lost_index_files_are_written_again(tmp_path: Path, lost: str, clean: bool) -> None:
    messages = filled(tmp_path, 45, clean=clean, size=300)
    if not clean:
        set_checkpoint(tmp_path, 0, 0, 0)  # after a crash it alone says what should be there
    whole = tree(tmp_path / "index")
    files = files_under(tmp_path, "index")
    assert len(files) > 4
    for path in {"all": files, "first": files[:1], "middle": files[2:3], "last": files[-1:]}[lost]:
        path.unlink()

    store = open_store(tmp_path, now=LATER)
    there = survivors(store, messages)
    store.close(LATER)

    assert there == messages
    assert tree(tmp_path / "index") == whole


def test_an_index_that_knows_more_than_the_log_forgets_it(tmp_path: Path) -> None:
    messages = filled(tmp_path, 9, clean=False)
    set_checkpoint(tmp_path, 0, 0, LATER)
    zero(tmp_path, messages[7].physical_offset, messages[7].end - 1)

    store = open_store(tmp_path, now=LATER)

    assert survivors(store, messages) == messages[:7]
    assert store.index is not None
    assert store.index.end_physical_offset == messages[6].physical_offset
    store.abandon(LATER)


def test_times_that_the_log_no_longer_reaches_are_taken_out_of_the_checkpoint(tmp_path: Path) -> None:
    """Else the next crash would trust index entries of records put after the cut, at the very times it claims."""
    store = open_store(tmp_path)
    kept = put(store, a_message("kept", keys="kept"), NOW)
    store.flush_log()
    lost = put(store, a_message("lost", keys="lost"), NOW + 60_000)
    store.dispatch()
    store.flush_queues()
    store.abandon(NOW)
    zero(tmp_path, lost.physical_offset, lost.end)
    store = open_store(tmp_path, now=NOW)
    again = put(store, a_message("again", keys="again"), NOW + 30_000)  # the clock was ahead, and was set right
    store.abandon(NOW)

    store = open_store(tmp_path, now=LATER)

    assert survivors(store, [kept, again]) == [kept, again]
    assert store.checkpoint.index_msg_timestamp <= again.store_timestamp
    store.abandon(LATER)


# Damage and failure --------------------------------------------------------------------------------------------------


def test_damage_in_front_of_flushed_records_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    """Museum row 9."""
    messages = filled(tmp_path, 14, clean=False)
    zero(tmp_path, messages[5].physical_offset, messages[5].physical_offset + 8)
    set_checkpoint(tmp_path, LATER, 0, 0)
    before = tree(tmp_path)

    with pytest.raises(DamagedStoreError) as refused:
        open_store(tmp_path, now=LATER)

    assert refused.value.offset == messages[5].physical_offset
    assert refused.value.salvage
    assert tree(tmp_path) == before
    assert (tmp_path / "abort").exists()


@pytest.mark.parametrize("lost", ["last record", "last file", "all files"])
def test_a_log_that_ends_before_its_clean_stop_is_refused_and_salvage_goes_on(tmp_path: Path, lost: str) -> None:
    messages = filled(tmp_path, 14, clean=True)
    match lost:
        case "last record":
            zero(tmp_path, messages[-1].physical_offset, messages[-1].end)
        case "last file":
            log_file(tmp_path, -1).unlink()
        case "all files":
            shutil.rmtree(tmp_path / "commitlog")
    before = tree(tmp_path)

    with pytest.raises(DamagedStoreError, match=f"at the last clean stop it reached {messages[-1].end}") as refused:
        open_store(tmp_path, now=LATER)

    assert refused.value.salvage
    assert tree(tmp_path) == before
    store = open_store(tmp_path, tiny_config(salvage=True), now=LATER)
    there = survivors(store, messages)
    store.close(LATER)
    assert there == messages[: {"last record": 13, "last file": 12, "all files": 0}[lost]]
    open_store(tmp_path, now=LATER).abandon(LATER)


def test_records_of_the_checkpoints_own_millisecond_are_a_torn_tail(tmp_path: Path) -> None:
    """They may have come after the flush that the checkpoint speaks of: refusing to start would be wrong."""
    store = open_store(tmp_path)
    flushed = put(store, a_message("flushed"), NOW)
    store.flush_log()
    store.flush_queues()
    messages = [flushed, *(put(store, a_message(f"same ms {n}"), NOW) for n in range(3))]
    store.abandon(NOW)
    zero(tmp_path, messages[1].physical_offset, messages[1].end)

    store = open_store(tmp_path, now=LATER)

    assert survivors(store, messages) == [flushed]
    store.abandon(LATER)


def test_a_missing_segment_is_named(tmp_path: Path) -> None:
    """Museum row 51."""
    filled(tmp_path, 14, clean=True)
    log_file(tmp_path, 1).unlink()
    before = tree(tmp_path)

    with pytest.raises(DamagedStoreError, match="segments are missing between offsets 4096 and 8192"):
        open_store(tmp_path, now=LATER)

    assert tree(tmp_path) == before
    assert not (tmp_path / "abort").exists()


def test_a_failed_start_lets_go_of_the_lock_and_of_every_map(tmp_path: Path) -> None:
    messages = filled(tmp_path, 14, clean=True)
    gone = log_file(tmp_path, 1)
    content = gone.read_bytes()
    gone.unlink()
    store = MessageStore(HookedDisk(), str(tmp_path), tiny_config())
    with pytest.raises(DamagedStoreError):
        store.open(LATER)
    assert not store.is_open

    gone.write_bytes(content)
    store = open_store(tmp_path, now=LATER)

    assert survivors(store, messages) == messages
    store.abandon(LATER)


# The report ----------------------------------------------------------------------------------------------------------


def test_the_report_of_a_healthy_store_says_that_nothing_was_repaired(tmp_path: Path) -> None:
    messages = filled(tmp_path, 10, clean=True)

    report = recovered(tmp_path)

    assert not report.changed_anything
    assert (report.files_read, report.records) == (3, 10)
    assert report.bytes_read == sum(message.size for message in messages)
    assert (report.end_offset, report.files_synced) == (messages[-1].end, 0)
    assert report.lines()[:4] == [
        "stop was clean",
        "started at offset 0: first file",
        f"read 3 files, {report.bytes_read} bytes, 10 records",
        f"log ends at offset {messages[-1].end}: magic 00000000 is not a record's",
    ]


def test_the_report_of_a_crash_says_what_was_read_synced_cut_and_written(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    messages = fill(store, 10)
    messages += [put(store, a_message("not dispatched", keys="late"), NOW + 50_000) for _ in range(3)]
    store.flush_log()
    store.abandon(NOW)
    zero(tmp_path, messages[-1].physical_offset, messages[-1].physical_offset + 100)

    report = recovered(tmp_path)

    assert report.unclean
    assert report.changed_anything
    assert (report.files_read, report.files_synced, report.records) == (3, 3, 12)
    assert report.bytes_read == sum(message.size for message in messages[:-1])
    assert 0 < report.log_bytes_cleared < 100
    assert (report.queue_entries_written, report.queue_entries_removed) == (2, 0)
    assert report.queues_changed == ["orders/0"]
    assert report.index_entries_added == report.index_entries_dropped + 2
    assert any("rewrote and synced 3 log files" in line for line in report.lines())


def test_progress_is_told_file_by_file_up_to_the_whole(tmp_path: Path) -> None:
    filled(tmp_path, 14, clean=False)
    set_checkpoint(tmp_path, 0, 0, 0)
    told: list[tuple[int, int]] = []
    store = MessageStore(HookedDisk(), str(tmp_path), tiny_config())

    store.open(LATER, progress=lambda done, whole: told.append((done, whole)))

    assert told[:3] == [(4096, 16384), (8192, 16384), (12288, 16384)]
    store.abandon(LATER)


# Again, and broken off -----------------------------------------------------------------------------------------------

Damage = Callable[[Path], None]


def _nothing(_root: Path) -> None:
    pass


def _torn_tail(root: Path) -> None:
    """The last three records are cut, the first of them in its topic; and the next file was made ahead of need."""
    last = files_under(root, "commitlog")[-1]
    at = last.read_bytes().index(b"late 3") + len(b"late 3") + 2
    overwrite(last, at, bytes(4096 - at))
    (root / "commitlog" / f"{int(last.name) + 4096:020}").write_bytes(bytes(4096))


def _queues_lost(root: Path) -> None:
    shutil.rmtree(root / "consumequeue" / "orders")


def _queue_file_lost(root: Path) -> None:
    files_under(root, "consumequeue/orders/0")[1].unlink()


def _first_queue_file_lost(root: Path) -> None:
    files_under(root, "consumequeue/orders/0")[0].unlink()
    set_checkpoint(root, 0, 0, 0)


def _index_lost(root: Path) -> None:
    shutil.rmtree(root / "index")


def _checkpoint_lost(root: Path) -> None:
    (root / "checkpoint").unlink()


DAMAGES = [_nothing, _torn_tail, _queues_lost, _queue_file_lost, _first_queue_file_lost, _index_lost, _checkpoint_lost]
SMALL_QUEUES = tiny_config(mapped_file_size_consume_queue=60)


def a_damaged_store(root: Path, damage: Damage, *, clean: bool) -> list[Sent]:
    store = open_store(root, SMALL_QUEUES)
    messages = fill(store, 14, size=700)
    store.flush_log()
    store.flush_queues()
    for number in range(6):
        messages.append(put(store, a_message(f"late {number}", keys=f"late{number}"), NOW + 60_000 + number))
    store.dispatch(3)
    if clean:
        store.close(NOW)
    else:
        store.abandon(NOW)
    damage(root)
    return messages


@pytest.mark.parametrize(
    ("damage", "clean"),
    # A clean stop leaves no torn tail: that is refused, see below.
    [(damage, clean) for damage in DAMAGES for clean in (True, False) if not (clean and damage is _torn_tail)],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "clean stop" if value else "crash",
)
def test_recovering_twice_changes_nothing_more(tmp_path: Path, damage: Damage, clean: bool) -> None:
    messages = a_damaged_store(tmp_path, damage, clean=clean)

    recovered(tmp_path, SMALL_QUEUES)
    once = tree(tmp_path)
    report = recovered(tmp_path, SMALL_QUEUES)

    assert tree(tmp_path) == once
    assert report.unclean
    assert not report.changed_anything
    store = open_store(tmp_path, SMALL_QUEUES, now=LATER)
    assert len(survivors(store, messages)) >= len(messages) - 3
    store.abandon(LATER)


@pytest.mark.parametrize(
    ("damage", "clean"),
    [
        (_nothing, False),
        (_torn_tail, False),
        (_queues_lost, True),
        (_queue_file_lost, False),
        (_index_lost, False),
        (_checkpoint_lost, False),
    ],
    ids=lambda value: value.__name__[1:] if callable(value) else "clean stop" if value else "crash",
)
def test_recovery_that_dies_at_any_operation_is_made_good_by_the_next(
    tmp_path: Path, damage: Damage, clean: bool
) -> None:
    messages = a_damaged_store(tmp_path / "stopped", damage, clean=clean)
    whole = copy_store(tmp_path / "stopped", tmp_path / "whole")
    recovered(whole, SMALL_QUEUES)
    wanted = tree(whole)

    fail_at = 0
    while True:
        fail_at += 1
        root = copy_store(tmp_path / "stopped", tmp_path / "broken off")
        disk = FaultDisk(fail_at)
        try:
            open_store(root, SMALL_QUEUES, disk=disk, now=LATER).abandon(LATER)
        except CrashError as crash:
            recovered(root, SMALL_QUEUES)
            assert tree(root) == wanted, f"after {crash}"
            shutil.rmtree(root)
        else:
            break

    assert fail_at > 10
    assert fail_at == len(disk.operations) + 1
    assert tree(root) == wanted
    store = open_store(root, SMALL_QUEUES, now=LATER)
    assert len(survivors(store, messages)) >= len(messages) - 3
    store.abandon(LATER)


@pytest.mark.parametrize("damage", [_torn_tail, _queues_lost, _index_lost], ids=lambda damage: damage.__name__[1:])
def test_a_disk_error_during_recovery_fails_the_start_and_the_next_one_makes_it_good(
    tmp_path: Path, damage: Damage
) -> None:
    a_damaged_store(tmp_path / "stopped", damage, clean=False)
    whole = copy_store(tmp_path / "stopped", tmp_path / "whole")
    recovered(whole, SMALL_QUEUES)
    wanted = tree(whole)

    fail_at, refused = 0, 0
    while True:
        fail_at += 1
        root = copy_store(tmp_path / "stopped", tmp_path / "refused")
        disk = FaultDisk(fail_at, error=lambda action, path: DiskIOError(action, path, errno.EIO))
        try:
            open_store(root, SMALL_QUEUES, disk=disk, now=LATER).abandon(LATER)
        except StoreError:
            refused += 1
        recovered(root, SMALL_QUEUES)
        assert tree(root) == wanted, f"after an error in operation {fail_at}"
        shutil.rmtree(root)
        if not disk.failed:
            break

    assert refused > 20


def test_a_log_that_ends_before_its_clean_stop_is_refused_and_left_alone(tmp_path: Path) -> None:
    """Queues and index must not be cut to match a log that lost acknowledged messages."""
    a_damaged_store(tmp_path, _torn_tail, clean=True)
    before = tree(tmp_path)

    with pytest.raises(DamagedStoreError, match="at the last clean stop it reached"):
        recovered(tmp_path, SMALL_QUEUES)

    assert tree(tmp_path) == before
