"""The checkpoint page, its seal, and the abort file."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brokerlab.storage.checkpoint import CHECKPOINT_SIZE, AbortFile, Checkpoint, CheckpointValues, decode_checkpoint
from brokerlab.storage.config import StoreConfig
from brokerlab.storage.errors import DiskIOError
from brokerlab.storage.quirks import Dialect
from brokerlab.storage.real_disk import RealDisk

LONG = st.integers(-(2**63), 2**63 - 1)
GOLDEN = Path(__file__).parents[1] / "golden/rocketmq-4.x/checkpoint"
NEW = StoreConfig(process_id=4711)
OLD = StoreConfig(dialect=Dialect.V4_9, process_id=4711)


def opened(path: Path, config: StoreConfig = NEW) -> Checkpoint:
    checkpoint = Checkpoint(RealDisk(), str(path), config)
    checkpoint.load()
    return checkpoint


def set_values(checkpoint: Checkpoint, values: tuple[int, ...]) -> None:
    checkpoint.physic_msg_timestamp, checkpoint.logics_msg_timestamp, checkpoint.index_msg_timestamp = values[:3]
    checkpoint.master_flushed_offset, checkpoint.confirm_phy_offset = values[3:]


@settings(deadline=None)
@given(st.tuples(LONG, LONG, LONG, LONG, LONG))
def test_what_was_flushed_comes_back(tmp_path_factory: pytest.TempPathFactory, values: tuple[int, ...]) -> None:
    path = tmp_path_factory.mktemp("checkpoint") / "checkpoint"
    first = opened(path)
    set_values(first, values)
    first.flush()
    first.close()

    assert path.read_bytes() == struct.pack(">5q", *values) + bytes(CHECKPOINT_SIZE - 40)
    again = opened(path)
    assert again.values == values == decode_checkpoint(path.read_bytes())
    again.close()


def test_the_checkpoint_of_a_real_broker_is_read(tmp_path: Path) -> None:
    """Its bytes begin with 0000016944217872 twice; the index time is 0."""
    path = tmp_path / "checkpoint"
    path.write_bytes(GOLDEN.read_bytes())

    checkpoint = opened(path, OLD)
    assert checkpoint.values == (1_551_626_238_066, 1_551_626_238_066, 0, 0, 0)
    assert checkpoint.seal() is None
    checkpoint.flush()
    checkpoint.close()
    assert path.read_bytes() == GOLDEN.read_bytes()


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_of_any_length_are_a_checkpoint(data: bytes) -> None:
    """The page has no checksum: what is there is believed, what is missing is 0, and nothing is refused."""
    assert decode_checkpoint(data) == struct.unpack(">5q", data[:40].ljust(40, b"\0"))


@pytest.mark.parametrize(
    ("values", "least", "least_index"),
    [
        ((10_000, 9_000, 100), 6_000, 100),
        ((9_000, 10_000, 7_000), 6_000, 6_000),
        ((3_000, 3_000, 3_000), 0, 0),
        ((2_999, 50_000, 9), 0, 0),
        ((0, 0, 0), 0, 0),
    ],
)
def test_recovery_may_trust_three_seconds_less_than_the_smaller_time(
    values: tuple[int, int, int], least: int, least_index: int
) -> None:
    said = CheckpointValues(*values)

    assert (said.min_timestamp, said.min_timestamp_index) == (least, least_index)


def test_a_4_9_checkpoint_has_three_longs_and_leaves_the_others_alone(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    path.write_bytes(struct.pack(">5q", 1, 2, 3, 4, 5).ljust(4096, b"\xee"))

    checkpoint = opened(path, OLD)
    set_values(checkpoint, (11, 12, 13, 14, 15))
    checkpoint.flush()
    checkpoint.close()
    assert path.read_bytes() == struct.pack(">5q", 11, 12, 13, 4, 5).ljust(4096, b"\xee")


@pytest.mark.parametrize("length", [0, 1, 8, 24, 4095, 4096, 5000])
def test_a_file_of_any_length_is_taken_and_has_a_page_afterwards(tmp_path: Path, length: int) -> None:
    path = tmp_path / "checkpoint"
    path.write_bytes((struct.pack(">3q", 1, 2, 3) + bytes(5000))[:length])

    checkpoint = opened(path)
    expected = decode_checkpoint(path.read_bytes())
    assert checkpoint.values == expected
    assert (expected[2] == 3) == (length >= 24)
    checkpoint.flush()
    checkpoint.close()
    assert path.stat().st_size == max(length, 4096)


def test_values_in_memory_are_not_on_disk_before_the_flush(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path / "checkpoint")
    checkpoint.physic_msg_timestamp = 99

    assert (tmp_path / "checkpoint").read_bytes() == bytes(4096)
    checkpoint.flush()
    assert decode_checkpoint((tmp_path / "checkpoint").read_bytes()).physic_msg_timestamp == 99
    checkpoint.close()
    checkpoint.close()


def test_a_directory_in_its_place_is_a_disk_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()

    with pytest.raises(DiskIOError):
        opened(tmp_path / "checkpoint")


# Seal


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.data())
def test_a_seal_comes_back_unless_its_mark_is_damaged(
    tmp_path_factory: pytest.TempPathFactory, crc: int, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("seal") / "checkpoint"
    checkpoint = opened(path)
    assert checkpoint.seal() is None
    checkpoint.set_seal(crc)
    checkpoint.close()

    again = opened(path)
    assert again.seal() == crc
    assert again.values == (0, 0, 0, 0, 0)
    again.close()
    damaged = bytearray(path.read_bytes())
    damaged[64 + data.draw(st.integers(0, 7))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(damaged)
    spoiled = opened(path)
    assert spoiled.seal() is None
    spoiled.close()


def test_flushing_the_longs_leaves_the_seal(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path / "checkpoint")
    checkpoint.set_seal(0xDEADBEEF)

    set_values(checkpoint, (1, 2, 3, 4, 5))
    checkpoint.flush()
    assert checkpoint.seal() == 0xDEADBEEF
    checkpoint.close()


# Abort


def test_abort_of_4_9_is_empty(tmp_path: Path) -> None:
    abort = AbortFile(RealDisk(), str(tmp_path / "abort"), OLD)
    assert not abort.exists()

    abort.create()
    assert abort.exists()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"abort": b""}
    abort.remove()
    assert not abort.exists()


def test_abort_of_5_3_holds_the_process_and_keeps_what_was_there_before(tmp_path: Path) -> None:
    abort = AbortFile(RealDisk(), str(tmp_path / "abort"), NEW)

    abort.create()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"abort": b"4711", "abort.bak": b""}
    (tmp_path / "abort").write_bytes(b"17")
    abort.create()
    assert (tmp_path / "abort.bak").read_bytes() == b"17"
    abort.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["abort.bak"]
