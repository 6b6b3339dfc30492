"""Ratios taken round by round, their median and spread, and what they mean against a target.

The speed of a machine drifts by a factor of two within minutes, so two medians taken apart are not comparable. Two
runs of the same round are close in time; their ratio is, and the median over the rounds drops the unlucky ones.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some values and how far they reach."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Median, smallest and largest of at least one value."""
    if not values:
        raise ValueError("no values: at least one round is needed")
    return Spread(statistics.median(values), min(values), max(values))


def round_ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Our rate over theirs in each round. Both were measured in the same rounds, in the same order."""
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} rounds against {len(theirs)}: the same rounds are needed on both sides")
    for rate in (*ours, *theirs):
        if not (math.isfinite(rate) and rate > 0):
            raise ValueError(f"rate {rate}: must be a finite number above 0")
    return [our / their for our, their in zip(ours, theirs, strict=True)]


def best_by_median(rates: Mapping[str, Sequence[float]]) -> str:
    """Who has the best median rate; the first of equals.

    One peer for all rounds, not the best of each round: the maximum over several noisy peers is above each of them.
    """
    if not rates:
        raise ValueError("nobody to choose from")
    return max(rates, key=lambda name: statistics.median(rates[name]))


class Verdict(enum.Enum):
    """How a ratio stands against its two targets."""

    BOLD = "bold"
    MUST = "must"
    SHORT_OF_BOLD = "short of bold"
    MISS = "miss"
    NOT_MEASURED = "not measured"


def judge(ratio: float | None, *, must: float | None, bold: float | None) -> Verdict:
    """A miss is below `must`. Below `bold` where there is no `must` is short of an ambition, not a miss."""
    if must is None and bold is None:
        raise ValueError("a target needs a must or a bold")
    if ratio is None:
        return Verdict.NOT_MEASURED
    if must is not None and ratio < must:
        return Verdict.MISS
    if bold is not None and ratio >= bold:
        return Verdict.BOLD
    return Verdict.SHORT_OF_BOLD if must is None else Verdict.MUST
