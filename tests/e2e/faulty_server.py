"""A real server on a disk with faults (kvkeep.testing.faulty_disk). As a program: `kvkeep`, whose
server opens such a disk.

python faulty_server.py serve --tier disk:///path?size=64MiB ..."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvkeep.testing.process import ServerProcess


class FaultyServer(ServerProcess):
    """`tier` is the directory of its disk."""

    def __init__(self, tier: Path, *flags: str) -> None:
        self.faults = tier.with_name(f"{tier.name}-faults")
        self.faults.mkdir()
        super().__init__(*flags, "--tier", f"disk://{tier}?size=64MiB")

    def command(self) -> Sequence[str]:
        python, *words = super().command()
        return [python, __file__, *words[words.index("serve") :]]

    @contextmanager
    def fault(self, **faults: str) -> Iterator[None]:
        """Has these faults meanwhile: `fail_write="EIO"`. A stall has no value."""
        paths = {self.faults / name.replace("_", "-", 1): text for name, text in faults.items()}
        for path, text in paths.items():
            if path.name.startswith("stall"):
                os.mkfifo(path)
            else:
                path.write_text(text)
        try:
            yield
        finally:
            for path in paths:
                path.unlink()

    def resident_bytes(self) -> int:
        """Memory of the server and its mover, without the pool."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return sum(_anonymous_bytes(pid) for pid in (self.pid, *map(int, children)))


def _anonymous_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [found] = [line.split()[1] for line in lines if line.startswith("RssAnon:")]
    return int(found) * 1024


def main() -> None:
    from kvkeep.cli.main import main as kvkeep
    from kvkeep.server import startup
    from kvkeep.testing.faulty_disk import FaultyFiles

    opened: Any = FaultyFiles
    startup.DiskFiles = opened  # type: ignore[misc]
    kvkeep()


if __name__ == "__main__":
    sys.exit(main())
