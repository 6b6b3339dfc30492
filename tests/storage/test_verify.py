"""A cross-check that finds nothing in sound stores, and each kind of damage at its file and offset."""

from __future__ import annotations

import resource
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from brokerlab.storage.config import StoreConfig
from brokerlab.storage.consume_queue import PRE_BLANK, UNIT, Unit
from brokerlab.storage.find_message import Finder, Search
from brokerlab.storage.findings import ALIKE_MAX, Finding, Findings
from brokerlab.storage.message import BatchItem, Message, SysFlag, encode_properties
from brokerlab.storage.message_store import MessageStore
from brokerlab.storage.offline import NotAStoreError, QueueName, look_at, opened
from brokerlab.storage.offline_index import index_shape
from brokerlab.storage.real_disk import RealDisk
from brokerlab.storage.verify import VerifyReport, verify_store
from brokerlab.storage.verify_queues import Runs

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.lab.lab_stores import CONFIG, COUNT, FIRST, GOLDEN, NOON, SECOND, copy_store, flip, make_store, overwrite


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("verify") / "store")


@pytest.fixture
def store(sound: Path, tmp_path: Path) -> Path:
    return copy_store(sound, tmp_path / "store")


def verify(path: Path, **options: object) -> VerifyReport:
    return verify_store(RealDisk(read_only=True), str(path), **options)  # type: ignore[arg-type]


def told(report: VerifyReport, kind: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.kind == kind]


def only(report: VerifyReport, kind: str) -> Finding:
    """The one finding of this kind."""
    found = told(report, kind)
    assert len(found) == 1, report.findings
    return found[0]


def record_position(store: Path, number: int) -> int:
    """Where message `number` begins in the first segment, by its body."""
    return (store / "commitlog" / FIRST).read_bytes().index(b"body %03d" % number) - 88


# Sound stores --------------------------------------------------------------------------------------------------------


def test_a_cleanly_stopped_store_has_no_finding_but_the_shape_of_its_index(sound: Path) -> None:
    report = verify(sound)

    assert {finding.kind for finding in report.findings} == {"index-shape"}
    assert (report.errors, report.warnings, report.ok) == (0, 0, True)
    assert (report.log.records, report.queues, report.queue_entries) == (COUNT, 4, COUNT)
    assert report.index_entries == COUNT
    assert report.log.newest_store_timestamp == NOON + COUNT - 1


def test_an_abandoned_store_is_unclean_but_not_damaged(tmp_path: Path) -> None:
    report = verify(make_store(tmp_path / "store", clean=False))

    assert report.ok and report.unclean and not report.warnings
    assert only(report, "unclean-stop").severity == "info"


def test_records_not_yet_dispatched_at_a_crash_are_no_damage(tmp_path: Path) -> None:
    report = verify(make_store(tmp_path / "store", clean=False, dispatched=COUNT - 10))

    assert report.ok
    assert {finding.severity for finding in told(report, "not-dispatched")} == {"info"}
    assert "10 keys" in next(f.reason for f in told(report, "not-dispatched") if f.file.endswith("/index"))


def test_entries_missing_at_the_end_of_a_queue_after_a_clean_stop_are_damage(tmp_path: Path) -> None:
    root = make_store(tmp_path / "store", clean=False, dispatched=COUNT - 10)
    (root / "abort").unlink()

    report = verify(root)

    assert not report.ok
    assert len(told(report, "missing-entry")) == 10


def test_the_golden_segment_is_sound() -> None:
    report = verify(GOLDEN / "commitlog" / FIRST)

    assert report.kind == "commitlog" and report.findings == []
    assert (report.log.records, report.log.end) == (47, 8192)
    assert report.log.first_store_timestamp == 1_551_613_204_834


def test_the_golden_checkpoint_is_sound() -> None:
    report = verify(GOLDEN / "checkpoint")

    assert report.kind == "checkpoint" and report.findings == []
    assert report.checkpoint is not None
    assert report.checkpoint[:3] == (1_551_626_238_066, 1_551_626_238_066, 0)


def test_the_golden_files_together_lack_queues_and_what_the_checkpoint_promises() -> None:
    report = verify(GOLDEN)

    missing = {Path(finding.file).name: finding.severity for finding in told(report, "missing-part")}
    assert missing == {"consumequeue": "error", "index": "warning"}
    ahead = told(report, "checkpoint-ahead")
    assert [(finding.severity, finding.offset) for finding in ahead] == [("error", 0), ("warning", 8)]


