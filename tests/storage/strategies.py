"""Hypothesis strategies for messages and their parts, and a small vocabulary for logs in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from brokerlab.storage.commit_log import CommitLog
from brokerlab.storage.config import StoreConfig
from brokerlab.storage.message import RETRY_PREFIX, BatchItem, Message, SysFlag, encode_properties
from brokerlab.storage.real_disk import RealDisk
from brokerlab.storage.record import Layout, measure
from brokerlab.storage.results import PutMessageStatus

INT = st.integers(-(2**31), 2**31 - 1)
LONG = st.integers(-(2**63), 2**63 - 1)
NATURAL_INT = st.integers(0, 2**31 - 1)
NATURAL_LONG = st.integers(0, 2**62)

# A log file of this size takes any forty small messages.
FILE_SIZE = 64 << 10
NOW = 1_700_000_000_123

hosts = st.one_of(st.binary(min_size=8, max_size=8), st.binary(min_size=20, max_size=20))


def _is_topic(text: str) -> bool:
    return 0 < len(text.encode()) <= 127 and text not in (".", "..")


_topic_text = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=40)
topics = st.one_of(st.sampled_from(["TopicTest", "orders", "%RETRY%group", "主题"]), _topic_text.filter(_is_topic))
long_retry_topics = st.integers(128 - len(RETRY_PREFIX), 255 - len(RETRY_PREFIX)).map(lambda n: RETRY_PREFIX + "r" * n)

_property_text = st.text(st.characters(codec="utf-8", exclude_characters="\x01\x02"), min_size=1, max_size=12)
_keys = st.lists(st.sampled_from(["k1", "k2", "", "ключ", "🔑", "order-17"]), max_size=5).map(" ".join)
property_maps = st.dictionaries(
    st.one_of(st.sampled_from(["KEYS", "TAGS", "UNIQ_KEY", "WAIT", "DELAY"]), _property_text),
    st.one_of(_property_text, _keys.filter(bool)),
    max_size=5,
)

# Wire bytes that no careful writer makes: duplicates, empty names and values, marks in odd places, broken UTF-8.
_pieces = st.one_of(
    st.sampled_from(
        [b"KEYS", b"TAGS", b"UNIQ_KEY", b"\x01", b"\x02", b" ", b"  ", b"a", b"\xff", "é😀".encode(), b"\0"]
    ),
    st.sampled_from(
        [b"KEYS\x01a b\x02", b"TAGS\x01refund\x02", b"UNIQ_KEY\x01u\x02", b"KEYS\x01\x02", b"xKEYS\x01n\x02"]
    ),
    st.binary(max_size=6),
)
# Zeros at either end are refused by a put.
messy_properties = st.lists(_pieces, max_size=14).map(lambda pieces: b"".join(pieces).strip(b"\0"))

wire_properties = st.builds(
    lambda pairs, trailing: encode_properties(pairs, trailing=trailing).strip(b"\0"), property_maps, st.booleans()
)

sys_flags = st.sampled_from(
    [0, 0, 0, 1, 0x100, SysFlag.TRANSACTION_PREPARED, SysFlag.TRANSACTION_COMMIT, SysFlag.TRANSACTION_ROLLBACK, 0x742]
)


def messages(
    *,
    properties: st.SearchStrategy[bytes] = wire_properties,
    topic: st.SearchStrategy[str] = topics,
    body_max: int = 80,
) -> st.SearchStrategy[Message]:
    return st.builds(
        Message,
        topic=topic,
        body=st.binary(max_size=body_max),
        properties=properties,
        queue_id=st.one_of(st.integers(0, 3), NATURAL_INT),
        flag=INT,
        sys_flag=sys_flags,
        born_timestamp=LONG,
        born_host=hosts,
        store_host=hosts,
        reconsume_times=INT,
        prepared_transaction_offset=LONG,
    )


batch_items = st.builds(BatchItem, st.binary(max_size=60), st.binary(max_size=40), INT)


def a_message(**fields: Any) -> Message:
    """A plain message, with what the caller wants otherwise."""
    return Message(**({"topic": "TopicTest", "body": b"hello"} | fields))


def encoded(message: Message, *, config: StoreConfig | None = None, queue_offset: int = 0) -> bytes:
    """The record of this message at the beginning of a log."""
    return log_of([message], config=config, queue_offset=queue_offset)[0]


def log_of(
    messages: Sequence[Message], *, config: StoreConfig | None = None, queue_offset: int = 0, size: int = FILE_SIZE
) -> tuple[bytes, list[int]]:
    """The bytes of a log with these messages, written by the commit log, and where each record starts."""
    config = config or StoreConfig(mapped_file_size_commit_log=size)
    with tempfile.TemporaryDirectory() as directory:
        log = CommitLog(RealDisk(), directory, config, pool=None)
        starts = []
        for message in messages:
            log.next_queue_offset.setdefault((message.topic, message.queue_id), queue_offset)
            result = log.append(message, NOW)
            assert result.status is PutMessageStatus.PUT_OK, result.reason
            starts.append(result.physical_offset)
        data = b"".join(bytes(file.view[: file.wrote_position]) for file in log.files.files)
        log.files.close(0)
    return data, starts


def layout_of(record: bytes) -> Layout:
    return measure(memoryview(record), 0, len(record))
