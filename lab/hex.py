"""A record as hex, one line per field, each with its name and what it means."""

from __future__ import annotations

from collections.abc import Iterator

from brokerlab.lab.terminal import printable, show_time
from brokerlab.storage.message import SysFlag, format_host
from brokerlab.storage.record import Record

_BYTES_SHOWN = 24


def _fields(record: Record) -> Iterator[tuple[str, int, str]]:
    """(name, length, meaning) in the order in which they stand."""
    yield "total_size", 4, f"{record.total_size:,}"
    yield "magic", 4, f"message, version {record.version}"
    yield "body_crc", 4, f"{record.body_crc & 0xFFFFFFFF:08X}"
    yield "queue_id", 4, str(record.queue_id)
    yield "flag", 4, str(record.flag)
    yield "queue_offset", 8, f"{record.queue_offset:,}"
    yield "physical_offset", 8, f"{record.physical_offset:,}"
    yield "sys_flag", 4, sys_flag_words(record.sys_flag)
    yield "born_timestamp", 8, show_time(record.born_timestamp)
    yield "born_host", len(record.born_host), format_host(record.born_host)
    yield "store_timestamp", 8, show_time(record.store_timestamp)
    yield "store_host", len(record.store_host), format_host(record.store_host)
    yield "reconsume_times", 4, str(record.reconsume_times)
    yield "prepared_transaction_offset", 8, f"{record.prepared_transaction_offset:,}"
    yield "body_length", 4, f"{len(record.body):,}"
    yield "body", len(record.body), printable(record.body.decode("utf-8", "replace"), 60)
    topic = record.topic.encode()
    yield "topic_length", record.version, str(len(topic))
    yield "topic", len(topic), printable(record.topic)
    yield "properties_length", 2, f"{len(record.properties):,}"
    pairs = ", ".join(f"{name}={value}" for name, value in record.properties_dict().items())
    yield "properties", len(record.properties), printable(pairs, 300)


def sys_flag_words(sys_flag: int) -> str:
    """The bits that are set, in words."""
    transaction = {0x4: "prepared", 0x8: "commit", 0xC: "rollback"}.get(sys_flag & SysFlag.TRANSACTION_MASK)
    words = [transaction] if transaction else []
    named = {
        SysFlag.COMPRESSED: "compressed",
        SysFlag.MULTI_TAGS: "multi tags",
        SysFlag.BORN_HOST_V6: "born host IPv6",
        SysFlag.STORE_HOST_V6: "store host IPv6",
        SysFlag.NEED_UNWRAP: "need unwrap",
        SysFlag.INNER_BATCH: "inner batch",
    }
    words += [word for bit, word in named.items() if sys_flag & bit]
    return ", ".join(words) or "none"


def field_lines(raw: bytes, record: Record) -> list[str]:
    """One line per field: position in the record, name, bytes, meaning. Long fields show their beginning."""
    lines, at = [], 0
    for name, length, meaning in _fields(record):
        shown = raw[at : at + min(length, _BYTES_SHOWN)].hex(" ", 4)
        more = f" +{length - _BYTES_SHOWN:,}" if length > _BYTES_SHOWN else ""
        lines.append(f"{at:>6}  {name:<28}{shown + more:<20}  {meaning}".rstrip())
        at += length
    assert at == len(raw), f"fields add up to {at} bytes, the record has {len(raw)}"
    return lines
