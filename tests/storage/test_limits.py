"""Every limit of a put, at its exact edge."""

from __future__ import annotations

import pytest

from brokerlab.storage.config import StoreConfig
from brokerlab.storage.limits import refusal_of, refusal_of_batch
from brokerlab.storage.message import RETRY_PREFIX, SCHEDULE_TOPIC, BatchItem, Message, SysFlag
from brokerlab.storage.quirks import Dialect
from brokerlab.storage.results import PutMessageStatus
from tests.storage.strategies import a_message

ILLEGAL = PutMessageStatus.MESSAGE_ILLEGAL
TOO_LONG = PutMessageStatus.PROPERTIES_SIZE_EXCEEDED
CONFIG = StoreConfig()
OLD = StoreConfig.for_preset("rocketmq-4.9")


def status_of(message: Message, config: StoreConfig = CONFIG) -> PutMessageStatus | None:
    refused = refusal_of(message, config)
    assert refused is None or refused.reason
    return refused and refused.status


def status_of_batch(envelope: Message, items: list[BatchItem], config: StoreConfig = CONFIG) -> PutMessageStatus | None:
    refused = refusal_of_batch(envelope, items, config)
    assert refused is None or refused.reason
    return refused and refused.status


@pytest.mark.parametrize("config", [CONFIG, OLD])
@pytest.mark.parametrize(
    ("topic", "status"),
    [
        ("t" * 127, None),
        ("t" * 128, ILLEGAL),
        ("é" * 63 + "t", None),
        ("é" * 64, ILLEGAL),  # 64 characters, 128 bytes: the poison topic of museum row 63
        ("", ILLEGAL),
        ("..", ILLEGAL),
        ("a/b", ILLEGAL),
        ("a\0b", ILLEGAL),
        ("\ud800", ILLEGAL),
    ],
)
def test_a_topic_has_1_to_127_bytes_and_is_a_directory_name(
    config: StoreConfig, topic: str, status: PutMessageStatus | None
) -> None:
    assert status_of(a_message(topic=topic), config) is status
    assert status_of(a_message(topic=topic), config) is status  # nothing was remembered wrongly


@pytest.mark.parametrize(("length", "status"), [(127, None), (128, None), (255, None), (256, ILLEGAL)])
def test_a_retry_topic_may_have_255_bytes_in_5_3_only(length: int, status: PutMessageStatus | None) -> None:
    topic = RETRY_PREFIX.ljust(length, "r")
    no_v2 = StoreConfig(auto_message_version_on_topic_len=False)

    assert status_of(a_message(topic=topic)) is status
    for config in (OLD, StoreConfig(dialect=Dialect.V4_9), no_v2):
        assert status_of(a_message(topic=topic), config) is (None if length <= 127 else ILLEGAL)
    assert status_of(a_message(topic=topic.replace("%", "x"))) is (None if length <= 127 else ILLEGAL)


@pytest.mark.parametrize(
    ("length", "status"), [(0, None), (511, None), (512, None), (1024, None), (32767, None), (32768, TOO_LONG)]
)
def test_properties_have_at_most_32767_bytes(length: int, status: PutMessageStatus | None) -> None:
    assert status_of(a_message(properties=b"p" * length)) is status


def test_the_record_crc_needs_room_in_the_properties() -> None:
    config = StoreConfig(enabled_append_prop_crc=True)

    assert status_of(a_message(properties=b"p" * 32746), config) is None
    assert status_of(a_message(properties=b"p" * 32747), config) is TOO_LONG


@pytest.mark.parametrize(
    ("properties", "status"),
    [
        (b"a\x01\0b\x02", None),
        (b"\0a\x01b\x02", ILLEGAL),
        (b"a\x01b\0", ILLEGAL),
        (b"\0", ILLEGAL),
        (b"a\x01" + bytes(511) + b"b", None),
        (b"a\x01" + bytes(512) + b"b", ILLEGAL),
    ],
)
def test_properties_that_look_like_a_lost_sector_are_refused(
    properties: bytes, status: PutMessageStatus | None
) -> None:
    """Acknowledged, they would be taken for damage at the next start."""
    assert status_of(a_message(properties=properties)) is status
    assert status_of_batch(a_message(properties=b""), [BatchItem(b"", properties)]) is status
    assert status_of_batch(a_message(properties=properties), [BatchItem(b"", b"")]) is status


@pytest.mark.parametrize("most", [1, 100, 3000])
def test_a_body_has_at_most_max_message_size(most: int) -> None:
    config = StoreConfig(max_message_size=most)

    assert status_of(a_message(body=b"b" * most), config) is None
    assert status_of(a_message(body=b"b" * (most + 1)), config) is ILLEGAL
    assert status_of(a_message(body=b""), config) is None


