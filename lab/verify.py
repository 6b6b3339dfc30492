"""`brokerlab verify`: cross-check a store, or find one message in it."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console

from brokerlab.lab.terminal import (
    SEVERITY_STYLES,
    add_row,
    make_table,
    plural,
    printable,
    progress_bar,
    show_time,
)
from brokerlab.storage.disk import Disk
from brokerlab.storage.find_message import Finder, Search, Sighting
from brokerlab.storage.offline import QueueName, look_at
from brokerlab.storage.verify import VerifyReport, verify_store

FINDINGS_SHOWN_MAX = 200


class UsageError(Exception):
    """The command line asks for what cannot be."""


def run_verify(arguments: argparse.Namespace, disk: Disk, console: Console) -> int:
    """0 if all is well, 1 if not."""
    if arguments.key is not None or arguments.id is not None or arguments.queue is not None:
        return _run_find(arguments, disk, console)
    if arguments.topic is not None:
        raise UsageError("--topic goes with --key")
    with progress_bar() as report_progress:
        report = verify_store(
            disk,
            arguments.path,
            kind=arguments.kind,
            index_slots=arguments.index_slots,
            progress=report_progress,
        )
    if arguments.json:
        _print_json(report, console)
    else:
        _print(report, console)
    return 0 if report.ok else 1


def write_json(console: Console, value: dict[str, Any]) -> None:
    """One object a line, unfolded."""
    console.file.write(json.dumps(value) + "\n")


def _print_json(report: VerifyReport, console: Console) -> None:
    for finding in report.findings:
        write_json(console, {"what": "finding", **finding._asdict()})
    log = report.log
    write_json(
        console,
        {
            "what": "summary",
            "path": report.root,
            "kind": report.kind,
            "ok": report.ok,
            "errors": report.errors,
            "warnings": report.warnings,
            "unclean": report.unclean,
            "log": {name: getattr(log, name) for name in type(log).__slots__},
            "queues": report.queues,
            "queue_entries": report.queue_entries,
            "index_files": report.index_files,
            "index_entries": report.index_entries,
            "checkpoint": report.checkpoint._asdict() if report.checkpoint else None,
        },
    )


def _print(report: VerifyReport, console: Console) -> None:
    if report.findings:
        table = make_table("Findings", ["severity", "*file", ">at", "*reason"])
        for finding in report.findings[:FINDINGS_SHOWN_MAX]:
            name = finding.file.removeprefix(report.root.rstrip("/") + "/")
            at = "" if finding.offset is None else finding.offset
            add_row(table, finding.severity, name, at, finding.reason, style=SEVERITY_STYLES[finding.severity])
        console.print(table)
        if len(report.findings) > FINDINGS_SHOWN_MAX:
            console.print(f"... and {len(report.findings) - FINDINGS_SHOWN_MAX} more (all with --json)")
        console.print()
    log = report.log
    if log.segments:
        console.print(
            f"log     {plural(log.records, 'record')} in {plural(log.segments, 'segment')}, "
            f"offsets {log.begin:,} to {log.end:,}"
        )
        console.print(
            f"        stored {show_time(log.first_store_timestamp)} to {show_time(log.newest_store_timestamp)}"
        )
    if report.queues:
        console.print(f"queues  {report.queues:,} with {report.queue_entries:,} entries")
    if report.index_files:
        console.print(f"index   {plural(report.index_files, 'file')} with {report.index_entries:,} entries")
    if report.checkpoint is not None:
        names = ("log", "queues", "index")
        times = (f"{name} {show_time(time)}" for name, time in zip(names, report.checkpoint[:3], strict=True))
        console.print(f"checkpoint says flushed: {', '.join(times)}")
    verdict = "no damage found" if report.ok else plural(report.errors, "error")
    warnings = f", {plural(report.warnings, 'warning')}" if report.warnings else ""
    console.print(f"{printable(report.root)}: {verdict}{warnings}", style="bold green" if report.ok else "bold red")


# One message ---------------------------------------------------------------------------------------------------------


def parse_queue(text: str, *, with_index: bool) -> tuple[QueueName, int]:
    """`topic/0/17`, or `topic/0` without an index."""
    parts = text.rsplit("/", 2 if with_index else 1)
    wanted = "topic/queue/index, as in orders/0/17" if with_index else "topic/queue, as in orders/0"
    numbers = parts[1:]
    if len(parts) != (3 if with_index else 2) or not all(
        part.isascii() and part.isdigit() and len(part) <= 18 for part in numbers
    ):
        raise UsageError(f"--queue {text}: give {wanted}")
    return QueueName(parts[0], int(numbers[0])), int(numbers[1]) if with_index else -1


def _run_find(arguments: argparse.Namespace, disk: Disk, console: Console) -> int:
    asked = [arguments.key, arguments.id, arguments.queue]
    if sum(one is not None for one in asked) > 1:
        raise UsageError("give only one of --key, --id and --queue")
    if arguments.topic is not None and arguments.key is None:
        raise UsageError("--topic goes with --key")
    if arguments.key == "":
        raise UsageError("--key: a key is not empty")
    wanted = parse_queue(arguments.queue, with_index=True) if arguments.queue is not None else None
    finder = Finder(disk, look_at(disk, arguments.path, kind=arguments.kind), index_slots=arguments.index_slots)
    try:
        with progress_bar() as report_progress:
            if wanted is not None:
                search = finder.by_queue(*wanted)
            elif arguments.id is not None:
                search = finder.by_id(arguments.id, report_progress)
            else:
                search = finder.by_key(arguments.key, arguments.topic, report_progress)
    finally:
        finder.close()
    if arguments.json:
        for sighting in search.sightings:
            write_json(console, _sighting_json(sighting))
        write_json(
            console, {"what": "summary", "wanted": search.wanted, "ok": _found(search), "problem": search.problem}
        )
    else:
        _print_search(search, arguments.path, console)
    return 0 if _found(search) else 1


def _found(search: Search) -> bool:
    return search.ok and not search.problem


def _sighting_json(sighting: Sighting) -> dict[str, Any]:
    record = sighting.record
    return {
        "what": "message",
        "agrees": sighting.agrees,
        "topic": record.topic if record else None,
        "queue_id": record.queue_id if record else None,
        "queue_offset": record.queue_offset if record else None,
        "physical_offset": record.physical_offset if record else None,
        "message_id": record.message_id if record else None,
        "places": [place._asdict() for place in sighting.places],
    }


def _print_search(search: Search, root: str, console: Console) -> None:
    for sighting in search.sightings:
        record = sighting.record
        if record is not None:
            table = make_table(
                printable(
                    f"{record.topic}/{record.queue_id}/{record.queue_offset} at offset {record.physical_offset:,}, "
                    f"stored {show_time(record.store_timestamp)}, id {record.message_id}"
                ),
                ["part", "agrees", "*file", ">at", "*says"],
            )
        else:
            table = make_table("not in the log", ["part", "agrees", "*file", ">at", "*says"])
        for place in sighting.places:
            word = {True: "yes", False: "NO", None: "-"}[place.agrees]
            at = "" if place.position is None else place.position
            style = "bold red" if place.agrees is False else ""
            name = place.file.removeprefix(root.rstrip("/") + "/")
            add_row(table, place.part, word, name, at, place.says, style=style)
        console.print(table)
        console.print()
    if search.problem:
        console.print(printable(search.problem, 400), style="bold red")
    elif search.ok:
        found = plural(len(search.sightings), "message")
        console.print(f"{found}: log, queue and index agree", style="bold green")
    else:
        console.print("log, queue and index do not agree", style="bold red")
