"""The bytes: formats, mapped files, commit log, consume queues, index, checkpoint, recovery.

Passive and synchronous: no thread, no clock, no randomness, no system call but through the Disk port. A message's way:
`message` and `record` (the bytes), `commit_log` (append), `mapped_file` (positions), `dispatch` (what queues and index
are told), `consume_queue` and `index_file`, `reading`. `message_store` holds it together, `recovery` repairs it,
`verify` looks at it from outside.
"""

from brokerlab.storage.config import StoreConfig, load_broker_conf
from brokerlab.storage.errors import StoreError
from brokerlab.storage.message import BatchItem, Message, encode_properties, pack_host
from brokerlab.storage.message_store import MessageStore
from brokerlab.storage.quirks import PRESETS, Dialect, Quirk
from brokerlab.storage.real_disk import RealDisk
from brokerlab.storage.record import Record, decode_record
from brokerlab.storage.recovery_report import RecoveryReport
from brokerlab.storage.results import GetMessageStatus, PutMessageStatus, PutResult

__all__ = [
    "PRESETS",
    "BatchItem",
    "Dialect",
    "GetMessageStatus",
    "Message",
    "MessageStore",
    "PutMessageStatus",
    "PutResult",
    "Quirk",
    "RealDisk",
    "Record",
    "RecoveryReport",
    "StoreConfig",
    "StoreError",
    "decode_record",
    "encode_properties",
    "load_broker_conf",
    "pack_host",
]
