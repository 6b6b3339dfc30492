"""The `brokerlab` command: what is in this store, and is it sound?

Exit codes are the same for every command: 0 all good or found, 1 damage or not found, 2 wrong use or nothing to read,
130 interrupted. A fault of brokerlab itself is 70 and one line; BROKERLAB_DEBUG=1 shows where.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

from rich.console import Console

from brokerlab.lab.inspect import run_inspect
from brokerlab.lab.terminal import make_console, printable
from brokerlab.lab.verify import UsageError, run_verify
from brokerlab.storage.disk import Disk
from brokerlab.storage.errors import StoreError
from brokerlab.storage.offline import KINDS, NotAStoreError
from brokerlab.storage.real_disk import RealDisk

EXIT_OK, EXIT_FINDINGS, EXIT_USAGE, EXIT_INTERNAL, EXIT_INTERRUPTED = 0, 1, 2, 70, 130

_EXIT_CODES = """\
exit codes:
  0    all good, or the message was found and all parts agree (warnings and infos do not count)
  1    damage was found, or the message was not found, or log, queue and index do not agree about it
  2    wrong use, or the path cannot be read or holds no store
  130  interrupted
"""

_INSPECT_EXAMPLES = """\
examples:
  brokerlab inspect ~/store                                    what is there
  brokerlab inspect ~/store --records --topic orders           records of a topic, the first 20
  brokerlab inspect ~/store --records --from 1048576 --json    records from a log offset on, an object a line
  brokerlab inspect ~/store/commitlog/00000000000000000000     one segment
  brokerlab inspect ~/store --hex --from 172                   one record, field by field
  brokerlab inspect ~/store --queue orders/0                   entries of a consume queue
  brokerlab inspect ~/store --key order-17 --topic orders      the chain of index entries of a key
  brokerlab inspect ~/store/index/20240131120000000 --slots    the longest chains of an index file

"""

_VERIFY_EXAMPLES = """\
examples:
  brokerlab verify ~/store                               cross-check log, queues, index and checkpoint
  brokerlab verify ~/store --json                        findings as JSON, an object a line
  brokerlab verify ~/store --key order-17 --topic orders find a message by its key
  brokerlab verify ~/store --id C0A8011400002A9F0000000000000000
  brokerlab verify ~/store --queue orders/0/17           find a message by its place in a queue

"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (brokerlab --help tells more)")


def _number(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        digits = text.replace(",", "").replace("_", "")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 19) or int(digits) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no number from {least} on")
        return int(digits)

    return parse


def _version() -> str:
    try:
        return version("brokerlab")
    except PackageNotFoundError:
        return "not installed"


def make_parser() -> argparse.ArgumentParser:
    plain = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog="brokerlab",
        description="A lab for RocketMQ's message store. Both commands only read, and take no lock.",
        epilog=_INSPECT_EXAMPLES + _VERIFY_EXAMPLES + _EXIT_CODES,
        formatter_class=plain,
    )
    parser.add_argument("--version", action="version", version=f"brokerlab {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="{inspect,verify}")

    inspect = commands.add_parser(
        "inspect",
        help="show what a store directory or a single file holds",
        description="Show what is in a store directory, one of its directories, or a single file. Nothing is written.",
        epilog=_INSPECT_EXAMPLES + _EXIT_CODES,
        formatter_class=plain,
    )
    _add_common(inspect)
    inspect.add_argument("--records", action="store_true", help="the records of the log")
    inspect.add_argument("--hex", action="store_true", help="records as hex, a line per field")
    inspect.add_argument("--from", dest="start", type=_number(0), metavar="OFFSET", help="log offset to begin at")
    inspect.add_argument("--limit", type=_number(1), metavar="N", help="how many at most (default 20, JSON: all)")
    inspect.add_argument("--topic", metavar="T", help="only records of this topic; with --key: the key's topic")
    inspect.add_argument("--body", choices=("text", "base64"), help="bodies too; text where it is valid UTF-8")
    inspect.add_argument("--queue", metavar="TOPIC/ID", help="the entries of this consume queue")
    inspect.add_argument("--key", metavar="K", help="the index entries under this key's hash (with --topic)")
    inspect.add_argument("--slots", action="store_true", help="the longest chains of the index")

    verify = commands.add_parser(
        "verify",
        help="cross-check a store, or find one message in it",
        description="Check log, queues, index and checkpoint against each other, or find one message everywhere.",
        epilog=_VERIFY_EXAMPLES + _EXIT_CODES,
        formatter_class=plain,
    )
    _add_common(verify)
    verify.add_argument("--key", metavar="K", help="find messages by a key (a word of KEYS, or UNIQ_KEY)")
    verify.add_argument("--topic", metavar="T", help="with --key: only messages of this topic")
    verify.add_argument("--id", metavar="ID", help="find a message by its offset id or its unique id")
    verify.add_argument("--queue", metavar="TOPIC/ID/INDEX", help="find a message by its place in a queue")
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a store directory, or a file of one")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--as", dest="kind", choices=KINDS, help="what the path is, where its name does not say")
    parser.add_argument("--index-slots", type=_number(1), metavar="N", help="maxHashSlotNum of the index files")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Never raises, never shows a traceback."""
    try:
        code = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has seen enough. Python would complain once more when it flushes at exit.
        _silence_stdout()
        return EXIT_OK
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code


def _run(argv: Sequence[str] | None) -> int:
    commands: dict[str, Callable[[argparse.Namespace, Disk, Console], int]] = {
        "inspect": run_inspect,
        "verify": run_verify,
    }
    try:
        parser = make_parser()
        arguments = parser.parse_args(argv)
        if arguments.command is None:
            parser.print_help(sys.stderr)
            return EXIT_USAGE
        if not arguments.path or "\0" in arguments.path:
            return _fail("PATH is empty")
        return commands[arguments.command](arguments, RealDisk(read_only=True), make_console())
    except SystemExit as leaving:  # argparse, after --help and --version
        return leaving.code if isinstance(leaving.code, int) else EXIT_OK
    except UsageError as error:
        return _fail(str(error))
    except NotAStoreError as error:
        return _fail(f"{error.path}: {error.why}")
    except StoreError as error:
        return _fail(str(error))
    except BrokenPipeError:
        raise
    except Exception as error:
        if os.environ.get("BROKERLAB_DEBUG"):
            raise
        _fail(f"fault in brokerlab itself, please report it: {type(error).__name__}: {error}")
        return EXIT_INTERNAL


def _fail(message: str) -> int:
    sys.stderr.write(f"brokerlab: {printable(message, 1000)}\n")
    return EXIT_USAGE


def _silence_stdout() -> None:
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        return


if __name__ == "__main__":
    sys.exit(main())
