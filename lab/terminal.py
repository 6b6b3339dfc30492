"""How things look in a terminal: times, sizes, tables, a progress bar. Colours and bars only where a person looks."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

PLAIN_WIDTH = 160
"""Columns where nobody looks: a file or a pipe does not wrap."""
PROGRESS_BYTES_MIN = 64 << 20
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST_MS = 253_402_300_799_999
SEVERITY_STYLES = {"error": "bold red", "warning": "yellow", "info": "dim"}


class PipeConsole(Console):
    """Rich leaves the process with code 1 when the reader is gone; here that is for the command to decide."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_console() -> Console:
    """Standard output as it is now. Unprintable file names must not stop a listing."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    is_terminal = sys.stdout.isatty()
    return PipeConsole(
        file=sys.stdout,
        highlight=False,
        markup=False,
        emoji=False,
        width=None if is_terminal else PLAIN_WIDTH,
        soft_wrap=False,
    )


def show_time(timestamp_ms: int) -> str:
    """UTC with milliseconds; what cannot be a time is shown as the number it is."""
    if timestamp_ms == 0:
        return "-"
    if not 0 < timestamp_ms <= _LATEST_MS:
        return str(timestamp_ms)
    return (_EPOCH + timedelta(milliseconds=timestamp_ms)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def show_size(size: int) -> str:
    """Bytes, with a unit where that is exact enough to be read."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= 10 * unit or (size >= unit and size % unit == 0):
            return f"{size / unit:.4g} {name}"
    return f"{size:,} B"


def printable(text: str, most: int = 200) -> str:
    """Names and values from a damaged file must not steer the terminal."""
    shown = "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text[:most])
    return shown.encode("utf-8", "backslashreplace").decode() + ("…" if len(text) > most else "")


def make_table(title: str, columns: Sequence[str]) -> Table:
    """A column whose name starts with > is aligned to the right, with * it may be folded."""
    table = Table(
        title=Text(title, style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name in columns:
        table.add_column(
            name.lstrip(">*"),
            justify="right" if name.startswith(">") else "left",
            overflow="fold" if name.startswith("*") else "ellipsis",
            no_wrap=not name.startswith("*"),
        )
    return table


def add_row(table: Table, *cells: object, style: str = "") -> None:
    """A cell that is a tuple is shown as lines."""
    table.add_row(
        *(
            Text("\n".join(printable(str(line)) for line in (cell if type(cell) is tuple else (cell,))))
            for cell in cells
        ),
        style=style,
    )


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


Report = Callable[[int, int, str], None]


@contextmanager
def progress_bar(enabled: bool = True) -> Iterator[Report]:
    """A bar on standard error, where that is a terminal and there is enough to wait for."""
    if not enabled or not sys.stderr.isatty():
        yield lambda _done, _all, _what: None
        return
    console = Console(file=sys.stderr, highlight=False, markup=False)
    parts = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*parts, console=console, transient=True) as bar:
        task = bar.add_task("", total=None, visible=False)

        def report(done: int, everything: int, what: str) -> None:
            visible = everything >= PROGRESS_BYTES_MIN
            bar.update(task, completed=done, total=everything, description=printable(what, 30), visible=visible)

        yield report
