"""The museum, strict side: each weakness of the original store that lives in storage/, and that ours does not have it.

One test or more per row; the row stands in the docstring. The other side of the switch, where there is one, is in
test_museum_historic.py; docs/museum.md is the table of both.
"""

from __future__ import annotations

import shutil
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from brokerlab.storage.checksum import CRC_MASK, crc32
from brokerlab.storage.config import StoreConfig
from brokerlab.storage.consume_queue import PRE_BLANK, UNIT, UNIT_SIZE, ConsumeQueue
from brokerlab.storage.errors import (
    ConfigError,
    DamagedStoreError,
    DiskFullError,
    DiskIOError,
    QueueGapError,
    StoreLockedError,
)
from brokerlab.storage.message import DELAY, SCHEDULE_TOPIC, BatchItem, Message, encode_properties
from brokerlab.storage.real_disk import RealDisk
from brokerlab.storage.record import BLANK_SIZE_MIN, CRC_PROPERTY_SIZE
from brokerlab.storage.results import GetMessageStatus, PutMessageStatus
from tests.storage.store_tools import (
    LOG_FILE,
    NOW,
    PER_LOG_FILE,
    PER_QUEUE_FILE,
    QUEUE_FILE,
    RECORD,
    STEP_MS,
    CrashError,
    Fault,
    FaultDisk,
    Home,
    a_message,
    by_key,
    entry,
    flip,
    in_log,
    in_order,
    labels,
    lose_entries,
    lose_records,
    overwrite,
    place_of,
    pull,
    put,
    small,
    snapshot,
)

THREE_FILES = range(3 * PER_LOG_FILE)
BODY_AT = 88


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with Home(tmp_path / "store") as made:
        yield made


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[tuple[Home, FaultDisk]]:
    disk = FaultDisk()
    with Home(tmp_path / "store", disk=disk) as made:
        yield made, disk


def numbers(count: int, *, start: int = 0) -> range:
    return range(start, start + count)


def test_strict_is_the_default_and_has_no_quirk() -> None:
    """What all rows below rest on."""
    assert StoreConfig().quirks == frozenset()


# Puts ----------------------------------------------------------------------------------------------------------------


def test_a_record_larger_than_a_file_is_refused_and_nothing_is_written(home: Home) -> None:
    """Row 3."""
    store = home.open()
    put(store, numbers(2))
    before = snapshot(home.root)

    too_large = store.put(a_message(2, size=LOG_FILE - BLANK_SIZE_MIN + 1), NOW)

    assert too_large.status is PutMessageStatus.MESSAGE_ILLEGAL
    assert snapshot(home.root) == before
    largest = store.put(a_message(2, size=LOG_FILE - BLANK_SIZE_MIN), NOW)
    assert (largest.status, largest.physical_offset, largest.queue_offset) == (PutMessageStatus.PUT_OK, LOG_FILE, 2)


def test_a_batch_larger_than_a_file_is_refused_and_nothing_is_written(home: Home) -> None:
    """Row 3, for a batch: it must lie in one file."""
    store = home.open()
    put(store, numbers(2))
    before = snapshot(home.root)

    result = store.put_batch(Message(topic="T", body=b""), [BatchItem(bytes(2000))] * 2, NOW)

    assert result.status is PutMessageStatus.MESSAGE_ILLEGAL
    assert snapshot(home.root) == before


@pytest.mark.parametrize("fault", [Fault.FULL, Fault.IO])
def test_acknowledged_puts_behind_a_failed_append_survive_a_restart(
    faulty: tuple[Home, FaultDisk], fault: Fault
) -> None:
    """Row 42: the disk is full for one put, then has room again."""
    home, disk = faulty
    store = home.open()
    put(store, numbers(2))
    disk.fail(1, fault, action="wrote", path="commitlog")
    with pytest.raises((DiskFullError, DiskIOError)):
        store.put(a_message(99), NOW)
    put(store, numbers(3, start=2))
    store.abandon(0)

    again = home.open()

    assert pull(again) == in_order(numbers(5))
    assert again.report is not None and again.report.end_offset == place_of(5)


def test_half_a_record_that_could_not_be_cleared_is_cleared_before_the_next_append(
    faulty: tuple[Home, FaultDisk],
) -> None:
    """Row 42: the disk refuses the zeros too, and the next record is shorter than what lies there."""
    home, disk = faulty
    store = home.open()
    put(store, numbers(2))
    disk.fail(1, Fault.FULL, action="wrote", path="commitlog")
    disk.fail(2, Fault.FULL, action="wrote", path="commitlog", half=False)
    with pytest.raises(DiskFullError):
        store.put(a_message(99, size=1000), NOW)
    assert any(home.log_file().read_bytes()[place_of(2) :])
    put(store, numbers(1, start=2))

    content = home.log_file().read_bytes()

    assert content[place_of(3) :] == bytes(LOG_FILE - place_of(3))
    assert disk.undeclared(home.log_file()) == []


def test_batch_properties_that_add_up_to_too_many_bytes_are_refused(home: Home) -> None:
    """Row 62: each part alone is allowed."""
    home.config = small(mapped_file_size_commit_log=1 << 18)
    store = home.open()
    own = encode_properties({"a": "x" * 20_000})
    envelope = Message(topic="T", body=b"", properties=encode_properties({"b": "y" * 20_000}))
    put(store, numbers(2))

    result = store.put_batch(envelope, [BatchItem(b"poison", own)], NOW)
    put(store, numbers(2, start=2))
    store.abandon(0)

    assert result.status is PutMessageStatus.PROPERTIES_SIZE_EXCEEDED
    assert pull(home.open()) == in_order(numbers(4))


