"""StoreConfig keeps RocketMQ's names and defaults, refuses with reasons, and survives a trip through broker.conf."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerlab.storage.config import BrokerRole, FlushDiskType, StoreConfig, load_broker_conf, to_broker_conf
from brokerlab.storage.config_keys import STORE_KEYS, escape_value, find_store_key, read_properties
from brokerlab.storage.errors import ConfigError
from brokerlab.storage.quirks import PRESETS, Dialect, Quirk

# Typed by hand from the published defaults, not from our table.
ROCKETMQ_5_3 = {
    "store_path_root_dir": "~/store",
    "store_path_commit_log": None,
    "mapped_file_size_commit_log": 1024 * 1024 * 1024,
    "mapped_file_size_consume_queue": 300_000 * 20,
    "flush_interval_commit_log": 500,
    "commit_interval_commit_log": 200,
    "flush_commit_log_timed": True,
    "flush_interval_consume_queue": 1000,
    "clean_resource_interval": 10_000,
    "delete_commit_log_files_interval": 100,
    "delete_consume_queue_files_interval": 100,
    "destroy_maped_file_interval_forcibly": 120_000,
    "redelete_hanged_file_interval": 120_000,
    "delete_when": (4,),
    "disk_max_used_space_ratio": 75,
    "disk_space_warning_level_ratio": 90,
    "disk_space_clean_forcibly_ratio": 85,
    "file_reserved_time": 72,
    "delete_file_batch_max": 10,
    "max_message_size": 4 * 1024 * 1024,
    "check_crc_on_recover": True,
    "flush_commit_log_least_pages": 4,
    "commit_commit_log_least_pages": 4,
    "flush_least_pages_when_warm_maped_file": 4096,
    "flush_consume_queue_least_pages": 2,
    "flush_commit_log_thorough_interval": 10_000,
    "commit_commit_log_thorough_interval": 200,
    "flush_consume_queue_thorough_interval": 60_000,
    "max_transfer_bytes_on_message_in_memory": 256 * 1024,
    "max_transfer_count_on_message_in_memory": 32,
    "max_transfer_bytes_on_message_in_disk": 64 * 1024,
    "max_transfer_count_on_message_in_disk": 8,
    "access_message_in_memory_max_ratio": 40,
    "message_index_enable": True,
    "message_index_safe": False,
    "max_hash_slot_num": 5_000_000,
    "max_index_num": 5_000_000 * 4,
    "max_msgs_num_batch": 64,
    "default_query_max_num": 32,
    "broker_role": BrokerRole.ASYNC_MASTER,
    "flush_disk_type": FlushDiskType.ASYNC_FLUSH,
    "sync_flush_timeout": 5000,
    "slave_timeout": 3000,
    "put_message_timeout": 8000,
    "clean_file_forcibly_enable": True,
    "warm_maped_file_enable": False,
    "transient_store_pool_enable": False,
    "transient_store_pool_size": 5,
    "os_page_cache_busy_time_out_mills": 1000,
    "auto_message_version_on_topic_len": True,
    "enabled_append_prop_crc": False,
    "wake_commit_when_put_message": True,
    "wake_flush_when_put_message": False,
    "read_un_committed": False,
    "max_filter_message_size": 16_000,
}
OWN = {"dialect", "quirks", "utc_offset_minutes", "process_id", "physical_memory_bytes", "dispatch_from_log", "salvage"}


def problems_of(**values: Any) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        StoreConfig(**values)
    return refused.value.problems


def problems_in(text: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        load_broker_conf(text)
    return refused.value.problems


def properties(text: str) -> list[tuple[str, str]]:
    return [(key, value) for _, key, value in read_properties(text)]


# --- defaults and names


@pytest.mark.parametrize("attribute", ROCKETMQ_5_3)
def test_a_default_is_that_of_rocketmq_5_3(attribute: str) -> None:
    assert getattr(StoreConfig(), attribute) == ROCKETMQ_5_3[attribute]


def test_every_attribute_is_the_snake_case_of_a_rocketmq_key_or_is_our_own() -> None:
    of_keys = {key.attribute for key in STORE_KEYS.values()}

    assert {field.name for field in fields(StoreConfig)} - of_keys == OWN


def test_every_default_agrees_with_the_table_of_keys() -> None:
    table = "".join(
        f"{key.name}={key.default_text(Dialect.V5_3)}\n"
        for key in STORE_KEYS.values()
        if key.default_text(Dialect.V5_3) is not None
    )

    config, _ = load_broker_conf(table)

    assert config == StoreConfig()


def test_the_table_has_the_78_keys_of_4_9_8_and_the_182_of_5_3_3() -> None:
    assert sum(key.known_to(Dialect.V4_9) for key in STORE_KEYS.values()) == 78
    assert sum(key.known_to(Dialect.V5_3) for key in STORE_KEYS.values()) == 182


@pytest.mark.parametrize("dialect", Dialect)
def test_every_default_in_the_table_is_a_value_of_its_type(dialect: Dialect) -> None:
    for key in STORE_KEYS.values():
        text = key.default_text(dialect)
        assert text is None or key.refuses(text) is None, key


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        StoreConfig().max_message_size = 1  # type: ignore[misc]


# --- derived sizes


@pytest.mark.parametrize(("configured", "used"), [(20, 20), (21, 40), (39, 40), (40, 40), (6_000_000, 6_000_000)])
def test_a_consume_queue_file_holds_whole_units(configured: int, used: int) -> None:
    assert StoreConfig(mapped_file_size_consume_queue=configured).consume_queue_file_size == used


def test_the_default_index_file_has_420_000_040_bytes() -> None:
    assert StoreConfig().index_file_size == 420_000_040


def test_the_commit_log_lies_under_the_root_unless_told_otherwise() -> None:
    assert StoreConfig(store_path_root_dir="/data").commit_log_path == "/data/commitlog"
    assert StoreConfig(store_path_commit_log="/fast/log").commit_log_path == "/fast/log"


def test_the_delay_levels_are_rocketmqs_eighteen() -> None:
    levels = StoreConfig().delay_levels_ms

    assert len(levels) == 18
    assert (levels[0], levels[4], levels[17]) == (1000, 60_000, 7_200_000)
    assert StoreConfig(message_delay_level="1s 2m 3h 4d").delay_levels_ms == (1000, 120_000, 10_800_000, 345_600_000)


# --- what is refused


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (
            {"mapped_file_size_commit_log": 12},
            "mappedFileSizeCommitLog = 12: allowed is an integer from 256 to 2147483647",
        ),
        ({"max_index_num": 1}, "maxIndexNum = 1: allowed is an integer from 2 to 2147483647"),
        ({"max_hash_slot_num": "9"}, "maxHashSlotNum = '9': allowed is an integer from 1 to 2147483647"),
        ({"sync_flush_timeout": True}, "syncFlushTimeout = True: allowed is an integer from 0 to 2147483647"),
        ({"sync_flush_timeout": 5.0}, "syncFlushTimeout = 5.0: allowed is an integer from 0 to 2147483647"),
        ({"message_index_enable": 1}, "messageIndexEnable = 1: allowed is true or false"),
        ({"flush_disk_type": "SYNC_FLUSH"}, "flushDiskType = 'SYNC_FLUSH': allowed is one of SYNC_FLUSH, ASYNC_FLUSH"),
        ({"broker_role": FlushDiskType.SYNC_FLUSH}, "brokerRole = SYNC_FLUSH: allowed is one of ASYNC_MASTER, "),
        ({"dialect": "4.9"}, "brokerlab.dialect = '4.9': allowed is one of 4.9, 5.3"),
        ({"quirks": {Quirk.NORMAL_RECOVERY_SKIPS_ONE}}, "brokerlab.quirks = {"),
        ({"delete_when": (24,)}, "deleteWhen = (24,): allowed is hours from 00 to 23"),
        ({"delete_when": (True,)}, "deleteWhen = (True,): allowed is hours from 00 to 23"),
        ({"delete_when": "04"}, "deleteWhen = '04': allowed is hours from 00 to 23"),
        ({"disk_max_used_space_ratio": 96}, "diskMaxUsedSpaceRatio = 96: allowed is an integer from 10 to 95"),
        ({"message_delay_level": "1s  5s"}, "messageDelayLevel = '1s  5s': allowed is delays like 1s 5m 2h 1d"),
        ({"message_delay_level": ""}, "messageDelayLevel = '': allowed is delays like 1s 5m 2h 1d"),
        ({"store_path_root_dir": ""}, "storePathRootDir = '': allowed is a path"),
        ({"store_path_root_dir": None}, "storePathRootDir = None: allowed is a path"),
        ({"store_path_commit_log": "a\0b"}, "storePathCommitLog = 'a\\x00b': allowed is a path"),
        ({"utc_offset_minutes": 1081}, "brokerlab.utcOffsetMinutes = 1081: allowed is an integer from -1080 to 1080"),
    ],
)
def test_a_refusal_names_the_key_the_value_and_what_is_allowed(values: dict[str, Any], problem: str) -> None:
    (found,) = problems_of(**values)

    assert found.startswith(problem)


def test_all_problems_are_told_at_once() -> None:
    found = problems_of(max_index_num=0, file_reserved_time=-1, salvage="yes")

    assert [problem.split(" = ")[0] for problem in found] == ["maxIndexNum", "fileReservedTime", "brokerlab.salvage"]


def test_an_index_file_of_more_bytes_than_a_java_int_is_refused() -> None:
    largest = (2**31 - 1 - 40 - 4) // 20

    assert StoreConfig(max_hash_slot_num=1, max_index_num=largest).index_file_size < 2**31
    (problem,) = problems_of(max_hash_slot_num=1, max_index_num=largest + 1)
    assert "allowed are at most 2147483647" in problem


def test_a_message_may_be_allowed_to_be_larger_than_a_file() -> None:
    assert StoreConfig(mapped_file_size_commit_log=256, max_message_size=4096).max_message_size == 4096


# --- presets


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_brings_its_dialect_and_its_quirks(name: str) -> None:
    config = StoreConfig.for_preset(name)

    assert (config.dialect, config.quirks) == (PRESETS[name].dialect, PRESETS[name].quirks)


def test_strict_is_what_a_plain_config_is() -> None:
    assert StoreConfig.for_preset("strict") == StoreConfig()


def test_4_9_wakes_its_flusher_at_every_put_and_knows_no_second_record_version() -> None:
    config = StoreConfig.for_preset("rocketmq-4.9")

    assert config.wake_flush_when_put_message
    assert not config.auto_message_version_on_topic_len
    assert config.delete_file_batch_max == 10


def test_an_override_goes_before_the_preset() -> None:
    config = StoreConfig.for_preset("rocketmq-4.9", quirks=frozenset(), wake_flush_when_put_message=False)

    assert (config.dialect, config.quirks) == (Dialect.V4_9, frozenset())
    assert not config.wake_flush_when_put_message


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"brokerlab\.preset = 'kafka': allowed is one of strict, rocketmq-4\.9"):
        StoreConfig.for_preset("kafka")


# --- the syntax of a properties file


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=1\nb:2\nc 3\nd\t=\t4", [("a", "1"), ("b", "2"), ("c", "3"), ("d", "4")]),
        ("# a=1\n  ! b=2\n\n   \nc=#3", [("c", "#3")]),
        ("  \t\fa  =  1  ", [("a", "1  ")]),
        ("a", [("a", "")]),
        ("a=\nb:", [("a", ""), ("b", "")]),
        ("a==1\nb= :2\nc := 3", [("a", "=1"), ("b", ":2"), ("c", "= 3")]),
        ("a = 1\\\n   2\\\n   # 3", [("a", "12# 3")]),
        ("a=1\\\\\nb=2", [("a", "1\\"), ("b", "2")]),
        ("a=1\\\\\\\n2", [("a", "1\\2")]),
        ("# a comment does not go on\\\na=1", [("a", "1")]),
        ("a=1\\", [("a", "1")]),
        ("a=1\\\n\nb=2", [("a", "1"), ("b", "2")]),
        ("a\\ b\\:c\\=d=1", [("a b:c=d", "1")]),
        ("a=\\t\\n\\r\\f\\u0041\\\\\\q", [("a", "\t\n\r\fA\\q")]),
        ("a=\\ud83d\\ude00", [("a", "\N{GRINNING FACE}")]),
        ("\ufeffa=1\r\nb=2\rc=3", [("a", "1"), ("b", "2"), ("c", "3")]),
        ("=1", [("", "1")]),
        ("", []),
    ],
)
def test_properties_are_read_as_java_reads_them(text: str, expected: list[tuple[str, str]]) -> None:
    assert properties(text) == expected


def test_a_setting_has_the_number_of_the_line_it_starts_on() -> None:
    assert [line for line, _, _ in read_properties("# one\r\na=1\\\r\n 2\r\n\r\nb=2")] == [2, 5]


def test_every_broken_unicode_escape_is_told_with_its_line() -> None:
    assert problems_in("a=\\u12\nb=1\nc=\\uzzzz") == [
        "line 1: after \\u allowed are exactly four hexadecimal digits",
        "line 3: after \\u allowed are exactly four hexadecimal digits",
    ]


@given(st.text())
def test_an_escaped_value_reads_as_itself(value: str) -> None:
    # Blanks at the start belong to the separator.
    value = value.lstrip(" ")

    assert properties(f"key = {escape_value(value)}") == [("key", value)]


# --- broker.conf

PLAUSIBLE_LINES = st.builds(
    "{}{}{}".format,
    st.sampled_from(
        [*STORE_KEYS, "brokerlab.preset", "brokerlab.quirks", "brokerlab.dialect", "brokerName", "nonsense"]
    ),
    st.sampled_from(["=", " : ", " ", "\\\n"]),
    st.sampled_from(["1", "-1", "1" * 5000, "true", "04;", ";", "", "4.9", "-x", "null", "\\u", "rocketmq-5.3", "5s"])
    | st.text(),
)


@given(st.text() | st.lists(PLAUSIBLE_LINES).map("\n".join))
def test_any_text_is_either_a_config_or_a_config_error(text: str) -> None:
    try:
        config, notes = load_broker_conf(text)
    except ConfigError as error:
        assert error.problems
    else:
        assert isinstance(config, StoreConfig)
        assert all(note.startswith("line ") for note in notes)


def test_a_usual_broker_conf_is_read() -> None:
    config, notes = load_broker_conf(
        "brokerClusterName = DefaultCluster\n"
        "brokerId = 0\n"
        "deleteWhen = 04;16\n"
        "fileReservedTime = 48\n"
        "brokerRole = SYNC_MASTER\n"
        "flushDiskType = SYNC_FLUSH\n"
        "messageIndexEnable = FALSE\n"
        "storePathRootDir = ${user.home}/data \n"
    )

    assert config == StoreConfig(
        delete_when=(4, 16),
        file_reserved_time=48,
        broker_role=BrokerRole.SYNC_MASTER,
        flush_disk_type=FlushDiskType.SYNC_FLUSH,
        message_index_enable=False,
        store_path_root_dir="${user.home}/data",
    )
    assert notes == (
        "line 1: brokerClusterName is a key of the broker around the store and has no effect here",
        "line 2: brokerId is a key of the broker around the store and has no effect here",
    )


@pytest.mark.parametrize(
    ("text", "hours"), [("04", (4,)), ("4;23", (4, 23)), ("00;", (0,)), (";", ()), ("04;04", (4, 4))]
)
def test_delete_when_is_a_list_of_hours(text: str, hours: tuple[int, ...]) -> None:
    config, _ = load_broker_conf(f"deleteWhen={text}")

    assert config.delete_when == hours


@pytest.mark.parametrize("name", ["mapedFileSizeCommitLog", "mappedFileSizeCommitLog"])
def test_both_historic_spellings_of_mapped_are_read(name: str) -> None:
    config, _ = load_broker_conf(f"{name}=4096\ndestroyMappedFileIntervalForcibly=7\nwarmMappedFileEnable=true")

    assert config == StoreConfig(
        mapped_file_size_commit_log=4096, destroy_maped_file_interval_forcibly=7, warm_maped_file_enable=True
    )


def test_the_old_name_of_the_largest_replication_gap_is_known() -> None:
    assert find_store_key("haSlaveFallbehindMax") is STORE_KEYS["haMaxGapNotInSync"]


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("flushDiskTyp=SYNC_FLUSH", "line 1: unknown key 'flushDiskTyp', the nearest is flushDiskType"),
        ("qqqq=1", "line 1: unknown key 'qqqq'"),
        ("brokerlab.salvege=true", "line 1: unknown key 'brokerlab.salvege', the nearest is brokerlab.salvage"),
        ("\nhaListenPort=10912", "line 2: haListenPort has no effect here"),
        ("mapedFileSizeCommitLog=4096", "line 1: mapedFileSizeCommitLog is read as mappedFileSizeCommitLog"),
        ("diskMaxUsedSpaceRatio=99", "line 1: diskMaxUsedSpaceRatio = 99: 95 is used, as RocketMQ does"),
        ("diskSpaceWarningLevelRatio=95", "line 1: diskSpaceWarningLevelRatio = 95: 90 is used, as RocketMQ does"),
        ("diskSpaceCleanForciblyRatio=1", "line 1: diskSpaceCleanForciblyRatio = 1: 30 is used, as RocketMQ does"),
        ("syncFlushTimeout=1\nsyncFlushTimeout=2", "line 2: syncFlushTimeout replaces line 1"),
        ("mapedFileSizeCommitLog=1\nmappedFileSizeCommitLog=512", "line 2: mappedFileSizeCommitLog replaces line 1"),
        (
            "brokerlab.dialect=4.9\nputMessageTimeout=1",
            "line 2: putMessageTimeout is no key of RocketMQ 4.9, it is applied all the same",
        ),
    ],
)
def test_what_is_not_applied_as_written_is_noted(text: str, note: str) -> None:
    _, notes = load_broker_conf(text)

    assert notes == (note,)


def test_a_clamped_ratio_is_used_and_the_last_of_two_settings_wins() -> None:
    config, _ = load_broker_conf("diskMaxUsedSpaceRatio=99\nsyncFlushTimeout=1\nsyncFlushTimeout=2")

    assert (config.disk_max_used_space_ratio, config.sync_flush_timeout) == (95, 2)


def test_all_wrong_lines_are_told_at_once_with_their_numbers() -> None:
    found = problems_in(
        "flushIntervalCommitLog=1s\n"
        "mapedFileSizeCommitLog=12\n"
        "messageIndexEnable=ture\n"
        "brokerRole=sync_master\n"
        "haListenPort=2147483648\n"
        "brokerlab.preset=kafka\n"
        "deleteWhen=24\n"
        "logicalDiskSpaceCleanForciblyThreshold=much\n"
        "storePathCommitLog=\n"
        "maxIndexNum=200000000"
    )

    assert found == [
        "line 6: brokerlab.preset = 'kafka': allowed is one of strict, rocketmq-4.9, rocketmq-5.3",
        "line 1: flushIntervalCommitLog = '1s': allowed is an integer from 0 to 2147483647",
        "line 2: mapedFileSizeCommitLog = 12: allowed is an integer from 256 to 2147483647",
        "line 3: messageIndexEnable = 'ture': allowed is true or false",
        "line 4: brokerRole = 'sync_master': allowed is one of ASYNC_MASTER, SYNC_MASTER, SLAVE",
        "line 5: haListenPort = '2147483648': allowed is an integer from -2147483648 to 2147483647",
        "line 7: deleteWhen = (24,): allowed is hours from 00 to 23 with ; between them, or ; alone for never",
        "line 8: logicalDiskSpaceCleanForciblyThreshold = 'much': allowed is a decimal number",
        "line 9: storePathCommitLog = '': allowed is a path without blanks around it",
        "maxHashSlotNum = 5000000, maxIndexNum = 200000000: an index file has 4020000040 bytes, "
        "allowed are at most 2147483647",
    ]


@pytest.mark.parametrize(("text", "value"), [("7", 7), ("+7", 7), ("0" * 5000 + "7", 7), ("2147483647", 2**31 - 1)])
def test_a_number_is_read_as_java_reads_it(text: str, value: int) -> None:
    config, _ = load_broker_conf(f"syncFlushTimeout={text}")

    assert config.sync_flush_timeout == value


@pytest.mark.parametrize("text", ["", "-1", "2147483648", "9" * 5000, "1_000", "0x10", "1.0", "1 000", "٣"])
def test_what_java_does_not_read_as_a_number_is_refused(text: str) -> None:
    (problem,) = problems_in(f"syncFlushTimeout={text}")

    assert problem.endswith(": allowed is an integer from 0 to 2147483647")


def test_the_preset_in_the_text_goes_before_that_of_the_caller() -> None:
    in_text, _ = load_broker_conf("brokerlab.preset=rocketmq-5.3", preset="rocketmq-4.9")
    of_caller, _ = load_broker_conf("", preset="rocketmq-4.9")

    assert in_text == StoreConfig.for_preset("rocketmq-5.3")
    assert of_caller == StoreConfig.for_preset("rocketmq-4.9")


def test_quirks_are_added_to_the_preset_or_taken_from_it() -> None:
    added, _ = load_broker_conf("brokerlab.quirks = normal_recovery_skips_one")
    taken, _ = load_broker_conf("brokerlab.quirks = -queue_zero_entry_is_valid", preset="rocketmq-5.3")

    assert added.quirks == {Quirk.NORMAL_RECOVERY_SKIPS_ONE}
    assert taken.quirks == frozenset(Quirk) - {Quirk.QUEUE_ZERO_ENTRY_IS_VALID}


def test_a_dialect_in_the_text_brings_the_defaults_of_that_version() -> None:
    config, _ = load_broker_conf("brokerlab.dialect = 4.9")

    assert config == StoreConfig.for_preset("strict", dialect=Dialect.V4_9)
    assert config.wake_flush_when_put_message


def test_our_own_settings_have_their_own_prefix() -> None:
    config, notes = load_broker_conf(
        "brokerlab.utcOffsetMinutes=-90\nbrokerlab.processId=7\nbrokerlab.physicalMemoryBytes=1024\n"
        "brokerlab.dispatchFromLog=true\nbrokerlab.salvage=true"
    )

    assert config == StoreConfig(
        utc_offset_minutes=-90, process_id=7, physical_memory_bytes=1024, dispatch_from_log=True, salvage=True
    )
    assert notes == ()


PATHS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1).filter(
    lambda path: path[0] > " " and path[-1] > " "
)
CONFIGS = st.builds(
    StoreConfig,
    store_path_root_dir=PATHS,
    store_path_commit_log=st.none() | PATHS,
    mapped_file_size_commit_log=st.integers(256, 2**31 - 1),
    os_page_cache_busy_time_out_mills=st.integers(0, 2**63 - 1),
    disk_max_used_space_ratio=st.integers(10, 95),
    delete_when=st.lists(st.integers(0, 23)).map(tuple),
    message_delay_level=st.lists(st.from_regex(r"[0-9]{1,6}[smhd]", fullmatch=True), min_size=1).map(" ".join),
    auto_message_version_on_topic_len=st.booleans(),
    wake_flush_when_put_message=st.booleans(),
    put_message_timeout=st.integers(0, 2**31 - 1),
    broker_role=st.sampled_from(BrokerRole),
    flush_disk_type=st.sampled_from(FlushDiskType),
    dialect=st.sampled_from(Dialect),
    quirks=st.frozensets(st.sampled_from(Quirk)),
    utc_offset_minutes=st.integers(-1080, 1080),
    salvage=st.booleans(),
)


@given(CONFIGS, st.sampled_from(sorted(PRESETS)))
def test_a_config_written_as_broker_conf_reads_as_itself(config: StoreConfig, preset: str) -> None:
    read, _ = load_broker_conf(to_broker_conf(config), preset=preset)

    assert read == config


@pytest.mark.parametrize("name", PRESETS)
def test_a_written_preset_holds_only_keys_that_its_version_knows(name: str) -> None:
    config = StoreConfig.for_preset(name)

    assert load_broker_conf(to_broker_conf(config)) == (config, ())
