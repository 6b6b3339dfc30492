"""The `brokerlab` command as a person or a script meets it: what it prints, and with which code it leaves."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from brokerlab.lab import cli
from brokerlab.lab.cli import main
from brokerlab.lab.hex import field_lines
from brokerlab.lab.terminal import printable, show_size, show_time
from brokerlab.storage.record import decode_record

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.lab.lab_stores import COUNT, FIRST, GOLDEN, NOON, SECOND, copy_store, digest, flip, make_store

Output = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("cli") / "store")


@pytest.fixture
def store(sound: Path, tmp_path: Path) -> Path:
    return copy_store(sound, tmp_path / "store")


def run(*words: object) -> int:
    return main([str(word) for word in words])


def objects(output: Output) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.readouterr().out.splitlines()]


# Exit codes and errors -----------------------------------------------------------------------------------------------


def test_a_sound_store_leaves_with_0(sound: Path, capsys: Output) -> None:
    assert run("verify", sound) == 0
    assert "no damage found" in capsys.readouterr().out
    assert run("inspect", sound) == 0


def test_a_damaged_store_leaves_with_1_and_names_file_and_offset(store: Path, capsys: Output) -> None:
    flip(store / "commitlog" / SECOND, 90)

    assert run("verify", store) == 1

    printed = capsys.readouterr().out
    assert f"commitlog/{SECOND}" in printed and "CRC" in printed


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere", "no such file or directory"),
        ("empty", "empty directory, not a store"),
        ("random", "holds no commitlog, consumequeue, index or checkpoint: not a store"),
        ("random/a", "cannot tell what kind of file this is"),
        ("loop", "neither a directory nor a regular file"),
        ("pipe", "neither a directory nor a regular file"),
    ],
)
def test_a_path_that_is_no_store_is_one_clear_line(
    tmp_path: Path, capsys: Output, command: str, name: str, words: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "random").mkdir()
    for file in "abc":
        (tmp_path / "random" / file).write_bytes(bytes((7 * i + ord(file)) % 251 for i in range(5000)))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")

    assert run(command, tmp_path / name) == 2

    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"brokerlab: {tmp_path / name}: {words}") and printed.err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["verify"],
        ["polish", "."],
        ["verify", ".", "--queue", "orders"],
        ["verify", ".", "--queue", "orders/0/x"],
        ["verify", ".", "--topic", "orders"],
        ["verify", ".", "--key", "a", "--id", "b"],
        ["verify", ".", "--key", ""],
        ["inspect", ".", "--limit", "none"],
        ["inspect", ".", "--as", "nothing"],
        ["inspect", ""],
    ],
)
def test_wrong_use_is_code_2_and_one_line(words: list[str], capsys: Output) -> None:
    assert run(*words) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_inspect_tells_options_that_exclude_each_other_and_parts_that_are_not_there(
    sound: Path, capsys: Output
) -> None:
    assert run("inspect", sound, "--records", "--slots") == 2
    assert run("inspect", sound, "--key", "k1") == 2
    assert "--topic" in capsys.readouterr().err
    assert run("inspect", sound, "--queue", "nobody/0") == 2
    assert run("inspect", sound / "checkpoint", "--records") == 2


def test_help_shows_examples_and_exit_codes(capsys: Output) -> None:
    for words in (["--help"], ["inspect", "--help"], ["verify", "--help"]):
        assert run(*words) == 0
        printed = capsys.readouterr().out
        assert "examples:" in printed and "exit codes:" in printed and "130  interrupted" in printed


def test_version_and_no_command(capsys: Output) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("brokerlab ")
    assert run() == 2


def test_a_fault_of_our_own_is_told_apart_and_in_one_line(
    sound: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_arguments: object) -> int:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(cli, "run_verify", broken)
    monkeypatch.delenv("BROKERLAB_DEBUG", raising=False)

    assert run("verify", sound) == 70
    assert capsys.readouterr().err.count("\n") == 1


def start(*words: object, **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "brokerlab.lab.cli", *map(str, words)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, **options)


def test_a_reader_that_leaves_early_is_no_error(sound: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = start("inspect", sound, "--records", "--json", stdout=writing)
    os.close(writing)

    _, complaint = process.communicate(timeout=60)

    assert (process.returncode, complaint) == (0, b"")


def test_an_interrupt_leaves_with_130_and_without_a_word(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_arguments: object) -> int:
        signal.raise_signal(signal.SIGINT)
        return 0

    monkeypatch.setattr(cli, "run_inspect", interrupted)

    assert run("inspect", sound) == 130


# What is shown -------------------------------------------------------------------------------------------------------


def test_the_golden_segment_is_shown_with_its_records(capsys: Output) -> None:
    assert run("inspect", GOLDEN / "commitlog" / FIRST) == 0

    printed = capsys.readouterr().out
    assert "2019-03-03T11:40:04.834Z" in printed and "full" in printed
    assert "1551613204833" in printed and "TAG1" in printed


def test_the_golden_checkpoint_is_shown_as_times(capsys: Output) -> None:
    assert run("inspect", GOLDEN / "checkpoint") == 0
    assert capsys.readouterr().out.count("2019-03-03T15:17:18.066Z") == 2


def test_golden_records_as_json_have_every_field(capsys: Output) -> None:
    assert run("inspect", GOLDEN / "commitlog", "--records", "--json", "--body", "text") == 0

    records = objects(capsys)
    assert [record["queue_offset"] for record in records] == list(range(47))
    assert records[1] == {
        "what": "record",
        "total_size": 172,
        "version": 1,
        "body_crc": 0x09021560,
        "queue_id": 0,
        "flag": 0,
        "queue_offset": 1,
        "physical_offset": 172,
        "sys_flag": 0,
        "born_timestamp": 1551613204838,
        "born_host": "127.0.0.1:0",
        "store_timestamp": 1551613204838,
        "store_host": "10.1.30.38:8123",
        "reconsume_times": 0,
        "prepared_transaction_offset": 0,
        "topic": "abc",
        "body_length": 32,
        "properties": {"0": "imagoodperson0", "KEYS": "1551613204838", "TAGS": "TAG1"},
        "message_id": "0A011E2600001FBB00000000000000AC",
        "body": "Once, there was a chance for me!",
    }


def test_a_store_summary_as_json_has_every_part(sound: Path, capsys: Output) -> None:
    assert run("inspect", sound, "--json") == 0

    parts = objects(capsys)
    segments = [part for part in parts if part["what"] == "segment"]
    queues = [part for part in parts if part["what"] == "queue"]
    (checkpoint,) = [part for part in parts if part["what"] == "checkpoint"]
    assert sum(segment["records"] for segment in segments) == COUNT
    assert [(queue["topic"], queue["queue_id"], queue["max_index"]) for queue in queues] == [
        ("orders", 0, 25), ("orders", 1, 25), ("refunds", 0, 25), ("refunds", 1, 25),
    ]  # fmt: skip
    assert checkpoint["physic_msg_timestamp"] == checkpoint["newest_store_timestamp"] == NOON + COUNT - 1
    assert sum(part["index_count"] - 1 for part in parts if part["what"] == "index") == COUNT
    assert {part["name"] for part in parts if part["what"] == "file"} >= {"lock"}


def test_records_are_chosen_by_offset_topic_and_limit(sound: Path, capsys: Output) -> None:
    assert run("inspect", sound, "--records", "--json", "--topic", "refunds", "--from", 8192, "--limit", 3) == 0

    records = objects(capsys)
    assert len(records) == 3
    assert {record["topic"] for record in records} == {"refunds"}
    assert all(record["physical_offset"] >= 8192 for record in records)
    assert "body" not in records[0]


def test_bodies_come_as_text_or_base64(sound: Path, capsys: Output) -> None:
    run("inspect", sound, "--json", "--body", "base64", "--limit", 1)
    (record,) = objects(capsys)

    assert base64.b64decode(record["body_base64"]) == b"body 000"


def test_an_offset_inside_a_record_goes_on_at_the_next_and_says_so(sound: Path, capsys: Output) -> None:
    assert run("inspect", sound, "--records", "--json", "--from", 5, "--limit", 1) == 1

    damage, record = objects(capsys)[:2]
    assert damage["what"] == "damage" and record["queue_offset"] == 0 and record["queue_id"] == 1


def test_hex_names_every_field_and_shows_every_byte_of_the_short_ones(capsys: Output) -> None:
    assert run("inspect", GOLDEN / "commitlog" / FIRST, "--hex", "--from", 172) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:20]] == [
        "total_size", "magic", "body_crc", "queue_id", "flag", "queue_offset", "physical_offset", "sys_flag",
        "born_timestamp", "born_host", "store_timestamp", "store_host", "reconsume_times",
        "prepared_transaction_offset", "body_length", "body", "topic_length", "topic", "properties_length",
        "properties",
    ]  # fmt: skip
    assert lines[0].split() == ["0", "total_size", "000000ac", "172"]
    assert lines[11].split() == ["64", "store_host", "0a011e26", "00001fbb", "10.1.30.38:8123"]


def test_hex_lines_cover_a_record_of_version_2_with_ipv6_hosts() -> None:
    from brokerlab.storage.message import SysFlag
    from brokerlab.storage.record import MAGIC_V2, record_struct

    topic = b"%RETRY%" + b"g" * 150
    size = 92 + 24 + len(topic)
    flags = SysFlag.BORN_HOST_V6 | SysFlag.STORE_HOST_V6
    raw = record_struct(0, len(topic), 0, 20, 20).pack(
        size, MAGIC_V2, 0, 1, 2, 3, 0, flags, 5, bytes(20), NOON, bytes(20), 0, 0, 0, b"", len(topic), topic, 0, b""
    )

    lines = field_lines(raw, decode_record(raw))

    assert lines[-1].split()[0] == str(size)
    assert "born host IPv6, store host IPv6" in lines[7] and "[::]:0" in lines[9]


def test_queue_entries_are_shown(sound: Path, capsys: Output) -> None:
    assert run("inspect", sound, "--queue", "orders/1", "--json") == 0

    entries = objects(capsys)
    assert [entry["index"] for entry in entries] == list(range(25))
    assert {entry["tags_code"] for entry in entries} == {2598919}


def test_the_index_chain_of_a_key_is_shown(sound: Path, capsys: Output) -> None:
    assert run("inspect", sound, "--key", "k42", "--topic", "refunds", "--json") == 0
    (entry,) = objects(capsys)
    assert run("inspect", sound, "--json", "--from", entry["physical_offset"], "--limit", 1) == 0
    assert objects(capsys)[0]["properties"]["KEYS"] == "k42"

    assert run("inspect", sound, "--key", "unknown", "--topic", "refunds") == 1
    assert run("inspect", sound, "--slots") == 0


@pytest.mark.parametrize("part", ["commitlog", "index", "consumequeue", "consumequeue/orders", "consumequeue/orders/0"])
@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_single_directory_of_a_store_works_too(sound: Path, part: str, command: str, capsys: Output) -> None:
    assert run(command, sound / part) == 0
    assert capsys.readouterr().out


def test_a_file_of_any_name_is_taken_for_what_it_is_said_to_be(sound: Path, tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "copy").write_bytes((sound / "commitlog" / FIRST).read_bytes())

    assert run("verify", tmp_path / "copy") == 2
    assert run("verify", tmp_path / "copy", "--as", "commitlog") == 0
    assert "offsets 0 to 8,192" in capsys.readouterr().out


def test_a_store_behind_a_link_works_too(sound: Path, tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "link").symlink_to(sound)
    linked = tmp_path / "linked"
    linked.mkdir()
    for part in sound.iterdir():
        (linked / part.name).symlink_to(part)

    assert run("verify", tmp_path / "link") == 0
    assert run("verify", linked) == 0
    assert f"{COUNT} records" in capsys.readouterr().out


# One message ---------------------------------------------------------------------------------------------------------


def test_a_message_is_found_by_key_by_id_and_by_place(sound: Path, capsys: Output) -> None:
    assert run("verify", sound, "--key", "k42", "--topic", "refunds", "--json") == 0
    message, summary = objects(capsys)
    assert (message["topic"], message["queue_id"], message["queue_offset"]) == ("refunds", 0, 10)
    assert [place["part"] for place in message["places"]] == ["log", "queue", "index"]
    assert summary == {"what": "summary", "wanted": "refunds#k42", "ok": True, "problem": ""}

    assert run("verify", sound, "--id", message["message_id"]) == 0
    assert "refunds/0/10" in capsys.readouterr().out
    assert run("verify", sound, "--queue", "refunds/0/10") == 0
    assert "1 message: log, queue and index agree" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [["--key", "k1000"], ["--key", "k42", "--topic", "orders"], ["--queue", "orders/0/25"], ["--id", "00" * 16]],
)
def test_a_message_that_is_not_there_is_code_1(sound: Path, words: list[str]) -> None:
    expected = 0 if words[0] == "--id" else 1  # an id of zeros is that of the first record: host 0, offset 0
    assert run("verify", sound, *words) == expected


def test_findings_as_json_are_an_object_a_line(store: Path, capsys: Output) -> None:
    flip(store / "commitlog" / SECOND, 90)

    assert run("verify", store, "--json") == 1

    *findings, summary = objects(capsys)
    worst = findings[0]
    assert (worst["severity"], worst["kind"], worst["offset"]) == ("error", "damaged-record", 0)
    assert worst["file"] == str(store / "commitlog" / SECOND)
    assert summary["ok"] is False and summary["errors"] >= 1


# Reading only --------------------------------------------------------------------------------------------------------

_WATCH = """
import os, sys
opened = []
changes = "os.remove os.rename os.truncate os.mkdir os.utime os.chmod os.link fcntl.lockf".split()
writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
def watch(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith(sys.argv[1]):
        opened.append((arguments[0], arguments[2] & writing))
    elif event in changes:
        opened.append((event, 1))
from brokerlab.lab.cli import main
sys.addaudithook(watch)
codes = [main([command, sys.argv[1], *rest]) for command, rest in (
    ("inspect", []), ("verify", []), ("inspect", ["--records"]), ("verify", ["--key", "k42"]),
    ("inspect", ["--slots"]))]
print("WATCHED", codes, len(opened), [one for one in opened if one[1]])
"""


def test_no_file_of_the_store_is_ever_opened_for_writing(store: Path) -> None:
    for path in store.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = digest(store)

    done = subprocess.run(
        [sys.executable, "-c", _WATCH, str(store)], capture_output=True, text=True, timeout=120, check=True
    )

    for path in store.rglob("*"):
        assert not path.stat().st_mode & 0o222
    said = done.stdout.splitlines()[-1].split(maxsplit=7)
    assert done.stdout.splitlines()[-1].startswith("WATCHED [0, 0, 0, 0, 0] ")
    assert int(said[6]) > 30, "the hook saw the files being opened"
    assert said[7] == "[]"
    assert digest(store) == before
    assert not done.stderr


def test_the_lock_of_a_running_store_is_neither_taken_nor_dropped(tmp_path: Path) -> None:
    from brokerlab.storage.errors import StoreLockedError
    from brokerlab.storage.message_store import MessageStore
    from brokerlab.storage.real_disk import RealDisk
    from tests.lab.lab_stores import CONFIG

    make_store(tmp_path / "store")
    running = MessageStore(RealDisk(), str(tmp_path / "store"), CONFIG)
    running.open(NOON)

    assert run("verify", tmp_path / "store") == 0
    assert run("inspect", tmp_path / "store") == 0

    with pytest.raises(StoreLockedError):
        MessageStore(RealDisk(), str(tmp_path / "store"), CONFIG).open(NOON)
    another = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)"
    lock = str(tmp_path / "store" / "lock")
    tried = subprocess.run([sys.executable, "-c", another, lock], capture_output=True, timeout=60, check=False)
    assert tried.returncode != 0, "another process must not get the lock"
    running.close(NOON)


def test_a_sparse_store_of_four_gibibytes_answers_at_once(tmp_path: Path, capsys: Output) -> None:
    sizes = {f"commitlog/{number << 30:020}": 1 << 30 for number in range(4)}
    sizes |= {f"consumequeue/t/{number}/{0:020}": 6_000_000 for number in range(20)}
    sizes |= {"index/20240101000000000": 420_000_040, "checkpoint": 4096}
    for name, size in sizes.items():
        path = tmp_path / "store" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.truncate(path, size)

    began = time.monotonic()
    codes = [run(command, tmp_path / "store") for command in ("inspect", "verify")]

    assert codes == [0, 0]
    assert time.monotonic() - began < 10
    assert "0 records in 4 segments" in capsys.readouterr().out


# Small parts ---------------------------------------------------------------------------------------------------------


def test_times_are_utc_with_milliseconds_and_nonsense_stays_a_number() -> None:
    assert show_time(NOON + 7) == "2023-11-14T22:13:20.007Z"
    assert [show_time(value) for value in (0, -5, 1 << 62)] == ["-", "-5", str(1 << 62)]


def test_sizes_are_short() -> None:
    assert [show_size(size) for size in (0, 4096, 8193, 6_000_000, 1 << 30)] == [
        "0 B",
        "4 KiB",
        "8,193 B",
        "5859 KiB",
        "1 GiB",
    ]


def test_names_from_a_damaged_file_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[31mb\n\udcff") == "a\\x1b[31mb\\x0a\\xdcff"
    assert printable("x" * 300, 10) == "x" * 10 + "…"
