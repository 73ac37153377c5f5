"""A shared directory, as `Sweeper` sees it. Two hosts that write a note at once both succeed, and the
later one stays: the sweeper reads its lease back."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvkeep.tiers.sweeper import MOST_NOTE_BYTES, Note, Stored

_CONTROL = "control"  # in v1: what hosts tell each other; never evicted
_ABANDONED_S = 3600.0  # a file under tmp that old has no writer


class SweptDirectory:
    recount_s = 60.0

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def stored(self) -> Iterator[Stored]:
        blocks = self._directory / "v1"
        waiting = [str(path) for path in blocks.iterdir() if path.name != _CONTROL]
        while waiting:
            with contextlib.suppress(FileNotFoundError), os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        with contextlib.suppress(FileNotFoundError):
                            found = entry.stat(follow_symlinks=False)
                            yield Stored(found.st_mtime, found.st_size, entry.path)

    def remove(self, blocks: Sequence[Stored]) -> None:
        for block in blocks:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(block.path)

    def note(self, name: str) -> Note | None:
        path = self._directory / name
        try:
            with path.open("rb") as file:
                found, content = os.fstat(file.fileno()), file.read(MOST_NOTE_BYTES)
        except FileNotFoundError:
            return None
        return Note(f"{found.st_mtime_ns}-{found.st_ino}", found.st_mtime, content)

    def notes(self, folder: str) -> dict[str, Note]:
        found: dict[str, Note] = {}
        with contextlib.suppress(FileNotFoundError):
            for path in (self._directory / folder).iterdir():
                with contextlib.suppress(FileNotFoundError):
                    is_at = path.stat()
                    version = f"{is_at.st_mtime_ns}-{is_at.st_ino}"
                    found[path.name] = Note(version, is_at.st_mtime)
        return found

    def put_note(self, name: str, content: bytes, over: Note | None) -> bool:
        present = self.note(name)
        if (present and present.version) != (over and over.version):
            return False
        path = self._directory / name
        path.parent.mkdir(mode=self._directory.stat().st_mode & 0o770, exist_ok=True)
        temporary = self._directory / "tmp" / f"note-{secrets.token_hex(8)}"
        temporary.write_bytes(content)
        temporary.rename(path)
        return True

    def remove_note(self, name: str) -> None:
        (self._directory / name).unlink(missing_ok=True)

    def tidy(self, now_s: float) -> None:
        for path in (self._directory / "tmp").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if now_s > path.stat(follow_symlinks=False).st_mtime + _ABANDONED_S:
                    if path.is_dir() and not path.is_symlink():
                        shutil.rmtree(path, ignore_errors=True)
                    else:
                        path.unlink(missing_ok=True)