@pytest.mark.parametrize("topic", ["é" * 64, "語" * 43, "T" * 128], ids=["two bytes", "three bytes", "one byte"])
def test_a_topic_is_measured_in_bytes(home: Home, topic: str) -> None:
    """Row 63: 64 two-byte characters are fewer than 127, but 128 bytes."""
    store = home.open()
    put(store, numbers(2))

    result = store.put(Message(topic=topic, body=b"poison"), NOW)
    put(store, numbers(2, start=2))
    store.abandon(0)

    assert result.status is PutMessageStatus.MESSAGE_ILLEGAL
    assert pull(home.open()) == in_order(numbers(4))


def test_a_delay_that_is_no_number_is_refused_alone_and_in_a_batch(home: Home) -> None:
    """Row 64: at the put."""
    store = home.open()
    poison = encode_properties({DELAY: "soon"})

    alone = store.put(Message(topic=SCHEDULE_TOPIC, body=b"poison", properties=poison), NOW)
    batch = store.put_batch(Message(topic=SCHEDULE_TOPIC, body=b""), [BatchItem(b"poison", poison)], NOW)

    assert alone.status is batch.status is PutMessageStatus.MESSAGE_ILLEGAL
    assert store.commit_log.files.max_offset == 0


def test_a_delay_that_is_no_number_in_a_log_is_served_with_code_0_and_reported(home: Home) -> None:
    """Row 64: a record put past the checks must not take the records behind it along."""
    store = home.open()
    level = encode_properties({DELAY: "5"})
    first = store.put(Message(topic=SCHEDULE_TOPIC, body=b"later", properties=level), NOW)
    put(store, numbers(3))
    store.abandon(0)
    overwrite(home.log_file(), first.physical_offset + first.size - 2, b"x")
    shutil.rmtree(home.root / "consumequeue")

    again = home.open()

    assert pull(again) == in_order(numbers(3))
    assert entry(home, 0, SCHEDULE_TOPIC) == (first.physical_offset, first.size, 0)
    with again.reader.get_message(SCHEDULE_TOPIC, 0, 0) as found:
        assert [record.body for record in found.decoded()] == [b"later"]
    assert again.report is not None
    assert any("DELAY" in note for note in again.report.notes)


@pytest.mark.parametrize("pooled", [False, True])
def test_behind_the_tail_of_every_file_lie_zeros(home: Home, pooled: bool) -> None:
    """Row 61: also where a write buffer served another file before."""
    home.config = small(transient_store_pool_enable=pooled, transient_store_pool_size=1)
    store = home.open()
    for number in numbers(2 * PER_LOG_FILE + 1):
        put(store, numbers(1, start=number), at=NOW + number * STEP_MS)
        store.commit_log.files.commit_all()
    assert (store.commit_log.files.files[-1].write_buffer is not None) is pooled
    for number in (98, 99):  # neither fits behind the other: the third file ends early
        store.put(a_message(number, size=3900), NOW + 100 * STEP_MS)
        store.commit_log.files.commit_all()
    store.flush_log()

    blank_ats = {0: PER_LOG_FILE * RECORD, LOG_FILE: PER_LOG_FILE * RECORD, 2 * LOG_FILE: RECORD, 3 * LOG_FILE: 3900}
    assert store.commit_log.files.max_offset == 4 * LOG_FILE + 3900
    for start, blank_at in blank_ats.items():
        assert home.log_file(start).read_bytes()[blank_at + 8 :] == bytes(LOG_FILE - blank_at - 8)
    assert home.log_file(4 * LOG_FILE).read_bytes()[3900:] == bytes(LOG_FILE - 3900)


# What makes a record valid -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["topic and properties", "properties"])
def test_a_record_whose_page_behind_the_body_is_lost_is_not_accepted(home: Home, lost: str) -> None:
    """Row 5: the body's CRC is right, what follows it is zeros."""
    home.config = small(mapped_file_size_commit_log=4 * LOG_FILE)
    store = home.open()
    put(store, numbers(1))
    in_front = RECORD + BODY_AT + (0 if lost == "topic and properties" else 1 + 1 + 2)
    torn = Message(topic="T", body=b"b" * (LOG_FILE - in_front), properties=encode_properties({"KEYS": "k" * 600}))
    result = store.put(torn, NOW)
    store.abandon(0)
    page = home.log_file().read_bytes()[LOG_FILE : 2 * LOG_FILE]
    assert page.strip(b"\0") and result.physical_offset + result.size < 2 * LOG_FILE
    overwrite(home.log_file(), LOG_FILE, bytes(LOG_FILE))

    again = home.open()

    assert in_log(again) == ["T-0"]
    assert again.report is not None and again.report.end_offset == RECORD
    put(again, numbers(1, start=1))
    assert pull(again) == in_order(numbers(2))


def test_a_record_whose_whole_record_crc_is_0_is_accepted(home: Home) -> None:
    """Row 6."""
    home.config = small(enabled_append_prop_crc=True, force_verify_prop_crc=True)
    store = home.open()
    store.put(Message(topic="T", body=_body_that_makes_the_crc_0(home), properties=b"KEYS\x01k\x02"), NOW)
    put(store, numbers(2))
    store.abandon(0)
    digits = home.log_file().read_bytes()[: struct.unpack(">i", home.log_file().read_bytes()[:4])[0]][-11:-1]
    assert digits == b"0000000000"

    again = home.open()

    assert [label for _, label in pull(again)][1:] == labels(numbers(2))
    assert again.report is not None and again.report.records == 3


