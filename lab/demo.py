"""`make demo`: what the store can do today, on real files, in a few seconds.

1. A writer process appends and flushes; it is killed with SIGKILL in the middle. What it had acknowledged is there.
2. One weakness of the original, seen happening: two crashes under `rocketmq-4.9`, and messages that were gone come
   back. Under `strict` they stay gone.
3. A message is damaged on disk; `brokerlab verify` names the file, the offset and the reason.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from brokerlab.lab.cli import main as brokerlab
from brokerlab.storage import Message, MessageStore, RealDisk, StoreConfig, encode_properties

_WRITER = """
import sys
from brokerlab.lab.demo import write_until_killed
write_until_killed(sys.argv[1])
"""
_ACKNOWLEDGED_BEFORE_THE_KILL = 2000
_SMALL = {
    "mapped_file_size_commit_log": 1 << 20,
    "mapped_file_size_consume_queue": 20_000,
    "max_hash_slot_num": 1_000,
    "max_index_num": 20_000,
}


def _message(number: int, *, topic: str = "orders", body: bytes | None = None) -> Message:
    properties = encode_properties({"KEYS": f"order-{number:06d}", "TAGS": "paid"})
    return Message(topic=topic, queue_id=number % 4, body=body or b"%0200d" % number, properties=properties)


def write_until_killed(root: str) -> None:
    """The child: put, flush, dispatch, and say the number of every message whose flush has returned."""
    store = MessageStore(RealDisk(), root, StoreConfig.for_preset("strict", **_SMALL))
    store.open(_now_ms())
    number = 0
    while True:
        store.put_many([_message(n) for n in range(number, number + 50)], _now_ms())
        store.flush_log()
        store.dispatch()
        number += 50
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()


def kill_a_writer(console: Console, root: Path) -> bool:
    """Act 1. True if everything acknowledged survived."""
    console.rule("1  kill -9 in the middle of writing")
    writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(root)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    acknowledged = 0
    for line in writer.stdout:
        acknowledged = int(line)
        if acknowledged >= _ACKNOWLEDGED_BEFORE_THE_KILL:
            os.kill(writer.pid, signal.SIGKILL)
            break
    for line in writer.stdout:  # what it still said before it died
        acknowledged = int(line) if line.endswith("\n") else acknowledged
    writer.wait()

    store = MessageStore(RealDisk(), str(root), StoreConfig.for_preset("strict", **_SMALL))
    report = store.open(_now_ms())
    there = {int(record.body) for record in store.commit_log.records()}
    missing = set(range(acknowledged)) - there
    found = store.reader.query_message("orders", f"order-{acknowledged - 1:06d}", 1, 0, _now_ms())
    console.print(f"acknowledged {acknowledged}, after restart {len(there)} in the log, missing {len(missing)}")
    console.print(f"the last acknowledged one is found by its key: {bool(found)}")
    for line in report.lines():
        console.print(f"  [dim]{line}[/dim]")
    store.close(_now_ms())
    return not missing and bool(found)


def ghosts_after_two_crashes(root: Path, preset: str) -> list[int]:
    """Act 2. Numbers of messages that were cut off by a first recovery and are back after a second crash."""
    config = StoreConfig.for_preset(preset, **_SMALL)

    def store() -> MessageStore:
        opened = MessageStore(RealDisk(), str(root), config)
        opened.open(_now_ms())
        return opened

    first = store()
    places = [first.put(_message(number), _now_ms()) for number in range(10)]
    first.dispatch()
    first.abandon(0)
    _overwrite(root / "commitlog" / f"{0:020d}", places[5].physical_offset, bytes(64))  # a page that never got there

    second = store()  # cuts the log at message 5
    kept = {int(record.body) for record in second.commit_log.records()}
    second.put(_message(100), _now_ms())
    second.dispatch()
    second.abandon(0)

    third = store()
    back = {int(record.body) for record in third.commit_log.records()} - kept - {100}
    third.close(_now_ms())
    return sorted(back)


def damage_and_verify(console: Console, root: Path) -> bool:
    """Act 3. True if `verify` found it."""
    console.rule("3  one flipped bit in a body, and `brokerlab verify`")
    store = MessageStore(RealDisk(), str(root), StoreConfig.for_preset("strict", **_SMALL))
    store.open(_now_ms())
    place = store.reader.query_message("orders", "order-001000", 1, 0, _now_ms())[0].physical_offset
    store.close(_now_ms())
    size = _SMALL["mapped_file_size_commit_log"]
    segment = root / "commitlog" / f"{place - place % size:020d}"
    _overwrite(segment, place % size + 100, b"\xff")
    console.print(f"flipped a byte of message 1000, record at offset {place}; then: brokerlab verify STORE\n")
    return brokerlab(["verify", str(root)]) == 1


def _overwrite(path: Path, position: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def main() -> int:
    console = Console()
    passed: list[tuple[str, bool]] = []
    with tempfile.TemporaryDirectory(prefix="brokerlab-demo-") as folder:
        base = Path(folder)
        root = base / "store"
        passed.append(("nothing acknowledged was lost", kill_a_writer(console, root)))
        console.rule("2  two crashes, the original and us (museum row 4)")
        table = Table("preset", "messages that were gone and came back")
        ghosts: dict[str, list[int]] = {}
        for preset in ("rocketmq-4.9", "rocketmq-5.3", "strict"):
            ghosts[preset] = ghosts_after_two_crashes(base / preset, preset)
            table.add_row(preset, ", ".join(map(str, ghosts[preset])) or "none")
        console.print(table)
        passed.append(("the original brings them back", bool(ghosts["rocketmq-4.9"])))
        passed.append(("strict does not", not ghosts["strict"]))
        console.rule("the store of act 1, looked at from outside")
        brokerlab(["inspect", str(root)])
        passed.append(("verify found the damage", damage_and_verify(console, root)))
    console.rule()
    _print_verdicts(console.print, passed)
    return 0 if all(ok for _, ok in passed) else 1


def _print_verdicts(say: Callable[[str], None], passed: list[tuple[str, bool]]) -> None:
    for what, ok in passed:
        say(f"{'[green]yes[/green]' if ok else '[red]NO[/red]'}  {what}")


if __name__ == "__main__":
    sys.exit(main())
