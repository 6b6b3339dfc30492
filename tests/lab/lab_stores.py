"""Stores for tests of the command line: small, quickly made, and every record at a place that a test can know."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from brokerlab.storage.config import StoreConfig
from brokerlab.storage.message import Message, encode_properties
from brokerlab.storage.message_store import MessageStore
from brokerlab.storage.real_disk import RealDisk
from brokerlab.storage.results import PutMessageStatus

GOLDEN = Path(__file__).parents[1] / "golden" / "rocketmq-4.x"
NOON = 1_700_000_000_000
SEGMENT = 8192
CONFIG = StoreConfig(
    mapped_file_size_commit_log=SEGMENT,
    mapped_file_size_consume_queue=400,
    max_hash_slot_num=20,
    max_index_num=80,
)
COUNT = 100
FIRST, SECOND = "00000000000000000000", "00000000000000008192"


def make_store(root: Path, *, count: int = COUNT, clean: bool = True, dispatched: int | None = None) -> Path:
    """Messages 0 to `count` in queues orders/0, orders/1, refunds/0, refunds/1 in turn; message i has key k<i>."""
    store = MessageStore(RealDisk(), str(root), CONFIG)
    store.open(NOON)
    for number in range(count):
        topic = "orders" if number % 4 < 2 else "refunds"
        wire = encode_properties({"TAGS": "TagA", "KEYS": f"k{number}"})
        message = Message(topic=topic, queue_id=number % 2, body=b"body %03d" % number, properties=wire)
        assert store.put(message, NOON + number).status is PutMessageStatus.PUT_OK
    if clean:
        store.close(NOON)
    else:
        store.dispatch(dispatched)
        store.flush_log()
        store.abandon(NOON)
    return root


def copy_store(template: Path, root: Path) -> Path:
    shutil.copytree(template, root, symlinks=True)
    return root


def overwrite(path: Path, position: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


def flip(path: Path, position: int) -> None:
    content = path.read_bytes()
    overwrite(path, position, bytes([content[position] ^ 0x5A]))


def digest(root: Path) -> str:
    """Names, kinds, sizes, times and contents of everything below; links and special files are not followed."""
    found = hashlib.sha256()
    for directory, names, files in os.walk(root):
        names.sort()
        for name in sorted(names + files):
            path = Path(directory, name)
            info = path.lstat()
            found.update(f"{path} {info.st_mode} {info.st_size} {info.st_mtime_ns}".encode("utf-8", "surrogateescape"))
            if path.is_file() and not path.is_symlink():
                found.update(path.read_bytes())
    return found.hexdigest()
