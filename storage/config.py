"""StoreConfig: frozen, validated, with RocketMQ's names and defaults; and broker.conf text from and to it.

An attribute is the snake_case of its RocketMQ key (`mappedFileSizeCommitLog` is `mapped_file_size_commit_log`), a
default is that of 5.3. Intervals and timeouts are milliseconds, `file_reserved_time` hours, ratios percent. Nothing
here reads the environment: `~` in a path stays `~`, whoever opens the store expands it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from enum import Enum
from functools import cache
from typing import Any

from brokerlab.storage.errors import ConfigError
from brokerlab.storage.quirks import PRESETS, Dialect, Quirk

INT_MAX = 2**31 - 1
LONG_MAX = 2**63 - 1

_QUEUE_UNIT_SIZE = 20
_INDEX_HEADER_SIZE, _INDEX_SLOT_SIZE, _INDEX_ENTRY_SIZE = 40, 4, 20

_DELAY_LEVELS = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
_DELAY_UNIT_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


class BrokerRole(Enum):
    """What this broker is to its replicas."""

    ASYNC_MASTER = "ASYNC_MASTER"
    SYNC_MASTER = "SYNC_MASTER"
    SLAVE = "SLAVE"


class FlushDiskType(Enum):
    """Does a put wait for the disk?"""

    SYNC_FLUSH = "SYNC_FLUSH"
    ASYNC_FLUSH = "ASYNC_FLUSH"


def _int(default: int, low: int = 0, high: int = INT_MAX) -> int:
    """A whole number with its bounds, both included."""
    value: int = field(default=default, metadata={"low": low, "high": high})
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Everything the store and its services can be told. Construction raises one ConfigError with all problems."""

    # Where things are, and how large a file is.
    store_path_root_dir: str = "~/store"
    store_path_commit_log: str | None = None  # None: <root>/commitlog
    mapped_file_size_commit_log: int = _int(1 << 30, 256)
    mapped_file_size_consume_queue: int = _int(300_000 * _QUEUE_UNIT_SIZE, _QUEUE_UNIT_SIZE)
    max_hash_slot_num: int = _int(5_000_000, 1)
    max_index_num: int = _int(20_000_000, 2)  # entry 0 is never used: 2 is the smallest file that holds one
    warm_maped_file_enable: bool = False
    flush_least_pages_when_warm_maped_file: int = _int(4096)

    # Taking messages in.
    max_message_size: int = _int(4 << 20, 1)
    max_filter_message_size: int = _int(16_000)
    auto_message_version_on_topic_len: bool = True
    enabled_append_prop_crc: bool = False
    force_verify_prop_crc: bool = False
    put_message_timeout: int = _int(8_000)
    os_page_cache_busy_time_out_mills: int = _int(1_000, 0, LONG_MAX)
    broker_role: BrokerRole = BrokerRole.ASYNC_MASTER
    slave_timeout: int = _int(3_000)
    offset_check_in_slave: bool = False
    duplication_enable: bool = False
    message_delay_level: str = _DELAY_LEVELS

    # The write buffer in front of the page cache.
    transient_store_pool_enable: bool = False
    transient_store_pool_size: int = _int(5, 1)
    fast_fail_if_no_buffer_in_store_pool: bool = False
    commit_interval_commit_log: int = _int(200)
    commit_commit_log_least_pages: int = _int(4)
    commit_commit_log_thorough_interval: int = _int(200)
    wake_commit_when_put_message: bool = True
    read_un_committed: bool = False

    # From the page cache to the disk.
    flush_disk_type: FlushDiskType = FlushDiskType.ASYNC_FLUSH
    sync_flush_timeout: int = _int(5_000)
    flush_commit_log_timed: bool = True
    flush_interval_commit_log: int = _int(500)
    flush_commit_log_least_pages: int = _int(4)
    flush_commit_log_thorough_interval: int = _int(10_000)
    wake_flush_when_put_message: bool = False
    flush_interval_consume_queue: int = _int(1_000)
    flush_consume_queue_least_pages: int = _int(2)
    flush_consume_queue_thorough_interval: int = _int(60_000)

    # Reading.
    max_transfer_bytes_on_message_in_memory: int = _int(256 << 10)
    max_transfer_count_on_message_in_memory: int = _int(32)
    max_transfer_bytes_on_message_in_disk: int = _int(64 << 10)
    max_transfer_count_on_message_in_disk: int = _int(8)
    access_message_in_memory_max_ratio: int = _int(40, 0, 100)
    message_index_enable: bool = True
    message_index_safe: bool = False
    max_msgs_num_batch: int = _int(64, 1)
    default_query_max_num: int = _int(32, 1)

    # Recovery.
    check_crc_on_recover: bool = True

    # Deleting what is old.
    clean_resource_interval: int = _int(10_000, 1)
    delete_commit_log_files_interval: int = _int(100)
    delete_consume_queue_files_interval: int = _int(100)
    destroy_maped_file_interval_forcibly: int = _int(120_000)
    redelete_hanged_file_interval: int = _int(120_000)
    delete_when: tuple[int, ...] = (4,)  # hours of the local day
    disk_max_used_space_ratio: int = _int(75, 10, 95)
    disk_space_warning_level_ratio: int = _int(90, 35, 90)
    disk_space_clean_forcibly_ratio: int = _int(85, 30, 85)
    file_reserved_time: int = _int(72)
    delete_file_batch_max: int = _int(10, 1)
    clean_file_forcibly_enable: bool = True

    # brokerlab's own.
    dialect: Dialect = Dialect.V5_3
    quirks: frozenset[Quirk] = frozenset()
    utc_offset_minutes: int = _int(0, -18 * 60, 18 * 60)  # for index file names and delete_when
    process_id: int = _int(0)  # the text in `abort`
    physical_memory_bytes: int = _int(8 << 30, 1, LONG_MAX)  # what the in-memory share of reads is a share of
    dispatch_from_log: bool = False  # never take the short cut past the log
    salvage: bool = False  # open a damaged store and go on behind the damage