def _body_that_makes_the_crc_0(home: Home) -> bytes:
    """CRC-32 is linear, and so is the body CRC in the header: solve for the body's bits over GF(2)."""
    with Home(home.root.with_name("trial"), home.config) as trial:
        store = trial.open()
        size = store.put(Message(topic="T", body=bytes(8), properties=b"KEYS\x01k\x02"), NOW).size
        record = trial.log_file().read_bytes()[: size - CRC_PROPERTY_SIZE]

    def whole_crc(bits: int) -> int:
        body = bits.to_bytes(8, "big")
        head = record[:8] + struct.pack(">i", crc32(body) & CRC_MASK) + record[12:BODY_AT]
        return crc32(head + body + record[BODY_AT + 8 :]) & CRC_MASK

    zero = whole_crc(0)
    pivots: dict[int, tuple[int, int]] = {}
    wanted, chosen = zero, 0
    for bit in range(64):
        effect, bits = whole_crc(1 << bit) ^ zero, 1 << bit
        for high, (pivot_effect, pivot_bits) in sorted(pivots.items(), reverse=True):
            if effect >> high & 1:
                effect, bits = effect ^ pivot_effect, bits ^ pivot_bits
        if effect:
            pivots[effect.bit_length() - 1] = (effect, bits)
    for high, (effect, bits) in sorted(pivots.items(), reverse=True):
        if wanted >> high & 1:
            wanted, chosen = wanted ^ effect, chosen ^ bits
    assert wanted == 0 and whole_crc(chosen) == 0
    return chosen.to_bytes(8, "big")


def test_a_record_that_belongs_elsewhere_is_not_accepted(home: Home) -> None:
    """Row 7: an older record's bytes were written to a newer one's place."""
    store = home.open()
    put(store, numbers(4))
    store.abandon(0)
    content = home.log_file().read_bytes()
    overwrite(home.log_file(), place_of(3), content[place_of(1) : place_of(2)])

    again = home.open()

    assert in_log(again) == labels(numbers(3))
    assert pull(again) == in_order(numbers(3))


@pytest.mark.parametrize("claim", [0x7FFFFFFF, -1, 0, 91, LOG_FILE + 1])
def test_a_corrupt_length_is_bounded_by_the_file(home: Home, claim: int) -> None:
    """Row 8: nothing is allocated by it."""
    store = home.open()
    put(store, numbers(4))
    store.abandon(0)
    overwrite(home.log_file(), place_of(3), struct.pack(">i", claim))

    tracemalloc.start()
    again = home.open()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert in_log(again) == labels(numbers(3))
    assert peak < 16 << 20


def test_a_record_whose_topic_is_lost_does_not_stop_the_store(home: Home) -> None:
    """Row 45: no queue could ever be made for it."""
    store = home.open()
    put(store, numbers(3))
    put(store, numbers(1, start=3), "Topic")
    store.abandon(0)
    topic_at = home.log_file().read_bytes().index(b"\x05Topic") + 1
    overwrite(home.log_file(), topic_at, bytes(5))

    again = home.open()
    put(again, numbers(2, start=3))

    assert pull(again) == in_order(numbers(5))
    assert in_log(again) == labels(numbers(5))


@pytest.mark.parametrize("topic", ["", "a/b", "..", "zero\0byte"])
def test_a_topic_that_cannot_be_a_directory_is_refused(home: Home, topic: str) -> None:
    """Row 45, at the put."""
    store = home.open()

    assert store.put(Message(topic=topic, body=b"x"), NOW).status is PutMessageStatus.MESSAGE_ILLEGAL


def test_a_queue_that_cannot_be_written_does_not_stop_the_others(home: Home) -> None:
    """Row 45: here a file stands where the topic's directory belongs."""
    store = home.open()
    (home.root / "consumequeue" / "A").write_bytes(b"in the way")
    put(store, numbers(1), "A", dispatch=False)
    put(store, numbers(2), "T", dispatch=False)

    with pytest.raises(DiskIOError):
        store.dispatch()

    assert pull(store, "T") == in_order(numbers(2))


def test_forcing_the_whole_record_crc_on_a_store_without_it_is_refused_and_changes_nothing(home: Home) -> None:
    """Row 66."""
    store = home.open()
    put(store, numbers(5))
    store.close(NOW)
    before = snapshot(home.root)

    with pytest.raises(DamagedStoreError, match="forceVerifyPropCRC") as refused:
        home.open(small(enabled_append_prop_crc=True, force_verify_prop_crc=True))

    assert refused.value.path == str(home.log_file())
    assert snapshot(home.root) == before
    assert pull(home.open()) == in_order(numbers(5))


def test_duplication_mode_is_refused_before_a_file_is_touched(home: Home) -> None:
    """Row 66, for `duplicationEnable`."""
    with pytest.raises(ConfigError, match="duplicationEnable"):
        home.open(small(duplication_enable=True))

    assert not home.root.exists()


# The log's end -------------------------------------------------------------------------------------------------------


def test_records_behind_a_truncated_tail_do_not_come_back_after_the_next_crash(home: Home) -> None:
    """Row 4: two crashes, records of equal length."""
    store = home.open()
    put(store, numbers(4), dispatch=False)
    store.abandon(0)
    flip(home.log_file(), place_of(1) + BODY_AT)
    store = home.open()
    assert in_log(store) == ["T-0"]
    put(store, range(77, 78))
    store.abandon(0)

    again = home.open()

    assert in_log(again) == ["T-0", "T-77"]
    assert pull(again) == [(0, "T-0"), (1, "T-77")]


