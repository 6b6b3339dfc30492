"""The rules that no reviewer should have to remember: who may call what, how long things get, what is public.

Each rule about source text is a function from source to complaints, and is itself tried on text that breaks it.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STORAGE = sorted((ROOT / "storage").glob("*.py"))
THE_PORT = "real_disk.py"
"""The one module that talks to the operating system."""

FUNCTION_LINES_MAX = 80
FILE_LINES_MAX = 450

# Whatever reaches the operating system, a clock, a thread or chance. `mmap` is for types; calling it is banned below.
BANNED_MODULES = set(
    "_thread asyncio concurrent ctypes fcntl getpass glob importlib io locale logging multiprocessing os pathlib "
    "pickle platform pykka queue random resource rich sched secrets select selectors shelve shutil signal simpy socket "
    "sqlite3 subprocess tempfile threading time uuid".split()
)
BANNED_BUILTINS = {"open", "input", "print", "exec", "eval", "compile", "__import__", "breakpoint", "hash", "id"}
BANNED_METHODS = {"now", "utcnow", "today", "fromfile", "tofile", "memmap", "getenv", "astimezone"}


def banned_uses(source: str) -> list[str]:
    """Every import and call that would make a module of the store depend on more than its arguments."""
    found = []
    mapped: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [f"{node.lineno}: import {name.name}" for name in names if _root(name.name) in BANNED_MODULES]
            case ast.ImportFrom(module=str(module), names=names):
                if _root(module) in BANNED_MODULES:
                    found.append(f"{node.lineno}: from {module} import")
                if module == "mmap":
                    mapped |= {name.asname or name.name for name in names}
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in BANNED_BUILTINS | mapped:
                found.append(f"{node.lineno}: {name}()")
            case ast.Call(func=ast.Attribute(value=ast.Name(id="mmap"), attr="mmap")):
                found.append(f"{node.lineno}: mmap.mmap()")
            case ast.Call(func=ast.Attribute(attr=name)) if name in BANNED_METHODS:
                found.append(f"{node.lineno}: .{name}()")
            case ast.Call(func=ast.Attribute(attr="fromtimestamp"), args=[_], keywords=[]):
                found.append(f"{node.lineno}: .fromtimestamp() in the local time zone")
            case ast.Attribute(value=ast.Name(id="np" | "numpy"), attr="random" | "load" | "save" | "memmap" as name):
                found.append(f"{node.lineno}: np.{name}")
            case _:
                pass
    return found


def _root(module: str) -> str:
    return module.partition(".")[0]


def foreign_imports(source: str, room: str, left_of_it: set[str]) -> list[str]:
    """Imports from rooms that are not this one and not to its left, and imports that do not say their full name."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        modules = [name.name for name in node.names]
        if isinstance(node, ast.ImportFrom):
            if node.level:
                found.append(f"{node.lineno}: relative import")
            modules = [node.module or ""]
            if node.module == "brokerlab":
                modules = [f"brokerlab.{name.name}" for name in node.names]
        for module in modules:
            parts = module.split(".")
            own = parts[0] == "brokerlab" and (len(parts) < 2 or parts[1] not in {room, *left_of_it})
            if own or parts[0] in {"tests", "benchmarks"}:
                found.append(f"{node.lineno}: {module}")
    return found


def long_functions(source: str, most: int = FUNCTION_LINES_MAX) -> list[str]:
    return [
        f"{node.lineno}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > most
    ]


@pytest.fixture(params=STORAGE, ids=lambda path: path.name)
def module(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


# The store


def test_the_store_has_modules() -> None:
    assert len(STORAGE) > 20
    assert THE_PORT in {path.name for path in STORAGE}


def test_only_the_port_reaches_the_operating_system_a_clock_or_chance(module: Path) -> None:
    uses = banned_uses(module.read_text())

    assert bool(uses) if module.name == THE_PORT else uses == []


def test_the_port_too_reads_no_clock_and_starts_no_thread() -> None:
    source = (ROOT / "storage" / THE_PORT).read_text()

    imported = {
        name.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import) for name in node.names
    }
    assert imported & BANNED_MODULES == {"ctypes", "fcntl", "os"}


