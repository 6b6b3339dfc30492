"""The store as one object: who may open it, what a stop leaves, how far dispatch goes, what expires."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from brokerlab.storage.config import FlushDiskType, StoreConfig
from brokerlab.storage.errors import ConfigError, DiskFullError, DiskIOError, StoreClosedError, StoreLockedError
from brokerlab.storage.message import BatchItem
from brokerlab.storage.message_store import MessageStore
from brokerlab.storage.quirks import Dialect
from brokerlab.storage.real_disk import RealDisk
from brokerlab.storage.results import GetMessageStatus, PutMessageStatus
from tests.storage.store_model import (
    HOUR,
    NOW,
    FaultDisk,
    Sent,
    a_message,
    files_under,
    open_store,
    put,
    scanned,
    survivors,
    tiny_config,
    tree,
)

SYNC = {"flush_disk_type": FlushDiskType.SYNC_FLUSH}


def fill(store: MessageStore, count: int, *, size: int = 900, step_ms: int = 1000, now: int = NOW) -> list[Sent]:
    """Four messages to a log file of 4096."""
    return [
        put(
            store,
            a_message(f"{n}:".ljust(size, "x"), queue_id=n % 2, keys=f"k{n}", tags=f"t{n % 3}"),
            now + n * step_ms,
        )
        for n in range(count)
    ]


# Open ----------------------------------------------------------------------------------------------------------------


def test_a_new_store_makes_its_directories_lock_and_marks(tmp_path: Path) -> None:
    root = tmp_path / "not" / "there" / "yet"
    store = MessageStore(RealDisk(), f"{root}/", tiny_config(process_id=4711))

    report = store.open(NOW)

    assert sorted(path.name for path in root.iterdir()) == [
        "abort", "abort.bak", "checkpoint", "commitlog", "consumequeue", "lock",
    ]  # fmt: skip
    assert (root / "lock").read_bytes() == b"lock"
    assert (root / "abort").read_text() == "4711"
    assert (root / "checkpoint").stat().st_size == 4096
    assert not report.unclean
    assert report.start_reason == "the log is empty"
    store.close(NOW)


def test_a_second_store_is_refused_before_it_touches_anything(tmp_path: Path) -> None:
    """Museum rows 30 and 59: the original recovers, and truncates, a live store before it looks at the lock."""
    store = open_store(tmp_path)
    messages = fill(store, 9)
    before, marks = tree(tmp_path), (tmp_path / "abort").read_bytes()

    second = MessageStore(RealDisk(), str(tmp_path), tiny_config(process_id=99))
    with pytest.raises(StoreLockedError):
        second.open(NOW)

    assert not second.is_open
    assert tree(tmp_path) == before
    assert (tmp_path / "abort").read_bytes() == marks
    store.dispatch()
    assert survivors(store, messages) == messages
    store.close(NOW)


def test_the_lock_is_free_after_close(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    states = [store.is_open]
    store.close(NOW)
    states.append(store.is_open)

    again = MessageStore(RealDisk(), str(tmp_path), tiny_config())

    assert states == [True, False]
    assert not again.open(NOW).unclean
    again.close(NOW)


def test_a_closed_store_takes_no_message_and_cannot_be_closed_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.close(NOW)
    before = tree(tmp_path)

    answers = [store.put(a_message(), NOW), *store.put_many([a_message(), a_message()], NOW)]
    answers.append(store.put_batch(a_message(b""), [BatchItem(b"1")], NOW))

    assert {answer.status for answer in answers} == {PutMessageStatus.SERVICE_NOT_AVAILABLE}
    assert all("not open" in answer.reason for answer in answers)
    assert len(answers) == 4
    with pytest.raises(StoreClosedError):
        store.close(NOW)
    assert tree(tmp_path) == before


def test_a_setting_that_stored_records_cannot_meet_is_refused() -> None:
    """Museum row 66."""
    with pytest.raises(ConfigError, match="duplicationEnable"):
        MessageStore(RealDisk(), "anywhere", StoreConfig(duplication_enable=True))


def test_stray_files_are_skipped_and_told(tmp_path: Path) -> None:
    """Museum row 54."""
    store = open_store(tmp_path)
    messages = fill(store, 5)
    store.close(NOW)
    (tmp_path / "commitlog" / "notes.txt").write_text("hello")
    (tmp_path / "commitlog" / "lost+found").mkdir()
    (tmp_path / "consumequeue" / "README").write_text("hello")
    (tmp_path / "consumequeue" / "orders" / "zero").mkdir()
    (tmp_path / "consumequeue" / "orders" / "0" / "7").write_text("short name")
    (tmp_path / "index" / "index.bak").write_text("hello")
    before = tree(tmp_path)

    store = open_store(tmp_path)
    report = store.report
    there = survivors(store, messages)
    store.close(NOW)

    assert there == messages
    assert report is not None
    for name in ("notes.txt", "lost+found", "README", "orders/zero", "orders/0/7", "index.bak"):
        assert any(name in note and "skipped" in note for note in report.notes), name
        assert any(name in line for line in report.lines())
    assert {path: tree(tmp_path)[path] for path in before} == before


# Close ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, SYNC, {"transient_store_pool_enable": True}], ids=["async", "sync", "pool"])
def test_a_clean_stop_dispatches_and_flushes_everything_and_takes_the_mark_away(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    config = tiny_config(**settings)
    disk = FaultDisk()
    store = open_store(tmp_path, config, disk=disk)
    messages = fill(store, 9)
    disk.operations.clear()

    store.close(NOW)

    done = [step.replace(str(tmp_path), "") for step in disk.operations]
    assert not (tmp_path / "abort").exists()
    for synced in (path for part in ("commitlog", "consumequeue", "index") for path in files_under(tmp_path, part)):
        assert f"sync {str(synced).replace(str(tmp_path), '')}" in done, synced
    assert done.index("sync /checkpoint") < done.index("unlink /abort")
    assert done[-1].startswith("sync_directory")
    values = struct.unpack(">3q", (tmp_path / "checkpoint").read_bytes()[:24])
    assert values == (messages[-1].store_timestamp,) * 3
    store = open_store(tmp_path, config)
    assert store.report is not None
    assert not store.report.unclean
    assert not store.report.changed_anything
    assert survivors(store, messages) == messages
    store.abandon(NOW)


def test_a_crash_leaves_the_mark_and_writes_nothing(tmp_path: Path) -> None:
    disk = FaultDisk()
    store = open_store(tmp_path, disk=disk)
    fill(store, 9)
    disk.operations.clear()

    store.abandon(NOW)

    assert disk.operations == []
    assert (tmp_path / "abort").exists()
    store = open_store(tmp_path)
    assert store.report is not None
    assert store.report.unclean
    store.close(NOW)


def test_a_stop_that_fails_anywhere_keeps_the_mark_and_lets_go_of_the_lock(tmp_path: Path) -> None:
    """The walk: the 1st operation of close fails, then the 2nd, until none is left."""
    fail_at, failed = 0, 0
    while True:
        fail_at += 1
        root = tmp_path / f"{fail_at}"
        disk = FaultDisk(error=lambda action, path: DiskIOError(action, path, errno.EIO))
        store = open_store(root, disk=disk)
        messages = fill(store, 5)
        disk.operations.clear()
        disk.fail_at = fail_at
        try:
            store.close(NOW)
        except DiskIOError:
            failed += 1
            assert (root / "abort").exists(), f"operation {fail_at}"
        assert not store.is_open
        again = open_store(root)
        assert survivors(again, messages) == messages
        again.abandon(NOW)
        if not disk.failed:
            break

    assert failed > 10


def test_a_file_that_was_made_ahead_of_need_goes_with_a_clean_stop(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    messages = fill(store, 4)
    files = store.commit_log.files
    blanked = store.commit_log._file_with_room(2000)  # ends the first file, and nothing is put into the next
    assert blanked is files.files[1]

    store.close(NOW)

    assert len(files_under(tmp_path, "commitlog")) == 1
    store = open_store(tmp_path)
    store.dispatch()
    assert survivors(store, messages) == messages
    store.abandon(NOW)


def test_a_refused_put_that_ended_a_file_does_not_stand_in_the_way_of_the_next_start(tmp_path: Path) -> None:
    """The blank is written, dispatch goes over it, and the next file stays empty: the log ends before it again."""
    store = open_store(tmp_path)
    messages = fill(store, 4)
    refused = store.put(a_message(b"x" * 900, flag=1 << 40), NOW + 9000)
    store.dispatch()
    store.close(NOW)

    store = open_store(tmp_path)
    again = put(store, a_message("again"), NOW + 10_000)
    store.dispatch()

    assert refused.status is PutMessageStatus.MESSAGE_ILLEGAL
    assert survivors(store, [*messages, again]) == [*messages, again]
    store.abandon(NOW)


# Dialects ------------------------------------------------------------------------------------------------------------


def test_the_marks_of_5_3_hold_the_process_id_and_the_former_one(tmp_path: Path) -> None:
    open_store(tmp_path, tiny_config(process_id=1001)).abandon(NOW)
    assert ((tmp_path / "abort").read_text(), (tmp_path / "abort.bak").read_text()) == ("1001", "")

    store = open_store(tmp_path, tiny_config(process_id=1002))
    assert ((tmp_path / "abort").read_text(), (tmp_path / "abort.bak").read_text()) == ("1002", "1001")
    store.close(NOW)

    assert not (tmp_path / "abort").exists()
    assert (tmp_path / "abort.bak").read_text() == "1001"
    open_store(tmp_path, tiny_config(process_id=1003)).abandon(NOW)
    assert ((tmp_path / "abort").read_text(), (tmp_path / "abort.bak").read_text()) == ("1003", "")


def test_the_mark_of_4_9_is_empty_and_alone(tmp_path: Path) -> None:
    store = open_store(tmp_path, tiny_config(dialect=Dialect.V4_9, process_id=1001))

    assert (tmp_path / "abort").read_bytes() == b""
    assert not (tmp_path / "abort.bak").exists()
    store.close(NOW)


@pytest.mark.parametrize(("dialect", "longs"), [(Dialect.V4_9, 3), (Dialect.V5_3, 5)])
def test_a_checkpoint_has_the_longs_of_its_dialect(tmp_path: Path, dialect: Dialect, longs: int) -> None:
    store = open_store(tmp_path, tiny_config(dialect=dialect))
    messages = fill(store, 3)
    store.dispatch()
    store.flush_log()
    store.flush_queues()
    values = struct.unpack(">5q", (tmp_path / "checkpoint").read_bytes()[:40])
    store.abandon(NOW)

    assert values[:3] == (messages[-1].store_timestamp,) * 3
    assert values[4] == (messages[-1].end if longs == 5 else 0)


# Dispatch ------------------------------------------------------------------------------------------------------------


def test_under_async_flush_dispatch_goes_as_far_as_the_log(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    messages = fill(store, 3)

    assert store.confirm_offset == messages[-1].end
    assert store.dispatch() == 3
    assert store.reput_from_offset == messages[-1].end
    assert store.dispatch() == 0
    store.abandon(NOW)


@pytest.mark.parametrize("from_log", [False, True], ids=["handed over", "from the log"])
def test_under_sync_flush_dispatch_goes_no_further_than_the_flush(tmp_path: Path, from_log: bool) -> None:
    """Museum row 17: what a consumer sees must be on the disk."""
    store = open_store(tmp_path, tiny_config(dispatch_from_log=from_log, **SYNC))
    messages = fill(store, 6)
    unflushed = store.dispatch()
    store.flush_log()
    more = fill(store, 2)
    flushed = store.dispatch()

    assert unflushed == 0
    assert flushed >= 6  # a blank read from the log counts as a step
    assert store.reput_from_offset == messages[-1].end
    for number in range(2):
        with store.reader.get_message("orders", number, 0) as result:
            assert (result.status, result.indexes) == (GetMessageStatus.FOUND, [0, 1, 2])
    store.flush_log()
    store.dispatch()
    assert survivors(store, messages + more) == messages + more
    store.abandon(NOW)


def test_with_a_pool_dispatch_goes_no_further_than_what_was_committed(tmp_path: Path) -> None:
    """Museum row 26. Two files are full of records that only a buffer holds."""
    store = open_store(tmp_path, tiny_config(transient_store_pool_enable=True))
    messages = fill(store, 9)

    assert store.dispatch() == 0
    assert scanned(store) == []
    store.commit_log.files.commit(0)
    store.dispatch()
    assert store.reput_from_offset <= 4096
    store.commit_log.files.commit_all()
    store.dispatch()
    assert survivors(store, messages) == messages
    store.abandon(NOW)


def test_with_a_pool_a_flush_vouches_only_for_what_reached_the_file(tmp_path: Path) -> None:
    config = tiny_config(transient_store_pool_enable=True)
    store = open_store(tmp_path, config)
    first = put(store, a_message("flushed, so committed before"), NOW)
    store.flush_log()
    put(store, a_message("only in the buffer"), NOW + 5000)
    store.flush_log(least_pages=4)

    assert store.commit_log.files.flushed_where == first.end
    assert store.checkpoint.physic_msg_timestamp == NOW
    store.abandon(NOW)
    store = open_store(tmp_path, config)
    assert survivors(store, [first]) == [first]
    store.abandon(NOW)


def test_dispatch_can_be_done_in_small_steps(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    messages = fill(store, 9)

    steps = [store.dispatch(2) for _ in range(5)]

    assert steps == [2, 2, 2, 2, 1]
    assert survivors(store, messages) == messages
    store.abandon(NOW)


def test_reading_the_log_again_gives_the_bytes_of_the_hand_over(tmp_path: Path) -> None:
    def run(root: Path, *, from_log: bool) -> dict[str, str]:
        store = open_store(root, tiny_config(dispatch_from_log=from_log))
        for part in range(6):
            fill(store, 7, size=40 + 97 * part, now=NOW + part * 10_000)
            items = [BatchItem(b"%d" % n) for n in range(part)]
            store.put_batch(a_message(b"", topic="batch"), items, NOW + part * 10_000 + 9000)
            store.dispatch((3, None)[part % 2])
        store.close(NOW)
        return tree(root)

    handed = run(tmp_path / "handed", from_log=False)

    assert run(tmp_path / "read", from_log=True) == handed
    assert len(handed) > 10


def test_a_full_queue_disk_stops_dispatch_and_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    """Museum row 46."""
    disk = FaultDisk(error=lambda action, path: DiskFullError(action, path, errno.ENOSPC))
    store = open_store(tmp_path, disk=disk)
    messages = fill(store, 6)
    disk.operations.clear()
    disk.fail_at = 2  # the directory can be made, the file cannot

    with pytest.raises(DiskFullError):
        store.dispatch()
    before = store.reput_from_offset
    store.dispatch()

    assert before == 0
    assert survivors(store, messages) == messages
    store.close(NOW)


# Expiry --------------------------------------------------------------------------------------------------------------


def test_a_file_expires_by_the_store_time_of_its_records_not_by_its_mtime(tmp_path: Path) -> None:
    """Museum row 40: a copied or touched store keeps its retention."""
    store = open_store(tmp_path)  # fileReservedTime is an hour
    messages = fill(store, 12, step_ms=600_000)
    store.dispatch()
    for path in files_under(tmp_path, "commitlog"):
        os.utime(path, (NOW / 1000 + 10**8, NOW / 1000 + 10**8))
    first_of_second = next(m for m in messages if m.physical_offset == 4096)
    due = first_of_second.store_timestamp + HOUR

    early = store.delete_expired_files(due - 1)
    on_time = store.delete_expired_files(due)

    assert early == []
    assert [Path(path).name for path in on_time] == [f"{0:020}"]
    assert survivors(store, messages) == messages[4:]
    store.abandon(NOW)


def test_old_mtimes_expire_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    messages = fill(store, 12)
    store.dispatch()
    for path in files_under(tmp_path, "commitlog"):
        os.utime(path, (0, 0))

    assert store.delete_expired_files(NOW + 1000) == []
    assert survivors(store, messages) == messages
    store.abandon(NOW)


def test_the_last_file_and_what_is_not_dispatched_never_expire(tmp_path: Path) -> None:
    """Museum row 24."""
    store = open_store(tmp_path)
    messages = fill(store, 14)
    store.dispatch(6)

    first = store.delete_expired_files(NOW + 100 * HOUR, force=True)
    store.dispatch()
    rest = store.delete_expired_files(NOW + 100 * HOUR, force=True)

    assert (len(first), len(rest)) == (1, 2)
    assert len(store.commit_log.files.files) == 1
    assert survivors(store, messages) == messages[12:]
    store.abandon(NOW)


def test_no_more_files_go_at_once_than_configured(tmp_path: Path) -> None:
    store = open_store(tmp_path, tiny_config(delete_file_batch_max=2))
    fill(store, 20)
    store.dispatch()

    assert len(store.delete_expired_files(NOW, force=True)) == 2
    assert len(store.delete_expired_files(NOW, force=True, most=1)) == 1
    store.abandon(NOW)


def test_queues_and_index_let_go_of_what_expired_and_numbering_goes_on(tmp_path: Path) -> None:
    config = tiny_config(mapped_file_size_consume_queue=60, max_index_num=6)
    store = open_store(tmp_path, config)
    messages = fill(store, 20)
    store.dispatch()
    before = len(files_under(tmp_path, "consumequeue")), len(files_under(tmp_path, "index"))

    store.delete_expired_files(NOW, force=True, most=3)
    after = len(files_under(tmp_path, "consumequeue")), len(files_under(tmp_path, "index"))
    store.close(NOW)
    store = open_store(tmp_path, config)
    again = put(store, a_message("again", queue_id=0), NOW + HOUR)
    store.dispatch()

    assert after[0] < before[0]
    assert after[1] < before[1]
    assert again.queue_offset == 10
    assert survivors(store, [*messages, again]) == [*messages[12:], again]
    store.abandon(NOW)


def test_queues_are_flushed_before_the_records_they_count_go(tmp_path: Path) -> None:
    """Else a power cut could take the last trace of how far a queue was numbered (museum row 48)."""
    disk = FaultDisk()
    store = open_store(tmp_path, disk=disk)
    fill(store, 12)
    store.dispatch()
    disk.operations.clear()

    deleted = store.delete_expired_files(NOW, force=True)

    first_unlink = disk.operations.index(f"unlink {deleted[0]}")
    synced = disk.operations[:first_unlink]
    for path in files_under(tmp_path, "consumequeue"):
        assert f"sync {path}" in synced
    assert any(step.startswith("sync_directory") and "consumequeue" in step for step in synced)
    store.abandon(NOW)
