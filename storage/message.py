"""A message as a producer hands it over, and the small formats around it: properties, hosts, message ids, batches.

Properties are kept in their wire form (`bytes`), the form that the store writes byte for byte:
name 0x01 value 0x02 name 0x01 value [0x02], UTF-8, no escaping. `encode_properties` and `decode_properties` convert.

A host is kept as it is stored: address (4 or 16 bytes) and port (4 bytes, big-endian), 8 or 20 bytes in all.

Decoding any input raises CorruptRecordError or returns; nothing else.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from brokerlab.storage.errors import CorruptRecordError

NAME_VALUE_SEPARATOR = "\x01"
PROPERTY_SEPARATOR = "\x02"

KEYS = "KEYS"
TAGS = "TAGS"
UNIQ_KEY = "UNIQ_KEY"
DELAY = "DELAY"
SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
RETRY_PREFIX = "%RETRY%"

TOPIC_LENGTH_MAX = 127
RETRY_TOPIC_LENGTH_MAX = 255
PROPERTIES_LENGTH_MAX = 32767
RECORD_OVERHEAD_MAX = 64 * 1024
"""A record may be this much larger than maxMessageSize, which limits the body (since 4.9.4)."""

NO_HOST = bytes(8)


class SysFlag:
    """Bits of the SYSFLAG field."""

    COMPRESSED = 0x1
    MULTI_TAGS = 0x2
    TRANSACTION_NOT = 0x0
    TRANSACTION_PREPARED = 0x4
    TRANSACTION_COMMIT = 0x8
    TRANSACTION_ROLLBACK = 0xC
    TRANSACTION_MASK = 0xC
    BORN_HOST_V6 = 0x10
    STORE_HOST_V6 = 0x20
    NEED_UNWRAP = 0x40
    INNER_BATCH = 0x80
    COMPRESSION_MASK = 0x700


@dataclass(slots=True, kw_only=True)
class Message:
    """What a producer sends. Not frozen only because one is made per put, and frozen costs twice as much."""

    topic: str
    body: bytes
    properties: bytes = b""
    queue_id: int = 0
    flag: int = 0
    sys_flag: int = 0
    born_timestamp: int = 0
    born_host: bytes = NO_HOST
    store_host: bytes = NO_HOST
    reconsume_times: int = 0
    prepared_transaction_offset: int = 0


class BatchItem(NamedTuple):
    """One inner message of a batch; topic, queue, hosts and times come from the envelope."""

    body: bytes
    properties: bytes = b""
    flag: int = 0


# Properties ----------------------------------------------------------------------------------------------------------


def encode_properties(properties: Mapping[str, str], *, trailing: bool = True) -> bytes:
    """The wire form, in the mapping's order. `trailing` is the dialect's separator behind the last pair."""
    for name, value in properties.items():
        if not name or any(mark in name + value for mark in "\x01\x02"):
            raise ValueError(f"property {name!r}: a name is not empty, and bytes 1 and 2 cannot be escaped")
    joined = PROPERTY_SEPARATOR.join(f"{name}{NAME_VALUE_SEPARATOR}{value}" for name, value in properties.items())
    return (joined + PROPERTY_SEPARATOR if trailing and joined else joined).encode()


def decode_properties(wire: bytes) -> dict[str, str]:
    """Both trailing styles; malformed items and empty values vanish, of duplicates the last one stays (as 4.9.1+)."""
    found: dict[str, str] = {}
    for item in wire.decode("utf-8", "replace").split(PROPERTY_SEPARATOR):
        name, separator, value = item.partition(NAME_VALUE_SEPARATOR)
        if name and separator and value:
            found[name] = value
    return found


def property_value(wire: bytes, name: bytes) -> bytes | None:
    """One value out of the wire form, or None, without decoding the others. Agrees with `decode_properties`."""
    at = len(wire)
    while True:
        at = wire.rfind(name + b"\x01", 0, at)
        if at < 0:
            return None
        if at == 0 or wire[at - 1] == 2:
            start = at + len(name) + 1
            end = wire.find(b"\x02", start)
            value = wire[start : end if end >= 0 else len(wire)]
            if value:
                return value


def java_int(text: bytes) -> int | None:
    """What Integer.parseInt makes of a property's value; None where it would throw."""
    digits = text[1:] if text[:1] in (b"+", b"-") else text
    if not digits.isdigit() or len(digits) > 64:
        return None
    value = int(text)
    return value if -(2**31) <= value < 2**31 else None


# Topics --------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=65536)
def topic_bytes(topic: str) -> bytes:
    """The topic as stored. ValueError if it cannot be a directory name: its queues could never be created."""
    try:
        encoded = topic.encode()
    except UnicodeEncodeError:
        raise ValueError(f"topic {topic!r} is not valid Unicode") from None
    problem = topic_problem(encoded)
    if problem:
        raise ValueError(f"topic {topic[:60]!r} {problem}")
    return encoded