def test_transactions_batches_and_ipv6_are_sound(tmp_path: Path) -> None:
    store = MessageStore(RealDisk(), str(tmp_path / "store"), CONFIG)
    store.open(NOON)
    keys = encode_properties({"KEYS": "a b a", "UNIQ_KEY": "u"})
    for sys_flag in (0, SysFlag.TRANSACTION_PREPARED, SysFlag.TRANSACTION_COMMIT, SysFlag.TRANSACTION_ROLLBACK):
        store.put(Message(topic="t", body=b"x", properties=keys, sys_flag=sys_flag), NOON)
    store.put(Message(topic="t", body=b"x", properties=keys, born_host=bytes(20), store_host=bytes(20)), NOON)
    store.put_batch(Message(topic="b", body=b""), [BatchItem(b"1", keys), BatchItem(b"2")], NOON)
    store.close(NOON)

    report = verify(tmp_path / "store")

    assert report.ok and not report.warnings
    assert report.log.records == 7 and report.queue_entries == 5


def test_a_queue_that_began_late_is_sound_and_its_held_places_are_told(store: Path) -> None:
    """The first segment expired: entries below the log's beginning are expired, not wrong."""
    (store / "commitlog" / FIRST).unlink()

    report = verify(store)

    assert report.ok, report.findings
    assert report.log.begin == 8192
    assert report.queue_entries_expired > 10 and report.index_entries_expired == report.queue_entries_expired
    assert {finding.severity for finding in told(report, "expired")} == {"info"}


def test_pre_blank_entries_before_the_first_are_normal(store: Path) -> None:
    (store / "commitlog" / FIRST).unlink()
    queue = store / "consumequeue/orders/0" / FIRST
    expired = sum(unit.physical_offset < 8192 for unit in units(queue))
    overwrite(queue, 0, PRE_BLANK * expired)

    report = verify(store)

    assert report.ok, report.findings
    assert f"{expired} places" in only(report, "pre-blank").reason


# The log -------------------------------------------------------------------------------------------------------------


def units(path: Path) -> list[Unit]:
    return [Unit._make(fields) for fields in UNIT.iter_unpack(path.read_bytes())]


def test_a_flipped_body_byte_is_found_where_its_record_begins(store: Path) -> None:
    position = record_position(store, 7)
    flip(store / "commitlog" / FIRST, position + 90)

    report = verify(store)

    damage = only(report, "damaged-record")
    assert (damage.severity, damage.file, damage.offset) == ("error", str(store / "commitlog" / FIRST), position)
    assert "CRC" in damage.reason


def test_a_damaged_blank_record_is_damage_when_the_log_goes_on(store: Path) -> None:
    segment = store / "commitlog" / FIRST
    at = segment.read_bytes().rindex(b"\xcb\xd4\x31\x94")
    overwrite(segment, at, bytes(4))

    damage = only(verify(store), "damaged-record")

    assert (damage.file, damage.offset) == (str(segment), at - 4)


def test_a_torn_tail_is_the_end_and_no_error(tmp_path: Path) -> None:
    root = make_store(tmp_path / "store", count=5, clean=False, dispatched=4)
    position = record_position(root, 4)
    overwrite(root / "commitlog" / FIRST, position + 60, bytes(100))
    (root / "checkpoint").unlink()

    report = verify(root)

    assert report.ok and report.log.records == 4
    torn = only(report, "torn-tail")
    assert (torn.severity, torn.offset) == ("warning", position)


def test_a_record_whose_place_is_elsewhere_is_damage(store: Path) -> None:
    position = record_position(store, 3)
    overwrite(store / "commitlog" / FIRST, position + 28, (99).to_bytes(8, "big"))

    damage = only(verify(store), "damaged-record")

    assert damage.offset == position and "belongs at offset 99" in damage.reason


def test_a_missing_segment_is_a_gap(tmp_path: Path) -> None:
    root = make_store(tmp_path / "store", count=200)
    (root / "commitlog" / SECOND).unlink()

    gap = only(verify(root), "gap")

    assert gap.file.endswith("/00000000000000016384") and "8192 bytes missing" in gap.reason


def test_a_cut_segment_has_the_wrong_size(store: Path) -> None:
    segment = store / "commitlog" / SECOND
    segment.write_bytes(segment.read_bytes()[:5000])

    wrong = only(verify(store), "wrong-size")

    assert (wrong.severity, wrong.file) == ("error", str(segment))


