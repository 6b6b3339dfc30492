"""Where the figures come from: without this they cannot be compared with others."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sqlite3
import zlib
from pathlib import Path

from benchmarks.protocol import OurSide

FREE_BYTES_MIN = 4 << 30
MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})


class NotEnoughSpaceError(Exception):
    """The disk under the scratch folder is too full for a run."""


def require_free_space(folder: Path) -> None:
    """Full disks are slow and a full one ends the run in the middle: refuse before the start."""
    free = shutil.disk_usage(folder).free
    if free < FREE_BYTES_MIN:
        raise NotEnoughSpaceError(
            f"{folder}: {free / 2**30:.1f} GiB free, {FREE_BYTES_MIN / 2**30:.0f} GiB needed. "
            "Make room or choose a folder on another disk with --dir."
        )


def file_system_of(folder: Path, mount_info: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the file system, such as `ext4`; `unknown` where the system does not tell."""
    try:
        lines = mount_info.read_text().splitlines()
    except OSError:
        return "unknown"
    resolved = folder.resolve()
    best_mount, best_type = Path(), "unknown"
    for line in lines:
        mount, _, rest = line.partition(" - ")
        fields = mount.split()
        if len(fields) < 5 or not rest:
            continue
        # Spaces in a mount point are written in octal.
        mount_point = Path(fields[4].replace("\\040", " "))
        # `>=`: a later mount on the same point hides the earlier one.
        if resolved.is_relative_to(mount_point) and len(mount_point.parts) >= len(best_mount.parts):
            best_mount, best_type = mount_point, rest.split()[0]
    return best_type


def describe(scratch: Path, ours: OurSide | None) -> dict[str, object]:
    """What the report writes about the machine and the versions."""
    return {
        "python": platform.python_version(),
        "python_implementation": platform.python_implementation(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu_count": os.cpu_count(),
        "cpu_usable": len(os.sched_getaffinity(0)),
        "load_average_at_start": os.getloadavg()[0],
        "scratch_file_system": file_system_of(scratch),
        "crc_implementation": "no store of ours" if ours is None else ours.crc_implementation(),
        "zlib": zlib.ZLIB_RUNTIME_VERSION,
        "isal": _version("isal"),
        "numpy": _version("numpy"),
        "sqlite": sqlite3.sqlite_version,
        "lmdb": _version("lmdb"),
        "rocksdict": _version("rocksdict"),
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
