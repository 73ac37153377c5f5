"""A flood of malformed frames: inputs from a seed, without Atheris and its guidance, at the full
speed of the code.

    kvkeep fuzz --malformed-frames N ──► flood() ──► python, plain kvkeep ──► drown() ──► a target's
    function
                                             └────◄ counts and the input under way, in a small
                                             shared file

It ends when N frames were refused. An input that makes a target raise, or its process end, is a
crash; one that takes longer than HANG_AFTER_S is a hang. Memory that grows by more than
MOST_GROWTH_MIB after the first inputs is a leak."""

from __future__ import annotations

import mmap
import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from kvkeep.errors import SettingsError
from kvkeep_lab.fuzz.choices import Leak, memory_directory, own_memory_kib
from kvkeep_lab.fuzz.targets import (
    HANG_AFTER_S,
    MOST_FINDINGS,
    FuzzResult,
    finding,
    load,
    run_child,
)

# Targets that take frames, with more that is wrong than coverage would want.
FLOODS = {
    "wire": ("kvkeep_lab.fuzz.wire", "flood_decoder"),
    "service": ("kvkeep_lab.fuzz.service", "flood_service"),
}
MOST_GROWTH_MIB = 64
LONGEST_INPUT_BYTES = 1 << 14
_WARM_INPUTS = 100  # until then memory grows because caches fill
_LOOK_EVERY = 50  # inputs
# inputs, messages, malformed frames, leaks; bytes of the input under way, then itself
_STATE = struct.Struct("<QQQQI")
_CHILD = "import sys; from kvkeep_lab.fuzz import flood; flood.drown(*sys.argv[1:])"


def flood(target: str, frames: int, seed: int = 0) -> FuzzResult:
    """Inputs of that seed until so many malformed frames were refused, in a process that may die of
    it; then another one goes on with the next seed."""
    if target not in FLOODS:
        raise SettingsError(
            f"--target is {target!r}, which takes no frames",
            f"there are {', '.join(FLOODS)}, and all",
        )
    result, started = FuzzResult(target), time.monotonic()
    with memory_directory() as name:
        while result.malformed_frames < frames and len(result.findings) < MOST_FINDINGS:
            wanted = frames - result.malformed_frames
            _process(result, Path(name) / "state", wanted, seed + len(result.findings))
    result.seconds = round(time.monotonic() - started, 1)
    return result


def _process(result: FuzzResult, state: Path, frames: int, seed: int) -> None:
    state.write_bytes(bytes(_STATE.size + LONGEST_INPUT_BYTES))
    arguments = [result.target, str(state), str(frames), str(seed)]
    # An alarm ends the process if an input does not.
    code, said = run_child(_CHILD, arguments, state.parent)
    content = state.read_bytes()
    inputs, messages, malformed, leaks, nbytes = _STATE.unpack_from(content)
    result.count(inputs, messages, malformed)
    if code:
        kind = "hang" if code == -signal.SIGALRM else "leak" if leaks else "crash"
        result.hangs += kind == "hang"
        result.leaks += kind == "leak"
        result.crashes += kind == "crash"
        result.findings.append(finding(kind, content[_STATE.size : _STATE.size + nbytes], said))


def drown(target: str, state: str, frames: str, seed: str) -> None:
    """In a process of its own: inputs until so many frames were refused. The file always says how
    far it came and with what, whatever becomes of the process."""
    import logging

    logging.disable(logging.CRITICAL)  # what is wrong with inputs is wanted
    run, wanted = load(target, FLOODS), int(frames)
    with open(state, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    inputs = messages = malformed = warm_mib = 0
    for data in _inputs(int(seed), most=max(1_000, wanted)):
        memory[_STATE.size : _STATE.size + len(data)] = data
        inputs += 1
        _STATE.pack_into(memory, 0, inputs, messages, malformed, 0, len(data))
        # nobody handles it: the kernel ends even what is stuck outside of Python
        signal.alarm(HANG_AFTER_S)
        try:
            ran = run(data)
            if inputs % _LOOK_EVERY == 0:
                warm_mib = warm_mib if inputs > _WARM_INPUTS else own_memory_kib() >> 10
                if (own_memory_kib() >> 10) - warm_mib > MOST_GROWTH_MIB:
                    raise Leak(
                        f"{inputs} inputs, and memory grew by more than {MOST_GROWTH_MIB} MiB"
                    )
        except Leak:
            _STATE.pack_into(memory, 0, inputs, messages, malformed, 1, len(data))
            raise
        messages += ran.messages
        malformed += ran.malformed_frames
        _STATE.pack_into(memory, 0, inputs, messages, malformed, 0, 0)
        if malformed >= wanted:
            signal.alarm(0)  # the end of the process is no part of an input
            return
    raise AssertionError(
        f"{inputs} inputs, and only {malformed} malformed frames: this is not what they are made for"
    )


def _inputs(seed: int, most: int) -> Iterator[bytes]:
    random = Random(seed)
    for _ in range(most):
        yield random.randbytes(random.randrange(LONGEST_INPUT_BYTES + 1))
