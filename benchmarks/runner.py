"""Rounds: in each round every case, inside a case every contestant once, in an order drawn from the seed."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.cases import BEST_PEER, Case, Target
from benchmarks.stats import Spread, Verdict, best_by_median, judge, round_ratios, spread

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Comparison:
    """A target and how it came out. `peer` is who was meant, also where the target says the best one."""

    target: Target
    peer: str
    ratios: tuple[float, ...]
    verdict: Verdict

    @property
    def spread(self) -> Spread | None:
        """None when one side was not measured."""
        return spread(self.ratios) if self.ratios else None


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The seconds of each contestant, one number a round, in the order of the rounds."""

    case: Case
    seconds: dict[str, list[float]]

    def rates(self, name: str) -> list[float]:
        """Messages or bytes a second, one number a round."""
        return [self.case.rate(seconds) for seconds in self.seconds[name]]

    def ratio(self, ours: str, peer: str) -> list[float]:
        """Round by round; empty if one of them did not take part."""
        if ours not in self.seconds or peer not in self.seconds:
            return []
        return round_ratios(self.rates(ours), self.rates(peer))

    def comparisons(self) -> list[Comparison]:
        """All targets of the case."""
        found = []
        for target in self.case.targets:
            peer = target.peer
            if peer == BEST_PEER:
                peer = best_by_median({name: self.rates(name) for name in target.best_of})
            ratios = self.ratio(target.ours, peer)
            median = spread(ratios).median if ratios else None
            found.append(Comparison(target, peer, tuple(ratios), judge(median, must=target.must, bold=target.bold)))
        return found


def runs_per_round(cases: Sequence[Case]) -> int:
    """How many runs a round has, for a progress bar."""
    return sum(len(case.entrants) for case in cases)


def run_rounds(
    cases: Sequence[Case], *, rounds: int, seed: int, scratch: Path, step: Callable[[int, str, str], None]
) -> list[CaseResult]:
    """Run everything. `step(round, case, entrant)` is called before each run, never inside one.

    The contestants of a case follow one another directly: their ratio is taken, so they should see the same machine.
    """
    order = random.Random(seed)
    results = [CaseResult(case, {entrant.name: [] for entrant in case.entrants}) for case in cases]
    for number in range(1, rounds + 1):
        for result in results:
            entrants = list(result.case.entrants)
            order.shuffle(entrants)
            for entrant in entrants:
                step(number, result.case.title, entrant.name)
                seconds = in_fresh_folder(scratch, entrant.run)
                result.seconds[entrant.name].append(seconds)
    return results


def in_fresh_folder(scratch: Path, run: Callable[[Path], ResultT]) -> ResultT:
    """Run in an empty folder and delete it: nobody reads, overwrites or pays for the files of another run."""
    folder = scratch / "run"
    folder.mkdir()
    try:
        return run(folder)
    finally:
        shutil.rmtree(folder)
