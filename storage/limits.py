"""What a put may not be: every limit of a message, checked before a byte is written.

The original misses some of these, and one such message then takes acknowledged messages of others with it at the next
start (museum rows 3 and 62 to 64). Lengths are counted in bytes, after everything that will be stored is added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from brokerlab.storage.config import StoreConfig
from brokerlab.storage.message import (
    DELAY,
    PROPERTIES_LENGTH_MAX,
    RECORD_OVERHEAD_MAX,
    RETRY_PREFIX,
    RETRY_TOPIC_LENGTH_MAX,
    SCHEDULE_TOPIC,
    TOPIC_LENGTH_MAX,
    BatchItem,
    Message,
    SysFlag,
    java_int,
    join_properties,
    property_value,
    topic_bytes,
)
from brokerlab.storage.record import BLANK_SIZE_MIN, CRC_PROPERTY_SIZE, FIXED_SIZE_V2
from brokerlab.storage.results import PutMessageStatus

_ILLEGAL = PutMessageStatus.MESSAGE_ILLEGAL
_CRC_RESERVE = CRC_PROPERTY_SIZE + 1
_INT_MAX = 0x7FFFFFFF
_SECTOR_OF_ZEROS = bytes(512)


class Refusal(NamedTuple):
    """Why a put is not taken."""

    status: PutMessageStatus
    reason: str


def refusal_of(message: Message, config: StoreConfig) -> Refusal | None:
    """None if the message may be stored. The common message passes by the first test alone."""
    body, properties, topic = len(message.body), len(message.properties), message.topic
    if (
        topic in _usable_topics
        and body + 2048 < config.mapped_file_size_commit_log
        and body <= config.max_message_size
        and (not properties or (properties < 512 and message.properties[0] and message.properties[-1]))
        and 0 <= message.queue_id <= _INT_MAX
        and len(message.born_host) == len(message.store_host) == 8
        and not message.sys_flag & SysFlag.INNER_BATCH
    ):
        return None
    return _zeros_refusal(message.properties) or _judge(message, config, body, properties)


def _zeros_refusal(properties: bytes) -> Refusal | None:
    """Text never looks like this: `record.check` would take it for a sector lost in a power cut."""
    if properties and (not properties[0] or not properties[-1] or _SECTOR_OF_ZEROS in properties):
        return Refusal(_ILLEGAL, "properties begin or end with a zero byte, or hold 512 of them in a row")
    return None


_usable_topics: set[str] = set()
"""Short topics that were found valid, other than the schedule topic. Bounded: see `_judge`."""


def _judge(message: Message, config: StoreConfig, body: int, properties: int) -> Refusal | None:
    topic = message.topic
    try:
        encoded = topic_bytes(topic)
    except ValueError as error:
        return Refusal(_ILLEGAL, str(error))
    longest = TOPIC_LENGTH_MAX
    if config.dialect.knows_record_v2 and config.auto_message_version_on_topic_len and topic.startswith(RETRY_PREFIX):
        longest = RETRY_TOPIC_LENGTH_MAX
    if len(encoded) > longest:
        return Refusal(_ILLEGAL, f"topic has {len(encoded)} bytes, allowed are {longest}")
    if message.sys_flag & SysFlag.INNER_BATCH:
        return Refusal(_ILLEGAL, "an inner batch needs a batch consume queue, which this store does not have")
    if not 0 <= message.queue_id <= _INT_MAX:
        return Refusal(_ILLEGAL, f"queue id is {message.queue_id}, allowed is 0 to {_INT_MAX}")
    for name, host in (("born", message.born_host), ("store", message.store_host)):
        if len(host) not in (8, 20):
            return Refusal(_ILLEGAL, f"{name} host has {len(host)} bytes, allowed are 8 (IPv4) and 20 (IPv6)")
    reserve = _CRC_RESERVE if config.enabled_append_prop_crc else 0
    if properties + reserve > PROPERTIES_LENGTH_MAX:
        return Refusal(
            PutMessageStatus.PROPERTIES_SIZE_EXCEEDED,
            f"properties have {properties} bytes, allowed are {PROPERTIES_LENGTH_MAX - reserve}",
        )
    if body > config.max_message_size:
        return Refusal(_ILLEGAL, f"body has {body} bytes, maxMessageSize allows {config.max_message_size}")
    record = FIXED_SIZE_V2 + 24 + body + len(encoded) + properties + reserve
    if record > config.max_message_size + RECORD_OVERHEAD_MAX:
        return Refusal(_ILLEGAL, f"record has {record} bytes, maxMessageSize allows {config.max_message_size} + 64 KiB")
    file_size = config.mapped_file_size_commit_log
    exact = record - 24 - (len(encoded) <= TOPIC_LENGTH_MAX) + len(message.born_host) + len(message.store_host) - 16
    if exact + BLANK_SIZE_MIN > file_size:
        return Refusal(_ILLEGAL, f"record has {exact} bytes and does not fit a log file of {file_size}")
    if topic == SCHEDULE_TOPIC:
        return _delay_refusal(topic, message.properties)
    if len(encoded) <= TOPIC_LENGTH_MAX and len(_usable_topics) < 65536:
        _usable_topics.add(topic)
    return None


def _delay_refusal(topic: str, properties: bytes) -> Refusal | None:
    delay = property_value(properties, DELAY.encode()) if topic == SCHEDULE_TOPIC else None
    if delay is not None and java_int(delay) is None:
        return Refusal(_ILLEGAL, f"DELAY is {delay[:20]!r}, not a number")
    return None


def refusal_of_batch(envelope: Message, items: Sequence[BatchItem], config: StoreConfig) -> Refusal | None:
    """A batch is neither transactional nor delayed, and each item is judged with the envelope's properties added."""
    if envelope.sys_flag & SysFlag.TRANSACTION_MASK:
        return Refusal(_ILLEGAL, "a batch cannot be part of a transaction")
    if property_value(envelope.properties, DELAY.encode()) is not None:
        return Refusal(_ILLEGAL, "a batch cannot be delayed")
    whole = sum(len(item.body) for item in items)
    if whole > config.max_message_size:
        return Refusal(_ILLEGAL, f"batch has {whole} bytes of bodies, maxMessageSize allows {config.max_message_size}")
    for item in items:
        joined = join_properties(item.properties, envelope.properties)
        refused = (
            _zeros_refusal(joined)
            or _judge(envelope, config, len(item.body), len(joined))
            or _delay_refusal(envelope.topic, item.properties)
        )
        if refused is not None:
            return refused
    return None