def test_the_cleared_tail_is_durable_before_the_store_opens(faulty: tuple[Home, FaultDisk], tmp_path: Path) -> None:
    """Row 4: cleared in the page cache only, old records in later pages would come back with a power cut."""
    home, disk = faulty
    home.config = small(mapped_file_size_commit_log=4 * LOG_FILE)
    store = home.open()
    put(store, numbers(40), dispatch=False)
    store.flush_log()
    store.abandon(0)
    flip(home.log_file(), RECORD + BODY_AT)

    home.open()
    image = disk.power_cut(home.root, tmp_path / "image")

    assert home.at(image).log_file().read_bytes()[RECORD:] == bytes(4 * LOG_FILE - RECORD)


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("bad", [5, PER_LOG_FILE - 1, PER_LOG_FILE])
def test_damage_in_the_middle_of_the_log_stops_the_start_and_changes_nothing(home: Home, clean: bool, bad: int) -> None:
    """Row 9: the file and the offset are named."""
    _store_with_bit_rot(home, bad, clean=clean)
    before = snapshot(home.root)

    with pytest.raises(DamagedStoreError, match="middle of the log") as damage:
        home.open()

    assert damage.value.path == str(home.log_file(bad // PER_LOG_FILE * LOG_FILE))
    assert damage.value.offset == place_of(bad)
    assert damage.value.salvage
    assert snapshot(home.root) == before


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("bad", [5, PER_LOG_FILE - 1, PER_LOG_FILE])
def test_salvage_keeps_what_is_behind_the_damage_and_the_next_plain_start_is_fine(
    home: Home, clean: bool, bad: int
) -> None:
    """Row 9: the damaged bytes are fenced off as a record that nobody is served."""
    _store_with_bit_rot(home, bad, clean=clean)
    kept = [(number, f"T-{number}") for number in THREE_FILES if number != bad]

    salvaged = home.open(small(salvage=True))
    assert salvaged.report is not None and len(salvaged.report.salvaged) == 1
    assert pull(salvaged) == kept
    put(salvaged, numbers(1, start=len(THREE_FILES)), at=NOW + 100 * STEP_MS)
    if clean:
        salvaged.close(NOW)
    else:
        salvaged.abandon(0)
    plain = home.open()

    assert pull(plain) == [*kept, (len(THREE_FILES), f"T-{len(THREE_FILES)}")]
    assert plain.report is not None and plain.report.salvaged == []
    assert [number for number in THREE_FILES if by_key(plain, number) == []] == [bad]


def _store_with_bit_rot(home: Home, bad: int, *, clean: bool) -> None:
    store = home.open()
    put(store, THREE_FILES)
    store.flush_log()
    store.flush_queues()
    if clean:
        store.close(NOW)
    else:
        store.abandon(0)
    # The checkpoint would let an unclean start begin behind the damage: without it everything is read.
    if not clean:
        overwrite(home.checkpoint, 8, bytes(16))
    start = bad // PER_LOG_FILE * LOG_FILE
    flip(home.log_file(start), place_of(bad) - start + BODY_AT)


def test_damage_right_before_the_last_record_of_a_clean_stop_is_no_torn_tail(home: Home) -> None:
    """Row 9: after a clean stop everything was flushed, the last record too."""
    store = home.open()
    put(store, numbers(5))
    store.close(NOW)
    flip(home.log_file(), place_of(3) + BODY_AT)

    with pytest.raises(DamagedStoreError):
        home.open()


def test_a_bad_record_behind_which_nothing_was_flushed_is_a_torn_tail_and_is_cut(home: Home) -> None:
    """Row 9, the other half: only what was promised makes a hole a damage."""
    store = home.open()
    put(store, numbers(3))
    store.flush_log()
    store.flush_queues()
    put(store, numbers(3, start=3), at=NOW + 100 * STEP_MS)
    store.abandon(0)
    flip(home.log_file(), place_of(3) + BODY_AT)

    again = home.open()

    assert pull(again) == in_order(numbers(3))


def test_a_segment_of_a_wrong_size_is_refused_by_name(home: Home) -> None:
    """Row 31."""
    store = home.open()
    put(store, THREE_FILES)
    store.close(NOW)
    cut = home.log_file(LOG_FILE)
    cut.write_bytes(cut.read_bytes()[:1000])
    before = snapshot(home.root)

    with pytest.raises(DamagedStoreError, match="1000 bytes") as refused:
        home.open()

    assert refused.value.path == str(cut)
    assert snapshot(home.root) == before


def test_a_missing_segment_is_refused_by_the_gap(home: Home) -> None:
    """Row 51."""
    store = home.open()
    put(store, THREE_FILES)
    store.close(NOW)
    home.log_file(LOG_FILE).unlink()
    before = snapshot(home.root)

    with pytest.raises(DamagedStoreError, match=f"between offsets {LOG_FILE} and {2 * LOG_FILE}"):
        home.open()

    assert snapshot(home.root) == before


def test_stray_files_and_directories_are_skipped_and_told(home: Home) -> None:
    """Row 54."""
    store = home.open()
    put(store, numbers(3))
    store.close(NOW)
    strays = [
        home.root / "commitlog" / ".nfs0001",
        home.root / "commitlog" / "0000000000000000000x",
        home.root / "consumequeue" / "notes.txt",
        home.queue_file().with_name("core"),
        home.root / "index" / "readme",
    ]
    for stray in strays:
        stray.write_bytes(b"stray")
    directories = [home.root / "commitlog" / "lost+found", home.root / "consumequeue" / "T" / "lost+found"]
    for directory in directories:
        directory.mkdir()

    again = home.open()

    assert pull(again) == in_order(numbers(3))
    assert again.report is not None
    for stray in [*strays, *directories]:
        assert any(note.startswith(f"{stray}: skipped") for note in again.report.notes), stray
        assert stray.exists()


# Which bytes are trusted ---------------------------------------------------------------------------------------------


def test_recovery_syncs_every_log_byte_it_trusts_before_the_store_opens(faulty: tuple[Home, FaultDisk]) -> None:
    """Row 41."""
    home, disk = faulty
    store = home.open()
    put(store, numbers(2 * PER_LOG_FILE + 3))
    store.abandon(0)
    since = len(disk.operations)

    again = home.open()

    published = next(
        number for number, done in enumerate(disk.operations) if number >= since and done.path == str(home.abort)
    )
    for file in again.commit_log.files.files:
        assert disk.synced(file.path, 0, file.wrote_position, since=since)
    log_syncs = [
        number for number, done in enumerate(disk.operations) if "commitlog" in done.path and done.action == "sync"
    ]
    assert max(log_syncs) < published
    directory_syncs = [done for done in disk.operations[since:published] if done.action == "sync_directory"]
    assert str(home.root / "commitlog") in [done.path for done in directory_syncs]


def test_a_store_whose_recovered_bytes_cannot_be_synced_does_not_open(faulty: tuple[Home, FaultDisk]) -> None:
    """Row 41: for every one of its files."""
    home, disk = faulty
    store = home.open()
    put(store, numbers(2 * PER_LOG_FILE + 3))
    store.abandon(0)

    for nth in (1, 2, 3):
        disk.fail(nth, Fault.IO, action="sync", path="commitlog")
        with pytest.raises(DiskIOError):
            home.open()
        disk.heal()

    assert pull(home.open()) == in_order(numbers(2 * PER_LOG_FILE + 3))


def test_a_put_flushed_after_a_process_crash_survives_a_power_cut(
    faulty: tuple[Home, FaultDisk], tmp_path: Path
) -> None:
    """Row 41: unsynced bytes in two files, kill, restart, a sync put, power loss."""
    home, disk = faulty
    store = home.open()
    put(store, numbers(PER_LOG_FILE + 3))
    store.abandon(0)
    store = home.open()
    put(store, numbers(1, start=PER_LOG_FILE + 3), at=NOW + 100 * STEP_MS)
    store.flush_log()

    image = home.at(disk.power_cut(home.root, tmp_path / "image")).open()

    assert pull(image) == in_order(numbers(PER_LOG_FILE + 4))


def test_the_checkpoint_speaks_only_for_queue_entries_that_were_flushed(
    faulty: tuple[Home, FaultDisk], tmp_path: Path
) -> None:
    """Row 10: the log is durable, of the queues only the first part is; the checkpoint is saved once more."""
    home, disk = faulty
    store = home.open()
    put(store, numbers(20))
    store.flush_log()
    store.flush_queues()
    put(store, numbers(40, start=20), at=NOW + 20 * STEP_MS)
    store.flush_log()
    store.checkpoint.flush()

    image = home.at(disk.power_cut(home.root, tmp_path / "image")).open()

    assert pull(image) == in_order(numbers(60))
    assert image.checkpoint.logics_msg_timestamp < NOW + 20 * STEP_MS


def test_the_checkpoint_is_saved_after_the_queues_and_the_index(faulty: tuple[Home, FaultDisk]) -> None:
    """Row 10: in this order on the disk."""
    home, disk = faulty
    store = home.open()
    put(store, numbers(20))
    since = len(disk.operations)

    store.flush_queues()

    synced = [Path(done.path) for done in disk.operations[since:] if done.action == "sync"]
    assert synced[-1] == home.checkpoint
    assert {path.parent.parent.name for path in synced[:-1]} == {"T", home.root.name}
    assert any(path.parent.name == "index" for path in synced[:-1])


def test_a_queue_flush_that_fails_leaves_the_checkpoint_where_it_was(faulty: tuple[Home, FaultDisk]) -> None:
    """Row 10: for queues and index."""
    home, disk = faulty
    store = home.open()
    put(store, numbers(3))
    store.flush_log()

    for part in ("consumequeue", "index"):
        disk.fail(1, Fault.IO, action="sync", path=part)
        with pytest.raises(DiskIOError):
            store.flush_queues()
        disk.heal()
        assert store.checkpoint.logics_msg_timestamp == 0

    store.flush_queues()
    assert store.checkpoint.logics_msg_timestamp == NOW + 2 * STEP_MS


def test_every_flush_sets_the_physic_time_and_recovery_starts_from_it(home: Home) -> None:
    """Row 11."""
    store = home.open()
    for number in numbers(3 * PER_LOG_FILE):
        put(store, numbers(1, start=number), at=NOW + number * STEP_MS)
        store.flush_log()
        assert store.checkpoint.physic_msg_timestamp == NOW + number * STEP_MS
    store.flush_queues()
    store.abandon(0)

    again = home.open()

    assert again.report is not None and again.report.start_offset == 2 * LOG_FILE
    assert pull(again) == in_order(THREE_FILES)


def test_recovery_never_starts_behind_what_the_log_has_synced(faulty: tuple[Home, FaultDisk], tmp_path: Path) -> None:
    """Row 58: the queues were flushed ahead of the log."""
    home, disk = faulty
    store = home.open()
    put(store, numbers(5))
    store.flush_log()
    put(store, numbers(50, start=5), at=NOW + 5 * STEP_MS)
    disk.sync_directory(str(home.root / "commitlog"))  # the kernel has written the later files' names, not their bytes
    store.flush_queues()

    image = home.at(disk.power_cut(home.root, tmp_path / "image"))
    again = image.open()

    assert again.report is not None and again.report.start_offset == 0
    assert pull(again) == in_order(numbers(5))
    put(again, numbers(1, start=5))
    assert pull(again) == in_order(numbers(6))


def test_a_clock_that_steps_back_misleads_neither_store_time_nor_recovery(
    faulty: tuple[Home, FaultDisk], tmp_path: Path
) -> None:
    """Row 49: an hour back, then many files, then power loss."""
    home, disk = faulty
    store = home.open()
    put(store, numbers(20))
    store.flush_log()
    store.flush_queues()
    put(store, numbers(60, start=20), at=NOW - 3_600_000)
    store.flush_log()

    image = home.at(disk.power_cut(home.root, tmp_path / "image")).open()

    assert pull(image) == in_order(numbers(80))
    times = [record.store_timestamp for record in image.commit_log.records()]
    assert times == sorted(times)


def test_a_log_with_times_that_step_back_is_read_from_before_the_step(home: Home) -> None:
    """Row 49: a log that the original wrote, where newer files are older than the checkpoint."""
    store = home.open()
    put(store, numbers(20))
    store.flush_log()
    store.flush_queues()
    put(store, numbers(60, start=20), at=NOW + 20 * STEP_MS)
    store.abandon(0)
    for number in range(30, 80):
        start = number // PER_LOG_FILE * LOG_FILE
        overwrite(home.log_file(start), place_of(number) - start + 56, struct.pack(">q", NOW - 3_600_000 + number))
    lose_entries(home, 20)

    again = home.open()

    assert again.report is not None and again.report.start_offset == LOG_FILE
    assert pull(again) == in_order(numbers(80))


def test_lost_queues_are_rebuilt_from_the_first_file_however_many_there_are(home: Home) -> None:
    """Row 57: queues and checkpoint lost, 21 files."""
    count = 21 * PER_LOG_FILE
    for clean in (True, False):
        shutil.rmtree(home.root, ignore_errors=True)
        store = home.open()
        put(store, numbers(count))
        if clean:
            store.close(NOW)
        else:
            store.abandon(0)
        shutil.rmtree(home.root / "consumequeue")
        home.checkpoint.unlink()

        again = home.open()

        assert pull(again) == in_order(numbers(count))
        assert again.report is not None and (again.report.start_offset, again.report.files_read) == (0, 21)
        again.abandon(0)


# Consume queues ------------------------------------------------------------------------------------------------------


def test_an_entry_beyond_the_end_of_its_queue_is_refused(tmp_path: Path) -> None:
    """Row 12: appended, it would shift every later index."""
    queue = ConsumeQueue(RealDisk(), str(tmp_path / "queue"), "T", 0, QUEUE_FILE)
    column = np.arange(3, dtype=np.int64)
    queue.put(column, column * RECORD, column * 0 + RECORD, column)

    with pytest.raises(QueueGapError) as gap:
        queue.put(column + 5, (column + 5) * RECORD, column * 0 + RECORD, column)

    assert (gap.value.expected, gap.value.found) == (3, 5)
    assert queue.max_index == 3
    queue.close(0)


def test_a_hole_in_a_queue_is_filled_from_the_log(home: Home) -> None:
    """Row 12: the newer records of the topic lie behind another topic's, which has its entries."""
    store = home.open()
    put(store, numbers(3))
    put(store, numbers(2), "other")
    put(store, numbers(2, start=3))
    store.close(NOW)
    lose_entries(home, 1)

    again = home.open()

    assert pull(again) == in_order(numbers(5))
    assert pull(again, "other") == in_order(numbers(2), "other")


def test_a_queue_file_of_zeros_holds_no_entry(home: Home) -> None:
    """Row 13: power loss just after the queue file was made; the log has lost its tail."""
    store = home.open()
    put(store, numbers(PER_QUEUE_FILE))
    store.abandon(0)
    home.queue_file(start=QUEUE_FILE).write_bytes(bytes(QUEUE_FILE))
    lose_records(home, 6)

    again = home.open()
    put(again, range(6, 8))

    assert pull(again) == in_order(numbers(8))
    again.abandon(0)
    assert pull(home.open()) == in_order(numbers(8))


@pytest.mark.parametrize("count", [1, 2])
def test_empty_last_files_are_removed_and_rebuilt(home: Home, count: int) -> None:
    """Row 14: length 0, in log and queue."""
    store = home.open()
    put(store, numbers(PER_LOG_FILE))
    store.abandon(0)
    for number in range(count):
        home.log_file((1 + number) * LOG_FILE).write_bytes(b"")
        home.queue_file(start=(2 + number) * QUEUE_FILE).write_bytes(b"")
    home.queue_file(start=QUEUE_FILE).write_bytes(b"")

    again = home.open()

    assert pull(again) == in_order(numbers(PER_LOG_FILE))
    put(again, numbers(10, start=PER_LOG_FILE), at=NOW + 100 * STEP_MS)
    assert pull(again) == in_order(numbers(PER_LOG_FILE + 10))


def test_a_power_cut_while_files_are_made_does_not_block_the_start(
    faulty: tuple[Home, FaultDisk], tmp_path: Path
) -> None:
    """Row 14: their names are durable, their lengths are not."""
    home, disk = faulty
    store = home.open()
    put(store, numbers(PER_QUEUE_FILE))
    store.flush_log()
    store.flush_queues()
    put(store, numbers(PER_QUEUE_FILE, start=PER_QUEUE_FILE), at=NOW + PER_QUEUE_FILE * STEP_MS)
    for directory in (home.root / "commitlog", home.queue_file().parent, home.root / "index"):
        disk.sync_directory(str(directory))

    image = home.at(disk.power_cut(home.root, tmp_path / "image", new_files_empty=True))
    assert image.log_file(LOG_FILE).stat().st_size == image.queue_file(start=QUEUE_FILE).stat().st_size == 0
    again = image.open()

    assert pull(again) == in_order(numbers(PER_QUEUE_FILE))
    put(again, range(10, 30), at=NOW + 100 * STEP_MS)
    assert pull(again) == in_order(numbers(30))


def test_a_queue_of_pre_blank_entries_stalls_nothing(home: Home) -> None:
    """Row 15: a crash after the pre-fill; another topic goes on too."""
    store = home.open()
    put(store, numbers(5))
    put(store, numbers(2), "other")
    store.abandon(0)
    home.queue_file().write_bytes(PRE_BLANK * PER_QUEUE_FILE)

    again = home.open()
    put(again, numbers(1, start=5))
    put(again, numbers(1, start=2), "other")

    assert pull(again) == in_order(numbers(6))
    assert pull(again, "other") == in_order(numbers(3), "other")


def test_a_crash_after_the_pre_fill_is_made_good_at_the_next_start(faulty: tuple[Home, FaultDisk]) -> None:
    """Row 15: recovery itself is killed at each of its queue writes; the log no longer starts at 0."""
    home, disk = faulty
    _expire_all_but_the_last_file(home, numbers(PER_LOG_FILE + 10))
    nth = 0
    while True:
        nth += 1
        shutil.rmtree(home.root / "consumequeue")
        disk.fail(nth, Fault.CRASH, action="write", path="consumequeue")
        try:
            home.open().abandon(0)
            break
        except CrashError:
            disk.restart()

        again = home.open()

        assert pull(again) == in_order(range(15, 25), start=15)
        again.abandon(0)
    assert nth > 2, "the pre-fill and the entries are two writes at least"


def test_a_queue_emptied_by_truncation_has_its_minimum_corrected_too(home: Home) -> None:
    """Row 36: its older records expired, its newer ones were lost."""
    _expire_all_but_the_last_file(home, numbers(2 * PER_LOG_FILE + 5))
    lose_records(home, 2 * PER_LOG_FILE)

    again = home.open()

    queue = again.queues.find("T", 0)
    assert queue is not None and queue.min_index == queue.max_index == 30
    for index, status in ((29, GetMessageStatus.OFFSET_TOO_SMALL), (30, GetMessageStatus.OFFSET_OVERFLOW_ONE)):
        with again.reader.get_message("T", 0, index) as result:
            assert (result.status, result.next_index) == (status, 30)
    put(again, range(77, 78))
    assert pull(again) == [(30, "T-77")]


def test_the_start_of_a_queue_survives_truncation(home: Home) -> None:
    """Row 48: the only queue file left loses all its entries; the next message is not number 0."""
    _expire_all_but_the_last_file(home, numbers(2 * PER_LOG_FILE + 5))
    assert sorted(path.name for path in home.queue_file().parent.iterdir()) == [f"{3 * QUEUE_FILE:020d}"]
    lose_records(home, 2 * PER_LOG_FILE)

    again = home.open()

    assert put(again, range(77, 78))[0].queue_offset == 30
    again.abandon(0)
    assert pull(home.open()) == [(30, "T-77")]


def _expire_all_but_the_last_file(home: Home, messages: range) -> None:
    store = home.open()
    put(store, messages)
    assert store.delete_expired_files(NOW, force=True)
    store.abandon(0)


def test_stale_entries_behind_a_truncated_queue_do_not_come_back(home: Home) -> None:
    """Row 43: log tail lost, puts to another topic, second crash."""
    store = home.open()
    put(store, numbers(5))
    store.abandon(0)
    lose_records(home, 2)
    store = home.open()
    put(store, numbers(3), "U")
    store.abandon(0)

    again = home.open()

    assert pull(again) == in_order(numbers(2))
    assert pull(again, "U") == in_order(numbers(3), "U")
    assert put(again, range(77, 78))[0].queue_offset == 2


def test_an_entry_of_another_record_is_not_kept(home: Home) -> None:
    """Row 43: stale entries are recognised by the record they point to, wherever they come from."""
    store = home.open()
    put(store, numbers(2))
    put(store, numbers(3), "U")
    store.flush_log()
    store.flush_queues()
    store.close(NOW)
    for index in (2, 3, 4):
        overwrite(home.queue_file(), index * UNIT_SIZE, UNIT.pack(place_of(index), RECORD, 0))

    again = home.open()

    assert pull(again) == in_order(numbers(2))
    assert put(again, range(77, 78))[0].queue_offset == 2


def test_a_stale_entry_below_the_recovery_start_is_not_kept(home: Home) -> None:
    """Row 43: recovery does not read the part of the log that it points to."""
    store = home.open()
    put(store, numbers(2))
    put(store, numbers(3 * PER_LOG_FILE), "U", at=NOW + 2 * STEP_MS)
    store.flush_log()
    store.flush_queues()
    store.abandon(0)
    for index in (2, 3, 4):
        overwrite(home.queue_file(), index * UNIT_SIZE, UNIT.pack(place_of(index), RECORD, 0))

    again = home.open()

    assert again.report is not None and again.report.start_offset > place_of(4)
    assert pull(again) == in_order(numbers(2))
    assert put(again, range(77, 78), at=NOW + 100 * STEP_MS)[0].queue_offset == 2


@pytest.mark.parametrize("missing", [1, 3])
def test_entries_missing_after_a_clean_exit_are_all_written_again(home: Home, missing: int) -> None:
    """Row 44: the first missing one too."""
    store = home.open()
    put(store, numbers(5))
    store.close(NOW)
    lose_entries(home, 5 - missing)

    again = home.open()

    assert pull(again) == in_order(numbers(5))
    assert again.report is not None and again.report.queue_entries_written == missing


def test_one_lost_queue_is_rebuilt_after_a_clean_exit(home: Home) -> None:
    """Row 50: the other queues are ahead of it; its records lie far back."""
    store = home.open()
    put(store, numbers(5))
    put(store, numbers(6 * PER_LOG_FILE), "other", at=NOW + 100 * STEP_MS)
    store.close(NOW)
    shutil.rmtree(home.root / "consumequeue" / "T")

    again = home.open()

    assert pull(again) == in_order(numbers(5))
    assert put(again, numbers(1, start=5))[0].queue_offset == 5
    assert pull(again, "other") == in_order(numbers(6 * PER_LOG_FILE), "other")


# Index ---------------------------------------------------------------------------------------------------------------


def test_every_key_is_found_after_a_kill(home: Home) -> None:
    """Row 18: the index file in use is kept, and what was not flushed is written again."""
    home.config = small(max_index_num=10)
    store = home.open()
    put(store, numbers(25))
    store.flush_log()
    store.flush_queues()
    put(store, numbers(25, start=25), at=NOW + 25 * STEP_MS)
    files = sorted(path.name for path in (home.root / "index").iterdir())
    store.abandon(0)

    again = home.open()

    assert [by_key(again, number) for number in numbers(50)] == [[f"T-{number}"] for number in numbers(50)]
    assert sorted(path.name for path in (home.root / "index").iterdir()) == files
    assert again.report is not None and again.report.index_entries_added <= 26


def test_every_key_of_the_durable_log_is_found_after_a_power_cut(
    faulty: tuple[Home, FaultDisk], tmp_path: Path
) -> None:
    """Row 18: the index was last synced long before."""
    home, disk = faulty
    home.config = small(max_index_num=10)
    store = home.open()
    put(store, numbers(25))
    store.flush_log()
    store.flush_queues()
    put(store, numbers(25, start=25), at=NOW + 25 * STEP_MS)
    store.flush_log()

    image = home.at(disk.power_cut(home.root, tmp_path / "image")).open()

    assert [by_key(image, number) for number in numbers(50)] == [[f"T-{number}"] for number in numbers(50)]


def test_the_index_survives_a_power_cut_right_after_a_clean_exit(
    faulty: tuple[Home, FaultDisk], tmp_path: Path
) -> None:
    """Row 53: it was synced before `abort` went."""
    home, disk = faulty
    store = home.open()
    put(store, numbers(20))
    store.close(NOW)

    image = home.at(disk.power_cut(home.root, tmp_path / "image"))
    again = image.open()

    assert again.report is not None and not again.report.unclean
    assert again.report.index_entries_added == 0
    assert [by_key(again, number) for number in numbers(20)] == [[f"T-{number}"] for number in numbers(20)]


def test_abort_goes_only_after_everything_else_is_synced(faulty: tuple[Home, FaultDisk]) -> None:
    """Row 53: nothing is written behind it."""
    home, disk = faulty
    store = home.open()
    put(store, numbers(20))
    since = len(disk.operations)

    store.close(NOW)

    done = [(step.action, Path(step.path).name) for step in disk.operations[since:]]
    assert done[-2:] == [("unlink", "abort"), ("sync_directory", "store")]
    assert ("sync", next((home.root / "index").iterdir()).name) in done[:-2]


# Reading and deleting ------------------------------------------------------------------------------------------------


def test_a_body_that_rots_under_a_running_store_is_not_delivered_but_told(home: Home) -> None:
    """Row 52: by pull, by offset and by key."""
    store = home.open()
    put(store, numbers(3))
    flip(home.log_file(), place_of(1) + BODY_AT)

    with store.reader.get_message("T", 0, 0) as result:
        served = list(result.indexes)
        damaged = list(result.damaged)

    assert served == [0, 2]
    assert [(found.queue_index, found.physical_offset) for found in damaged] == [(1, place_of(1))]
    assert "CRC" in damaged[0].reason
    assert store.reader.look_message_by_offset(place_of(1)) is None
    assert by_key(store, 1) == []


def test_files_expire_by_the_time_of_their_last_record_not_by_their_mtime(home: Home) -> None:
    """Row 40: the store was copied, or touched."""
    store = home.open()
    put(store, THREE_FILES)
    disk, hour = RealDisk(), 3_600_000
    newest = NOW + len(THREE_FILES) * STEP_MS
    files = [home.log_file(start) for start in (0, LOG_FILE, 2 * LOG_FILE)]

    for path in files:
        disk.set_mtime(str(path), NOW - 1000 * hour)
    too_early = store.delete_expired_files(newest + 71 * hour)
    for path in files:
        disk.set_mtime(str(path), newest + 1000 * hour)
    due = store.delete_expired_files(newest + 73 * hour)

    assert too_early == []
    assert due == [str(path) for path in files[:2]]
    assert pull(store) == in_order(range(30, 45), start=30)


def test_an_entry_with_offset_0_is_not_served_from_another_file(home: Home) -> None:
    """Row 65: file 0 has expired, and a stale entry points there."""
    store = home.open()
    put(store, numbers(PER_LOG_FILE + 5))
    assert store.delete_expired_files(NOW, force=True) == [str(home.log_file())]
    overwrite(home.queue_file(start=QUEUE_FILE), 7 * UNIT_SIZE, UNIT.pack(0, RECORD, 0))

    with store.reader.get_message("T", 0, 17, 1) as result:
        status, records = result.status, list(result.indexes)

    assert (status, records) == (GetMessageStatus.FOUND, [18])
    assert store.reader.look_message_by_offset(0) is None
    assert store.commit_log.find(0, RECORD) is None


def test_who_does_not_hold_the_lock_writes_nothing(home: Home) -> None:
    """Row 59: a second start fails, and the live store goes on."""
    store = home.open()
    put(store, numbers(3))
    before = snapshot(home.root)

    with pytest.raises(StoreLockedError):
        home.open(small(salvage=True))

    assert snapshot(home.root) == before
    assert home.abort.exists()
    put(store, numbers(2, start=3))
    store.abandon(0)
    assert pull(home.open()) == in_order(numbers(5))
