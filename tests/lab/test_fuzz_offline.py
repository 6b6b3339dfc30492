"""`inspect` and `verify` on stores that something has been at: an answer with a documented code, soon, and no write.

Each case is a number: it seeds the choice of damage, so a failing one is run again by its number alone.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from brokerlab.lab.cli import main

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.lab.lab_stores import copy_store, digest, make_store

CASES = 1500 if os.environ.get("BROKERLAB_SOAK") else 60
SECONDS_MAX = 30

Damage = Callable[[random.Random, Path, Path], None]


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("fuzz")
    return [
        make_store(root / "clean"),
        make_store(root / "abandoned", clean=False),
        make_store(root / "behind", clean=False, dispatched=60),
    ]


def some_file(rng: random.Random, store: Path) -> Path | None:
    """A file of the store, each part as likely as the others."""
    parts = [
        sorted(path for path in store.glob(pattern) if path.is_file() and not path.is_symlink())
        for pattern in ("commitlog/*", "consumequeue/*/*/*", "index/*", "*")
    ]
    filled = [part for part in parts if part]
    return rng.choice(rng.choice(filled)) if filled else None


def on_bytes(change: Callable[[random.Random, bytearray], None]) -> Damage:
    def damage(rng: random.Random, store: Path, _outside: Path) -> None:
        path = some_file(rng, store)
        if path is not None:
            content = bytearray(path.read_bytes())
            change(rng, content)
            path.write_bytes(content)

    damage.__name__ = change.__name__
    return damage


def cut(rng: random.Random, content: bytearray) -> None:
    del content[rng.choice([0, 1, 39, 40, 4095, rng.randrange(len(content) + 1)]) :]


def grow(rng: random.Random, content: bytearray) -> None:
    content += rng.randbytes(rng.choice([1, 19, 20, 4096]))


def zero(rng: random.Random, content: bytearray) -> None:
    start = rng.randrange(len(content) + 1)
    end = min(len(content), start + rng.choice([1, 8, 20, 512, 4096]))
    content[start:end] = bytes(end - start)


def flip(rng: random.Random, content: bytearray) -> None:
    for _ in range(rng.choice([1, 1, 5, 50]) if content else 0):
        content[rng.randrange(min(len(content), rng.choice([64, 400, len(content)])))] ^= 1 << rng.randrange(8)


def spray(rng: random.Random, content: bytearray) -> None:
    """Extreme numbers where lengths, offsets and counts may stand."""
    extremes = (b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\x80" + bytes(7), bytes(4) + b"\x7f\xff\xff\xff", bytes(8))
    for _ in range(rng.choice([1, 3, 30])):
        at = 4 * rng.randrange(len(content) // 4 + 1)
        value = rng.choice(extremes)[: len(content) - at]
        content[at : at + len(value)] = value


def shuffle(rng: random.Random, content: bytearray) -> None:
    size = rng.choice([20, 512, 4096])
    pages = [content[at : at + size] for at in range(0, len(content), size)]
    rng.shuffle(pages)
    content[:] = b"".join(pages)


def scramble(rng: random.Random, content: bytearray) -> None:
    content[:] = rng.randbytes(len(content))


def rename(rng: random.Random, store: Path, _outside: Path) -> None:
    path = some_file(rng, store)
    if path is not None:
        names = [
            "99999999999999999999",
            "00000000000000000007",
            "x",
            "0",
            "\udcff\x1b[31m",
            "9" * 18,
            "00000000000000008193",
        ]
        target = path.with_name(rng.choice(names))
        if not target.exists():
            path.rename(target)


def remove(rng: random.Random, store: Path, _outside: Path) -> None:
    path = some_file(rng, store)
    if path is not None:
        path.unlink()


def repeat(rng: random.Random, store: Path, _outside: Path) -> None:
    """One file's bytes under another file's name."""
    left, right = some_file(rng, store), some_file(rng, store)
    if left is not None and right is not None:
        right.write_bytes(left.read_bytes())


def replace(rng: random.Random, store: Path, outside: Path) -> None:
    """Something that is no file where a file is expected. Permissions would not stop a test that runs as root."""
    path = some_file(rng, store)
    if path is None:
        return
    path.unlink()
    match rng.choice(["directory", "dangling", "loop", "fifo", "outward", "device", "to directory"]):
        case "directory":
            path.mkdir()
        case "dangling":
            path.symlink_to(outside / "nothing")
        case "loop":
            path.symlink_to(path)
        case "fifo":
            os.mkfifo(path)
        case "outward":
            path.symlink_to(outside / "file")
        case "device":
            path.symlink_to("/dev/zero")
        case _:
            path.symlink_to(store)


def replace_directory(rng: random.Random, store: Path, outside: Path) -> None:
    """Something that is no directory where one is expected."""
    directories = sorted(path for path in store.rglob("*") if path.is_dir() and not path.is_symlink())
    if not directories:
        return
    path = rng.choice(directories)
    path.rename(outside / f"moved-{rng.randrange(1 << 60)}")
    match rng.choice(["file", "loop", "fifo", "up", "nothing", "empty"]):
        case "file":
            path.write_bytes(b"a file")
        case "loop":
            path.symlink_to(path)
        case "fifo":
            os.mkfifo(path)
        case "up":
            path.symlink_to(store)
        case "empty":
            path.mkdir()
        case _:
            pass


DAMAGES: list[Damage] = [
    *(on_bytes(change) for change in (cut, grow, zero, flip, flip, spray, spray, shuffle, scramble)),
    rename, remove, repeat, replace, replace, replace_directory,
]  # fmt: skip

ASKS = [
    ["verify"],
    ["inspect"],
    ["verify", "--json"],
    ["inspect", "--json"],
    ["inspect", "--records", "--json", "--body", "text"],
    ["inspect", "--records", "--topic", "orders"],
    ["inspect", "--hex", "--limit", "5"],
    ["inspect", "--queue", "orders/0"],
    ["inspect", "--key", "k7", "--topic", "orders"],
    ["inspect", "--slots"],
    ["verify", "--key", "k42"],
    ["verify", "--queue", "refunds/1/3"],
    ["verify", "--id", "00000000000000000000000000000080"],
    ["verify", "--index-slots", "7"],
]


class TooSlowError(BaseException):
    """Not an Exception: nothing on the way may catch it."""


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def expired(_signal: int, _frame: FrameType | None) -> None:
        raise TooSlowError(f"no answer within {seconds} seconds")

    former = signal.signal(signal.SIGALRM, expired)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)


@pytest.mark.parametrize("seed", range(CASES))
def test_a_damaged_store_gets_an_answer_and_is_left_as_it_is(
    seed: int, templates: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(seed)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(rng.randbytes(3000))
    store = copy_store(rng.choice(templates), tmp_path / "store")
    chosen = [rng.choice(DAMAGES) for _ in range(rng.choice([1, 1, 2, 4]))]
    for damage in chosen:
        damage(rng, store, outside)
    target = some_file(rng, store) if rng.random() < 0.3 else store
    before = digest(tmp_path)

    for ask in ASKS:
        with time_limit(SECONDS_MAX):
            code = main([ask[0], str(target or store), *ask[1:]])

        printed = capsys.readouterr()
        story = f"seed {seed}: {[damage.__name__ for damage in chosen]}, {ask} on {target}: {printed.err}"
        assert code in (0, 1, 2), story
        assert (code == 2) == bool(printed.err), story
        assert "Traceback" not in printed.out + printed.err, story
    assert digest(tmp_path) == before


def test_every_single_flipped_bit_of_a_body_is_found(templates: list[Path], tmp_path: Path) -> None:
    store = copy_store(templates[0], tmp_path / "store")
    segment = store / "commitlog" / "00000000000000000000"
    content = segment.read_bytes()
    body_at = content.index(b"body 003")

    for bit in range(64):
        changed = bytearray(content)
        changed[body_at + bit // 8] ^= 1 << bit % 8
        segment.write_bytes(changed)
        assert main(["verify", str(store)]) == 1, f"bit {bit}"
