"""The tables for people and the JSON for machines. Both show every round's spread; nothing here measures."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.cases import Case
from benchmarks.protocol import OURS
from benchmarks.runner import CaseResult, Comparison
from benchmarks.stats import Spread, Verdict, spread

JSON_VERSION = 1

_MARKS = {
    Verdict.BOLD: "[bold green]✔✔ bold[/]",
    Verdict.MUST: "[green]✔ must[/]",
    Verdict.SHORT_OF_BOLD: "[yellow]· short of bold[/]",
    Verdict.MISS: "[bold red]✘ miss[/]",
    Verdict.NOT_MEASURED: "[dim]not measured[/]",
}


def print_report(console: Console, results: Sequence[CaseResult]) -> None:
    """One table a case, then all targets, then what was missed."""
    for result in results:
        console.print(_case_table(result))
    console.print(_target_table(results))
    missed = [
        f"{result.case.title}: {_pair(comparison)}"
        for result in results
        for comparison in result.comparisons()
        if comparison.verdict is Verdict.MISS
    ]
    if missed:
        console.print(f"[bold red]{len(missed)} missed:[/] " + "; ".join(missed))


def _case_table(result: CaseResult) -> Table:
    case = result.case
    title = f"{case.title}  [dim]({case.name}; {case.messages:,} messages a run; {case.clock})[/]"
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    table.add_column("contestant", overflow="fold", min_width=20)
    reference = _reference(result)
    headings = ["per s", "min - max", "µs each"]
    if reference is not None:
        headings += [f"{reference} ÷ this", "min - max"]
    for heading in headings:
        table.add_column(heading, justify="right")
    for name in sorted(result.seconds, key=lambda name: -spread(result.rates(name)).median):
        rate = spread(result.rates(name))
        microseconds = spread(result.seconds[name]).median / case.messages * 1e6
        cells = [
            _rate(case, rate.median),
            f"{_rate(case, rate.low)} - {_rate(case, rate.high)}",
            f"{microseconds:,.2f}",
        ]
        if reference is not None and name != reference:
            ratio = spread(result.ratio(reference, name))
            cells += [f"{ratio.median:.2f}", _range(ratio)]
        table.add_row(f"[bold]{name}[/]" if name.startswith(OURS) else name, *cells)
    return table


def _reference(result: CaseResult) -> str | None:
    """Whom the ratio column compares with the others: the first of ours that takes part."""
    return next((name for name in result.seconds if name.startswith(OURS)), None)


def _target_table(results: Sequence[CaseResult]) -> Table:
    table = Table(title="targets  [dim](median of the ratios of each round)[/]", title_justify="left", box=box.SIMPLE)
    table.add_column("work")
    table.add_column("ratio of")
    for heading in ("median", "min - max", "must", "bold"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("result", no_wrap=True)
    for result in results:
        for comparison in result.comparisons():
            ratio = comparison.spread
            table.add_row(
                result.case.title,
                _pair(comparison),
                f"{ratio.median:.2f}" if ratio else "",
                _range(ratio),
                _goal(comparison.target.must),
                _goal(comparison.target.bold),
                _MARKS[comparison.verdict],
            )
    return table


def _pair(comparison: Comparison) -> str:
    best = " (the best peer)" if comparison.target.best_of else ""
    return f"{comparison.target.ours} ÷ {comparison.peer}{best}"


def _rate(case: Case, rate: float) -> str:
    """Three digits are more than the spread allows; the rest is in the JSON."""
    unit = "" if case.bytes_per_run is None else "B"
    for limit, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if rate >= limit:
            return f"{rate / limit:.3g} {prefix}{unit}"
    return f"{rate:.3g} {unit}".rstrip()


def _range(ratio: Spread | None) -> str:
    return f"{ratio.low:.2f} - {ratio.high:.2f}" if ratio else ""


def _goal(goal: float | None) -> str:
    return "" if goal is None else f"{goal:.2f}"


def as_json(
    results: Sequence[CaseResult], *, environment: dict[str, object], options: dict[str, object]
) -> dict[str, object]:
    """Everything the tables show and each round's number."""
    return {
        "version": JSON_VERSION,
        "environment": environment,
        "options": options,
        "cases": [_case_json(result) for result in results],
    }


def _case_json(result: CaseResult) -> dict[str, object]:
    case = result.case
    return {
        "name": case.name,
        "title": case.title,
        "clock": case.clock,
        "messages": case.messages,
        "rate_unit": "messages/s" if case.bytes_per_run is None else "bytes/s",
        "contestants": {
            name: {**dataclasses.asdict(spread(result.rates(name))), "seconds": result.seconds[name]}
            for name in result.seconds
        },
        "targets": [_comparison_json(comparison) for comparison in result.comparisons()],
    }


def _comparison_json(comparison: Comparison) -> dict[str, object]:
    ratio = comparison.spread
    return {
        "ours": comparison.target.ours,
        "peer": comparison.peer,
        "best_of": list(comparison.target.best_of),
        "must": comparison.target.must,
        "bold": comparison.target.bold,
        "median": ratio.median if ratio else None,
        "low": ratio.low if ratio else None,
        "high": ratio.high if ratio else None,
        "ratios": list(comparison.ratios),
        "verdict": comparison.verdict.value,
    }


def write_json(path: Path, document: dict[str, object]) -> None:
    """Write beside it first: a reader never finds half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(json.dumps(document, indent=2) + "\n")
    unfinished.replace(path)
