"""Coverage-guided fuzzing: which targets there are, and how each is run by Atheris in a process of
its own.

    kvkeep fuzz ──► fuzz() ──► python, Atheris, instrumented kvkeep ──► run_one() ──► a target's
    function
                        └────◄ counts in a small shared file, findings as files, edges in
                        libFuzzer's log

An input that makes a target raise is a crash (`Leak`: a leak), one that takes longer than
HANG_AFTER_S is a hang, and more memory than MOST_MEMORY_MIB is a leak. The process ends with a
finding, or when it has grown to RENEW_AT_MIB; another goes on with what it has learned in the time
that is left. Inputs of a corpus are lines of base64, so that they can be read, compared and
commented in a text file."""

from __future__ import annotations

import base64
import contextlib
import importlib
import importlib.util
import mmap
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from kvkeep.errors import SettingsError
from kvkeep.units import MIB
from kvkeep_lab.fuzz.choices import Leak, Ran, memory_directory

# Name -> module and function.
TARGETS = {
    "wire": ("kvkeep_lab.fuzz.wire", "run_decoder"),
    "service": ("kvkeep_lab.fuzz.service", "run_service"),
    "index": ("kvkeep_lab.fuzz.index", "run_index"),
    "config": ("kvkeep_lab.fuzz.config", "run_config"),
    "http": ("kvkeep_lab.fuzz.http", "run_http"),
}
HANG_AFTER_S = 30
MOST_MEMORY_MIB = 2048
# Atheris 3.0 leaks what a comparison of arrays gives: 0.3 MiB with each input of `service`
RENEW_AT_MIB = 1024
_LOOK_EVERY = 100  # inputs
LONGEST_INPUT_BYTES = 1024
MOST_FINDINGS = 20  # of one run: whatever is wrong by then is wrong often
_COUNTS = struct.Struct("<QQQQ")  # inputs, messages, malformed frames, leaks
_EDGES = re.compile(r"\bcov: (\d+)")
_START_S = 120  # what a process may take over its time, to start and to end

# The child: instruments kvkeep, and how messages are made of an input, as they are imported. So
# Atheris comes first.
_CHILD = """
import sys, atheris
with atheris.instrument_imports(include=["kvkeep", "kvkeep_lab"]):
    from kvkeep_lab.fuzz import targets as fuzz
    run_one = fuzz.child(sys.argv.pop(1), sys.argv.pop(1))
atheris.Setup(sys.argv, run_one)
atheris.Fuzz()
"""


@dataclass
class FuzzResult:
    """What came of one target. Messages and malformed frames are those of `Ran`."""

    target: str
    inputs: int = 0
    messages: int = 0
    malformed_frames: int = 0
    crashes: int = 0
    hangs: int = 0
    leaks: int = 0
    edges: int = 0
    seconds: float = 0.0
    findings: list[dict[str, str]] = field(default_factory=list)

    def count(self, inputs: int, messages: int, malformed_frames: int) -> None:
        """Adds what one process did."""
        self.inputs += inputs
        self.messages += messages
        self.malformed_frames += malformed_frames

    @property
    def is_clean(self) -> bool:
        return not (self.crashes or self.hangs or self.leaks)


def load(target: str, among: Mapping[str, tuple[str, str]] | None = None) -> Callable[[bytes], Ran]:
    """The target's function: takes an input, raises if anything is wrong."""
    targets = TARGETS if among is None else among
    if target not in targets:
        raise SettingsError(f"--target is {target!r}", f"there are {', '.join(targets)}, and all")
    module, name = targets[target]
    function: Callable[[bytes], Ran] = getattr(importlib.import_module(module), name)
    return function


def read_corpus(path: Path) -> list[bytes]:
    """The inputs in a file: lines of base64; empty ones and those that begin with # are for
    people."""
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
        return [
            base64.b64decode(line, validate=True)
            for line in lines
            if line and not line.startswith("#")
        ]
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"{path} is no corpus: {error}", "it has lines of base64, and comments"
        ) from error


def run_child(
    code: str, arguments: Sequence[str], scratch: Path, within_s: float | None = None
) -> tuple[int | None, str]:
    """Runs Python code in a process of its own. Returns its exit code, None if it was killed after
    `within_s`, and what it wrote. Its temporary files are in `scratch`, because it may end at any
    moment."""
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        environment = {**os.environ, "TMPDIR": str(scratch)}
        child = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdout=said,
            stderr=said,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        exit_code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                exit_code = child.wait(within_s)
        finally:
            child.kill()
            child.wait()
        said.seek(0)
        return exit_code, said.read()


