"""The mounts that this process sees, as the kernel lists them."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Final, NamedTuple

MOUNTS: Final = Path("/proc/self/mountinfo")


class Mount(NamedTuple):
    """`root` is the directory of the file system that appears at `point`; `options` are those of
    the file system."""

    root: str
    point: str
    kind: str
    options: tuple[str, ...]


def read_mounts(mounts: Path = MOUNTS) -> list[Mount]:
    """In the order of mounting. Empty if the list cannot be read; lines of another form are left
    out."""
    found = []
    with contextlib.suppress(OSError):
        for line in mounts.read_text(errors="surrogateescape").splitlines():
            mounted, _, system = line.partition(" - ")
            if len(fields := mounted.split(" ")) >= 5 and system:
                kind, _, rest = system.partition(" ")
                options = tuple(rest.split(" ")[-1].split(","))
                found.append(Mount(_plain(fields[3]), _plain(fields[4]), kind, options))
    return found


def file_system_of(directory: Path, mounts: Path = MOUNTS) -> str:
    """The type of the file system that holds `directory`, such as tmpfs or ext4. Empty if it is
    unknown."""
    found, longest = "", -1
    place = os.path.realpath(directory)
    for mount in read_mounts(mounts):
        # Of two on one point the later one hides the earlier.
        is_above = place == mount.point or place.startswith(mount.point.rstrip("/") + "/")
        if is_above and len(mount.point) >= longest:
            found, longest = mount.kind, len(mount.point)
    return found


def _plain(path: str) -> str:
    """The kernel writes blanks and backslashes as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), path)
