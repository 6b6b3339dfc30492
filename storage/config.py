"""StoreConfig: frozen, validated, with RocketMQ's names and defaults; and broker.conf text from and to it.

An attribute is the snake_case of its RocketMQ key (`mappedFileSizeCommitLog` is `mapped_file_size_commit_log`), a
default is that of 5.3. Intervals and timeouts are milliseconds, `file_reserved_time` hours, ratios percent. Nothing
here reads the environment: `~` in a path stays `~`, whoever opens the store expands it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import Field, dataclass, field, fields
from enum import Enum
from functools import lru_cache
from typing import Any

from brokerlab.storage.config_keys import (
    ALLOWED_BOOLEANS,
    BROKER_KEYS,
    INT_MAX,
    JAVA_BLANK,
    LONG_MAX,
    STORE_KEYS,
    Property,
    allowed_integers,
    escape_value,
    find_store_key,
    java_boolean,
    java_integer,
    read_properties,
)
from brokerlab.storage.errors import ConfigError
from brokerlab.storage.quirks import PRESETS, STRICT, Dialect, Quirk

_QUEUE_UNIT_SIZE = 20
_INDEX_HEADER_SIZE, _INDEX_SLOT_SIZE, _INDEX_ENTRY_SIZE = 40, 4, 20
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


def _int(default: int, low: int = 0, high: int = INT_MAX, *, clamp: bool = False) -> int:
    """A whole number with its bounds, both included. `clamp`: RocketMQ moves what it reads into them."""
    value: int = field(default=default, metadata={"low": low, "high": high, "clamp": clamp})
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Everything the store and its services can be told. Construction raises one ConfigError with all problems."""

    # Where things are, and how large a file is.
    store_path_root_dir: str = "~/store"
    store_path_commit_log: str | None = None  # None: <root>/commitlog
    mapped_file_size_commit_log: int = _int(1 << 30, 256)
    mapped_file_size_consume_queue: int = _int(
        6_000_000, _QUEUE_UNIT_SIZE, INT_MAX // _QUEUE_UNIT_SIZE * _QUEUE_UNIT_SIZE
    )
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
    message_delay_level: str = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"

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
    disk_max_used_space_ratio: int = _int(75, 10, 95, clamp=True)
    disk_space_warning_level_ratio: int = _int(90, 35, 90, clamp=True)
    disk_space_clean_forcibly_ratio: int = _int(85, 30, 85, clamp=True)
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

    def __post_init__(self) -> None:
        problems = []
        for setting in fields(self):
            value = getattr(self, setting.name)
            allowed = _refusal(setting, value)
            if allowed is not None:
                problems.append(_problem(_KEY_OF[setting.name], value, allowed))
        slots, entries = self.max_hash_slot_num, self.max_index_num
        if isinstance(slots, int) and isinstance(entries, int) and self.index_file_size > INT_MAX:
            sizes = f"maxHashSlotNum = {slots}, maxIndexNum = {entries}: an index file has {self.index_file_size} bytes"
            problems.append(f"{sizes}, allowed are at most {INT_MAX}")
        if problems:
            raise ConfigError(problems)

    @classmethod
    def for_preset(cls, name: str, **overrides: Any) -> StoreConfig:
        """A preset's dialect and quirks, and the defaults of that dialect, with what the caller wants otherwise."""
        if name not in PRESETS:
            raise ConfigError([_problem(_PRESET_KEY, name, _one_of(PRESETS))])
        chosen: dict[str, Any] = {"dialect": PRESETS[name].dialect, "quirks": PRESETS[name].quirks} | overrides
        return cls(**(_dialect_defaults(chosen["dialect"]) | chosen))

    @property
    def commit_log_path(self) -> str:
        """The directory of the commit log."""
        return self.store_path_commit_log or f"{self.store_path_root_dir}/commitlog"

    @property
    def consume_queue_file_size(self) -> int:
        """The configured size, rounded up to whole units."""
        return -(-self.mapped_file_size_consume_queue // _QUEUE_UNIT_SIZE) * _QUEUE_UNIT_SIZE

    @property
    def index_file_size(self) -> int:
        """Header, slots and entries. Java counts in int, so more than 2^31 - 1 cannot be."""
        return _INDEX_HEADER_SIZE + _INDEX_SLOT_SIZE * self.max_hash_slot_num + _INDEX_ENTRY_SIZE * self.max_index_num

    @property
    def delay_levels_ms(self) -> tuple[int, ...]:
        """The delays of level 1, 2, …: level n is at index n - 1."""
        return _delay_levels_ms(self.message_delay_level)


_FIELDS: dict[str, Field[Any]] = {setting.name: setting for setting in fields(StoreConfig)}
_PRESET_KEY = "brokerlab.preset"
_OWN_KEY_OF = {name: "brokerlab." + re.sub(r"_(.)", lambda match: match[1].upper(), name) for name in _FIELDS}
_ROCKETMQ_KEY_OF = {key.attribute: name for name, key in STORE_KEYS.items()}
_KEY_OF = {name: _ROCKETMQ_KEY_OF.get(name, own) for name, own in _OWN_KEY_OF.items()}
_ATTRIBUTE_OF = {key: attribute for attribute, key in _KEY_OF.items()}
_QUIRK_OF = {quirk.label: quirk for quirk in Quirk}
_KNOWN_NAMES = sorted({*STORE_KEYS, *BROKER_KEYS, *_ATTRIBUTE_OF, _PRESET_KEY})


@lru_cache(maxsize=16)
def _delay_levels_ms(text: str) -> tuple[int, ...]:
    """Empty if any word is no delay. Words are one blank apart, as Java splits them."""
    levels = []
    for word in text.split(" "):
        amount = java_integer(word[:-1]) if re.fullmatch(r"[0-9]+[smhd]", word) else None
        if amount is None or amount * _DELAY_UNIT_MS[word[-1]] > LONG_MAX:
            return ()
        levels.append(amount * _DELAY_UNIT_MS[word[-1]])
    return tuple(levels)


def _dialect_defaults(dialect: Dialect) -> dict[str, Any]:
    """Where a version behaves otherwise than the defaults above."""
    defaults: dict[str, Any] = {}
    for attribute, name in _KEY_OF.items():
        key = STORE_KEYS.get(name)
        text = key.default_text(dialect) if key else None
        if key and text is not None and text != key.default_text(Dialect.V5_3):
            defaults[attribute] = _parse(_FIELDS[attribute], text)
    return defaults


def _refusal(setting: Field[Any], value: object) -> str | None:
    """What is allowed, if this value is not. The default stands for the type: `True` is no number."""
    right_type = type(value) is type(setting.default)
    match setting.default:
        case bool():
            return None if right_type else ALLOWED_BOOLEANS
        case int():
            low, high = setting.metadata["low"], setting.metadata["high"]
            return None if right_type and low <= value <= high else allowed_integers(low, high)
        case Enum() as default:
            return None if right_type else _one_of(str(member.value) for member in type(default))
        case tuple():
            hours = isinstance(value, tuple) and all(type(hour) is int and 0 <= hour <= 23 for hour in value)
            return None if hours else "hours from 00 to 23 with ; between them, or ; alone for never"
        case frozenset():
            quirks = isinstance(value, frozenset) and all(isinstance(quirk, Quirk) for quirk in value)
            return None if quirks else f"a comma list, each with or without a leading -, of {', '.join(_QUIRK_OF)}"
    if setting.name == "message_delay_level":
        levels = _delay_levels_ms(value) if isinstance(value, str) else ()
        return None if levels else "delays like 1s 5m 2h 1d, one blank apart"
    return None if _is_path(value) or value is setting.default else "a path without blanks around it"


def _is_path(value: object) -> bool:
    """A zero byte ends a path, and half of a surrogate pair has no bytes at all."""
    if not isinstance(value, str) or not value or value != value.strip(JAVA_BLANK):
        return False
    return not re.search("[\0\ud800-\udfff]", value)


def _one_of(names: Iterable[str]) -> str:
    return f"one of {', '.join(names)}"


def _problem(key: str, value: object, allowed: str) -> str:
    shown = value.value if isinstance(value, Enum) else repr(value)
    return f"{key} = {shown}: allowed is {allowed}"


def _parse(setting: Field[Any], text: str, base: frozenset[Quirk] = frozenset()) -> Any:
    """The value that this text means, or the text itself, which `_refusal` then refuses."""
    parsed: Any
    match setting.default:
        case bool():
            parsed = java_boolean(text)
        case int():
            parsed = java_integer(text)
        case Enum() as default:
            parsed = next((member for member in type(default) if member.value == text), None)
        case tuple():
            # Java's split drops what is empty at the end: `04;` is one hour and `;` is none.
            hours = [java_integer(hour) for hour in text.rstrip(";").split(";")] if text.strip(";") else []
            parsed = tuple(hours) if text and None not in hours else None
        case frozenset():
            parsed = _parse_quirks(text, base)
        case _:
            parsed = text
    return text if parsed is None else parsed


def _parse_quirks(text: str, base: frozenset[Quirk]) -> frozenset[Quirk] | None:
    quirks = set(base)
    for word in filter(None, (word.strip() for word in text.split(","))):
        quirk = _QUIRK_OF.get(word.removeprefix("-"))
        if quirk is None:
            return None
        (quirks.discard if word.startswith("-") else quirks.add)(quirk)
    return frozenset(quirks)


def load_broker_conf(text: str, *, preset: str = "strict") -> tuple[StoreConfig, tuple[str, ...]]:
    """Read the text of a broker.conf: the configuration, and notes on what is not applied as it was written.

    `brokerlab.preset` in the text goes before `preset`. Raises one ConfigError with every wrong line.
    """
    latest, notes = _latest_settings(text)
    problems: list[str] = []
    named = latest.pop(_PRESET_KEY, None)
    name = named.value if named else preset
    if name not in PRESETS:
        problems.append((f"line {named.line}: " if named else "") + _problem(_PRESET_KEY, name, _one_of(PRESETS)))
    base = PRESETS.get(name, STRICT)
    values: dict[str, Any] = {"dialect": base.dialect, "quirks": base.quirks}

    for key, (line, written, value_text) in latest.items():
        if key in _ATTRIBUTE_OF:
            setting = _FIELDS[_ATTRIBUTE_OF[key]]
            value, note = _clamped(setting, _parse(setting, value_text, base.quirks))
            if note:
                notes.append((line, f"{key} = {value_text}: {note}"))
            allowed = _refusal(setting, value)
            if allowed is None:
                values[setting.name] = value
        else:
            value = value_text
            allowed = STORE_KEYS[key].refuses(value_text) if key in STORE_KEYS else None
        if allowed is not None:
            problems.append(f"line {line}: {_problem(written, value, allowed)}")

    try:
        config = StoreConfig(**(_dialect_defaults(values["dialect"]) | values))
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    notes += _notes_on_keys(latest, config.dialect)
    return config, tuple(f"line {line}: {note}" for line, note in sorted(notes, key=lambda note: note[0]))


def _latest_settings(text: str) -> tuple[dict[str, Property], list[tuple[int, str]]]:
    """The settings by their usual key, the last one where a key is set twice, and notes on those."""
    latest: dict[str, Property] = {}
    notes = []
    for setting in read_properties(text):
        known = find_store_key(setting.key)
        key = known.name if known else setting.key
        if key in latest:
            notes.append((setting.line, f"{key} replaces line {latest[key].line}"))
        latest[key] = setting._replace(value=setting.value.strip(JAVA_BLANK))
    return latest, notes


def _clamped(setting: Field[Any], value: Any) -> tuple[Any, str]:
    """RocketMQ moves some ratios silently into their bounds. So do we, and say so."""
    if not setting.metadata.get("clamp") or not isinstance(value, int) or abs(value) > INT_MAX:
        return value, ""
    clamped = min(max(value, setting.metadata["low"]), setting.metadata["high"])
    return clamped, "" if clamped == value else f"{clamped} is used, as RocketMQ does"


def _notes_on_keys(latest: dict[str, Property], dialect: Dialect) -> list[tuple[int, str]]:
    notes = []
    for key, (line, written, _) in latest.items():
        if key in STORE_KEYS:
            if key != written:
                notes.append((line, f"{written} is read as {key}"))
            if not STORE_KEYS[key].known_to(dialect):
                but = ", it is applied all the same" if key in _ATTRIBUTE_OF else ""
                notes.append((line, f"{key} is no key of RocketMQ {dialect.value}{but}"))
            if key not in _ATTRIBUTE_OF:
                notes.append((line, f"{key} has no effect here"))
        elif key in BROKER_KEYS:
            notes.append((line, f"{key} is a key of the broker around the store and has no effect here"))
        elif key not in _ATTRIBUTE_OF:
            # A very long key is no typing mistake, and comparing it takes long.
            nearest = difflib.get_close_matches(key, _KNOWN_NAMES, n=1) if len(key) <= 80 else []
            notes.append((line, f"unknown key {key!r}" + (f", the nearest is {nearest[0]}" if nearest else "")))
    return notes


def to_broker_conf(config: StoreConfig) -> str:
    """The text of a broker.conf that `load_broker_conf` reads as an equal configuration, whatever its preset."""
    lines = [f"{_PRESET_KEY} = strict"]
    defaults = StoreConfig.for_preset("strict", dialect=config.dialect)
    for attribute, key in _KEY_OF.items():
        value = getattr(config, attribute)
        of_version = key not in STORE_KEYS or STORE_KEYS[key].known_to(config.dialect)
        if value is not None and (of_version or value != getattr(defaults, attribute)):
            lines.append(f"{key} = {escape_value(_text(value))}")
    return "\n".join(lines) + "\n"


def _text(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case Enum():
            return str(value.value)
        case tuple():
            return ";".join(f"{hour:02}" for hour in value) or ";"
        case frozenset():
            return ", ".join(sorted(quirk.label for quirk in value))
        case _:
            return str(value)
