"""The museum, both sides of the switch: with a quirk on the damage happens as it did to the original's users, with it
off it does not.

Each quirk is tried alone and in the presets that have it. The reader stays strict (it tells records that an entry does
not mean), so what a queue really holds is read from its file (`entry`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from brokerlab.storage.config import StoreConfig
from brokerlab.storage.consume_queue import PRE_BLANK
from brokerlab.storage.errors import DamagedStoreError, DiskFullError
from brokerlab.storage.message_store import MessageStore
from brokerlab.storage.quirks import PRESETS, Dialect, Quirk
from brokerlab.storage.recovery_report import RecoveryReport
from tests.storage.store_tools import (
    LOG_FILE,
    NOW,
    PER_LOG_FILE,
    PER_QUEUE_FILE,
    QUEUE_FILE,
    RECORD,
    STEP_MS,
    Fault,
    FaultDisk,
    Home,
    a_message,
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
    small_preset,
)

STRICT = small()
V4_9 = small_preset("rocketmq-4.9")
V5_3 = small_preset("rocketmq-5.3")
BODY_AT = 88


def only(*quirks: Quirk) -> StoreConfig:
    """Strict but for these."""
    return small(quirks=frozenset(quirks))


def with_quirk(*quirks: Quirk) -> pytest.MarkDecorator:
    """The quirk alone, and every preset that has it."""
    presets = {"4.9": V4_9, "5.3": V5_3}
    having = {name: config for name, config in presets.items() if config.quirks.issuperset(quirks)}
    configs = {"alone": only(*quirks)} | having
    return pytest.mark.parametrize("historic", list(configs.values()), ids=list(configs))


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with Home(tmp_path / "store") as made:
        yield made


def report_of(store: MessageStore) -> RecoveryReport:
    assert store.report is not None
    return store.report


def index_range(store: MessageStore, topic: str = "T") -> tuple[int, int]:
    queue = store.queues.find(topic, 0)
    assert queue is not None
    return queue.min_index, queue.max_index


def test_a_preset_is_its_versions_dialect_and_quirks() -> None:
    """Row 44 came with 5.3; all others are in both."""
    assert (V4_9.dialect, V5_3.dialect) == (Dialect.V4_9, Dialect.V5_3)
    assert PRESETS["rocketmq-5.3"].quirks - PRESETS["rocketmq-4.9"].quirks == {Quirk.NORMAL_RECOVERY_SKIPS_ONE}
    assert frozenset(Quirk) == V5_3.quirks


@pytest.mark.parametrize("historic", [V4_9, V5_3], ids=["4.9", "5.3"])
def test_a_preset_leaves_nothing_of_ours_in_the_checkpoint(home: Home, historic: StoreConfig) -> None:
    """Only the longs that its version maintains."""
    store = home.open(historic)
    put(store, range(3))
    store.close(NOW)

    longs = 8 * historic.dialect.checkpoint_longs
    assert home.checkpoint.read_bytes()[longs:] == bytes(4096 - longs)


@pytest.mark.parametrize("historic", [V4_9, V5_3], ids=["4.9", "5.3"])
def test_a_preset_opens_a_store_whose_synced_index_entries_are_gone(home: Home, historic: StoreConfig) -> None:
    """The original does not go back for them, and neither is that an error."""
    store = home.open(historic)
    put(store, range(20))
    store.flush_log()
    store.flush_queues()
    put(store, range(20, 25), at=NOW + 20 * STEP_MS)
    store.abandon(0)
    index = next((home.root / "index").iterdir())
    overwrite(index, 40 + 4 * 50 + 20 * 5, bytes(20 * 3))

    assert pull(home.open(historic)) == in_order(range(25))


# Row 4 ---------------------------------------------------------------------------------------------------------------


@with_quirk(Quirk.STALE_TAIL_SURVIVES_TRUNCATION)
def test_old_records_come_back_behind_a_new_one_after_the_second_crash(home: Home, historic: StoreConfig) -> None:
    """Row 4, on."""
    again = _two_crashes(home, historic)

    assert in_log(again) == ["T-0", "T-77", "T-2", "T-3"]
    assert pull(again) == [(0, "T-0"), (1, "T-77"), (2, "T-2"), (3, "T-3")]


def test_old_records_do_not_come_back(home: Home) -> None:
    """Row 4, off."""
    again = _two_crashes(home, STRICT)

    assert in_log(again) == ["T-0", "T-77"]


def _two_crashes(home: Home, config: StoreConfig) -> MessageStore:
    store = home.open(config)
    put(store, range(4), dispatch=False)
    store.abandon(0)
    flip(home.log_file(), place_of(1) + BODY_AT)
    store = home.open(config)
    put(store, range(77, 78), at=NOW + 100 * STEP_MS)
    store.abandon(0)
    return home.open(config)


# Row 7 ---------------------------------------------------------------------------------------------------------------


@with_quirk(Quirk.PHYSICAL_OFFSET_UNCHECKED)
def test_a_record_that_belongs_elsewhere_is_counted_as_part_of_the_log(home: Home, historic: StoreConfig) -> None:
    """Row 7, on: it takes the place of an acknowledged one, and the log goes on behind it."""
    again = _misdirected_page(home, historic)

    assert (report_of(again).records, report_of(again).end_offset) == (4, place_of(4))
    assert put(again, range(77, 78))[0].physical_offset == place_of(4)


def test_a_record_that_belongs_elsewhere_ends_the_log(home: Home) -> None:
    """Row 7, off."""
    again = _misdirected_page(home, STRICT)

    assert (report_of(again).records, report_of(again).end_offset) == (3, place_of(3))


def _misdirected_page(home: Home, config: StoreConfig) -> MessageStore:
    store = home.open(config)
    put(store, range(4))
    store.abandon(0)
    content = home.log_file().read_bytes()
    overwrite(home.log_file(), place_of(3), content[place_of(1) : place_of(2)])
    return home.open(config)


# Row 9 ---------------------------------------------------------------------------------------------------------------


@with_quirk(Quirk.ONE_BAD_RECORD_DROPS_THE_REST)
def test_bit_rot_in_the_first_file_deletes_all_later_files(home: Home, historic: StoreConfig) -> None:
    """Row 9, on: after an unclean stop, with everything flushed."""
    _flushed_store_with_bit_rot(home, historic, 5, clean=False)

    again = home.open(historic)

    assert in_log(again) == labels(range(5))
    assert report_of(again).files_deleted == [str(home.log_file(LOG_FILE)), str(home.log_file(2 * LOG_FILE))]


@pytest.mark.parametrize(
    ("historic", "bad", "left"),
    [(V4_9, 5, 5), (V5_3, 5, 3 * PER_LOG_FILE), (V5_3, 2 * PER_LOG_FILE + 5, 2 * PER_LOG_FILE + 5)],
    ids=["4.9 reads three files", "5.3 does not read the first", "5.3 reads the last"],
)
def test_bit_rot_drops_the_rest_after_a_clean_exit_too(home: Home, historic: StoreConfig, bad: int, left: int) -> None:
    """Row 9, on: which files a clean start reads differs by version."""
    _flushed_store_with_bit_rot(home, historic, bad, clean=True)

    again = home.open(historic)

    assert again.commit_log.files.max_offset == (place_of(left) if left < 45 else 2 * LOG_FILE + PER_LOG_FILE * RECORD)


@pytest.mark.parametrize("clean", [True, False])
def test_bit_rot_in_front_of_flushed_records_stops_the_start(home: Home, clean: bool) -> None:
    """Row 9, off."""
    _flushed_store_with_bit_rot(home, STRICT, 5, clean=clean)

    with pytest.raises(DamagedStoreError):
        home.open(STRICT)

    assert home.log_file(2 * LOG_FILE).exists()


def _flushed_store_with_bit_rot(home: Home, config: StoreConfig, bad: int, *, clean: bool) -> None:
    store = home.open(config)
    put(store, range(3 * PER_LOG_FILE))
    store.flush_log()
    store.flush_queues()
    if clean:
        store.close(NOW)
    else:
        store.abandon(0)
        overwrite(home.checkpoint, 8, bytes(16))  # or recovery may start behind the damage
    start = bad // PER_LOG_FILE * LOG_FILE
    flip(home.log_file(start), place_of(bad) - start + BODY_AT)


# Row 12 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("historic", "shifted"),
    [(only(Quirk.QUEUE_GAP_SHIFTS_ENTRIES), [5, 6]), (V4_9, [5, 6]), (V5_3, [6])],
    ids=["alone", "4.9", "5.3 loses one more (row 44)"],
)
def test_entries_behind_a_gap_are_appended_under_wrong_indexes(
    home: Home, historic: StoreConfig, shifted: list[int]
) -> None:
    """Row 12, on: the records in the gap are in no queue any more."""
    again = _queue_with_a_gap(home, historic)

    assert [entry(home, 1 + number)[0] for number in range(len(shifted))] == [place_of(number) for number in shifted]
    assert index_range(again) == (0, 1 + len(shifted))
    assert pull(again) == [(0, "T-0")]


def test_a_gap_is_filled_from_the_log(home: Home) -> None:
    """Row 12, off."""
    assert pull(_queue_with_a_gap(home, STRICT)) == in_order(range(5))


def _queue_with_a_gap(home: Home, config: StoreConfig) -> MessageStore:
    """T-0 to T-2, two of another topic, T-3 and T-4; the queue of T has lost all but its first entry."""
    store = home.open(config)
    put(store, range(3))
    put(store, range(2), "other", at=NOW + 100 * STEP_MS)
    put(store, range(3, 5), at=NOW + 200 * STEP_MS)
    store.close(NOW)
    lose_entries(home, 1)
    again = home.open(config)
    again.dispatch()
    return again


# Row 13 --------------------------------------------------------------------------------------------------------------


@with_quirk(Quirk.QUEUE_ZERO_ENTRY_IS_VALID)
def test_a_queue_file_of_zeros_adds_a_phantom_and_hides_entries_behind_the_log(
    home: Home, historic: StoreConfig
) -> None:
    """Row 13, on: the new record stands under an old index and once more at the end."""
    again = _queue_with_a_file_of_zeros(home, historic)

    assert index_range(again) == (0, PER_QUEUE_FILE + 1)
    new = put(again, range(77, 78), at=NOW + 100 * STEP_MS)[0]
    assert (new.physical_offset, new.queue_offset) == (place_of(6), PER_QUEUE_FILE + 1)
    assert entry(home, 6)[0] == entry(home, PER_QUEUE_FILE + 1)[0] == place_of(6)


def test_a_queue_file_of_zeros_is_no_entry(home: Home) -> None:
    """Row 13, off."""
    again = _queue_with_a_file_of_zeros(home, STRICT)

    assert index_range(again) == (0, 6)
    assert put(again, range(77, 78), at=NOW + 100 * STEP_MS)[0].queue_offset == 6


def _queue_with_a_file_of_zeros(home: Home, config: StoreConfig) -> MessageStore:
    store = home.open(config)
    put(store, range(PER_QUEUE_FILE))
    store.abandon(0)
    home.queue_file(start=QUEUE_FILE).write_bytes(bytes(QUEUE_FILE))
    lose_records(home, 6)
    return home.open(config)


# Row 14 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["log", "queue"])
@pytest.mark.parametrize(
    ("historic", "empty"),
    [(V4_9, 1), (V5_3, 2), (only(Quirk.EMPTY_QUEUE_FILE_BLOCKS_START), 2)],
    ids=["4.9 one", "5.3 two", "alone two"],
)
def test_empty_last_files_block_every_start(home: Home, historic: StoreConfig, empty: int, part: str) -> None:
    """Row 14, on."""
    paths = _store_with_empty_files(home, historic, empty, part)

    for _ in range(2):
        with pytest.raises(DamagedStoreError, match="empty"):
            home.open(historic)

    assert all(path.exists() for path in paths)


@pytest.mark.parametrize("part", ["log", "queue"])
@pytest.mark.parametrize(("config", "empty"), [(V5_3, 1), (STRICT, 1), (STRICT, 2)], ids=["5.3", "one", "two"])
def test_empty_last_files_are_removed(home: Home, config: StoreConfig, empty: int, part: str) -> None:
    """Row 14, off; 5.3 removes a single one too."""
    _store_with_empty_files(home, config, empty, part)

    again = home.open(config)
    put(again, range(5, 20), at=NOW + 100 * STEP_MS)

    assert pull(again) == in_order(range(20))


def _store_with_empty_files(home: Home, config: StoreConfig, empty: int, part: str) -> list[Path]:
    store = home.open(config)
    put(store, range(5))
    store.abandon(0)
    step, file = (LOG_FILE, home.log_file) if part == "log" else (QUEUE_FILE, lambda at: home.queue_file(start=at))
    paths = [file(step * (1 + number)) for number in range(empty)]
    for path in paths:
        path.write_bytes(b"")
    return paths


# Row 15 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("historic", [only(Quirk.PREBLANK_QUEUE_STALLS_DISPATCH), V5_3], ids=["alone", "5.3"])
def test_a_queue_of_pre_blank_entries_gets_no_entry_any_more(home: Home, historic: StoreConfig) -> None:
    """Row 15, on, in 5.3: only that queue stands still."""
    _queue_of_pre_blanks(home, historic)

    for start in range(2):
        again = home.open(historic)
        put(again, range(5 + start, 6 + start), at=NOW + 100 * STEP_MS)
        put(again, range(2 + start, 3 + start), "other", at=NOW + 200 * STEP_MS)
        assert pull(again) == []
        assert pull(again, "other") == in_order(range(3 + start), "other")
        again.abandon(0)


def test_a_queue_of_pre_blank_entries_stalls_all_dispatch(home: Home) -> None:
    """Row 15, on, in 4.9: at every start."""
    _queue_of_pre_blanks(home, V4_9)

    for start in range(2):
        again = home.open(V4_9)
        before = pull(again, "other")
        put(again, range(2 + start, 3 + start), "other", at=NOW + 200 * STEP_MS)
        assert again.reput_from_offset > again.commit_log.files.max_offset
        assert pull(again, "other") == before
        again.abandon(0)


def test_a_queue_of_pre_blank_entries_is_ignored(home: Home) -> None:
    """Row 15, off."""
    _queue_of_pre_blanks(home, STRICT)

    again = home.open(STRICT)

    assert pull(again) == in_order(range(5))
    assert pull(again, "other") == in_order(range(2), "other")


def _queue_of_pre_blanks(home: Home, config: StoreConfig) -> None:
    store = home.open(config)
    put(store, range(5))
    put(store, range(2), "other", at=NOW + 50 * STEP_MS)
    store.abandon(0)
    home.queue_file().write_bytes(PRE_BLANK * PER_QUEUE_FILE)


# Row 41 --------------------------------------------------------------------------------------------------------------


@with_quirk(Quirk.RECOVERED_BYTES_COUNT_AS_FLUSHED)
def test_an_acknowledged_sync_put_is_lost_behind_pages_that_recovery_only_believed(
    home: Home, historic: StoreConfig, tmp_path: Path
) -> None:
    """Row 41, on."""
    image, acknowledged = _kill_restart_put_power_cut(home, historic, tmp_path)

    assert acknowledged == PER_LOG_FILE + 3
    assert in_log(image) == []


def test_an_acknowledged_sync_put_survives_because_recovery_synced_what_is_before_it(
    home: Home, tmp_path: Path
) -> None:
    """Row 41, off."""
    image, acknowledged = _kill_restart_put_power_cut(home, STRICT, tmp_path)

    assert in_log(image) == labels(range(acknowledged + 1))


def _kill_restart_put_power_cut(home: Home, config: StoreConfig, tmp_path: Path) -> tuple[MessageStore, int]:
    """The store that a power cut leaves, and the number of the message that was flushed last."""
    disk, last = FaultDisk(), PER_LOG_FILE + 3
    store = home.open(config, disk=disk)
    put(store, range(last))
    store.abandon(0)
    disk.sync_directory(str(home.root / "commitlog"))  # the kernel has written the files' names, not their bytes
    store = home.open(config, disk=disk)
    put(store, range(last, last + 1), at=NOW + 100 * STEP_MS)
    store.flush_log()
    assert store.commit_log.files.flushed_where == store.commit_log.files.max_offset
    image = disk.power_cut(home.root, tmp_path / "image")
    return home.at(image).open(config), last


# Row 42 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("historic", [V4_9, V5_3], ids=["4.9", "5.3"])
def test_flushed_puts_behind_half_a_record_are_cut_off_at_the_next_start(
    home: Home, historic: StoreConfig, clean: bool
) -> None:
    """Row 42, on: after a shutdown as after a kill."""
    again = _disk_full_for_one_put(home, historic, clean=clean, flush=True)

    assert in_log(again) == labels(range(2))
    assert pull(again) == in_order(range(2))


def test_puts_behind_half_a_record_are_cut_off_with_the_quirk_alone(home: Home) -> None:
    """Row 42, on."""
    again = _disk_full_for_one_put(home, only(Quirk.FAILED_APPEND_LEAVES_HALF_RECORD), clean=False, flush=False)

    assert in_log(again) == labels(range(2))


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("flush", [True, False])
def test_puts_behind_a_failed_append_are_kept(home: Home, clean: bool, flush: bool) -> None:
    """Row 42, off."""
    again = _disk_full_for_one_put(home, STRICT, clean=clean, flush=flush)

    assert in_log(again) == labels(range(5))
    assert pull(again) == in_order(range(5))


def _disk_full_for_one_put(home: Home, config: StoreConfig, *, clean: bool, flush: bool) -> MessageStore:
    disk = FaultDisk()
    store = home.open(config, disk=disk)
    put(store, range(2))
    disk.fail(1, Fault.FULL, action="wrote", path="commitlog")
    with pytest.raises(DiskFullError):
        store.put(a_message(99), NOW + 10 * STEP_MS)
    put(store, range(2, 5), at=NOW + 20 * STEP_MS)
    if flush:
        store.flush_log()
        store.flush_queues()
    if clean:
        store.close(NOW)
    else:
        store.abandon(0)
    return home.open(config, disk=disk)


# Row 43 --------------------------------------------------------------------------------------------------------------


@with_quirk(Quirk.STALE_QUEUE_TAIL_SURVIVES_TRUNCATION)
def test_stale_entries_come_back_and_point_into_another_topics_records(home: Home, historic: StoreConfig) -> None:
    """Row 43, on: and numbering goes on behind them."""
    again = _log_tail_lost_and_another_crash(home, historic)

    assert index_range(again) == (0, 5)
    with again.reader.get_message("T", 0, 2) as result:
        assert [damage.queue_index for damage in result.damaged] == [2, 3, 4]
        assert "entry points at U/0/0" in result.damaged[0].reason
    assert put(again, range(77, 78), at=NOW + 300 * STEP_MS)[0].queue_offset == 5


def test_stale_entries_do_not_come_back(home: Home) -> None:
    """Row 43, off."""
    again = _log_tail_lost_and_another_crash(home, STRICT)

    assert index_range(again) == (0, 2)
    assert put(again, range(77, 78), at=NOW + 300 * STEP_MS)[0].queue_offset == 2


def _log_tail_lost_and_another_crash(home: Home, config: StoreConfig) -> MessageStore:
    store = home.open(config)
    put(store, range(5))
    store.abandon(0)
    lose_records(home, 2)
    store = home.open(config)
    put(store, range(3), "U", at=NOW + 100 * STEP_MS)
    store.abandon(0)
    return home.open(config)


# Row 44 --------------------------------------------------------------------------------------------------------------


@with_quirk(Quirk.NORMAL_RECOVERY_SKIPS_ONE)
def test_the_first_missing_entry_never_comes_back_after_a_clean_exit(home: Home, historic: StoreConfig) -> None:
    """Row 44, on: its number is given to the next message."""
    again = _clean_exit_with_entries_lost(home, historic, 1)

    assert pull(again) == in_order(range(4))
    assert put(again, range(77, 78), at=NOW + 100 * STEP_MS)[0].queue_offset == 4


@pytest.mark.parametrize(
    "historic",
    [only(Quirk.NORMAL_RECOVERY_SKIPS_ONE, Quirk.QUEUE_GAP_SHIFTS_ENTRIES), V5_3],
    ids=["with row 12", "5.3"],
)
def test_the_entries_behind_the_first_missing_one_shift_by_one(home: Home, historic: StoreConfig) -> None:
    """Row 44, on, together with row 12."""
    again = _clean_exit_with_entries_lost(home, historic, 3)

    assert [entry(home, index)[0] for index in range(4)] == [place_of(number) for number in (0, 1, 3, 4)]
    assert index_range(again) == (0, 4)


@pytest.mark.parametrize("missing", [1, 3])
@pytest.mark.parametrize("config", [STRICT, V4_9], ids=["strict", "4.9"])
def test_all_missing_entries_come_back_after_a_clean_exit(home: Home, config: StoreConfig, missing: int) -> None:
    """Row 44, off; 4.9 never had it, and numbers its queues after it has caught up."""
    again = _clean_exit_with_entries_lost(home, config, missing)

    assert pull(again) == in_order(range(5))
    assert put(again, range(5, 6), at=NOW + 100 * STEP_MS)[0].queue_offset == 5
    assert pull(again) == in_order(range(6))


def _clean_exit_with_entries_lost(home: Home, config: StoreConfig, missing: int) -> MessageStore:
    store = home.open(config)
    put(store, range(5))
    store.close(NOW)
    lose_entries(home, 5 - missing)
    again = home.open(config)
    again.dispatch()
    return again
