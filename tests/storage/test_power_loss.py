"""After a power cut the store comes back with everything that was flushed, and complete for all that it still has.

One run of a small workload yields every cut: the disk remembers what was synced, and before each operation an image
can be laid out of what a cut there could leave (see `PowerDisk`). Each image is opened and read through every path.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from brokerlab.storage.config import StoreConfig
from brokerlab.storage.message_store import MessageStore
from tests.storage.store_model import (
    NOW,
    PowerDisk,
    Sent,
    Survival,
    a_message,
    open_store,
    put,
    survival_patterns,
    survivors,
    tiny_config,
)

SOAK = bool(os.environ.get("BROKERLAB_SOAK"))
WORDS = ("red", "green", "blue")


@dataclass
class Cuts:
    """Runs a workload and judges an image at every `stride`-th step of the disk."""

    folder: Path
    config: StoreConfig
    seed: int
    stride: int
    sent: list[Sent] = field(default_factory=list)
    flushed: int = 0
    """How many messages a returned flush covers."""
    begin: int = 0
    """Files before this offset may have been deleted by expiry."""
    judged: int = 0
    lost: int = 0
    _steps: int = 0

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.disk = PowerDisk(self.folder / "live")
        self.store = open_store(self.folder / "live", self.config, disk=self.disk)
        self.disk.on_step = self._step

    def put(self, size: int, now: int, *, queue_id: int | None = None, topic: str = "orders") -> None:
        number = len(self.sent)
        message = a_message(
            f"{number}:".encode() + self.random.randbytes(size),
            topic=topic,
            queue_id=self.random.randrange(2) if queue_id is None else queue_id,
            keys=" ".join(self.random.sample(WORDS, self.random.randrange(3))),
            unique=f"u{number}",
        )
        self._attempt = message
        self.sent.append(put(self.store, message, now))

    def flush(self) -> None:
        self.store.commit_log.files.commit_all()
        self.store.flush_log()
        self.flushed = len(self.sent)

    def reopen(self, now: int) -> None:
        """The process dies and starts again: the page cache survives, and what it held is still not synced."""
        self.store.abandon(now)
        self.store = MessageStore(self.disk, str(self.folder / "live"), self.config)
        self.store.open(now)
        assert len(survivors(self.store, self.sent)) >= self.flushed

    def _step(self, what: str) -> None:
        self._steps += 1
        if self._steps % self.stride:
            return
        for survival in survival_patterns(self.seed + self._steps):
            self.judge_image(self.disk, f"cut-{self._steps}", survival, what)

    def judge_image(self, disk: PowerDisk, name: str, survival: Survival, what: str) -> None:
        image = disk.image(self.folder / f"{name}-{survival.name}", survival)
        try:
            self._judge(image)
        except Exception as error:
            raise AssertionError(f"seed {self.seed}, {name} ({what}), survival {survival.name}: {error!r}") from error

    def _judge(self, image: Path) -> None:
        self.judged += 1
        store = open_store(image, self.config, now=NOW + 100_000)
        # A put that was running at the cut may be there or not: its place is known, so is its content.
        there = survivors(store, self.sent + self._running(store))
        kept = {message.physical_offset for message in there}
        missing = [m for m in self.sent[: self.flushed] if m.physical_offset not in kept]
        assert all(message.physical_offset < self.begin for message in missing), f"flushed and gone: {missing[:1]}"
        self.lost += len(self.sent) - len(there)

        again = a_message("after the cut", keys="again", queue_id=0)
        there.append(put(store, again, NOW + 100_001))
        store.dispatch()
        survivors(store, there)
        store.close(NOW + 100_002)

        store = open_store(image, self.config, now=NOW + 100_003)
        assert survivors(store, there) == there
        store.abandon(0)

    def _running(self, store: MessageStore) -> list[Sent]:
        """The put that the cut interrupted, where the log has it."""
        end = max((message.end for message in self.sent), default=0)
        running: list[Sent] = []
        for record in store.commit_log.records():
            if record.physical_offset >= end:
                assert (record.body, record.properties) == (self._attempt.body, self._attempt.properties)
                running.append(
                    Sent(
                        record.physical_offset, record.total_size, (record.topic, record.queue_id),
                        record.queue_offset, record.body, record.properties, tuple(
                            word for word in record.properties_dict().get("UNIQ_KEY", "").split(" ")
                            + record.properties_dict().get("KEYS", "").split(" ") if word
                        ), record.sys_flag, record.store_timestamp,
                    )
                )  # fmt: skip
        assert len(running) <= 1
        return running


def busy(cuts: Cuts, steps: int, *, ms_per_put: Callable[[Random], int], reopen: bool, expire: bool) -> None:
    """Puts, with everything else now and then, and never in step with each other."""
    random, now = cuts.random, NOW
    for _ in range(steps):
        now += ms_per_put(random)
        cuts.put(random.choice([0, 10, 300, 1500]), now)
        chance = random.random()
        if chance < 0.35:
            cuts.store.dispatch(random.choice([1, 2, None]))
        elif chance < 0.5:
            cuts.flush()
        elif chance < 0.62:
            cuts.store.flush_queues()
        elif chance < 0.67 and reopen:
            cuts.store.commit_log.files.commit_all()
            cuts.reopen(now)
        elif chance < 0.72 and expire:
            cuts.store.dispatch()
            files = cuts.store.commit_log.files.files
            if len(files) > 3:
                cuts.begin = files[2].start
                cuts.store.delete_expired_files(now, force=True, most=2)


@pytest.mark.parametrize("seed", range(40 if SOAK else 1))
@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {"reopen": False, "expire": False}),
        ({}, {"reopen": True, "expire": False}),
        ({}, {"reopen": True, "expire": True}),
        ({"transient_store_pool_enable": True}, {"reopen": False, "expire": False}),
    ],
    ids=["plain", "with restarts", "with restarts and expiry", "with a pool"],
)
@pytest.mark.parametrize("ms", [0, 700], ids=["in one millisecond", "over seconds"])
def test_what_was_flushed_survives_a_cut_anywhere(
    tmp_path: Path, seed: int, settings: dict[str, Any], options: dict[str, bool], ms: int
) -> None:
    config = tiny_config(mapped_file_size_commit_log=8192, mapped_file_size_consume_queue=400, **settings)
    cuts = Cuts(tmp_path, config, seed, stride=3 if SOAK else 61)

    busy(cuts, 40, ms_per_put=lambda random: random.randrange(ms + 1), **options)

    assert cuts.judged >= 10
    assert cuts.lost > 0, "no cut ever took anything: the model proves nothing"
    cuts.store.abandon(0)


@pytest.mark.parametrize("seed", range(40 if SOAK else 2))
@pytest.mark.parametrize("pattern", [1, 2, 3], ids=["all kept", "every other", "random"])
def test_a_cut_during_the_recovery_from_a_cut_loses_no_more(tmp_path: Path, seed: int, pattern: int) -> None:
    """What the first recovery has done so far is just as unsure as what it found."""
    config = tiny_config(mapped_file_size_commit_log=8192)
    cuts = Cuts(tmp_path, config, seed, stride=1 << 40)
    busy(cuts, 30, ms_per_put=lambda random: random.randrange(700), reopen=True, expire=True)
    cuts.store.abandon(0)
    image = cuts.disk.image(tmp_path / "first", survival_patterns(seed)[pattern])
    disk, steps = PowerDisk(image), 0

    def step(what: str) -> None:
        nonlocal steps
        steps += 1
        if steps % (2 if SOAK else 9) == 0:
            for survival in survival_patterns(seed + steps):
                cuts.judge_image(disk, f"second-{steps}", survival, what)

    disk.on_step = step
    open_store(image, config, disk=disk, now=NOW + 50_000).abandon(0)

    assert steps > 20
    assert cuts.judged > 8
