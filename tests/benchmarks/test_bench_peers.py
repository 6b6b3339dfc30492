"""A peer that gives back something else than it was given must not be measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.protocol import BenchMessage, Durability, StoreFactory
from benchmarks.workload import make_messages

pytest.importorskip("lmdb")
pytest.importorskip("rocksdict")

from benchmarks import measure
from benchmarks.cases import Setting, build_cases, stores_to_check
from benchmarks.peers import PlainFile
from benchmarks.protocol import LogFixture
from benchmarks.workload import Scale


def no_log(_records: int) -> LogFixture:
    raise AssertionError("this test needs no log")


SETTING = Setting(messages=make_messages(2_500, seed=7), scale=Scale.of(1_000), ours=None, seed=7, make_log=no_log)
PEERS = [
    pytest.param(factory, durability, id=f"{name}-{durability.value}")
    for durability in Durability
    for name, factory in stores_to_check(SETTING, durability).items()
]


@pytest.mark.parametrize(("factory", "durability"), PEERS)
def test_a_peer_gives_back_what_it_was_given(factory: StoreFactory, durability: Durability, tmp_path: Path) -> None:
    measure.check_store(factory, SETTING.messages[:200], durability, tmp_path)


class Forgetful(PlainFile):
    """Loses the last message of each batch."""

    def append_batch(self, items: Sequence[BenchMessage]) -> None:
        super().append_batch(items[:-1])


def test_the_check_finds_a_lost_message(tmp_path: Path) -> None:
    with pytest.raises(measure.WrongAnswerError, match=r"queue 7: 24 messages read, 25 put"):
        measure.check_store(Forgetful, SETTING.messages[:200], Durability.ASYNC, tmp_path)


def test_every_peer_runs_every_case_with_a_disk(tmp_path: Path) -> None:
    cases = build_cases(SETTING, ["async", "batch100", "batch1000", "sync", "sync100", "read", "lookup"])

    for case in cases:
        for number, entrant in enumerate(case.entrants):
            folder = tmp_path / f"{case.name}-{number}"
            folder.mkdir()
            assert entrant.run(folder) > 0, entrant.name