def fuzz(
    target: str,
    seconds: float,
    inputs: int = 0,
    seed: int = 0,
    corpus: Path | None = None,
    keep: Path | None = None,
) -> FuzzResult:
    """Runs one target for so long, or for so many inputs if that is not 0. `corpus`: a directory
    with TARGET.txt to begin from; `keep`: one whose folder TARGET is to have what was found to
    reach new code, for the next run."""
    load(target)
    if importlib.util.find_spec("atheris") is None:
        raise SettingsError(
            "fuzzing needs Atheris, which is not installed",
            "pip install 'kvkeep[dev]' on x86_64; elsewhere pip install 'atheris>=3,<4', with clang to build it",
        )
    result, started = FuzzResult(target), time.monotonic()
    with memory_directory() as name:
        run = _Run(result, Path(name), corpus, keep)
        while len(result.findings) < MOST_FINDINGS:
            left_s = seconds - (time.monotonic() - started)
            if left_s <= 0 or (inputs and result.inputs >= inputs):
                break
            seed += 1
            run.process(left_s, inputs - result.inputs if inputs else -1, seed)
    result.seconds = round(time.monotonic() - started, 1)
    return result


class _Run:
    """Processes of one target, one after the other, that share what they have learned."""

    def __init__(
        self, result: FuzzResult, scratch: Path, corpus: Path | None, keep: Path | None
    ) -> None:
        self._result = result
        self._scratch = scratch
        self._learned = (keep or scratch / "learned") / result.target
        self._learned.mkdir(parents=True, exist_ok=True)
        self._seeds = scratch / "seeds"
        self._seeds.mkdir()
        if corpus is not None and (path := corpus / f"{result.target}.txt").exists():
            for number, data in enumerate(read_corpus(path)):
                (self._seeds / f"{number:04}").write_bytes(data)
        self._found = scratch / "found"
        self._counts = scratch / "counts"

    def process(self, seconds: float, inputs: int, seed: int) -> None:
        """One process, until time or inputs are over or it has found something."""
        self._found.mkdir(exist_ok=True)
        self._counts.write_bytes(bytes(_COUNTS.size))
        flags = {
            "max_total_time": max(1, int(seconds)),
            "runs": inputs,
            "seed": seed,
            "max_len": LONGEST_INPUT_BYTES,
            "timeout": HANG_AFTER_S,
            "rss_limit_mb": MOST_MEMORY_MIB,
            "artifact_prefix": f"{self._found}/",
            "len_control": 20,
            "detect_leaks": 0,
            "reload": 0,
        }
        arguments = [self._result.target, str(self._counts)]
        arguments += [f"-{name}={value}" for name, value in flags.items()]
        arguments += [str(self._learned), str(self._seeds)]
        within_s = seconds + HANG_AFTER_S + _START_S
        self._count(*run_child(_CHILD, arguments, self._scratch, within_s))

    def _count(self, code: int | None, said: str) -> None:
        result = self._result
        inputs, messages, malformed, leaks = _COUNTS.unpack(self._counts.read_bytes())
        result.count(inputs, messages, malformed)
        result.leaks += leaks
        result.edges = max([result.edges, *(int(number) for number in _EDGES.findall(said))])
        found = sorted(self._found.iterdir())
        for path in found:
            kind = path.name.partition("-")[0]
            if kind in ("timeout", "slow"):
                result.hangs += kind == "timeout"
            elif kind in ("oom", "leak"):
                result.leaks += 1
            else:
                result.crashes += not leaks
            if kind != "slow":
                result.findings.append(finding(kind, path.read_bytes(), said))
            path.unlink()
        # no input is to blame: the process itself could not start, or could not end
        if code != 0 and not found:
            result.crashes += code is not None
            result.hangs += code is None
            result.findings.append(finding("process", b"", said))


def finding(kind: str, data: bytes, said: str) -> dict[str, str]:
    """What is told of an input that found something: the input as a line of a corpus, and what its
    process said."""
    text = said.partition("Uncaught Python exception")[2] or said
    lines = [
        line
        for line in text.splitlines()
        if line.strip() and not re.match(r"#\d+|MS:|INFO|WARNING", line)
    ]
    return {"kind": kind, "input": base64.b64encode(data).decode(), "said": "\n".join(lines[:40])}


def child(target: str, counts: str) -> Callable[[bytes], None]:
    """In the process that Atheris has: the target with its counts in the file that its parent
    reads."""
    import logging

    logging.disable(logging.CRITICAL)  # what is wrong with inputs is wanted
    run = load(target)
    with open(counts, "r+b") as file:
        memory = mmap.mmap(file.fileno(), _COUNTS.size)
    numbers = [0, 0, 0, 0]

    def run_one(data: bytes) -> None:
        numbers[0] += 1
        try:
            ran = run(data)
            numbers[1] += ran.messages
            numbers[2] += ran.malformed_frames
        except Leak:
            numbers[3] += 1
            raise
        finally:
            _COUNTS.pack_into(memory, 0, *numbers)
        if numbers[0] % _LOOK_EVERY == 0 and _resident_mib() > RENEW_AT_MIB:
            os._exit(0)  # all that it has learned is in files

    return run_one


def _resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE / MIB


def total(results: Sequence[FuzzResult]) -> dict[str, Any]:
    """All targets as one, in the words of one."""
    names = [each.name for each in fields(FuzzResult) if each.name not in ("target", "findings")]
    target = results[0].target if len(results) == 1 else "all"
    return {
        "target": target,
        **{name: round(sum(getattr(each, name) for each in results), 1) for name in names},
    }