def test_a_segment_under_another_name_does_not_hold_what_it_should(store: Path) -> None:
    (store / "commitlog" / SECOND).rename(store / "commitlog" / "00000000000000009000")

    report = verify(store)

    assert only(report, "gap").file.endswith("9000")
    assert not report.ok


def test_a_store_time_that_goes_back_is_a_warning(store: Path) -> None:
    position = record_position(store, 9)
    overwrite(store / "commitlog" / FIRST, position + 56, (NOON + 1).to_bytes(8, "big"))

    back = only(verify(store), "time-goes-back")

    assert (back.severity, back.offset) == ("warning", position) and "7 ms" in back.reason


def test_two_records_with_one_queue_number_are_told(store: Path) -> None:
    position = record_position(store, 8)  # orders/0, number 2
    overwrite(store / "commitlog" / FIRST, position + 20, (1).to_bytes(8, "big"))

    duplicate = only(verify(store), "duplicate")

    assert (duplicate.severity, duplicate.file, duplicate.offset) == (
        "error",
        str(store / "commitlog" / FIRST),
        position,
    )


def test_random_bytes_in_place_of_a_log_are_no_log(tmp_path: Path) -> None:
    (tmp_path / "commitlog").mkdir()
    (tmp_path / "commitlog" / FIRST).write_bytes(bytes(range(1, 256)) * 40)

    nothing = only(verify(tmp_path), "no-record")

    assert (nothing.severity, nothing.offset) == ("error", 0)


# The queues ----------------------------------------------------------------------------------------------------------


def test_a_wrong_tags_code_is_found(store: Path) -> None:
    queue = store / "consumequeue/orders/1" / FIRST
    overwrite(queue, 3 * 20 + 12, (5).to_bytes(8, "big"))

    wrong = only(verify(store), "wrong-tags-code")

    assert (wrong.severity, wrong.file, wrong.offset) == ("error", str(queue), 60)


@pytest.mark.parametrize("at", [0, 8])
def test_an_entry_that_points_elsewhere_is_found(store: Path, at: int) -> None:
    queue = store / "consumequeue/refunds/0" / FIRST
    flip(queue, 4 * 20 + at + 3)

    report = verify(store)

    assert [(f.severity, f.file, f.offset) for f in told(report, "wrong-entry")] == [("error", str(queue), 80)]


def test_a_hole_in_a_queue_is_a_missing_entry(store: Path) -> None:
    queue = store / "consumequeue/orders/0" / FIRST
    overwrite(queue, 5 * 20, bytes(40))

    missing = told(verify(store), "missing-entry")

    assert [(f.file, f.offset) for f in missing] == [(str(queue), 100), (str(queue), 120)]


def test_an_entry_behind_the_end_of_the_log_is_found(store: Path) -> None:
    queue = store / "consumequeue/orders/0" / "00000000000000000400"
    overwrite(queue, 5 * 20, UNIT.pack(1 << 40, 150, 0))

    behind = only(verify(store), "behind-the-log")

    assert (behind.severity, behind.file, behind.offset) == ("error", str(queue), 100)


def test_a_stale_entry_behind_the_end_of_a_queue_is_found(store: Path) -> None:
    queue = store / "consumequeue/orders/0" / "00000000000000000400"
    overwrite(queue, 8 * 20, UNIT.pack(0, 150, 0))

    stale = only(verify(store), "stale")

    assert (stale.severity, stale.file, stale.offset) == ("error", str(queue), 160)
    assert "number 0 of orders/0" in stale.reason


def test_a_lost_queue_is_told_once(store: Path) -> None:
    for file in (store / "consumequeue/refunds/1").iterdir():
        file.unlink()

    missing = only(verify(store), "missing-entry")

    assert missing.file == str(store / "consumequeue/refunds/1") and "25 records" in missing.reason