@lru_cache(maxsize=65536)
def topic_problem(encoded: bytes) -> str:
    """Why these bytes cannot be a topic, or "". Queues are directories of that name."""
    if not encoded:
        return "is empty"
    if encoded in (b".", b"..") or b"/" in encoded or b"\0" in encoded:
        return "cannot be a directory name"
    if len(encoded) > RETRY_TOPIC_LENGTH_MAX:
        return f"has {len(encoded)} bytes, allowed are {RETRY_TOPIC_LENGTH_MAX}"
    try:
        encoded.decode()
    except UnicodeDecodeError:
        return "is not valid UTF-8"
    return ""


# Hosts and message ids -----------------------------------------------------------------------------------------------


def pack_host(address: str, port: int) -> bytes:
    """An IPv4 or IPv6 address and a port, as stored. ValueError for anything else."""
    if not 0 <= port <= 0x7FFFFFFF:
        raise ValueError(f"port {port}: allowed is 0 to 2147483647")
    return ipaddress.ip_address(address).packed + struct.pack(">i", port)


def unpack_host(host: bytes) -> tuple[str, int]:
    """(address, port); the port is whatever the four bytes say."""
    if len(host) not in (8, 20):
        raise CorruptRecordError(f"a host has 8 or 20 bytes, not {len(host)}")
    return str(ipaddress.ip_address(host[:-4])), int.from_bytes(host[-4:], "big", signed=True)


def format_host(host: bytes) -> str:
    """`address:port`, IPv6 in brackets."""
    address, port = unpack_host(host)
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def encode_message_id(store_host: bytes, physical_offset: int) -> str:
    """The offset id: store host and physical offset in upper-case hex, 32 (IPv4) or 56 characters."""
    return (store_host + physical_offset.to_bytes(8, "big", signed=True)).hex().upper()


def decode_message_id(text: str) -> tuple[bytes, int]:
    """(store host, physical offset)."""
    try:
        raw = bytes.fromhex(text) if len(text) in (32, 56) and text.isalnum() else b""
    except ValueError:
        raw = b""
    if len(raw) not in (16, 28):
        raise CorruptRecordError(f"a message id is 32 or 56 hex digits, not {text[:60]!r}")
    return raw[:-8], int.from_bytes(raw[-8:], "big", signed=True)


# Batch body ----------------------------------------------------------------------------------------------------------

_BATCH_HEAD = struct.Struct(">iiiii")
"""total, magic, crc, flag, body length; then body, i16 property length, properties."""
_BATCH_OVERHEAD = _BATCH_HEAD.size + 2


def encode_batch(items: Iterable[BatchItem]) -> bytes:
    """The body a client sends for a batch. Magic and CRC are 0: the store computes its own."""
    parts = []
    for item in items:
        total = _BATCH_OVERHEAD + len(item.body) + len(item.properties)
        parts += [
            _BATCH_HEAD.pack(total, 0, 0, item.flag, len(item.body)),
            item.body,
            struct.pack(">h", len(item.properties)),
            item.properties,
        ]
    return b"".join(parts)


def decode_batch(wire: bytes) -> list[BatchItem]:
    """The inner messages. Every length is checked against what is there before it is used."""
    items, at = [], 0
    while at < len(wire):
        if len(wire) - at < _BATCH_OVERHEAD:
            raise CorruptRecordError("batch ends inside an item's header", offset=at, torn=True)
        total, _magic, _crc, flag, body_length = _BATCH_HEAD.unpack_from(wire, at)
        if total < _BATCH_OVERHEAD or not 0 <= body_length <= total - _BATCH_OVERHEAD:
            raise CorruptRecordError(f"batch item claims {total} bytes with a body of {body_length}", offset=at)
        if total > len(wire) - at:
            raise CorruptRecordError("batch ends inside an item", offset=at, torn=True)
        body_at = at + _BATCH_HEAD.size
        properties_at = body_at + body_length + 2
        (properties_length,) = struct.unpack_from(">h", wire, properties_at - 2)
        if properties_length != at + total - properties_at:
            raise CorruptRecordError(f"batch item's properties claim {properties_length} bytes", offset=at)
        items.append(BatchItem(wire[body_at : body_at + body_length], wire[properties_at : at + total], flag))
        at += total
    return items


def join_properties(own: bytes, envelope: bytes) -> bytes:
    """A batch's envelope properties behind an item's own, so that the envelope wins (since 4.8)."""
    if own and envelope and not own.endswith(b"\x02"):
        return own + b"\x02" + envelope
    return own + envelope
