"""What a look at a store's files finds, as values: where, how bad, and why.

error    acknowledged data is lost or wrong, or readers will be misled
warning  not as it should be, but nothing that was promised is lost by it; or the next start repairs it
info     worth knowing, and normal
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

SEVERITIES = ("error", "warning", "info")
ALIKE_MAX = 20
"""Of one kind in one file this many are kept one by one; the rest is counted."""


class Finding(NamedTuple):
    """`offset` is a position in `file`; None where the whole file is meant. `kind` is a short, stable name."""

    severity: str
    file: str
    offset: int | None
    reason: str
    kind: str


class Findings:
    """Collects findings, and keeps a broken store from producing millions of them."""

    def __init__(self) -> None:
        self._kept: list[Finding] = []
        self._counts: Counter[tuple[str, str, str]] = Counter()

    def add(self, severity: str, file: str, offset: int | None, reason: str, kind: str) -> None:
        assert severity in SEVERITIES
        self._counts[severity, file, kind] += 1
        if self._counts[severity, file, kind] <= ALIKE_MAX:
            self._kept.append(Finding(severity, file, offset, reason, kind))

    def more(self, severity: str, file: str, kind: str, count: int) -> None:
        """So many more of a kind that were not looked at one by one."""
        self._counts[severity, file, kind] += count

    def count(self, severity: str) -> int:
        return sum(count for (level, _, _), count in self._counts.items() if level == severity)

    def __iter__(self) -> Iterator[Finding]:
        """Worst first, then by file and offset; what was only counted comes as one finding per file and kind."""
        kept = Counter((one.severity, one.file, one.kind) for one in self._kept)
        rest = [
            Finding(severity, file, None, f"{count - kept[severity, file, kind]} more of kind {kind}", kind)
            for (severity, file, kind), count in self._counts.items()
            if count > kept[severity, file, kind]
        ]
        rank = {severity: place for place, severity in enumerate(SEVERITIES)}
        order = sorted(self._kept, key=lambda one: (one.file, -1 if one.offset is None else one.offset))
        yield from sorted(order + rest, key=lambda one: rank[one.severity])
