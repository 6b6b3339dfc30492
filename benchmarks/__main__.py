"""`python -m benchmarks`: the command line of the benchmark. See `--help`."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.environment import MEMORY_FILE_SYSTEMS, NotEnoughSpaceError, describe, require_free_space
from benchmarks.protocol import Durability, LogFixture, load_our_side
from benchmarks.workload import MESSAGES_DEFAULT, MESSAGES_MIN, Scale, make_messages

try:
    from benchmarks.cases import CASE_NAMES, Case, Setting, build_cases, stores_to_check
    from benchmarks.measure import WrongAnswerError, check_store
    from benchmarks.records import write_log
    from benchmarks.report import as_json, print_report, write_json
    from benchmarks.runner import CaseResult, in_fresh_folder, run_rounds, runs_per_round
except ModuleNotFoundError as missing:
    if missing.name not in ("lmdb", "rocksdict"):
        raise
    sys.exit(f"{missing.name} is not installed. Install the peers: python -m pip install -e '.[bench]'")

ROUNDS_DEFAULT = 7
QUICK_ROUNDS = 3
QUICK_MESSAGES = 16_000
CHECK_MESSAGES = 800
FILE_WIDTH = 132

EXAMPLES = """\
examples:
  python -m benchmarks                              all cases, 7 rounds, 3 to 6 minutes on two cores
  python -m benchmarks --quick                      a look in a quarter of a minute; too short for a verdict
  python -m benchmarks --only async,batch100        only these cases
  python -m benchmarks --rounds 15 --only sync      more rounds for a noisy disk
  python -m benchmarks --dir /mnt/nvme --out a.json another disk, another result file

cases:
  async, batch100, batch1000   append without waiting for the disk: one by one, in batches
  sync, sync100                append and wait for the disk: one by one, in batches of 100
  read, lookup                 a queue in order; a message by its key
  scan, dispatch               recovery against zlib.crc32; queue and index entries against a naive loop

exit codes: 0 done (also with missed targets), 1 a contestant gave a wrong answer or the disk is too full, 2 wrong
options, 130 interrupted
"""


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="The same work for brokerlab, SQLite, LMDB, RocksDB and a plain file, in one interleaved run.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=_at_least(1), metavar="N", help=f"rounds (default {ROUNDS_DEFAULT})")
    parser.add_argument(
        "--messages",
        type=_at_least(MESSAGES_MIN),
        metavar="N",
        help=f"messages of the single put case; the others follow (default {MESSAGES_DEFAULT:,})",
    )
    parser.add_argument("--only", type=_case_names, default=CASE_NAMES, metavar="CASES", help="cases, by comma")
    parser.add_argument("--out", type=Path, default=Path("out/bench.json"), metavar="FILE", help="default %(default)s")
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path("out/bench-scratch"),
        metavar="FOLDER",
        help="where to write, on the disk to be measured; what is written there is removed (default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of bodies and order (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds of {QUICK_MESSAGES:,} messages")
    options = parser.parse_args(arguments)
    if options.rounds is None:
        options.rounds = QUICK_ROUNDS if options.quick else ROUNDS_DEFAULT
    if options.messages is None:
        options.messages = QUICK_MESSAGES if options.quick else MESSAGES_DEFAULT
    return options


def _at_least(smallest: int) -> functools.partial[int]:
    return functools.partial(_number, smallest)


def _number(smallest: int, text: str) -> int:
    try:
        number = int(text.replace("_", "").replace(",", ""))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if number < smallest:
        raise argparse.ArgumentTypeError(f"{number:,} is too small, must be {smallest:,} or more")
    return number


def _case_names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in CASE_NAMES]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(CASE_NAMES)}")
    return names


@contextlib.contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A new folder inside `parent`. Only what was made here is removed: the parent may hold files of the user."""
    made_parent = not parent.exists()
    parent.mkdir(parents=True, exist_ok=True)
    try:
        require_free_space(parent)
        folder = Path(tempfile.mkdtemp(prefix="brokerlab-bench-", dir=parent))
        try:
            yield folder
        finally:
            shutil.rmtree(folder)
    finally:
        if made_parent:
            with contextlib.suppress(OSError):
                parent.rmdir()


def check_all(setting: Setting, cases: Sequence[Case], scratch: Path, console: Console) -> None:
    """Before the first round everyone shows that it gives back what it was given."""
    if all(case.name in ("scan", "dispatch") for case in cases):
        return
    messages = setting.messages[:CHECK_MESSAGES]
    with console.status("checking that everyone gives back what it was given"):
        for durability in Durability:
            for name, factory in stores_to_check(setting, durability).items():
                try:
                    in_fresh_folder(scratch, functools.partial(check_store, factory, messages, durability))
                except WrongAnswerError as error:
                    raise WrongAnswerError(f"{name}, {durability.value}: {error}") from error


def run_with_progress(
    console: Console, cases: Sequence[Case], options: argparse.Namespace, scratch: Path
) -> list[CaseResult]:
    # No thread that redraws the bar: it would run on the clock of whoever is measured.
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
    )
    with progress:
        task = progress.add_task("", total=options.rounds * runs_per_round(cases))
        finished = itertools.count()

        def step(number: int, case: str, entrant: str) -> None:
            description = f"round {number}/{options.rounds}  {case}: {entrant}"
            progress.update(task, completed=next(finished), description=description, refresh=True)

        return run_rounds(cases, rounds=options.rounds, seed=options.seed, scratch=scratch, step=step)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write. The exit code is documented in `--help`."""
    options = parse_options(arguments)
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH  # in a file nothing is gained by folding lines
    try:
        with scratch_folder(options.dir) as scratch:
            return run(options, scratch, console)
    except (NotEnoughSpaceError, WrongAnswerError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("benchmarks: interrupted, nothing written", file=sys.stderr)
        return 130


def run(options: argparse.Namespace, scratch: Path, console: Console) -> int:
    started = time.monotonic()
    ours = load_our_side()
    environment = describe(scratch, ours)
    console.print("  ".join(f"[dim]{name}[/] {value}" for name, value in environment.items()))
    if ours is None:
        console.print("[yellow]benchmarks/our_store.py is not there: only the peers are measured[/]")
    if environment["scratch_file_system"] in MEMORY_FILE_SYSTEMS:
        console.print("[yellow]the scratch folder is in memory: the sync cases mean nothing here; see --dir[/]")

    scale = Scale.of(options.messages)
    logs = itertools.count()

    def make_log(records: int) -> LogFixture:
        return write_log(scratch / f"log-{next(logs)}", setting.messages, records)

    setting = Setting(
        messages=make_messages(scale.largest, seed=options.seed),
        scale=scale,
        ours=ours,
        seed=options.seed,
        make_log=make_log,
    )
    cases = build_cases(setting, options.only)
    check_all(setting, cases, scratch, console)
    results = run_with_progress(console, cases, options, scratch)

    print_report(console, results)
    seconds = time.monotonic() - started
    chosen: dict[str, object] = {
        "rounds": options.rounds,
        "messages": options.messages,
        "only": list(options.only),
        "seed": options.seed,
        "seconds": round(seconds, 1),
    }
    write_json(options.out, as_json(results, environment=environment, options=chosen))
    console.print(f"{options.rounds} rounds in {seconds:.0f} s; every number of every round is in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