def test_the_store_imports_from_no_other_room(module: Path) -> None:
    assert foreign_imports(module.read_text(), "storage", set()) == []


def test_a_module_says_what_it_is(module: Path) -> None:
    assert ast.get_docstring(ast.parse(module.read_text()))


def test_a_function_fits_on_a_screen(module: Path) -> None:
    assert long_functions(module.read_text()) == []


def test_a_file_is_read_in_ten_minutes(module: Path) -> None:
    lines = len(module.read_text().splitlines())

    assert lines <= FILE_LINES_MAX


def test_the_public_names_are_sorted_and_there() -> None:
    package = importlib.import_module("brokerlab.storage")
    names = list(getattr(package, "__all__", []))

    # Constants, then classes, then functions, each by name: the order that ruff keeps.
    assert names == sorted(names, key=lambda name: (not name.isupper(), name[0].islower(), name))
    assert len(set(names)) == len(names)
    assert [name for name in names if not hasattr(package, name)] == []
    assert [name for name in names if name.startswith("_")] == []


def test_importing_the_store_starts_no_thread_and_imports_no_other_room() -> None:
    program = (
        "import sys, threading, brokerlab.storage\n"
        "rooms = sorted(m for m in sys.modules if m.startswith('brokerlab.') and m.split('.')[1] != 'storage')\n"
        "print(threading.active_count(), rooms, 'pykka' in sys.modules, 'simpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.strip() == "1 [] False False"


def test_the_import_contracts_name_every_room_from_right_to_left() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(contract["layers"] for contract in settings["contracts"] if contract["type"] == "layers")
    forbidden = next(contract for contract in settings["contracts"] if contract["type"] == "forbidden")

    assert layers == [f"brokerlab.{room}" for room in ("lab", "pipeline", "scenarios", "actors", "storage")]
    assert {"threading", "time", "random"} <= set(forbidden["forbidden_modules"]) <= BANNED_MODULES
    assert forbidden["source_modules"] == ["brokerlab.storage"]


# The rules, seen failing


@pytest.mark.parametrize(
    "source",
    [
        "import os",
        "import os.path as p",
        "from os import path",
        "import time, struct",
        "from threading import Lock",
        "from random import Random",
        "def f():\n    import socket",
        "open('x')",
        "print('x')",
        "hash('x')",
        "import mmap\nmmap.mmap(0, 1)",
        "from mmap import mmap\nmmap(0, 1)",
        "from mmap import mmap as m\nm(0, 1)",
        "from datetime import datetime\ndatetime.now()",
        "import datetime\ndatetime.date.today()",
        "from datetime import datetime\ndatetime.fromtimestamp(1)",
        "import numpy as np\nnp.random.default_rng()",
        "import numpy as np\nnp.fromfile('x')",
    ],
)
def test_a_banned_use_is_noticed(source: str) -> None:
    assert len(banned_uses(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import mmap\ndef f(m: mmap.mmap) -> int: return len(m)",
        "from mmap import mmap\ndef f(m: mmap) -> mmap: return m",
        "disk.open('x')",
        "store.open(5)",
        "from datetime import UTC, datetime\ndatetime.fromtimestamp(1, UTC)",
        "import numpy as np\nnp.frombuffer(b'')",
    ],
)
def test_what_only_looks_like_a_banned_use_is_let_through(source: str) -> None:
    assert banned_uses(source) == []


@pytest.mark.parametrize(
    "source",
    [
        "import brokerlab.actors",
        "from brokerlab.scenarios.world import World",
        "from brokerlab import lab",
        "from . import record",
        "from tests.storage import strategies",
        "import benchmarks.records",
    ],
)
def test_a_foreign_import_is_noticed(source: str) -> None:
    assert len(foreign_imports(source, "storage", set())) == 1
    assert foreign_imports("from brokerlab.storage.record import check", "storage", set()) == []
    assert foreign_imports("from brokerlab.storage.record import check", "actors", {"storage"}) == []


def test_a_long_function_is_noticed() -> None:
    source = "class A:\n    def f(self):\n" + "        x = 1\n" * 80

    assert long_functions(source) == ["2: f has 81 lines"]
    assert long_functions(source.removesuffix("        x = 1\n")) == []
