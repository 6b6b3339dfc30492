"""Consume queue units and the queue that is made of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from brokerlab.storage.consume_queue import PRE_BLANK, UNIT, UNIT_SIZE, ConsumeQueue, Unit, encode_units
from brokerlab.storage.errors import QueueGapError
from brokerlab.storage.real_disk import RealDisk

PER_FILE = 10
FILE = PER_FILE * UNIT_SIZE
RECORD = 100

LONG = st.integers(-(2**63), 2**63 - 1)
INT = st.integers(-(2**31), 2**31 - 1)


class Entries(NamedTuple):
    indexes: NDArray[np.int64]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    codes: NDArray[np.int64]


def entries(first: int, end: int) -> Entries:
    """Entries first .. end - 1 of a queue whose records are RECORD bytes long and alone in the log."""
    indexes = np.arange(first, end, dtype=np.int64)
    return Entries(indexes, indexes * RECORD, np.full(len(indexes), RECORD), indexes * 7 - 3)


def unit(index: int) -> Unit:
    return Unit(index * RECORD, RECORD, index * 7 - 3)


def new_queue(directory: Path | str, *, shift_gaps: bool = False) -> ConsumeQueue:
    return ConsumeQueue(RealDisk(), str(directory), "T", 0, FILE, shift_gaps=shift_gaps)


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[ConsumeQueue]:
    made = new_queue(tmp_path / "T" / "0")
    yield made
    made.close(0)


# Units


@settings(deadline=None)
@given(st.lists(st.tuples(LONG, INT, LONG), max_size=20))
def test_units_come_back(rows: list[tuple[int, int, int]]) -> None:
    columns = [np.array([row[n] for row in rows], dtype=np.int64) for n in range(3)]

    data = encode_units(*columns)
    assert data == b"".join(UNIT.pack(*row) for row in rows)
    assert [tuple(found) for found in UNIT.iter_unpack(data)] == rows


def test_the_bytes_of_known_units() -> None:
    def one(*values: int) -> bytes:
        return encode_units(*(np.array([value]) for value in values))

    assert one(0, 123, 2598919) == bytes.fromhex("0000000000000000 0000007B 000000000027A807")
    assert one(0, 123, -934813832) == bytes.fromhex("0000000000000000 0000007B FFFFFFFFC847DF78")
    assert bytes.fromhex("0000000000000000 7FFFFFFF 0000000000000000") == PRE_BLANK


def test_a_unit_knows_whether_it_holds_only_a_place() -> None:
    assert Unit(0, 2**31 - 1, 0).is_pre_blank
    assert not Unit(5, 2**31 - 1, 0).is_pre_blank
    assert not Unit(0, 100, 0).is_pre_blank
    assert [Unit(*row).is_empty for row in ((0, 0, 0), (0, -1, 0), (-1, 5, 0), (0, 5, 0))] == [True, True, True, False]


# Put


def test_entries_stand_at_their_index_across_files(queue: ConsumeQueue) -> None:
    assert queue.put(*entries(0, 25)) == 25

    assert [queue.unit(index) for index in range(25)] == [unit(index) for index in range(25)]
    assert (queue.unit(25), queue.unit(-1), queue.unit(10**9)) == (None, None, None)
    assert [file.start for file in queue.files.files] == [0, FILE, 2 * FILE]
    assert (queue.min_index, queue.max_index, queue.max_physical_offset) == (0, 25, 25 * RECORD)
    assert queue.last_physical_end() == 25 * RECORD
    assert repr(queue) == "ConsumeQueue(T/0, [0, 25))"


@settings(deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.data())
def test_entries_put_in_any_portions_and_again_are_there_once(
    tmp_path_factory: pytest.TempPathFactory, portions: list[int], data: st.DataObject
) -> None:
    queue = new_queue(tmp_path_factory.mktemp("queue"))
    total = 0
    for portion in portions:
        back = data.draw(st.integers(0, total))
        assert queue.put(*entries(back, total + portion)) == portion
        assert queue.put(*entries(back, total)) == 0
        total += portion

    assert [queue.unit(index) for index in range(total)] == [unit(index) for index in range(total)]
    assert (queue.max_index, queue.max_physical_offset) == (total, total * RECORD)
    queue.close(0)


def test_a_hole_is_refused_and_what_comes_before_it_is_taken(queue: ConsumeQueue) -> None:
    queue.put(*entries(0, 3))
    with pytest.raises(QueueGapError) as caught:
        queue.put(*entries(5, 7))
    assert (caught.value.expected, caught.value.found, queue.max_index) == (3, 5, 3)

    broken = Entries(*(np.concatenate(pair) for pair in zip(entries(3, 5), entries(8, 9), strict=True)))
    with pytest.raises(QueueGapError) as caught:
        queue.put(*broken)
    assert (caught.value.expected, caught.value.found, queue.max_index) == (5, 8, 5)
    assert queue.put(*entries(5, 9)) == 4


def test_the_quirk_appends_behind_a_hole_at_the_wrong_index(tmp_path: Path) -> None:
    """Museum row 12, historic side."""
    queue = new_queue(tmp_path, shift_gaps=True)
    queue.put(*entries(0, 3))

    assert queue.put(*entries(5, 7)) == 2
    assert [queue.unit(3), queue.unit(4)] == [unit(5), unit(6)]
    queue.close(0)


@pytest.mark.parametrize("first", [0, 1, PER_FILE - 1, PER_FILE, PER_FILE + 3, 5 * PER_FILE])
def test_a_queue_that_does_not_begin_at_0_holds_the_places_before(queue: ConsumeQueue, first: int) -> None:
    queue.put(*entries(first, first + 2))

    start = first - first % PER_FILE
    assert queue.files.min_offset == start * UNIT_SIZE
    assert (queue.min_index, queue.max_index) == (first, first + 2)
    held = [queue.unit(index) for index in range(start, first)]
    assert held == [Unit(0, 2**31 - 1, 0)] * (first - start)
    assert [queue.unit(first), queue.unit(first + 1)] == [unit(first), unit(first + 1)]
    assert queue.last_physical_end() == (first + 2) * RECORD


def test_places_of_lost_records_are_held_up_to_an_index(queue: ConsumeQueue) -> None:
    queue.put(*entries(0, 8))

    assert queue.skip_to(13) == 5
    assert queue.skip_to(13) == queue.skip_to(2) == 0
    assert queue.put(*entries(13, 15)) == 2
    held = Unit._make(UNIT.unpack(PRE_BLANK))
    assert [queue.unit(index) for index in (7, 8, 12, 13)] == [unit(7), held, held, unit(13)]


def test_an_empty_queue_can_begin_later(queue: ConsumeQueue) -> None:
    assert queue.skip_to(14) == 0

    assert (queue.min_index, queue.max_index, queue.last_physical_end()) == (14, 14, -1)
    assert queue.put(*entries(14, 15)) == 1


# Shrink


@pytest.mark.parametrize(
    ("min_physical_offset", "min_index"),
    [(0, 0), (1, 1), (RECORD, 1), (12 * RECORD, 12), (25 * RECORD, 25), (10**9, 25)],
)
def test_the_minimum_is_the_first_entry_whose_record_is_there(
    queue: ConsumeQueue, min_physical_offset: int, min_index: int
) -> None:
    queue.put(*entries(0, 25))

    queue.correct_min_offset(min_physical_offset)
    assert queue.min_index == min_index


def test_a_place_holder_is_never_the_minimum(queue: ConsumeQueue) -> None:
    """Its offset is 0, which the original takes for a record of a log that starts at 0."""
    queue.put(*entries(7, 9))

    queue.correct_min_offset(0)
    assert queue.min_index == 7


@pytest.mark.parametrize(
    ("min_physical_offset", "files_left", "min_index"),
    [
        (9 * RECORD, 3, 9),
        (9 * RECORD + 1, 2, 10),
        (19 * RECORD, 2, 19),
        (20 * RECORD, 1, 20),
        (10**9, 1, 25),
    ],
)
def test_files_go_when_their_last_entry_points_below_the_log(
    queue: ConsumeQueue, min_physical_offset: int, files_left: int, min_index: int
) -> None:
    queue.put(*entries(0, 25))

    deleted = queue.delete_expired(min_physical_offset, 0, force_after_ms=0)
    assert (len(queue.files.files), len(deleted), queue.min_index) == (files_left, 3 - files_left, min_index)
    assert queue.max_index == 25
    assert queue.unit(24) == unit(24)
    assert queue.put(*entries(25, 26)) == 1


def test_units_of_a_file_are_a_column(queue: ConsumeQueue) -> None:
    queue.put(*entries(0, 13))

    last = queue.units_of(queue.files.files[-1])
    assert last["offset"].tolist() == [1000, 1100, 1200]
    assert queue.units_of(queue.files.files[0], 3 * UNIT_SIZE)["code"].tolist() == [-3, 4, 11]
    del last
