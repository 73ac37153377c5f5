"""The C kernel as it is built for another processor, run by an emulator: the same checksums as
here, the same bytes.

On x86_64 this runs NEON, on 64-bit ARM AVX2, wherever a cross compiler and QEMU are installed
(Debian: gcc-aarch64-linux-gnu or gcc-x86-64-linux-gnu, and qemu-user). The same harness also runs
as built for this processor."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvkeep.kv import native
from kvkeep.kv.checksum import checksum, mix64

HARNESS = Path(__file__).with_name("native_harness.c")
KERNEL = Path(native.__file__).with_name("_native.c")
LONGEST = 40960  # as in the harness: where block b begins


@dataclass(frozen=True)
class Target:
    """A kind of processor, and what must run on it."""

    compilers: tuple[str, ...]
    emulators: tuple[str, ...]
    instruction_sets: frozenset[str]


AARCH64 = Target(
    ("aarch64-linux-gnu-gcc",),
    ("qemu-aarch64", "qemu-aarch64-static"),
    frozenset({"portable", "neon"}),
)
X86_64 = Target(
    ("x86_64-linux-gnu-gcc",),
    ("qemu-x86_64", "qemu-x86_64-static"),
    frozenset({"portable", "avx2"}),
)
FOREIGN = {"x86_64": AARCH64, "aarch64": X86_64}


def installed(programs: tuple[str, ...]) -> str:
    found = next((path for path in map(shutil.which, programs) if path is not None), None)
    if found is None:
        pytest.skip(f"{' or '.join(programs)} is not installed")
    return found


def built(compiler: str, folder: Path, *options: str) -> Path:
    program = folder / "harness"
    flags = ["-O3", "-std=gnu11", "-Wall", "-Wextra", "-Werror", f"-I{KERNEL.parent}", *options]
    done = subprocess.run(
        [compiler, *flags, str(HARNESS), "-o", str(program)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return program


def sums_of(command: list[str]) -> dict[str, dict[str, int]]:
    """What the harness printed: checksums by case, by instruction set."""
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sums: dict[str, dict[str, int]] = {}
    for line in done.stdout.splitlines():
        level, case, value = line.split()
        sums.setdefault(native.INSTRUCTION_SETS[int(level)], {})[case] = int(value, 16)
    return sums


def source() -> NDArray[np.uint8]:
    return mix64(np.arange(1, 5 * LONGEST // 8 + 9, dtype=np.uint64)).astype("<u8").view(np.uint8)


def expected(case: str) -> int:
    """By the definition in numpy, or by what runs on this processor, which other tests hold to
    it."""
    name, *numbers = case.replace("bytes", "bytes.").replace("layout", "layout.").split(".")
    values = [int(number) for number in numbers]
    if name == "bytes":
        nbytes, shift = values
        return checksum(source()[shift : shift + nbytes])
    layout, _, block = values
    nbytes = (13504, 8192, 32768, 8254, 20672)[layout]
    return checksum(source()[block * LONGEST : block * LONGEST + nbytes])


def check(sums: dict[str, dict[str, int]]) -> None:
    assert {len(by_case) for by_case in sums.values()} == {15 * 2 + 5 * 2 * 5}
    for instruction_set, by_case in sums.items():
        wrong = {case for case, value in by_case.items() if value != expected(case)}
        assert not wrong, f"{instruction_set} has other checksums"


def test_the_kernel_built_for_another_processor_gives_the_same_bytes_and_checksums(
    tmp_path: Path,
) -> None:
    target = FOREIGN.get(platform.machine())
    if target is None:
        pytest.skip(f"no other processor is known to test on {platform.machine()}")
    compiler, emulator = installed(target.compilers), installed(target.emulators)
    sums = sums_of([emulator, "-cpu", "max", str(built(compiler, tmp_path, "-static"))])
    check(sums)
    missing = target.instruction_sets - set(sums)
    if missing == {"avx2"}:
        pytest.skip(f"{Path(emulator).name} has no AVX2 (QEMU has it from 7.2 on)")
    assert not missing


def test_the_kernel_built_for_this_processor_gives_the_same_bytes_and_checksums(
    tmp_path: Path,
) -> None:
    sums = sums_of([str(built(installed((os.environ.get("CC", "cc"), "gcc")), tmp_path))])
    check(sums)
    assert platform.machine() != "aarch64" or "neon" in sums
