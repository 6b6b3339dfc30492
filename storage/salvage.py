"""Fencing off damage in the middle of the log.

The format knows no "skip these bytes" but at the end of a file. A rolled back transaction record is the next best
thing: every version reads over it, no queue and no index ever mentions it, and its body can be anything. So the damaged
bytes become the body of one such record that is exactly as long as they are. Its header and its last few bytes
overwrite what stood there; the rest of the damaged bytes stays for whoever wants to look.
"""

from __future__ import annotations

from brokerlab.storage.checksum import body_crc
from brokerlab.storage.mapped_file import MappedFile
from brokerlab.storage.message import NO_HOST, SysFlag
from brokerlab.storage.record import FIXED_SIZE_V1, MAGIC_V1, record_struct

FENCE_TOPIC = b"BROKERLAB_SALVAGED"


def fence(file: MappedFile, start: int, end: int, *, store_timestamp: int) -> None:
    """Turn bytes [start, end) of the file into one record that is never dispatched."""
    size = end - start
    topic = FENCE_TOPIC[: max(1, size - FIXED_SIZE_V1)]
    body_length = size - FIXED_SIZE_V1 - len(topic)
    assert body_length >= 0, f"{size} bytes are too few for a record, so they cannot have been one"
    body_at = start + FIXED_SIZE_V1 - 3
    body = bytes(file.view[body_at : body_at + body_length])
    packer = record_struct(body_length, len(topic), 0, 8, 8)
    file.region.write(
        start,
        packer.pack(
            size, MAGIC_V1, body_crc(body), 0, 0, 0, file.start + start, SysFlag.TRANSACTION_ROLLBACK, store_timestamp,
            NO_HOST, store_timestamp, NO_HOST, 0, 0, body_length, body, len(topic), topic, 0, b"",
        ),
    )  # fmt: skip