@pytest.mark.parametrize("hosts", [(8, 8), (20, 8), (8, 20), (20, 20)])
@pytest.mark.parametrize("topic", ["T", "%RETRY%" + "g" * 150])
def test_a_record_and_a_blank_must_fit_one_file(hosts: tuple[int, int], topic: str) -> None:
    born, store = (bytes(size) for size in hosts)
    fixed = (91 if len(topic) <= 127 else 92) + sum(hosts) - 16
    config = StoreConfig(mapped_file_size_commit_log=4096)
    body = 4096 - 8 - fixed - len(topic)

    fitting = a_message(topic=topic, body=b"b" * body, born_host=born, store_host=store)
    assert status_of(fitting, config) is None
    fitting.body += b"b"
    assert status_of(fitting, config) is ILLEGAL


@pytest.mark.parametrize("field", ["born_host", "store_host"])
@pytest.mark.parametrize("length", [0, 4, 7, 9, 16, 19, 21])
def test_a_host_has_8_or_20_bytes(field: str, length: int) -> None:
    assert status_of(a_message(**{field: bytes(length)})) is ILLEGAL


@pytest.mark.parametrize(("queue_id", "status"), [(0, None), (2**31 - 1, None), (-1, ILLEGAL), (2**31, ILLEGAL)])
def test_a_queue_id_is_a_java_int_and_not_negative(queue_id: int, status: PutMessageStatus | None) -> None:
    assert status_of(a_message(queue_id=queue_id)) is status
    assert status_of(a_message(queue_id=queue_id)) is status


@pytest.mark.parametrize(
    ("delay", "status"), [(b"3", None), (b"-1", None), (b"soon", ILLEGAL), (b"2147483648", ILLEGAL)]
)
def test_a_delay_of_the_schedule_topic_is_a_number(delay: bytes, status: PutMessageStatus | None) -> None:
    """Museum row 64: the original stores it, and cuts the log there at the next start."""
    properties = b"DELAY\x01" + delay + b"\x02"

    assert status_of(a_message(topic=SCHEDULE_TOPIC, properties=properties)) is status
    assert status_of(a_message(topic="T", properties=properties)) is None
    assert status_of_batch(a_message(topic=SCHEDULE_TOPIC), [BatchItem(b"", properties)]) is status


def test_an_inner_batch_is_refused() -> None:
    """It needs a batch consume queue, which this store does not have."""
    for _ in range(2):
        assert status_of(a_message()) is None
        assert status_of(a_message(sys_flag=SysFlag.INNER_BATCH)) is ILLEGAL
    assert status_of_batch(a_message(sys_flag=SysFlag.INNER_BATCH), [BatchItem(b"a")]) is ILLEGAL


# Batches


def test_a_batch_is_neither_transactional_nor_delayed() -> None:
    items = [BatchItem(b"a"), BatchItem(b"b")]

    assert status_of_batch(a_message(), items) is None
    for flag in (SysFlag.TRANSACTION_PREPARED, SysFlag.TRANSACTION_COMMIT, SysFlag.TRANSACTION_ROLLBACK):
        assert status_of_batch(a_message(sys_flag=flag), items) is ILLEGAL
    assert status_of_batch(a_message(properties=b"DELAY\x013\x02"), items) is ILLEGAL


def test_the_bodies_of_a_batch_count_together() -> None:
    config = StoreConfig(max_message_size=100)

    assert status_of_batch(a_message(), [BatchItem(b"b" * 50)] * 2, config) is None
    assert status_of_batch(a_message(), [BatchItem(b"b" * 50), BatchItem(b"b" * 51)], config) is ILLEGAL


def test_the_properties_of_item_and_envelope_are_added_up() -> None:
    """Museum row 62: the original stores a negative length, and cuts the log there at the next start."""
    envelope = a_message(properties=b"e" * 20_000)

    assert status_of_batch(envelope, [BatchItem(b"", b"p" * 12_765 + b"\x02")]) is None
    assert status_of_batch(envelope, [BatchItem(b"", b"p" * 12_767)]) is TOO_LONG
    assert status_of_batch(envelope, [BatchItem(b"", b"ok"), BatchItem(b"", b"p" * 12_768)]) is TOO_LONG
    assert status_of_batch(a_message(), [BatchItem(b"", b"p" * 32_768)]) is TOO_LONG


def test_an_envelope_is_judged_like_a_message() -> None:
    items = [BatchItem(b"a")]

    for wrong in ({"topic": ""}, {"topic": "t" * 128}, {"queue_id": -1}, {"born_host": b""}):
        assert status_of_batch(a_message(**wrong), items) is ILLEGAL