def test_a_store_without_queues_says_so_once(store: Path) -> None:
    for path in sorted((store / "consumequeue").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    (store / "consumequeue").rmdir()

    missing = only(verify(store), "missing-part")

    assert missing.severity == "error" and f"{COUNT} records" in missing.reason


def test_a_single_queue_file_is_checked_by_itself(store: Path) -> None:
    queue = store / "consumequeue/orders/0" / FIRST
    assert verify(queue).findings == []

    overwrite(queue, 5 * 20, bytes(20))

    hole = only(verify(queue), "hole")
    assert (hole.severity, hole.offset) == ("error", 100)


# The index -----------------------------------------------------------------------------------------------------------

SLOTS_END = 40 + 4 * 20


def index_file(store: Path) -> Path:
    return sorted((store / "index").iterdir())[0]


def test_a_broken_link_and_a_lost_slot_are_found(store: Path) -> None:
    path = index_file(store)
    content = path.read_bytes()
    slot = next(s for s in range(20) if struct.unpack_from(">i", content, 40 + 4 * s)[0] > 20)
    newest = struct.unpack_from(">i", content, 40 + 4 * slot)[0]
    overwrite(path, SLOTS_END + 20 * newest + 16, bytes(4))
    other = next(s for s in range(20) if s != slot and any(content[40 + 4 * s : 44 + 4 * s]))
    overwrite(path, 40 + 4 * other, bytes(4))

    broken = told(verify(store), "index-chain")

    assert {(f.severity, f.file, f.offset) for f in broken} == {
        ("error", str(path), 40 + 4 * other),
        ("error", str(path), SLOTS_END + 20 * newest),
    }


def test_an_entry_that_points_to_no_record_is_found_and_its_key_is_missing(store: Path) -> None:
    path = index_file(store)
    overwrite(path, SLOTS_END + 20 * 6 + 4 + 7, b"\xff")

    report = verify(store)

    assert [f.offset for f in told(report, "index-entry")] == [SLOTS_END + 20 * 6]
    assert f"offset {record_position(store, 5)}" in only(report, "missing-key").reason


def test_a_header_that_contradicts_the_entries_is_found(store: Path) -> None:
    path = index_file(store)
    overwrite(path, 16, (12345).to_bytes(8, "big"))

    wrong = only(verify(store), "index-header")

    assert (wrong.severity, wrong.file, wrong.offset) == ("error", str(path), 16)


def test_a_lost_index_is_a_warning(store: Path) -> None:
    for path in (store / "index").iterdir():
        path.unlink()

    report = verify(store)

    assert report.ok and only(report, "missing-part").severity == "warning"


def test_the_shape_of_an_index_file_is_found_from_its_bytes(store: Path) -> None:
    with opened(RealDisk(read_only=True), str(index_file(store))) as region:
        found = index_shape(region)
        assert found is not None and found[:2] == (20, 80)
        given = index_shape(region, slots=5)
        assert given is not None and given[:2] == (5, 83)


def test_a_shape_that_is_not_one_to_four_is_found_too(tmp_path: Path) -> None:
    odd = StoreConfig(mapped_file_size_commit_log=8192, max_hash_slot_num=33, max_index_num=70)
    store = MessageStore(RealDisk(), str(tmp_path), odd)
    store.open(NOON)
    for number in range(30):
        store.put(Message(topic="t", body=b"", properties=encode_properties({"KEYS": f"k{number}"})), NOON)
    store.close(NOON)

    report = verify(tmp_path)

    assert "33 slots and 70 entries" in only(report, "index-shape").reason
    assert report.ok and report.index_entries == 30


# The checkpoint and the rest -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("at", "severity"), [(0, "error"), (8, "warning"), (16, "warning")])
def test_a_checkpoint_ahead_of_the_log_is_told(store: Path, at: int, severity: str) -> None:
    overwrite(store / "checkpoint", at, (NOON + 5000).to_bytes(8, "big"))

    ahead = only(verify(store), "checkpoint-ahead")

    assert (ahead.severity, ahead.offset) == (severity, at)


def test_a_negative_checkpoint_time_is_an_error(store: Path) -> None:
    overwrite(store / "checkpoint", 8, b"\xff" * 8)

    wrong = only(verify(store), "checkpoint")

    assert (wrong.severity, wrong.offset) == ("error", 8)


def test_stray_files_are_warnings_and_unreadable_parts_errors(store: Path) -> None:
    (store / "commitlog" / "notes.txt").write_text("hello")
    (store / "commitlog" / "00000000000000999999").mkdir()
    (store / "consumequeue" / "file").write_text("")

    report = verify(store)

    assert {Path(f.file).name: f.severity for f in told(report, "stray")} == {"notes.txt": "warning", "file": "warning"}
    assert only(report, "unreadable").file.endswith("999999")


def test_thousands_of_queues_need_few_descriptors(tmp_path: Path) -> None:
    store = MessageStore(RealDisk(), str(tmp_path), CONFIG)
    store.open(NOON)
    for number in range(300):
        store.put(Message(topic=f"t{number}", body=b""), NOON)
    store.close(NOON)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = max(int(name.name) for name in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 250, hard))
    try:
        report = verify(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert report.ok, report.findings
    assert report.queues == 300


@pytest.mark.parametrize("what", ["empty", "missing", "other"])
def test_a_path_that_is_no_store_is_refused_with_words(tmp_path: Path, what: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_bytes(b"x")

    with pytest.raises(NotAStoreError) as refused:
        verify(tmp_path / what)

    words = {"empty": "empty directory, not a store", "missing": "no such file", "other": "holds no commitlog"}
    assert refused.value.why.startswith(words[what])


# One message ---------------------------------------------------------------------------------------------------------


def find(store: Path, ask: Callable[[Finder], Search]) -> Search:
    disk = RealDisk(read_only=True)
    finder = Finder(disk, look_at(disk, str(store)))
    try:
        return ask(finder)
    finally:
        finder.close()


def test_a_message_is_found_by_key_id_and_queue_and_all_agree(sound: Path) -> None:
    by_key = find(sound, lambda finder: finder.by_key("k42", "refunds"))
    record = by_key.sightings[0].record
    assert record is not None
    by_id = find(sound, lambda finder: finder.by_id(record.message_id))
    by_queue = find(sound, lambda finder: finder.by_queue(QueueName("refunds", 0), 10))

    assert record.body == b"body 042"
    assert by_key.ok and by_id.ok and by_queue.ok
    assert by_key.sightings == by_id.sightings == by_queue.sightings
    assert [place.part for place in by_key.sightings[0].places] == ["log", "queue", "index"]


def test_a_key_is_looked_for_in_its_topic_only(sound: Path) -> None:
    assert find(sound, lambda finder: finder.by_key("k42", "orders")).sightings == []
    assert find(sound, lambda finder: finder.by_key("k4", None)).sightings[0].agrees
    assert find(sound, lambda finder: finder.by_key("nothing", None)).problem == "no message with key nothing"


def test_a_message_that_the_index_forgot_is_found_and_the_parts_disagree(store: Path) -> None:
    for path in (store / "index").iterdir():
        overwrite(path, 40, bytes(80))

    search = find(store, lambda finder: finder.by_key("k42", None))

    assert not search.ok
    assert {place.part: place.agrees for place in search.sightings[0].places} == {
        "log": True,
        "queue": True,
        "index": False,
    }


def test_an_entry_that_leads_to_another_message_is_told(store: Path) -> None:
    queue = store / "consumequeue/orders/0" / FIRST
    overwrite(queue, 20, queue.read_bytes()[40:60])

    search = find(store, lambda finder: finder.by_queue(QueueName("orders", 0), 1))

    assert not search.ok
    assert "number 2 of orders/0" in search.problem


def test_a_place_without_an_entry_finds_nothing(sound: Path) -> None:
    assert "no entry 1000" in find(sound, lambda finder: finder.by_queue(QueueName("orders", 0), 1000)).problem
    assert "no queue nowhere/7" in find(sound, lambda finder: finder.by_queue(QueueName("nowhere", 7), 0)).problem


# The small parts -----------------------------------------------------------------------------------------------------


def test_findings_of_one_kind_are_counted_where_they_are_too_many_to_keep() -> None:
    findings = Findings()
    for number in range(ALIKE_MAX + 5):
        findings.add("error", "file", number, "bad", "kind")
    findings.add("info", "file", None, "fine", "other")

    listed = list(findings)

    assert len(listed) == ALIKE_MAX + 2 and findings.count("error") == ALIKE_MAX + 5
    assert listed[ALIKE_MAX].reason == "5 more of kind kind"
    assert [finding.severity for finding in listed][-1] == "info"


def test_runs_merge_where_they_meet() -> None:
    runs = Runs()
    for start, end in ((5, 7), (7, 9), (20, 30), (1, 2), (2, 5), (8, 21)):
        runs.add(start, end)

    assert (runs.starts, runs.ends) == ([1], [30])
    assert runs.holds(np.array([0, 1, 29, 30])).tolist() == [False, True, True, False]


def test_the_largest_numbers_a_record_can_claim_are_judged_not_computed_with(store: Path) -> None:
    position = record_position(store, 7)
    largest = (2**63 - 1).to_bytes(8, "big")
    overwrite(store / "commitlog" / FIRST, position + 20, largest)  # queue offset
    overwrite(store / "commitlog" / FIRST, record_position(store, 4) + 56, largest)  # store time
    overwrite(store / "commitlog" / FIRST, record_position(store, 5) + 56, b"\x80" + bytes(7))

    report = verify(store)

    assert not report.ok
    assert f"{2**64 - 1} ms" in told(report, "time-goes-back")[0].reason
    assert only(report, "queue-offset-gap").offset == position
