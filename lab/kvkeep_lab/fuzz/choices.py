"""An input of a fuzzer, read as a series of choices: every byte string is some test, and near ones
are near tests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

NUMBERS: tuple[int, ...] = (0, 1, 2, 3, 7, 50, 100, 101, -1, 255, 65_535, 65_536)
NUMBERS += (1 << 31, 1 << 32, 1 << 53, (1 << 63) - 1, 1 << 63)
NUMBERS += (-(1 << 31), -(1 << 63), (1 << 64) - 1)
TEXTS: tuple[str, ...] = ("", "x", "none", "default", "\0", "\n", "é\u2028", "\ud800", "../..")
TEXTS += ("%s%n", "x" * 300, "tcp://[::1]:1", "1e9")
MEMORY = "/dev/shm"
_DEEPEST = 4


def random_inputs(seed: int, count: int, longest: int = 200) -> Iterator[bytes]:
    """Inputs of no guidance at all, the same for the same seed: enough to see whether a target
    notices anything."""
    random = Random(seed)
    for _ in range(count):
        yield random.randbytes(random.randrange(longest + 1))


def memory_directory() -> tempfile.TemporaryDirectory[str]:
    """A directory in memory for the files of inputs. Who runs us in a process that may end at any
    moment says by TMPDIR where it will clean up."""
    return tempfile.TemporaryDirectory(prefix="kvkeep-fuzz-", dir=os.environ.get("TMPDIR", MEMORY))


def own_memory_kib(pid: int | str = "self") -> int:
    """The memory that a process has and does not share with another."""
    _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE") >> 10


class Leak(AssertionError):
    """Something was kept that nobody can give back."""


class Ran(NamedTuple):
    """What an input came to. An input may have many messages: frames, requests or files. Of these
    `malformed_frames` were refused by the decoder: no header or CRC of ours, a frame missing or too
    long, a body that is no message. What counts is the refusal, not what the input meant; a message
    of another protocol version is not malformed."""

    messages: int
    malformed_frames: int = 0


class Choices:
    """Takes from the front of the input; when that is used up every choice is the first one."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, nbytes: int) -> bytes:
        """That many bytes, fewer at the end."""
        taken = self._data[self._at : self._at + nbytes]
        self._at += len(taken)
        return taken

    def rest(self) -> bytes:
        return self.take(self.left)

    def byte(self) -> int:
        return self.take(1)[0] if self.left else 0

    def below(self, end: int) -> int:
        """0 to end - 1, by as many bytes as that needs."""
        nbytes = max(1, ((end - 1).bit_length() + 7) // 8)
        return int.from_bytes(self.take(nbytes), "little") % end

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def seldom(self) -> bool:
        """True for 16 of 256 bytes; not at the end of the input."""
        return self.byte() >= 240

    def number(self) -> int:
        """Small ones, those at the limits of types, or any."""
        kind = self.byte()
        if kind < 128:
            return kind % 8
        return (
            self.pick(NUMBERS)
            if kind < 224
            else int.from_bytes(self.take(8), "little", signed=kind < 240)
        )

    def text(self) -> str:
        kind = self.byte()
        return (
            self.pick(TEXTS)
            if kind < 128
            else self.take(kind % 64).decode(errors="surrogateescape")
        )

    def value(self, depth: int = 0) -> Any:
        """Anything that JSON, TOML or MessagePack can say."""
        match self.below(9 if depth < _DEEPEST else 6):
            case 0:
                return self.number()
            case 1:
                return self.text()
            case 2:
                return None
            case 3:
                return self.byte() % 2 == 1
            case 4:
                return self.pick((0.0, -1.5, 1e300, float("inf"), float("nan")))
            case 5:
                return self.take(self.byte() % 40)
            case 6:
                return [self.value(depth + 1) for _ in range(self.byte() % 4)]
            case 7:
                return {self.text(): self.value(depth + 1) for _ in range(self.byte() % 4)}
            case _:
                return [[[[[[self.number()]]]]]]
