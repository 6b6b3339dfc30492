"""Ratios, medians and verdicts of the benchmark."""

from __future__ import annotations

import pytest

from benchmarks.stats import Spread, Verdict, best_by_median, judge, round_ratios, spread


def test_ratios_are_taken_within_each_round() -> None:
    # The machine was twice as fast in the second round; the ratio does not see it.
    ours, theirs = [100.0, 200.0, 90.0], [50.0, 100.0, 30.0]

    assert round_ratios(ours, theirs) == [2.0, 2.0, 3.0]


def test_the_median_of_ratios_is_not_the_ratio_of_medians() -> None:
    ours, theirs = [10.0, 40.0, 30.0], [10.0, 10.0, 30.0]

    assert spread(round_ratios(ours, theirs)) == Spread(median=1.0, low=1.0, high=4.0)
    assert spread(ours).median / spread(theirs).median == 3.0


def test_an_even_number_of_rounds_has_the_middle_between_two() -> None:
    assert spread([4.0, 1.0, 2.0, 3.0]) == Spread(median=2.5, low=1.0, high=4.0)


def test_no_round_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one round"):
        spread([])


def test_sides_of_different_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rounds against 1"):
        round_ratios([1.0, 2.0], [1.0])


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_that_cannot_be_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="finite number above 0"):
        round_ratios([1.0], [rate])


def test_the_best_peer_is_one_peer_for_all_rounds() -> None:
    rates = {"steady": [5.0, 5.0, 5.0], "lucky once": [1.0, 99.0, 1.0]}

    assert best_by_median(rates) == "steady"


@pytest.mark.parametrize(
    ("ratio", "must", "bold", "verdict"),
    [
        (2.0, 1.0, 2.0, Verdict.BOLD),
        (1.99, 1.0, 2.0, Verdict.MUST),
        (1.0, 1.0, 2.0, Verdict.MUST),
        (0.99, 1.0, 2.0, Verdict.MISS),
        (5.0, 1.0, None, Verdict.MUST),
        (0.5, None, 0.7, Verdict.SHORT_OF_BOLD),
        (0.7, None, 0.7, Verdict.BOLD),
        (None, 1.0, 2.0, Verdict.NOT_MEASURED),
    ],
)
def test_a_ratio_is_judged_by_both_targets(
    ratio: float | None, must: float | None, bold: float | None, verdict: Verdict
) -> None:
    assert judge(ratio, must=must, bold=bold) is verdict


def test_a_target_without_a_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="must or a bold"):
        judge(1.0, must=None, bold=None)
